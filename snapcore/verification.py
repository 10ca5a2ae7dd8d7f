"""Verify: does the blob store hold what the database says, and does every checkpoint lead to all of its content?"""

from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from .engine import Engine
from .model import Checkpoint, Progress
from .packcheck import PRESENT, PackCheck
from .protocols import ProgressCallback
from .subset import Subset
from .treecheck import Found, TreeCheck

__all__ = ["PRESENT", "Problem", "Verification", "VerifyReport", "verify"]

CHECKPOINTS_AT_ONCE: Final = 256

User = tuple[str, str]  # thread, checkpoint


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong: `kind`, the pack, record, manifest or thread it is about, in words, and the (thread, checkpoint) pairs
    that it hurts.

    Kinds: pack-missing, pack-size, pack-damaged, pack-state (needed, but not kept for good), record-missing, record-damaged,
    record-misplaced (its row leads elsewhere), manifest-damaged, head.
    """

    kind: str
    subject: str
    message: str
    checkpoints: tuple[tuple[str, str], ...] = ()


@dataclass(slots=True)
class VerifyReport:
    """What was looked at, and every problem found. `records` counts the records that were looked up, each once. `bytes_read`
    counts pack bytes read with `read_data`."""

    checkpoints: int = 0
    packs: int = 0
    records: int = 0
    bytes_read: int = 0
    problems: list[Problem] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    @property
    def hurt(self) -> list[tuple[str, str]]:
        """The (thread, checkpoint) pairs that some problem hurts, in order."""
        return sorted({pair for problem in self.problems for pair in problem.checkpoints})


class Verification:
    """One verification, in the steps that repair takes too."""

    def __init__(self, engine: Engine, on_progress: ProgressCallback | None = None) -> None:
        self._engine = engine
        self._on_progress = on_progress
        self._report = VerifyReport()
        self._packs = PackCheck(engine, on_progress)
        self._trees = TreeCheck(engine, self._judge)
        self._hurt: dict[Found, set[User]] = defaultdict(set)

    async def _judge(self, ids: Collection[bytes]) -> dict[bytes, Found]:
        bad = await self._packs.judge(ids)
        self._report.records += sum(found[0] != "record-missing" for found in bad.values()) + len(ids) - len(bad)
        return bad

    async def packs(self, *, read: Subset | bool = False) -> None:
        """Look for all packs; read a part of them, or all."""
        await self._packs.run(read=read)

    async def stored(self) -> None:
        """Look at every checkpoint of the database, and at the heads of its threads."""
        for thread_id in await self._engine.checkpoints.astray_heads():
            words = f"The head of thread {thread_id!r} is not its newest checkpoint."
            self._report.problems.append(Problem("head", thread_id, words))
        total = sum(thread.checkpoints for thread in await self._engine.checkpoints.threads())
        async for some in self._stored():
            await self.look(some)
            self._report.checkpoints += len(some)
            if self._on_progress is not None:
                done = self._report.checkpoints
                self._on_progress(Progress("trees", done, total_files=max(total, done), unit="checkpoint"))

    async def look(self, checkpoints: Sequence[Checkpoint]) -> list[bool]:
        """Look at checkpoints, 256 or so at once; of each, whether nothing is wrong with it."""
        problems = await self._trees.look(checkpoints)
        for c, found in zip(checkpoints, problems, strict=True):
            for one in found:
                self._hurt[one].add((c.thread_id, c.id))
        return [not found for found in problems]

    async def report(self) -> VerifyReport:
        """All that was found. Checkpoints that were deleted meanwhile do not count."""
        await self._packs.settle()
        gone = await self._deleted()
        hurt = {found: users - gone for found, users in self._hurt.items()}
        for found, users in sorted(hurt.items()):
            if users:
                words = self._packs.problems.get(found) or _words(*found)
                self._report.problems.append(Problem(*found, words, tuple(sorted(users))))
        for found, message in sorted(self._packs.problems.items()):
            if not hurt.get(found):
                self._report.problems.append(Problem(*found, message))
        self._report.packs, self._report.bytes_read = self._packs.packs, self._packs.bytes_read
        return self._report

    async def _stored(self) -> AsyncIterator[list[Checkpoint]]:
        some: list[Checkpoint] = []
        for thread in await self._engine.checkpoints.threads():
            own = await self._engine.checkpoints.checkpoints(thread.thread_id)
            some += own
            while len(some) >= CHECKPOINTS_AT_ONCE:
                yield some[:CHECKPOINTS_AT_ONCE]
                del some[:CHECKPOINTS_AT_ONCE]
        if some:
            yield some

    async def _deleted(self) -> set[User]:
        users = set().union(*self._hurt.values())
        threads = {thread_id for thread_id, _ in users}
        there = {(c.thread_id, c.id) for thread_id in threads for c in await self._engine.checkpoints.checkpoints(thread_id)}
        return users - there


def _words(kind: str, subject: str) -> str:
    return {
        "record-missing": f"Record {subject} is in no pack.",
        "record-damaged": f"Record {subject} does not hold what it is named after.",
        "manifest-damaged": f"Manifest {subject} cannot be trusted.",
    }.get(kind, subject)


async def verify(
    engine: Engine, *, read_data: bool = False, subset: Subset | None = None, on_progress: ProgressCallback | None = None
) -> VerifyReport:
    """Check every pack (present, of the stated size; with `read_data` every byte, with `subset` those of a part), that every
    checkpoint's manifests can be read and are well formed, and that all records which they lead to have a place in a pack that
    is there and is kept for good. Contents of files are read with `read_data` and `subset` only; the rows of a pack that is read
    are compared with what it holds. Changes nothing. An empty repository is fine."""
    verification = Verification(engine, on_progress)
    await verification.packs(read=subset or read_data)
    await verification.stored()
    return await verification.report()
