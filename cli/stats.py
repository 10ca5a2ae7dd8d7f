"""What a repository holds, and who needs how much of it: `stats`."""

import sys
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from .output import count, moment, print_json, print_line, print_table, short_ids, size
from .progress import progress
from .runtime import Exit, Invocation, UsageError, command

if TYPE_CHECKING:
    from snapcore.repository import RepositoryStats
    from snapcore.usage import Usage

__all__ = ["stats"]

EXAMPLES: Final = {
    "stats": (
        "snapcore stats",
        "snapcore stats --threads",
        "snapcore stats --thread thread-1 --checkpoints",
        "snapcore stats --quick --json",
    )
}


@command
async def stats(
    invocation: Invocation,
    *,
    thread: Annotated[str | None, typer.Option("--thread", "-t", metavar="THREAD", help="What this thread needs.")] = None,
    threads: Annotated[bool, typer.Option("--threads", help="What each thread needs.")] = False,
    checkpoints: Annotated[
        bool, typer.Option("--checkpoints", help="What each checkpoint adds, of the thread or of all.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Only what the database knows without looking at trees.")] = False,
) -> int:
    """Say how much the repository holds, in how many bytes, and who needs them.

    A checkpoint adds what no earlier one of the repository needs. What only it, or only a thread, needs is what becomes free
    when it goes.
    """
    if quick and (thread is not None or threads or checkpoints):
        raise UsageError("--quick looks at no thread and at no checkpoint.")
    if thread is not None and threads:
        raise UsageError("--thread and --threads exclude each other.")
    async with invocation.repository() as repo:
        found = await repo.stats()
        usage = None
        if not quick:
            with progress(invocation, "stats") as on_progress:
                usage = await repo.usage(thread, checkpoints=checkpoints, on_progress=on_progress)
    tables = _Tables(usage, by_thread=threads or thread is not None, by_checkpoint=checkpoints)
    if invocation.json:
        print_json({"message_type": "stats", **_fields(found, usage), **tables.fields()})
    elif invocation.tells:
        if thread is None:
            _tell(found, usage)
        tables.print(full=invocation.verbose, after=thread is None, one_thread=thread is not None)
    return Exit.DONE


def _fields(found: "RepositoryStats", usage: "Usage | None") -> dict[str, Any]:
    fields: dict[str, Any] = {
        "threads": found.threads,
        "checkpoints": found.checkpoints,
        "packs": found.packs,
        "records": found.records,
        "logical_bytes": found.logical_bytes,
        "raw_bytes": found.raw_bytes,
        "stored_bytes": found.stored_bytes,
        "dedup_ratio": _ratio(found.logical_bytes, found.raw_bytes),
    }
    if usage is not None:
        fields |= {
            "compression_ratio": _ratio(usage.raw_bytes, usage.content_bytes),
            "content_bytes": usage.content_bytes,
            "needed_bytes": usage.needed_bytes,
            "held_bytes": usage.held_bytes,
            "unneeded_bytes": usage.unneeded_bytes,
            "overhead_bytes": usage.overhead_bytes,
        }
    return fields


def _ratio(whole: int, part: int) -> float | None:
    return round(whole / part, 3) if part else None


def _tell(found: "RepositoryStats", usage: "Usage | None") -> None:
    print_line(f"{count(found.checkpoints, 'checkpoint')} in {count(found.threads, 'thread')}")
    print_line(f"in all checkpoints   {size(found.logical_bytes):>10}")
    dedup = f"dedup ratio {_times(found.logical_bytes, found.raw_bytes)}"
    print_line(f"different content    {size(found.raw_bytes):>10}  {count(found.records, 'record')}, {dedup}")
    packed = "" if usage is None else f", compression ratio {_times(usage.raw_bytes, usage.content_bytes)}"
    print_line(f"stored               {size(found.stored_bytes):>10}  {count(found.packs, 'pack')}{packed}")
    if usage is None:
        return
    for name, part, about in (
        ("checkpoints need", usage.needed_bytes, ""),
        ("otherwise held", usage.held_bytes, "by logs, and by restores that run"),
        ("not needed", usage.unneeded_bytes, "gc frees it"),
        ("around it all", usage.overhead_bytes, "headers of packs and records"),
    ):
        share = f"{100 * part / usage.stored_bytes:.0f} %" if usage.stored_bytes else ""
        print_line(f"  {name:18} {size(part):>10}  {share}{', ' if share and about else ''}{about}")


def _times(whole: int, part: int) -> str:
    return f"{whole / part:.2f}" if part else "-"


class _Tables:
    """What each thread and each checkpoint needs."""

    def __init__(self, usage: "Usage | None", *, by_thread: bool, by_checkpoint: bool) -> None:
        self._threads = usage.threads if usage is not None and by_thread else None
        self._checkpoints = usage.checkpoints if usage is not None and by_checkpoint else None

    def fields(self) -> dict[str, Any]:
        """Those that were asked for, as JSON has them."""
        fields: dict[str, Any] = {}
        if self._threads is not None:
            fields["by_thread"] = [
                {
                    "thread_id": t.thread_id,
                    "checkpoints": t.checkpoints,
                    "logical_bytes": t.logical_bytes,
                    "refers_bytes": t.refers_bytes,
                    "adds_bytes": t.adds_bytes,
                    "only_bytes": t.only_bytes,
                }
                for t in self._threads
            ]
        if self._checkpoints is not None:
            fields["by_checkpoint"] = [
                {
                    "thread_id": c.thread_id,
                    "id": c.id,
                    "created_at": moment(c.created_at, exact=True),
                    "label": c.label,
                    "logical_bytes": c.logical_bytes,
                    "adds_bytes": c.adds_bytes,
                    "only_bytes": c.only_bytes,
                }
                for c in self._checkpoints
            ]
        return fields

    def print(self, *, full: bool, after: bool, one_thread: bool) -> None:
        """The tables, an empty line before each unless it is the first of all."""
        if self._threads is not None:
            self._space(after)
            print_table(
                ("THREAD", "CHECKPOINTS", "FILES", "NEEDS", "ADDS", "ONLY IT"),
                [
                    (t.thread_id, f"{t.checkpoints:,}", *map(size, (t.logical_bytes, t.refers_bytes, t.adds_bytes, t.only_bytes)))
                    for t in self._threads
                ],
                right=(1, 2, 3, 4, 5),
                names=() if full else (0,),
            )
        if self._checkpoints is not None:
            self._space(after or self._threads is not None)
            ids = [c.id for c in self._checkpoints]
            shown = ids if full else short_ids(ids)
            own = 0 if one_thread else 1
            print_table(
                (*("THREAD",) * own, "ID", "CREATED", "LABEL", "FILES", "ADDS", "ONLY IT"),
                [
                    (
                        *(c.thread_id,) * own,
                        name,
                        moment(c.created_at),
                        c.label or "",
                        *map(size, (c.logical_bytes, c.adds_bytes, c.only_bytes)),
                    )
                    for name, c in zip(shown, self._checkpoints, strict=True)
                ],
                right=(3 + own, 4 + own, 5 + own),
                names=() if full else (*(0,) * own, 2 + own),
            )

    def _space(self, wanted: bool) -> None:
        if wanted:
            sys.stdout.write("\n")
