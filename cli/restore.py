"""`snapcore restore`."""

import time
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from .options import AllowAnyRoot, DryRun, SecretCommand, SecretEnv, SecretFile, Spec, Thread
from .output import count, path_fields, path_list, path_text, print_json, print_line, size
from .progress import progress
from .runtime import Exit, Invocation, UsageError, command, places, resolve

if TYPE_CHECKING:
    from snapcore.restoring import Receipt

__all__ = ["restore"]


EXAMPLES: Final = {
    "restore": (
        "snapcore restore ./workspace --thread thread-1 --dry-run",
        "snapcore restore ./workspace --thread thread-1",
        "snapcore restore ./workspace --thread thread-1 --paths src --safety-checkpoint",
        "snapcore restore ./elsewhere --thread thread-1 -c label:after-install",
        "snapcore restore docker://my-container/workspace --thread thread-1",
        "# put the secrets that were left out back in",
        "snapcore restore ./elsewhere -t thread-1 --reinject --secret-env GITHUB_TOKEN",
    )
}


@command
async def restore(
    invocation: Invocation,
    *,
    directory: Annotated[
        str | None, typer.Argument(metavar="DIR", help="The folder to restore into, or a sandbox's address. Not with --root.")
    ] = None,
    thread: Thread,
    checkpoint: Spec = None,
    dry_run: DryRun = False,
    allow_empty: Annotated[
        bool, typer.Option("--allow-empty", help="Restore an empty checkpoint: everything in the folder goes.")
    ] = False,
    root: Annotated[
        list[str] | None,
        typer.Option("--root", metavar="NAME=DIR", help="Where one of several captured folders goes. Repeatable."),
    ] = None,
    paths: Annotated[
        list[str] | None, typer.Option("--paths", metavar="PATH", help="Only this path and what is under it. Repeatable.")
    ] = None,
    verify: Annotated[
        str, typer.Option("--verify", metavar="stat|content", help="Check the result by its stats, or read it all back.")
    ] = "stat",
    owners: Annotated[bool, typer.Option("--owners", help="Owners, setuid and setgid bits too.")] = False,
    reinject: Annotated[bool, typer.Option("--reinject", help="Put secrets that were redacted back.")] = False,
    secret_env: SecretEnv = None,
    secret_file: SecretFile = None,
    secret_command: SecretCommand = None,
    allow_any_root: AllowAnyRoot = False,
    safety_checkpoint: Annotated[
        bool,
        typer.Option(
            "--safety-checkpoint",
            help="Capture what is in the folder first, with the secrets of the checkpoint's capture redacted.",
        ),
    ] = False,
) -> int:
    """Make a folder what a checkpoint holds: the thread's newest, or the one named."""
    if verify not in ("stat", "content"):
        raise UsageError("--verify takes 'stat' or 'content'.")
    address, roots = places(directory, root)
    hidden = invocation.secrets(secret_env, secret_file, secret_command, needed=reinject or safety_checkpoint, put_back=reinject)
    if reinject and hidden is None:
        raise UsageError(
            "--reinject has no secret to put back.",
            hint="Name them: --secret-env NAME, --secret-file NAME=PATH, --secret-command NAME=COMMAND.",
        )
    started = time.monotonic()
    async with invocation.repository() as repo:
        found = await resolve(repo, checkpoint or "latest", thread)
        names = [each.name for each in found.roots]
        if len(names) > 1 and roots is None:
            raise UsageError(
                f"The checkpoint holds several folders: {', '.join(names)}.", hint="Say where each goes: --root NAME=DIR."
            )
        with progress(invocation, "restore") as on_progress:
            receipt = await repo.restore(
                address,
                thread_id=thread,
                checkpoint_id=found.id,
                roots=roots,
                paths=paths,
                dry_run=dry_run,
                verify="content" if verify == "content" else "stat",
                owners=owners,
                reinject=reinject,
                secrets=hidden,
                allow_empty=allow_empty,
                safety_checkpoint=safety_checkpoint,
                allow_any_root=allow_any_root,
                on_progress=on_progress,
            )
    assert receipt is not None  # a checkpoint was named
    if invocation.json:
        print_json(_fields(receipt, thread, time.monotonic() - started))
    elif invocation.tells:
        _tell(invocation, receipt, time.monotonic() - started)
    _warn(invocation, receipt)
    return Exit.WARNINGS if receipt.differences else Exit.DONE


def _fields(receipt: "Receipt", thread: str, seconds: float) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "message_type": "restore",
        "thread_id": thread,
        "id": receipt.checkpoint_id,
        "content_id": receipt.content_id.hex(),
        "dry_run": receipt.dry_run,
        "files": receipt.files,
        "folders": receipt.folders,
        "links": receipt.links,
        "bytes": receipt.bytes,
        "added": receipt.added,
        "changed": receipt.changed,
        "removed": receipt.removed,
        "unchanged": receipt.unchanged,
        "bytes_written": receipt.bytes_written,
        "kept": path_list(receipt.kept),
        "redacted": path_list(receipt.redacted),
        "differences": [{**path_fields(path), "reason": reason} for path, reason in receipt.differences],
        "seconds": round(seconds, 3),
    }
    if receipt.dry_run and receipt.plan is not None:
        from .restore_plan import plan_fields

        fields["plan"] = plan_fields(receipt.plan)
    return fields


def _tell(invocation: Invocation, receipt: "Receipt", seconds: float) -> None:
    if receipt.dry_run and receipt.plan is not None:
        from .restore_plan import print_plan

        print_plan(receipt.plan, all_paths=invocation.verbose)
    verb = "would restore" if receipt.dry_run else "restored"
    done = {
        "removed": receipt.removed,
        "added": receipt.added,
        "changed": receipt.changed,
        "already right": receipt.unchanged,
    }
    told = ", ".join(f"{number:,} {what}" for what, number in done.items() if number) or "nothing to do"
    print_line(f"{verb} checkpoint {receipt.checkpoint_id}: {count(receipt.files, 'file')}, {size(receipt.bytes)}")
    print_line(told if receipt.dry_run else f"{told}; wrote {size(receipt.bytes_written)} in {seconds:.2f} s")
    if receipt.redacted:
        print_line(f"{count(len(receipt.redacted), 'file')} with a redacted secret; --reinject puts secrets back")
    if receipt.kept and invocation.verbose:
        for path in receipt.kept:
            print_line(f"left alone: {path_text(path)}")
    elif receipt.kept:
        print_line(f"left alone: {count(len(receipt.kept), 'path')}; --verbose names them")


def _warn(invocation: Invocation, receipt: "Receipt") -> None:
    for path, reason in receipt.differences:
        invocation.warn(f"differs: {path_text(path)}: {reason}")
