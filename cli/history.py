"""Threads and their checkpoints: `list`, `show`, `threads`, `fork`, `rewind`, `label`, `delete`."""

from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from .options import At, DryRun, OptionalThread, Spec, Thread
from .output import checkpoint_fields, count, moment, path_fields, print_json, print_line, print_table, short_ids, size
from .runtime import Exit, Invocation, UsageError, command, resolve

if TYPE_CHECKING:
    from snapcore.forking import Uncovered
    from snapcore.model import Checkpoint

__all__ = ["delete", "fork", "label", "list_", "rewind", "show", "threads"]


EXAMPLES: Final = {
    "list": ("snapcore list --thread thread-1", "snapcore list --thread thread-1 --json"),
    "threads": ("snapcore threads",),
    "show": ("snapcore show latest --thread thread-1", "snapcore show 3f2a"),
    "fork": (
        "snapcore fork --thread thread-1 --to thread-2",
        "snapcore fork --thread thread-1 --to thread-3 -c label:after-install",
        "snapcore fork --thread thread-1 --to thread-4 --at-step 7",
    ),
    "rewind": (
        "snapcore rewind label:after-install --thread thread-1",
        "snapcore restore ./workspace --thread thread-1",
    ),
    "label": (
        "snapcore label latest before-upgrade --thread thread-1",
        "# without a label, the one it has is taken away",
        "snapcore label label:before-upgrade --thread thread-1",
    ),
    "delete": ("snapcore delete 3f2a --thread thread-1 --dry-run", "snapcore delete 3f2a --thread thread-1"),
}


@command
async def list_(invocation: Invocation, *, thread: Thread) -> int:
    """List a thread's checkpoints, oldest first."""
    async with invocation.repository() as repo:
        checkpoints = await repo.list(thread)
    if invocation.json:
        print_json([checkpoint_fields(each) for each in checkpoints])
    elif invocation.tells and not checkpoints:
        print_line(f"Thread {thread} has no checkpoint. 'snapcore threads' shows the threads there are.")
    elif invocation.tells:
        ids = [each.id for each in checkpoints]
        print_table(
            ("ID", "CREATED", "REASON", "LABEL", "FILES", "SIZE"),
            [
                (
                    name,
                    moment(each.created_at),
                    each.reason,
                    each.label or "",
                    f"{each.totals.files:,}",
                    size(each.totals.bytes),
                )
                for name, each in zip(ids if invocation.verbose else short_ids(ids), checkpoints, strict=True)
            ],
            right=(4, 5),
            names=() if invocation.verbose else (3,),
        )
    return Exit.DONE


@command
async def threads(invocation: Invocation) -> int:
    """List the threads of the repository."""
    async with invocation.repository() as repo:
        found = await repo.threads()
    if invocation.json:
        print_json(
            [
                {
                    "thread_id": each.thread_id,
                    "head_id": each.head_id,
                    "checkpoints": each.checkpoints,
                    "updated_at": moment(each.updated_at, exact=True),
                }
                for each in found
            ]
        )
    elif invocation.tells and not found:
        print_line("No thread has a checkpoint yet. 'snapcore capture' makes one.")
    elif invocation.tells:
        heads = [each.head_id or "" for each in found]
        print_table(
            ("THREAD", "CHECKPOINTS", "NEWEST", "HEAD"),
            [
                (each.thread_id, f"{each.checkpoints:,}", moment(each.updated_at), head)
                for head, each in zip(heads if invocation.verbose else short_ids(heads), found, strict=True)
            ],
            right=(1,),
            names=() if invocation.verbose else (0,),
        )
    return Exit.DONE


@command
async def show(invocation: Invocation, *, checkpoint: At, thread: OptionalThread = None) -> int:
    """Show all that is known of a checkpoint."""
    async with invocation.repository() as repo:
        found = await resolve(repo, checkpoint, thread)
    if invocation.json:
        print_json({"message_type": "show", **_details(found)})
    elif invocation.tells:
        details = _details(found)
        width = 1 + max(len(name) for name, value in details.items() if value is not None)
        for name, value in details.items():
            if isinstance(value, list):
                print_line(f"{name + ':':{width}} {len(value)}")
                for each in value:
                    print_line(f"  {_one_line(each)}")
            elif value is not None:
                print_line(f"{name + ':':{width}} {value}")
    return Exit.DONE


def _details(checkpoint: "Checkpoint") -> dict[str, Any]:
    return {
        **checkpoint_fields(checkpoint),
        "source_thread_id": checkpoint.source_thread_id,
        "source_id": checkpoint.source_id,
        "idempotency_key": checkpoint.idempotency_key,
        "conversation_bytes": checkpoint.conversation.size,
        "artifacts": [{"name": name, "bytes": ref.size} for name, ref in sorted(checkpoint.artifacts.items())],
        "roots": [
            {
                "name": root.name,
                "path": root.path,
                "content_id": root.content_id.hex(),
                "files": root.totals.files,
                "bytes": root.totals.bytes,
            }
            for root in checkpoint.roots
        ],
        "skipped": [
            {"root": root.name, **path_fields(skipped.path), "reason": skipped.reason}
            for root in checkpoint.roots
            for skipped in root.skipped
        ],
        "warnings": list(checkpoint.warnings),
    }


def _one_line(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items())
    return str(value)


@command
async def fork(
    invocation: Invocation,
    *,
    thread: Thread,
    to: Annotated[str, typer.Option("--to", metavar="THREAD", help="The new thread; it must have no checkpoint.")],
    checkpoint: Spec = None,
    step: Annotated[
        int | None, typer.Option("--at-step", "--step", metavar="N", help="The newest checkpoint at or before this step.")
    ] = None,
) -> int:
    """Start another thread from a checkpoint. No file is copied."""
    if checkpoint is not None and step is not None:
        raise UsageError("--checkpoint and --at-step exclude each other.")
    async with invocation.repository() as repo:
        source = None if checkpoint is None else (await resolve(repo, checkpoint, thread)).id
        report = await repo.fork_with_report(thread, source, to_thread_id=to, at_step=step)
    forked = report.checkpoint
    lacking = [_uncovered_fields(item) for item in report.uncovered]
    told = f"thread {to} starts with checkpoint {forked.id}, a copy of {forked.source_id}"
    _report(invocation, "fork", forked, told, uncovered=lacking)
    if invocation.tells and lacking:
        print_line(f"it lacks {count(len(lacking), 'operation')} up to step {step}:")
        for each in lacking:
            how = each["reason"] or "can be run again"
            print_line(f"  {each['sequence']:>6}  {'' if each['step'] is None else each['step']:>5}  {each['about']} ({how})")
    return Exit.WARNINGS if lacking else Exit.DONE


def _uncovered_fields(item: "Uncovered") -> dict[str, Any]:
    from snapcore.replay import describe

    event = item.event
    return {
        "sequence": event.sequence,
        "step": event.step,
        "kind": event.kind,
        "about": "" if event.operation is None else describe(event.operation),
        "reason": item.reason,
    }


@command
async def rewind(invocation: Invocation, *, checkpoint: At, thread: Thread) -> int:
    """Append a checkpoint with the content of an earlier one. Nothing is lost."""
    async with invocation.repository() as repo:
        target = await resolve(repo, checkpoint, thread)
        made = await repo.rewind(thread, target.id)
    _report(invocation, "rewind", made, f"checkpoint {made.id} has the content of {target.id} and is now the newest")
    return Exit.DONE


@command
async def label(
    invocation: Invocation,
    *,
    checkpoint: At,
    name: Annotated[str | None, typer.Argument(metavar="LABEL", help="The label; left out, it is removed.")] = None,
    thread: Thread,
) -> int:
    """Give a checkpoint a label, or take it away."""
    async with invocation.repository() as repo:
        target = await resolve(repo, checkpoint, thread)
        changed = await repo.label(thread, target.id, name)
    told = f"is labelled {changed.label}" if changed.label else "has no label any more"
    _report(invocation, "label", changed, f"checkpoint {changed.id} {told}")
    return Exit.DONE


@command
async def delete(invocation: Invocation, *, checkpoint: At, thread: Thread, dry_run: DryRun = False) -> int:
    """Remove a checkpoint from its thread."""
    async with invocation.repository() as repo:
        target = await resolve(repo, checkpoint, thread)
        removed = target if dry_run else await repo.delete(thread, target.id)
    verb = "would delete" if dry_run else "deleted"
    what = f"{count(removed.totals.files, 'file')}, {size(removed.totals.bytes)}"
    _report(invocation, "delete", removed, f"{verb} checkpoint {removed.id} of thread {thread}: {what}", dry_run=dry_run)
    return Exit.DONE


def _report(invocation: Invocation, kind: str, checkpoint: "Checkpoint", text: str, **more: object) -> None:
    if invocation.json:
        source = {"source_thread_id": checkpoint.source_thread_id, "source_id": checkpoint.source_id}
        print_json({"message_type": kind, **checkpoint_fields(checkpoint), **source, **more})
    elif invocation.tells:
        print_line(text)
