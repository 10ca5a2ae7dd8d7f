"""Making room: `forget` removes checkpoints by rules, `gc` frees what nothing needs any more."""

from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from snapcore.durations import parse_duration

from .options import DryRun, Wait
from .output import count, moment, print_json, print_line, print_table, short_ids, size
from .progress import progress
from .runtime import Exit, Invocation, UsageError, check_wait, command, usage_errors

if TYPE_CHECKING:
    from snapcore.collecting import GcReport, PackFate, Repack
    from snapcore.forgetting import ForgetReport, Verdict

__all__ = ["forget", "gc"]

EXAMPLES: Final = {
    "forget": (
        "snapcore forget --thread thread-1 --keep-last 10 --keep-daily 7 --dry-run",
        "snapcore forget --thread thread-1 --keep-last 10 --keep-daily 7",
        "snapcore forget --all --keep-within 30d --keep-weekly 8",
    ),
    "gc": ("snapcore gc --dry-run", "snapcore gc", "snapcore gc --grace 0 --repack"),
}

# Fate -> why, in the order in which it is told.
MEANINGS: Final = {
    "freed": "nothing needs them, and their grace is over",
    "condemned": "not needed; a gc after the grace frees them",
    "repacked": "what is needed of them moves into another pack",
    "live": "needed",
    "recent": "written or used since this gc looked",
    "writing": "of captures that are running",
    "lost": "missing or damaged, set aside by repair",
}


def _newest_of(name: str, period: str) -> Any:
    return typer.Option(f"--keep-{name}", metavar="N", help=f"Keep the newest of each of the last N {period} that have any.")


@command
async def forget(
    invocation: Invocation,
    *,
    thread: Annotated[str | None, typer.Option("--thread", "-t", metavar="THREAD", help="The thread.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every thread, each by itself.")] = False,
    last: Annotated[int | None, typer.Option("--keep-last", metavar="N", help="Keep the newest N.")] = None,
    hourly: Annotated[int | None, _newest_of("hourly", "hours")] = None,
    daily: Annotated[int | None, _newest_of("daily", "days")] = None,
    weekly: Annotated[int | None, _newest_of("weekly", "ISO weeks")] = None,
    monthly: Annotated[int | None, _newest_of("monthly", "months")] = None,
    yearly: Annotated[int | None, _newest_of("yearly", "years")] = None,
    within: Annotated[
        str | None,
        typer.Option("--keep-within", metavar="DURATION", help="Keep what is that much older than the newest at most: 30d12h."),
    ] = None,
    labels: Annotated[
        list[str] | None, typer.Option("--keep-label", metavar="L", help="Keep those with this label. Repeatable.")
    ] = None,
    forget_labeled: Annotated[
        bool, typer.Option("--forget-labeled", help="Let those with a label go as well, when no rule keeps them.")
    ] = False,
    wait: Wait = None,
    dry_run: DryRun = False,
) -> int:
    """Remove the checkpoints that no rule keeps. The newest always stays; what is labelled stays unless you say otherwise."""
    if (thread is None) != every:
        raise UsageError("Name a thread with --thread, or say --all.", hint="Nothing was forgotten.")
    check_wait(wait)
    async with invocation.repository() as repo:
        with usage_errors(), progress(invocation, "forget") as on_progress:
            report = await repo.forget(
                thread,
                all_threads=every,
                keep_last=last,
                keep_hourly=hourly,
                keep_daily=daily,
                keep_weekly=weekly,
                keep_monthly=monthly,
                keep_yearly=yearly,
                keep_within=within,
                keep_labels=tuple(labels or ()),
                keep_labeled=not forget_labeled,
                dry_run=dry_run,
                wait=wait,
                on_progress=on_progress,
            )
    if invocation.json:
        print_json(_forget_fields(report))
    elif invocation.tells:
        _tell_forget(invocation, report)
    else:
        _tell_skipped(invocation, report)
    return Exit.WARNINGS if report.skipped else Exit.DONE


def _forget_fields(report: "ForgetReport") -> dict[str, Any]:
    return {
        "message_type": "forget",
        "dry_run": report.dry_run,
        "kept": len(report.kept),
        "forgotten": len(report.forgotten),
        "checkpoints": [
            {
                "thread_id": verdict.thread_id,
                "id": verdict.checkpoint_id,
                "created_at": moment(verdict.created_at, exact=True),
                "label": verdict.label,
                "kept_by": list(verdict.kept_by),
            }
            for verdict in report.verdicts
        ],
        "skipped": [{"thread_id": skipped.thread_id, "reason": skipped.reason} for skipped in report.skipped],
    }


def _tell_forget(invocation: Invocation, report: "ForgetReport") -> None:
    if report.verdicts and (report.dry_run or invocation.verbose):
        ids = short_ids([verdict.checkpoint_id for verdict in report.verdicts])
        rows = [_row(verdict, short) for verdict, short in zip(report.verdicts, ids, strict=True)]
        print_table(("THREAD", "ID", "CREATED", "LABEL", "KEPT BY"), rows, names=() if invocation.verbose else (0, 3))
    _tell_skipped(invocation, report)
    verb = "would forget" if report.dry_run else "forgot"
    print_line(
        f"{verb} {count(len(report.forgotten), 'checkpoint')}, {'keep' if report.dry_run else 'kept'} {len(report.kept):,}"
    )
    if report.forgotten and not report.dry_run:
        print_line("'snapcore gc' frees what only they needed")


def _tell_skipped(invocation: Invocation, report: "ForgetReport") -> None:
    for skipped in report.skipped:
        invocation.warn(f"skipped thread {skipped.thread_id}: {skipped.reason}")


def _row(verdict: "Verdict", short: str) -> tuple[str, ...]:
    why = ", ".join(verdict.kept_by) or "(forgotten)"
    return verdict.thread_id, short, moment(verdict.created_at), verdict.label or "", why


@command
async def gc(
    invocation: Invocation,
    *,
    grace: Annotated[
        str,
        typer.Option(
            "--grace", metavar="DURATION", help="How long a pack stays after it was found unneeded: 0, 90s, 15m, 24h, 7d."
        ),
    ] = "24h",
    repack: Annotated[
        bool | None,
        typer.Option(
            "--repack/--no-repack",
            help="Rewrite also packs of which a twentieth is not needed, or none at all; else small and mostly unneeded ones.",
        ),
    ] = None,
    dry_run: DryRun = False,
) -> int:
    """Free what no checkpoint needs any more, and merge small packs. Captures and restores go on meanwhile."""
    with usage_errors():
        seconds = parse_duration(grace, "--grace", zero=True)
    how: Repack = "auto" if repack is None else "all" if repack else "none"
    async with invocation.repository() as repo:
        with progress(invocation, "gc") as on_progress:
            report = await repo.gc(grace=seconds, repack=how, dry_run=dry_run, on_progress=on_progress)
    if invocation.json:
        print_json(_gc_fields(report))
    elif invocation.tells:
        _tell_gc(invocation, report)
    return Exit.DONE


def _gc_fields(report: "GcReport") -> dict[str, Any]:
    return {
        "message_type": "gc",
        "dry_run": report.dry_run,
        "grace": report.grace,
        "records": report.records,
        "bytes_moved": report.bytes_moved,
        "caches_dropped": report.caches_dropped,
        "totals": {fate: {"packs": packs, "bytes": total} for fate, packs, total in _totals(report)},
        "packs": [_pack_fields(pack) for pack in report.packs],
    }


def _pack_fields(pack: "PackFate") -> dict[str, Any]:
    return {
        "id": pack.pack_id,
        "fate": str(pack.fate),
        "bytes": pack.size,
        "live_bytes": pack.live_bytes,
        "condemned_at": None if pack.condemned_at is None else moment(pack.condemned_at, exact=True),
    }


def _totals(report: "GcReport") -> list[tuple[str, int, int]]:
    from snapcore.collecting import Fate

    return [(str(fate), report.count(fate), report.size(fate)) for fate in map(Fate, MEANINGS)]


def _tell_gc(invocation: Invocation, report: "GcReport") -> None:
    if invocation.verbose and report.packs:
        print_table(
            ("PACK", "FATE", "SIZE", "NEEDED"),
            [(pack.pack_id, str(pack.fate), size(pack.size), size(pack.live_bytes)) for pack in report.packs],
            right=(2, 3),
        )
    brief = () if report.dry_run or invocation.verbose else ("freed", "condemned", "repacked")
    for fate, packs, total in _totals(report):
        if packs and (not brief or fate in brief):
            print_line(f"{fate:<9} {count(packs, 'pack'):>10}  {size(total) if total else '-':>8}  {MEANINGS[fate]}")
    freed, packs, total = _totals(report)[0]
    begun = sum(pack.fate == freed and not pack.size for pack in report.packs)  # by captures that made no checkpoint
    verb = "would free" if report.dry_run else "freed"
    unfinished = f", and {count(begun, 'pack')} that had only been begun" if begun else ""
    moved = f"; {size(report.bytes_moved)} written into new packs" if report.bytes_moved else ""
    print_line(f"{verb} {size(total)} in {count(packs - begun, 'pack')}{unfinished}{moved}")
