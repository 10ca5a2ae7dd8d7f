"""Forget: remove the checkpoints of a thread that no rule keeps.

The rules are those of restic's `forget`, where people know them. All times are UTC. A rule that is not understood is refused:
never may a slip of the pen forget everything.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from .durations import parse_duration
from .engine import Engine
from .errors import CheckpointWriterConflictError, Code, SnapshotError, printable
from .history import missing, surely
from .leases import WriterHold
from .model import Checkpoint, Progress, validate_text, validate_thread_id
from .protocols import CheckpointStore, ProgressCallback

__all__ = ["ForgetReport", "KeepRules", "SkippedThread", "Verdict", "forget", "forget_all", "judge"]

AT_ONCE: Final = 500  # checkpoints removed in one transaction
HOUR: Final = 3_600_000_000
DAY: Final = 24 * HOUR
EPOCH_WEEKDAY: Final = 3  # the epoch was a Thursday; ISO weeks begin on Mondays


def _week(checkpoint: Checkpoint) -> int:
    return (checkpoint.created_at // DAY + EPOCH_WEEKDAY) // 7


# Rule -> the period that a checkpoint belongs to. No two ISO weeks share a number, whatever year they are counted to.
PERIODS: Final[dict[str, Callable[[Checkpoint], object]]] = {
    "hourly": lambda checkpoint: checkpoint.created_at // HOUR,
    "daily": lambda checkpoint: checkpoint.created_at // DAY,
    "weekly": _week,
    "monthly": lambda checkpoint: (checkpoint.created.year, checkpoint.created.month),
    "yearly": lambda checkpoint: checkpoint.created.year,
}


class KeepRules(msgspec.Struct, frozen=True, kw_only=True):
    """Which checkpoints of a thread are kept: those that at least one rule keeps.

    `last` keeps the newest N. `hourly`, `daily`, `weekly` (ISO weeks), `monthly`, `yearly` keep the newest of each of the last N
    such periods that have a checkpoint, in UTC. `within`, seconds or a text such as `30d12h`, keeps what is newer than the
    thread's newest checkpoint less that time: a thread that nobody uses is not emptied as time goes by. `labels` keeps those
    with one of these labels; `labeled`, as long as it is not turned off, those with any. The head is always kept.

    Raises `SnapshotError` `INVALID_REQUEST` when there is no rule, or one that makes no sense.
    """

    last: int | None = None
    hourly: int | None = None
    daily: int | None = None
    weekly: int | None = None
    monthly: int | None = None
    yearly: int | None = None
    within: float | str | None = None
    labels: Collection[str] = ()
    labeled: bool = True

    def __post_init__(self) -> None:
        for name in ("last", *PERIODS):
            _check_count(name, getattr(self, name))
        if self.within is not None:
            parse_duration(self.within, "keep-within", months=True)
        if isinstance(self.labels, str) or not isinstance(self.labels, Collection):
            raise _refused("keep-label takes names.", "Give a list of labels.")
        for label in self.labels:
            validate_text(label, "A label to keep", code=Code.INVALID_REQUEST)
        if not isinstance(self.labeled, bool):
            raise _refused(f"keep-labeled is {self.labeled!r}, neither true nor false.", "")
        if not (self.counted or self.labels):
            raise _refused("There is no rule for what to keep.", "Give at least one, such as keep-last 10 or keep-within 30d.")

    @property
    def counted(self) -> bool:
        """Whether a rule other than one about labels is given."""
        return any(getattr(self, name) is not None for name in ("last", "within", *PERIODS))

    @property
    def rests_on_labels(self) -> bool:
        """Whether a label that nobody has would forget what was to be kept."""
        return bool(self.labels) and not (self.counted and self.labeled)


class Verdict(msgspec.Struct, frozen=True):
    """A checkpoint and the rules that keep it: `head`, `label`, `labeled`, `last`, `within`, `hourly` and so on. None: it is
    forgotten. `created_at` is in microseconds since the epoch."""

    thread_id: str
    checkpoint_id: str
    created_at: int
    label: str | None = None
    kept_by: tuple[str, ...] = ()


class SkippedThread(msgspec.Struct, frozen=True):
    """A thread that was left as it is, and why."""

    thread_id: str
    reason: str


@dataclass(slots=True)
class ForgetReport:
    """What became of each checkpoint, thread by thread, oldest first; with `dry_run`, what would."""

    dry_run: bool
    verdicts: list[Verdict] = field(default_factory=list)
    skipped: list[SkippedThread] = field(default_factory=list)

    @property
    def kept(self) -> list[Verdict]:
        """Checkpoints that stay."""
        return [verdict for verdict in self.verdicts if verdict.kept_by]

    @property
    def forgotten(self) -> list[Verdict]:
        """Checkpoints that are gone."""
        return [verdict for verdict in self.verdicts if not verdict.kept_by]


# ------------------------------------------------------------------------------------------------------ the rules


def judge(checkpoints: Sequence[Checkpoint], rules: KeepRules, head_id: str | None) -> list[Verdict]:
    """What the rules say of each checkpoint of one thread. `checkpoints` are all it has, oldest first; of equally old ones the
    last is the newest."""
    reasons: list[list[str]] = [[] for _ in checkpoints]
    newest_first = range(len(checkpoints) - 1, -1, -1)
    for number, checkpoint in enumerate(checkpoints):
        reasons[number] += _own_reasons(checkpoint, rules, head_id)
    for number in newest_first[: rules.last or 0]:
        reasons[number].append("last")
    if rules.within is not None and checkpoints:
        since = checkpoints[-1].created_at - round(parse_duration(rules.within, "keep-within", months=True) * 1_000_000)
        for number in newest_first:
            if checkpoints[number].created_at > since:
                reasons[number].append("within")
    for rule in PERIODS:
        for number in _newest_of_periods(checkpoints, rule, getattr(rules, rule) or 0):
            reasons[number].append(rule)
    return [Verdict(c.thread_id, c.id, c.created_at, c.label, tuple(why)) for c, why in zip(checkpoints, reasons, strict=True)]


def _own_reasons(checkpoint: Checkpoint, rules: KeepRules, head_id: str | None) -> Iterator[str]:
    if checkpoint.id == head_id:
        yield "head"
    if checkpoint.label is not None and checkpoint.label in rules.labels:
        yield "label"
    if checkpoint.label is not None and rules.labeled:
        yield "labeled"


def _newest_of_periods(checkpoints: Sequence[Checkpoint], rule: str, wanted: int) -> Iterator[int]:
    period = PERIODS[rule]
    seen: object = None
    for number in range(len(checkpoints) - 1, -1, -1):
        if not wanted:
            return
        current = period(checkpoints[number])
        if current != seen:
            seen = current
            wanted -= 1
            yield number


def _check_count(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _refused(f"keep-{name} is {value!r}; it must be a whole number above 0.", "Leave a rule out to not use it.")


def _refused(message: str, hint: str) -> SnapshotError:
    return SnapshotError(f"{message} Nothing was forgotten.", code=Code.INVALID_REQUEST, hint=hint)


# ------------------------------------------------------------------------------------------------------- the work


async def forget(
    engine: Engine, thread_id: str, rules: KeepRules, *, dry_run: bool = False, wait: float | None = None
) -> ForgetReport:
    """Forget in one thread, under its writer lease, so that no checkpoint appears meanwhile.

    Removes some hundreds of checkpoints in a transaction; when it fails half way, what is gone by then was to go. Raises
    `SnapshotError` `MISSING_CHECKPOINT` when the thread has no checkpoint, `INVALID_REQUEST` when a label that decides what is
    kept is none of the thread's; `CheckpointWriterConflictError` when another writer holds the thread, after `wait` seconds.
    """
    validate_thread_id(thread_id)
    if await engine.checkpoints.head(thread_id) is None:
        raise missing(thread_id, None)
    needed = frozenset(rules.labels) if rules.rests_on_labels else frozenset()

    def check(checkpoints: Sequence[Checkpoint]) -> None:
        for label in sorted(needed - {checkpoint.label for checkpoint in checkpoints}):
            raise _NoLabelError(f"Thread {printable(thread_id)}", label)

    return ForgetReport(dry_run, await _forget(engine, thread_id, rules, check, dry_run=dry_run, wait=wait))


async def forget_all(
    engine: Engine,
    rules: KeepRules,
    *,
    dry_run: bool = False,
    wait: float | None = None,
    on_progress: ProgressCallback | None = None,
) -> ForgetReport:
    """Forget in every thread, in each by itself.

    Threads that another writer holds are skipped, and so are those that have none of the labels to keep, when there is no
    other rule. Raises `SnapshotError` `INVALID_REQUEST` when a label that decides what is kept is no thread's.
    """
    report = ForgetReport(dry_run)
    thread_ids = [thread.thread_id for thread in await engine.checkpoints.threads()]
    if rules.rests_on_labels:
        await _check_labels(engine.checkpoints, thread_ids, rules.labels)

    def check(checkpoints: Sequence[Checkpoint]) -> None:
        if checkpoints and not rules.counted and not {c.label for c in checkpoints} & set(rules.labels):
            raise _NoLabelError(f"Thread {printable(checkpoints[0].thread_id)}", ", ".join(sorted(rules.labels)))

    for number, thread_id in enumerate(thread_ids):
        if on_progress is not None:
            on_progress(Progress("forget", number, total_files=len(thread_ids), unit="thread"))
        try:
            report.verdicts += await _forget(engine, thread_id, rules, check, dry_run=dry_run, wait=wait)
        except (CheckpointWriterConflictError, _NoLabelError) as error:
            report.skipped.append(SkippedThread(thread_id, error.message))
    return report


class _NoLabelError(SnapshotError):
    """A label to keep that no checkpoint has."""

    def __init__(self, where: str, label: str) -> None:
        super().__init__(
            f"{where} has no checkpoint labelled {printable(label)}, which was to be kept. Nothing was forgotten there.",
            code=Code.INVALID_REQUEST,
            hint="'snapcore list' shows the labels there are.",
        )


async def _check_labels(store: CheckpointStore, thread_ids: Sequence[str], labels: Collection[str]) -> None:
    for label in labels:
        for thread_id in thread_ids:
            if await store.by_label(thread_id, label) is not None:
                break
        else:
            raise _NoLabelError("The repository", label)


async def _forget(
    engine: Engine,
    thread_id: str,
    rules: KeepRules,
    check: Callable[[Sequence[Checkpoint]], None],
    *,
    dry_run: bool,
    wait: float | None,
) -> list[Verdict]:
    store = engine.checkpoints
    if dry_run:
        head = await store.head(thread_id)
        return await _judge(engine, thread_id, rules, head, check)
    async with WriterHold(engine, thread_id, wait=wait) as hold:
        verdicts = await _judge(engine, thread_id, rules, hold.grant.head, check)
        going = [verdict.checkpoint_id for verdict in verdicts if not verdict.kept_by]
        for start in range(0, len(going), AT_ONCE):
            hold.check()
            await _remove(store, hold, going[start : start + AT_ONCE])
    return verdicts


async def _judge(
    engine: Engine,
    thread_id: str,
    rules: KeepRules,
    head: Checkpoint | None,
    check: Callable[[Sequence[Checkpoint]], None],
) -> list[Verdict]:
    checkpoints = await engine.checkpoints.checkpoints(thread_id)
    check(checkpoints)
    return await engine.run(judge, checkpoints, rules, head.id if head else None)


async def _remove(store: CheckpointStore, hold: WriterHold, ids: Sequence[str]) -> None:
    thread_id = hold.lease.thread_id

    async def work() -> bool:
        await store.delete(hold.lease, ids)
        return True

    async def done() -> bool | None:
        # all of them go in one transaction or none does
        return True if await store.get(thread_id, ids[0]) is None else None

    await surely(work, done)
