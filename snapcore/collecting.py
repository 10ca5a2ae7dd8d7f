"""gc: free the space of what no checkpoint, pin or writer needs any more, and merge what is left in small pieces.

In two phases, so that nothing is deleted while it may be referred to again: a pack without live records is condemned, and
a condemned pack that nobody came back to within the grace is deleted. docs/format.md has the rules, and the tests an
enumeration of what happens without each.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal, get_args

import msgspec

from .durations import parse_duration
from .engine import Engine, each
from .errors import Code, RepositoryError, SnapshotError
from .maintenance import Maintenance, PackContents, Roots
from .model import PackState, Progress
from .packs import TARGET_PACK_BYTES, pack_key
from .protocols import ProgressCallback
from .reachability import Reachability, UnreadableError
from .repacking import Repacker

__all__ = ["DEFAULT_GRACE", "Fate", "GcReport", "PackFate", "Repack", "collect"]

DEFAULT_GRACE: Final = 24 * 3600.0
LATE_PUT: Final = 24 * 3600.0  # by then a put that a dead writer left under way has ended
UNUSED_CACHE: Final = 90 * 24 * 3600.0
SMALL_PACK: Final = TARGET_PACK_BYTES // 4
FEWEST_SMALL: Final = 8  # fewer small packs than these do not slow a restore
MOSTLY_DEAD: Final = 0.5
HARDLY_DEAD: Final = 0.95
RECORD_BYTES: Final = 88  # of a record beside its payload: its header, and its place in the footer
PACK_BYTES: Final = 72  # of a pack beside its records: header, tail, and what its footer needs at least
PACKS_AT_ONCE: Final = 64
DELETES_AT_ONCE: Final = 8

Repack = Literal["auto", "all", "none"]


class Fate(StrEnum):
    """What gc does with a pack, or why it leaves it."""

    FREED = "freed"  # deleted now
    CONDEMNED = "condemned"  # nothing needs it; deleted once the grace is over
    REPACKED = "repacked"  # its live records are moved into another pack; then as condemned
    LIVE = "live"  # checkpoints need it
    RECENT = "recent"  # written or referred to since gc looked
    WRITING = "writing"  # of a capture that is running
    LOST = "lost"  # set aside by repair; never deleted


class PackFate(msgspec.Struct, frozen=True):
    """One pack: its size and the bytes of it that are needed; `condemned_at` is in microseconds by the database's clock."""

    pack_id: str
    fate: Fate
    size: int
    live_bytes: int = 0
    condemned_at: int | None = None


@dataclass(slots=True)
class GcReport:
    """What was done, or with `dry_run` what would be. `records` are the live ones; `bytes_moved` were written to merge packs;
    sizes are of packs, in bytes."""

    dry_run: bool
    grace: float
    records: int = 0
    bytes_moved: int = 0
    caches_dropped: int = 0
    packs: list[PackFate] = field(default_factory=list)

    def count(self, fate: Fate) -> int:
        """How many packs have that fate."""
        return sum(pack.fate is fate for pack in self.packs)

    def size(self, fate: Fate) -> int:
        """The bytes of the packs with that fate."""
        return sum(pack.size for pack in self.packs if pack.fate is fate)


async def collect(
    engine: Engine,
    *,
    grace: float = DEFAULT_GRACE,
    repack: Repack = "auto",
    dry_run: bool = False,
    on_progress: ProgressCallback | None = None,
) -> GcReport:
    """Collect garbage while captures, restores and forks go on.

    `grace` is how many seconds a pack stays after it was condemned. `repack` merges small packs and those that are mostly dead
    (`auto`), also each of which a twentieth is dead (`all`), or none. Raises `RepositoryError` `MAINTENANCE_LOST` when another gc
    was started meanwhile, `DAMAGED` when a checkpoint's manifest cannot be read: what it needs is then not known. Whatever was
    done until then stays right.
    """
    grace = parse_duration(grace, "The grace of gc", zero=True)
    if repack not in get_args(Repack):
        raise SnapshotError(f"repack is {repack!r}, none of 'auto', 'all' and 'none'.", code=Code.INVALID_REQUEST)
    return await _Collect(engine, grace, repack, on_progress).run(dry_run=dry_run)


class _Collect:
    def __init__(self, engine: Engine, grace: float, repack: Repack, on_progress: ProgressCallback | None) -> None:
        self._engine = engine
        self._store = engine.checkpoints
        self._grace = grace
        self._repack = repack
        self._on_progress = on_progress
        self._reach = Reachability(engine, self._tell)

    async def run(self, *, dry_run: bool) -> GcReport:
        report = GcReport(dry_run, self._grace)
        run = None if dry_run else await self._store.start_maintenance()
        roots = await self._mark()
        report.records = len(self._reach.live)
        report.packs = [self._judge(pack, roots) async for pack in self._contents() if pack.state != PackState.DELETED]
        self._choose_repacks(report)
        if run is not None:
            await self._collect(run, roots, report)
        else:
            _foresee(report, roots.now)
        return report

    def _tell(self, done: int) -> None:
        if self._on_progress is not None:
            self._on_progress(Progress("mark", done, unit="record"))

    def _tell_moved(self, done: int, size: int, total: int) -> None:
        if self._on_progress is not None:
            self._on_progress(Progress("repack", done, size, total, unit="pack"))

    async def _mark(self) -> Roots:
        """Walk to all that is live. A checkpoint may be deleted meanwhile: the walk then goes on from the roots that are left."""
        while True:
            roots = await self._store.roots()
            try:
                await self._reach.walk(roots)
                return roots
            except UnreadableError as error:
                again = await self._store.roots()
                if not (roots.manifests - again.manifests or roots.chunk_lists - again.chunk_lists):
                    raise RepositoryError(
                        f"A checkpoint's content cannot be listed: {error.cause.message} Nothing was freed.",
                        code=Code.DAMAGED,
                        hint="Run 'snapcore verify' to see what is hurt, and 'snapcore repair'.",
                    ) from error

    async def _contents(self) -> AsyncIterator[PackContents]:
        after = 0
        while found := await self._store.pack_contents(after, PACKS_AT_ONCE):
            for pack in found:
                yield pack
            after = found[-1].number

    # ---- what becomes of each pack

    def _judge(self, pack: PackContents, roots: Roots) -> PackFate:
        live = sum(size + RECORD_BYTES for record_id, _, size in pack.records if record_id in self._reach.live)
        live_bytes = min(live + PACK_BYTES, pack.size) if live else 0
        return PackFate(pack.pack_id, self._fate(pack, live, roots), pack.size, live_bytes, pack.condemned_at)

    def _fate(self, pack: PackContents, live: int, roots: Roots) -> Fate:
        match pack.state:
            case PackState.WRITING:
                return Fate.WRITING if pack.owned else Fate.CONDEMNED
            case PackState.LIVE if (pack.commit_seq or 0) > roots.mark:
                return Fate.RECENT
            case PackState.LIVE:
                return Fate.LIVE if live else Fate.CONDEMNED
            case PackState.CONDEMNED:
                return Fate.CONDEMNED
            case PackState.LOST:
                return Fate.LOST
        return Fate.FREED

    def _choose_repacks(self, report: GcReport) -> None:
        """Live packs whose records are to be moved, marked in the report."""
        live = [pack for pack in report.packs if pack.fate is Fate.LIVE]
        small = {pack.pack_id for pack in live if pack.size < SMALL_PACK}
        chosen: set[str] = set()
        if self._repack != "none":
            least = MOSTLY_DEAD if self._repack == "auto" else HARDLY_DEAD
            chosen |= {p.pack_id for p in live if p.live_bytes < least * p.size}
            chosen |= small if len(small) >= FEWEST_SMALL else set()
        report.packs = [msgspec.structs.replace(p, fate=Fate.REPACKED) if p.pack_id in chosen else p for p in report.packs]

    # ---- doing it

    async def _collect(self, run: Maintenance, roots: Roots, report: GcReport) -> None:
        await self._forget_deleted(run)
        abandoned = await self._store.condemn_abandoned(run)
        garbage = [p.pack_id for p in report.packs if p.fate is Fate.CONDEMNED and p.condemned_at is None]
        condemned = {*abandoned, *await self._store.condemn(run, roots.mark, garbage)}
        moving = [p for p in report.packs if p.fate is Fate.REPACKED]
        repacker = Repacker(
            self._engine, run, roots.mark, self._reach.live, lambda done, size: self._tell_moved(done, size, len(moving))
        )
        moved = await repacker.move([p.pack_id for p in moving])
        report.bytes_moved = repacker.bytes_written
        freed = await self._sweep(run)
        report.caches_dropped = await self._store.expire_caches(run, unused=UNUSED_CACHE)
        report.packs = [_outcome(p, condemned, moved, freed) for p in report.packs]

    async def _forget_deleted(self, run: Maintenance) -> None:
        """Delete once more what was deleted long ago, and forget it."""
        while old := await self._store.deleted_before(run, LATE_PUT):
            await self._delete(old)
            await self._store.forget_packs(run, old)

    async def _sweep(self, run: Maintenance) -> set[str]:
        freed: set[str] = set()
        while due := await self._store.sweep(run, grace=self._grace):
            await self._delete(due)
            await self._store.mark_deleted(run, due)
            freed.update(due)
        return freed

    async def _delete(self, pack_ids: Sequence[str]) -> None:
        await each(pack_ids, lambda pack_id: self._engine.blobs.delete(pack_key(pack_id)), at_once=DELETES_AT_ONCE)


def _foresee(report: GcReport, now: int) -> None:
    """Of a dry run: which packs would be freed at once."""
    grace = int(report.grace * 1_000_000)
    going = (Fate.CONDEMNED, Fate.REPACKED)
    report.packs = [
        msgspec.structs.replace(p, fate=Fate.FREED) if p.fate in going and (p.condemned_at or now) <= now - grace else p
        for p in report.packs
    ]


def _outcome(pack: PackFate, condemned: set[str], moved: set[str], freed: set[str]) -> PackFate:
    """What became of a pack in truth: others may have come back to it meanwhile."""
    fate = pack.fate
    if pack.pack_id in freed:
        fate = Fate.FREED
    elif pack.pack_id in condemned:
        fate = Fate.CONDEMNED
    elif (fate is Fate.CONDEMNED and pack.condemned_at is None) or (fate is Fate.REPACKED and pack.pack_id not in moved):
        fate = Fate.RECENT
    return msgspec.structs.replace(pack, fate=fate)
