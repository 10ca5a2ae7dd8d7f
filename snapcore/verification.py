"""Verify: does the blob store hold what the database says, and does every checkpoint lead to all of its content?"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from .engine import Engine
from .errors import Code, SnapcoreError, SnapshotError
from .manifest import decode_page, validate_entries
from .model import Checkpoint, ContentRef, Entry, Location, PackState, Progress, RecordType, RootState
from .packs import pack_key, read_pack, record_content
from .protocols import ProgressCallback
from .records import RecordReader

__all__ = ["Problem", "VerifyReport", "verify"]

PAGES_AT_ONCE: Final = 64
PRESENT: Final = frozenset({PackState.LIVE, PackState.CONDEMNED})


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong: `kind` (pack-missing, pack-size, pack-damaged, record-missing, record-damaged, manifest-damaged, head),
    what it is about, in words, and the (thread, checkpoint) pairs that it hurts."""

    kind: str
    subject: str
    message: str
    checkpoints: tuple[tuple[str, str], ...] = ()


@dataclass(slots=True)
class VerifyReport:
    """What was looked at, and every problem found. `bytes_read` counts pack bytes read with `read_data`."""

    checkpoints: int = 0
    packs: int = 0
    records: int = 0
    bytes_read: int = 0
    problems: list[Problem] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


class _Verify:
    def __init__(self, engine: Engine, on_progress: ProgressCallback | None) -> None:
        self._engine = engine
        self._reader = RecordReader(engine)
        self._on_progress = on_progress
        self._report = VerifyReport()
        self._users: dict[bytes, set[tuple[str, str]]] = defaultdict(set)  # manifests and other roots: who uses them
        self._bad_packs: dict[str, tuple[str, str]] = {}
        self._bad_records: dict[bytes, str] = {}

    async def run(self, *, read_data: bool) -> VerifyReport:
        await self._packs(read_data=read_data)
        checkpoints = await self._checkpoints()
        manifests: dict[bytes, tuple[RootState, set[tuple[str, str]]]] = {}
        for c in checkpoints:
            for root in c.roots:
                manifests.setdefault(root.manifest, (root, set()))[1].add((c.thread_id, c.id))
        hurt: dict[tuple[str, str], set[tuple[str, str]]] = defaultdict(set)
        done: dict[bytes, None] = {}
        for root, users in manifests.values():
            for problem in await self._manifest(root, done):
                hurt[problem] |= users
        for c in checkpoints:
            for problem in await self._extras(c):
                hurt[problem].add((c.thread_id, c.id))
        for (kind, subject), users in sorted(hurt.items()):
            self._report.problems.append(Problem(kind, subject, self._words(kind, subject), tuple(sorted(users))))
        for pack_id, (kind, message) in sorted(self._bad_packs.items()):
            named = any(p.subject == pack_id for p in self._report.problems)
            if not named:
                self._report.problems.append(Problem(kind, pack_id, message))
        return self._report

    def _words(self, kind: str, subject: str) -> str:
        if subject in self._bad_packs:
            return self._bad_packs[subject][1]
        return {
            "record-missing": f"Record {subject} has no place in any pack.",
            "record-damaged": f"Record {subject} does not hold what it is named after.",
            "manifest-damaged": f"Manifest {subject} cannot be trusted.",
        }.get(kind, subject)

    # ---- packs

    async def _packs(self, *, read_data: bool) -> None:
        for pack in await self._engine.checkpoints.packs():
            if pack.state not in PRESENT:
                continue
            self._report.packs += 1
            info = await self._engine.blobs.head(pack_key(pack.pack_id))
            if info is None:
                self._bad_packs[pack.pack_id] = ("pack-missing", f"Pack {pack.pack_id} is missing from the blob store.")
            elif info.size != pack.size:
                message = f"Pack {pack.pack_id} has {info.size} bytes instead of {pack.size}."
                self._bad_packs[pack.pack_id] = ("pack-size", message)
            elif read_data:
                await self._read_pack(pack.pack_id)
            self._tell()

    async def _read_pack(self, pack_id: str) -> None:
        try:
            data = await self._engine.blobs.get(pack_key(pack_id))
        except SnapshotError as error:
            self._bad_packs[pack_id] = ("pack-missing", f"Pack {pack_id}: {error.message}")
            return
        self._report.bytes_read += len(data)
        problem = await self._engine.run(_check_pack, data)
        if problem:
            self._bad_packs[pack_id] = ("pack-damaged", f"Pack {pack_id} is damaged: {problem}")

    def _tell(self) -> None:
        if self._on_progress is not None:
            self._on_progress(Progress("verify", self._report.packs, self._report.bytes_read))

    # ---- checkpoints

    async def _checkpoints(self) -> list[Checkpoint]:
        found = []
        for thread in await self._engine.checkpoints.threads():
            own = await self._engine.checkpoints.checkpoints(thread.thread_id)
            found += own
            if own and (thread.head_id is None or own[-1].id != thread.head_id):
                self._report.problems.append(
                    Problem("head", thread.thread_id, f"The head of thread {thread.thread_id!r} is not its newest checkpoint.")
                )
        self._report.checkpoints = len(found)
        return found

    async def _manifest(self, root: RootState, done: dict[bytes, None]) -> set[tuple[str, str]]:
        problems: set[tuple[str, str]] = set()
        try:
            pages, index_ids = await self._reader.index(root.manifest)
        except SnapshotError as error:
            return {self._classify(error, root.manifest)}
        problems |= await self._places(index_ids)
        fresh = [p.page_id for p in pages if p.page_id not in done]
        for start in range(0, len(fresh), PAGES_AT_ONCE):
            ids = fresh[start : start + PAGES_AT_ONCE]
            found = await self._pages(ids)
            problems |= found
            if not found:
                done.update(dict.fromkeys(ids))
        if not problems:
            problems |= await self._order(root, [p.page_id for p in pages])
        return problems

    async def _order(self, root: RootState, page_ids: Sequence[bytes]) -> set[tuple[str, str]]:
        previous: Entry | None = None
        folders: list[bytes] = []
        try:
            for start in range(0, len(page_ids), PAGES_AT_ONCE):
                ids = page_ids[start : start + PAGES_AT_ONCE]
                raws = await self._reader.fetch(ids, RecordType.PAGE)
                for i in ids:
                    previous = validate_entries(decode_page(raws[i]), previous, folders)
        except SnapshotError:
            return {("manifest-damaged", root.manifest.hex())}
        return set()

    async def _pages(self, ids: Sequence[bytes]) -> set[tuple[str, str]]:
        problems = await self._places(ids)
        if problems:
            return problems
        try:
            raws = await self._reader.fetch(ids, RecordType.PAGE)
            chunks: set[bytes] = set()
            lists: set[bytes] = set()
            for i in ids:
                for e in decode_page(raws[i]):
                    chunks.update(e.chunk_ids())
                    if e.chunk_list:
                        lists.add(e.chunk_list)
            return await self._content(chunks, lists)
        except SnapshotError as error:
            return {self._classify(error, ids[0])}

    async def _extras(self, c: Checkpoint) -> set[tuple[str, str]]:
        refs: list[ContentRef] = [c.conversation, *c.artifacts.values()]
        chunks = {ref.chunks[i : i + 32] for ref in refs for i in range(0, len(ref.chunks), 32)}
        problems = await self._content(chunks, {ref.chunk_list for ref in refs if ref.chunk_list})
        return problems | await self._places([c.record_id])

    async def _content(self, chunks: set[bytes], lists: set[bytes]) -> set[tuple[str, str]]:
        problems: set[tuple[str, str]] = set()
        if lists:
            met: set[bytes] = set()
            try:
                for ids in (await self._reader.expand(sorted(lists), met)).values():
                    chunks = chunks | set(ids)
            except SnapshotError as error:
                problems.add(self._classify(error, min(lists)))
            problems |= await self._places(met)
        return problems | await self._places(chunks)

    async def _places(self, ids: Iterable[bytes]) -> set[tuple[str, str]]:
        wanted = set(ids)
        located: dict[bytes, Location] = await self._engine.checkpoints.locate(wanted)
        self._report.records += len(located)
        problems = {("record-missing", i.hex()) for i in wanted if i not in located}
        for at in located.values():
            if at.pack_id in self._bad_packs:
                problems.add((self._bad_packs[at.pack_id][0], at.pack_id))
        return problems

    def _classify(self, error: SnapcoreError, record: bytes) -> tuple[str, str]:
        kind = {Code.MISSING_BLOB: "record-missing", Code.INVALID_BLOB: "record-damaged"}.get(error.code, "manifest-damaged")
        return kind, record.hex()


def _check_pack(data: bytes) -> str:
    """What is wrong with a pack's bytes; empty when nothing is."""
    try:
        view = memoryview(data)
        for record in read_pack(data):
            record_content(view[record.offset : record.offset + record.stored_size], record)
    except SnapshotError as error:
        return error.message
    return ""


async def verify(engine: Engine, *, read_data: bool = False, on_progress: ProgressCallback | None = None) -> VerifyReport:
    """Check every pack (present, of the stated size; with `read_data` every byte), and that every checkpoint's records have a
    place in a pack that is there. Changes nothing. An empty repository is fine."""
    return await _Verify(engine, on_progress).run(read_data=read_data)
