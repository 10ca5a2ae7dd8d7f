"""`snapcore capture`."""

import time
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from snapcore.errors import CheckpointWriterConflictError

from .options import (
    AllowAnyRoot,
    Everything,
    Exclude,
    Include,
    KeepRebuildable,
    Label,
    OnUnsupported,
    SecretCommand,
    SecretEnv,
    SecretFile,
    Thread,
    Wait,
    WithGit,
)
from .output import checkpoint_fields, count, path_fields, print_json, print_line, size
from .progress import progress
from .runtime import Exit, Invocation, check_wait, command, places

if TYPE_CHECKING:
    from snapcore.capturing import CaptureReport

__all__ = ["capture", "tell_report"]

EXAMPLES: Final = {
    "capture": (
        "snapcore capture ./workspace --thread thread-1",
        "snapcore capture ./workspace --thread thread-1 --label after-install",
        "snapcore capture ./workspace --thread thread-1 --exclude '*.log' --with-git",
        "snapcore capture ./workspace --thread thread-1 --secret-env GITHUB_TOKEN",
        "snapcore capture docker://my-container/workspace --thread thread-1",
        "# from cron: nothing to do when nothing has changed, or another is at work",
        "snapcore capture ./workspace -t thread-1 -q --skip-unchanged --skip-locked",
    )
}

Directory = Annotated[
    str | None, typer.Argument(metavar="DIR", help="The folder, or another sandbox's address. Not with --root.")
]


@command
async def capture(
    invocation: Invocation,
    *,
    directory: Directory = None,
    thread: Thread,
    label: Label = None,
    include: Include = None,
    exclude: Exclude = None,
    everything: Everything = None,
    with_git: WithGit = None,
    keep_rebuildable: KeepRebuildable = None,
    root: Annotated[
        list[str] | None,
        typer.Option("--root", metavar="NAME=DIR", help="One of several folders to capture together. Repeatable."),
    ] = None,
    secret_env: SecretEnv = None,
    secret_file: SecretFile = None,
    secret_command: SecretCommand = None,
    on_unsupported: OnUnsupported = None,
    on_unreadable: Annotated[
        str | None,
        typer.Option("--on-unreadable", metavar="error|skip", help="Files and folders that cannot be read; else error."),
    ] = None,
    on_torn: Annotated[
        str | None,
        typer.Option("--on-torn", metavar="error|keep", help="Files that keep changing while they are read; else error."),
    ] = None,
    on_limit: Annotated[
        str | None, typer.Option("--on-limit", metavar="error|skip", help="Files beyond one of the limits; else error.")
    ] = None,
    max_files: Annotated[int | None, typer.Option("--max-files", help="At most this many files.")] = None,
    max_file_bytes: Annotated[int | None, typer.Option("--max-file-bytes", help="At most this many bytes a file.")] = None,
    max_total_bytes: Annotated[int | None, typer.Option("--max-total-bytes", help="At most this many bytes in all.")] = None,
    cross_mounts: Annotated[
        bool | None,
        typer.Option(
            "--cross-mounts/--no-cross-mounts",
            help="Also what other file systems hold that are mounted inside.",
            show_default=False,
        ),
    ] = None,
    skip_unchanged: Annotated[
        bool, typer.Option("--skip-unchanged", help="No new checkpoint when nothing has changed since the last.")
    ] = False,
    reread: Annotated[bool, typer.Option("--reread", help="Read every file, whatever its times say.")] = False,
    wait: Wait = None,
    skip_locked: Annotated[
        bool, typer.Option("--skip-locked", help="When another writer holds the thread, do nothing and end with 0.")
    ] = False,
    run_id: Annotated[str | None, typer.Option("--run-id", help="The run this belongs to.")] = None,
    step: Annotated[int | None, typer.Option("--step", help="The step of that run.")] = None,
    idempotency_key: Annotated[
        str | None, typer.Option("--idempotency-key", help="Captured under this key before: that checkpoint is the result.")
    ] = None,
    checkpoint_id: Annotated[str | None, typer.Option("--id", help="The id of the new checkpoint.")] = None,
    allow_any_root: AllowAnyRoot = False,
) -> int:
    """Save a folder as a new checkpoint of a thread."""
    policy = invocation.policy(
        include=include,
        exclude=exclude,
        everything=everything,
        with_git=with_git,
        keep_rebuildable=keep_rebuildable,
        on_unsupported=on_unsupported,
        on_unreadable=on_unreadable,
        on_torn=on_torn,
        on_limit=on_limit,
        max_files=max_files,
        max_file_bytes=max_file_bytes,
        max_total_bytes=max_total_bytes,
        cross_mounts=cross_mounts,
    )
    check_wait(wait)
    address, roots = places(directory, root)
    hidden = invocation.secrets(secret_env, secret_file, secret_command)
    started = time.monotonic()
    async with invocation.repository() as repo:
        try:
            with progress(invocation, "capture") as on_progress:
                report = await repo.capture_with_report(
                    address,
                    thread_id=thread,
                    label=label,
                    policy=policy,
                    secrets=hidden,
                    roots=roots,
                    run_id=run_id,
                    step=step,
                    skip_unchanged=skip_unchanged,
                    wait=wait,
                    on_progress=on_progress,
                    reread=reread,
                    idempotency_key=idempotency_key,
                    checkpoint_id=checkpoint_id,
                    allow_any_root=allow_any_root,
                )
        except CheckpointWriterConflictError as error:
            if not skip_locked:
                raise
            if invocation.json:
                print_json({"message_type": "capture", "thread_id": thread, "created": False, "locked": True})
            elif invocation.tells:
                print_line(f"nothing captured: {error.message}")
            return Exit.DONE
    return tell_report(invocation, "capture", report, time.monotonic() - started)


def tell_report(invocation: Invocation, message_type: str, report: "CaptureReport", seconds: float) -> int:
    """Tell what a capture or an import did; the exit code."""
    if invocation.json:
        print_json(_fields(report, seconds, message_type))
    elif invocation.tells:
        _tell(report, seconds)
    _tell_warnings(invocation, report)
    return Exit.WARNINGS if report.warnings or report.skipped else Exit.DONE


def _fields(report: "CaptureReport", seconds: float, message_type: str) -> dict[str, Any]:
    return {
        "message_type": message_type,
        **checkpoint_fields(report.checkpoint),
        "created": report.created,
        "files_read": report.files_read,
        "bytes_read": report.bytes_read,
        "bytes_stored": report.bytes_stored,
        "packs": report.packs,
        "skipped": [{**path_fields(skipped.path), "reason": skipped.reason} for skipped in report.skipped],
        "warnings": list(report.warnings),
        "seconds": round(seconds, 3),
    }


def _tell(report: "CaptureReport", seconds: float) -> None:
    checkpoint = report.checkpoint
    totals = checkpoint.totals
    what = f"{count(totals.files, 'file')}, {size(totals.bytes)}"
    if report.created:
        print_line(f"checkpoint {checkpoint.id} of thread {checkpoint.thread_id}: {what}")
        print_line(
            f"read {count(report.files_read, 'file')} ({size(report.bytes_read)}), "
            f"stored {size(report.bytes_stored)}, in {seconds:.2f} s"
        )
    else:
        print_line(f"nothing new: checkpoint {checkpoint.id} of thread {checkpoint.thread_id} holds it: {what}")


def _tell_warnings(invocation: Invocation, report: "CaptureReport") -> None:
    """What the checkpoint does not hold, or not for sure."""
    for warning in report.warnings:
        invocation.warn(f"warning: {warning}")
    if report.skipped and invocation.verbose:
        for skipped in report.skipped:
            invocation.warn(f"left out: {path_fields(skipped.path)['path']} ({skipped.reason})")
    elif report.skipped:
        invocation.warn(f"left out: {count(len(report.skipped), 'path')}; --verbose names them")
