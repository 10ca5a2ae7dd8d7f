"""Archives: `export`, `import`."""

import contextlib
import os
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from snapcore.errors import printable

from .capture import tell_report
from .options import (
    Everything,
    Exclude,
    Include,
    KeepRebuildable,
    Label,
    OnUnsupported,
    OptionalThread,
    SecretCommand,
    SecretEnv,
    SecretFile,
    Thread,
    Wait,
    WithGit,
)
from .output import count, path_list, path_text, print_json, print_line, size
from .progress import progress
from .runtime import Exit, Invocation, UsageError, check_wait, command, resolve

if TYPE_CHECKING:
    from snapcore.transfer_export import ExportReport

__all__ = ["export", "import_"]

EXAMPLES: Final = {
    "export": (
        "snapcore export --thread thread-1 -o backup.tar.zst",
        "snapcore export --thread thread-1 | tar -xf - -C ./elsewhere",
        "snapcore export label:after-install -t thread-1 --paths src -o src.tar.gz",
        "snapcore export 3f2a --format oci-layer --prefix app -o layer.tar.gz",
    ),
    "import": (
        "snapcore import backup.tar.zst --thread thread-5 --everything",
        "snapcore import ./workspace --thread thread-6 --label start",
        "docker export my-container |\n    snapcore import - --thread thread-7 --on-unsupported skip",
    ),
}

STANDARD: Final = "-"
SUFFIXES: Final = {".tar": "tar", ".tar.gz": "tar.gz", ".tgz": "tar.gz", ".tar.zst": "tar.zst", ".tzst": "tar.zst"}


@command
async def export(
    invocation: Invocation,
    *,
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="latest (with --thread), label:L, an id, or the start of one.")
    ] = "latest",
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE|-", help="Where to; - is stdout.")] = STANDARD,
    thread: OptionalThread = None,
    format_: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="tar, tar.gz, tar.zst, oci-layer or oci-layer-zstd. By default what FILE's name says, else tar.",
        ),
    ] = None,
    root: Annotated[str | None, typer.Option("--root", metavar="NAME", help="Which root, when there are several.")] = None,
    paths: Annotated[
        list[str] | None, typer.Option("--paths", metavar="PATH", help="Only this path and what is under it. Repeatable.")
    ] = None,
    prefix: Annotated[
        str | None, typer.Option("--prefix", metavar="FOLDER", help="The folder in the archive that all of it lies in.")
    ] = None,
    owners: Annotated[bool, typer.Option("--owners", help="Owners, setuid and setgid bits too; else all is of 0:0.")] = False,
) -> int:
    """Write a checkpoint's files as a tar, or as a layer of a container image.

    The same checkpoint gives the same bytes. A FILE is there whole, or as it was before. Without -o the archive goes to stdout;
    what --json and -v say goes to stderr then.
    """
    from snapcore.transfer_output import FORMATS

    if format_ is not None and format_ not in FORMATS:
        raise UsageError(f"There is no format {printable(format_)}.", hint=f"Known: {', '.join(FORMATS)}.")
    to_stdout = output == STANDARD
    if to_stdout and sys.stdout.isatty():
        raise UsageError("An archive is not for a terminal.", hint="Name a file with -o, or lead stdout elsewhere.")
    started = time.monotonic()
    async with invocation.repository() as repo:
        found = await resolve(repo, checkpoint, thread)
        with progress(invocation, "export") as on_progress:
            report = await repo.export(
                found,
                _binary(sys.stdout) if to_stdout else output,
                format=format_ or _format_of(output),
                root=root,
                paths=paths,
                prefix=prefix or "",
                owners=owners,
                on_progress=on_progress,
            )
    with contextlib.redirect_stdout(sys.stderr if to_stdout else sys.stdout):
        if invocation.json:
            print_json(_fields(report, found.thread_id, time.monotonic() - started))
        elif invocation.tells and (invocation.verbose or not to_stdout):
            _tell(invocation, report, output)
    return Exit.DONE


def _binary(stream: Any) -> Any:
    """A standard stream's bytes, without a buffer where there is a file below it: a reader that stands still holds up nothing
    else then."""
    return getattr(stream.buffer, "raw", stream.buffer)


def _format_of(output: str) -> str:
    return next((found for suffix, found in SUFFIXES.items() if output.endswith(suffix)), "tar")


def _fields(report: "ExportReport", thread: str, seconds: float) -> dict[str, Any]:
    return {
        "message_type": "export",
        "thread_id": thread,
        "id": report.checkpoint_id,
        "root": report.root,
        "format": report.format,
        "media_type": report.media_type,
        "files": report.files,
        "folders": report.folders,
        "links": report.links,
        "bytes": report.bytes,
        "size": report.size,
        "digest": report.digest,
        "diff_id": report.diff_id,
        "redacted": path_list(report.redacted),
        "seconds": round(seconds, 3),
    }


def _tell(invocation: Invocation, report: "ExportReport", output: str) -> None:
    print_line(f"checkpoint {report.checkpoint_id}: {count(report.files, 'file')}, {size(report.bytes)}")
    print_line(f"{path_text(os.fsencode(output))}: {size(report.size)}, {report.media_type}")
    print_line(f"digest  {report.digest}")
    print_line(f"diff id {report.diff_id}")
    if report.redacted:
        print_line(f"{count(len(report.redacted), 'file')} with a redacted secret, which is zeros in the archive")
        for path in report.redacted if invocation.verbose else ():
            print_line(f"redacted: {path_text(path)}")


@command
async def import_(
    invocation: Invocation,
    *,
    source: Annotated[str, typer.Argument(metavar="FILE|DIR|-", help="A tar, compressed or not, or a folder; - is stdin.")],
    thread: Thread,
    label: Label = None,
    include: Include = None,
    exclude: Exclude = None,
    everything: Everything = None,
    with_git: WithGit = None,
    keep_rebuildable: KeepRebuildable = None,
    secret_env: SecretEnv = None,
    secret_file: SecretFile = None,
    secret_command: SecretCommand = None,
    on_unsupported: OnUnsupported = None,
    max_unpacked_bytes: Annotated[
        int | None,
        typer.Option("--max-unpacked-bytes", help="How large a tar may be without its compression; else half of what is free."),
    ] = None,
    skip_unchanged: Annotated[
        bool, typer.Option("--skip-unchanged", help="No new checkpoint when nothing has changed since the last.")
    ] = False,
    wait: Wait = None,
    run_id: Annotated[str | None, typer.Option("--run-id", help="The run this belongs to.")] = None,
    step: Annotated[int | None, typer.Option("--step", help="The step of that run.")] = None,
    idempotency_key: Annotated[
        str | None, typer.Option("--idempotency-key", help="Saved under this key before: that checkpoint is the result.")
    ] = None,
    checkpoint_id: Annotated[str | None, typer.Option("--id", help="The id of the new checkpoint.")] = None,
) -> int:
    """Save a tar, or a folder, as a new checkpoint of a thread.

    A tar may be compressed by gzip, bzip2, xz or zstd, and is never unpacked into files. When it is cut short or damaged, or a
    member is absolute, leads up, comes twice or is a device, nothing is saved. What is left out is as in capture.
    """
    policy = invocation.policy(
        include=include,
        exclude=exclude,
        everything=everything,
        with_git=with_git,
        keep_rebuildable=keep_rebuildable,
        on_unsupported=on_unsupported,
    )
    check_wait(wait)
    if max_unpacked_bytes is not None and max_unpacked_bytes < 1:
        raise UsageError("--max-unpacked-bytes takes a number above 0.")
    hidden = invocation.secrets(secret_env, secret_file, secret_command)
    started = time.monotonic()
    async with invocation.repository() as repo:
        with progress(invocation, "import") as on_progress:
            report = await repo.import_(
                _binary(sys.stdin) if source == STANDARD else source,
                thread_id=thread,
                max_unpacked_bytes=max_unpacked_bytes,
                label=label,
                policy=policy,
                secrets=hidden,
                skip_unchanged=skip_unchanged,
                wait=wait,
                run_id=run_id,
                step=step,
                idempotency_key=idempotency_key,
                checkpoint_id=checkpoint_id,
                on_progress=on_progress,
            )
    return tell_report(invocation, "import", report, time.monotonic() - started)
