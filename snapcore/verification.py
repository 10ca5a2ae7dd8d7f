"""Verify: does the blob store hold what the database says, and does every checkpoint lead to all of its content?"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from .engine import Engine
from .errors import Code, SnapshotError
from .manifest import decode_page, load_index, validate_entries
from .model import Checkpoint, ContentRef, Entry, Location, PackState, Progress, RecordType, RootState, split_ids
from .packs import pack_key, read_pack, record_content
from .protocols import PackInfo, ProgressCallback
from .records import RecordReader, entry_records

__all__ = ["PRESENT", "Problem", "VerifyReport", "verify"]

PAGES_AT_ONCE: Final = 64
PRESENT: Final = frozenset({PackState.LIVE, PackState.CONDEMNED})  # packs whose content can be relied on

Found = tuple[str, str]  # a problem's kind and subject


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong: `kind`, the pack, record, manifest or thread it is about, in words, and the (thread, checkpoint) pairs
    that it hurts.

    Kinds: pack-missing, pack-size, pack-damaged, pack-state (needed, but not kept for good), record-missing, record-damaged,
    manifest-damaged, head.
    """

    kind: str
    subject: str
    message: str
    checkpoints: tuple[tuple[str, str], ...] = ()


@dataclass(slots=True)
class VerifyReport:
    """What was looked at, and every problem found. `records` counts the places looked up: a record that several pages share is
    looked up for each. `bytes_read` counts pack bytes read with `read_data`."""

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
    def __init__(self, engine: Engine, on_progress: ProgressCallback | None, *, read_data: bool) -> None:
        self._engine = engine
        self._reader = RecordReader(engine)
        self._on_progress = on_progress
        self._report = VerifyReport()
        self._good_packs: set[str] = set()
        self._bad_packs: dict[str, tuple[str, str]] = {}
        self._read_data = read_data

    async def run(self) -> VerifyReport:
        for pack in await self._engine.checkpoints.packs():
            if pack.state in PRESENT:
                await self._pack(pack)
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
            "record-missing": f"Record {subject} is in no pack.",
            "record-damaged": f"Record {subject} does not hold what it is named after.",
            "manifest-damaged": f"Manifest {subject} cannot be trusted.",
        }.get(kind, subject)

    # ---- packs

    async def _pack(self, pack: PackInfo) -> None:
        self._report.packs += 1
        info = await self._engine.blobs.head(pack_key(pack.pack_id))
        if info is None:
            self._bad_packs[pack.pack_id] = ("pack-missing", f"Pack {pack.pack_id} is missing from the blob store.")
        elif info.size != pack.size:
            message = f"Pack {pack.pack_id} has {info.size} bytes instead of {pack.size}."
            self._bad_packs[pack.pack_id] = ("pack-size", message)
        elif self._read_data:
            await self._read_pack(pack.pack_id)
        if pack.pack_id not in self._bad_packs:
            self._good_packs.add(pack.pack_id)
        self._tell()

    async def _look_again(self, needed: set[str]) -> None:
        """Packs that were not kept for good when the work began, and that a checkpoint needs: a commit may have come since."""
        packs = {pack.pack_id: pack for pack in await self._engine.checkpoints.packs()}
        for pack_id in sorted(needed):
            pack = packs.get(pack_id)
            if pack is not None and pack.state in PRESENT:
                await self._pack(pack)
            else:
                state = f"in the state '{pack.state}'" if pack is not None else "not in the database"
                self._bad_packs[pack_id] = ("pack-state", f"Pack {pack_id} is needed, but {state}.")

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

    async def _manifest(self, root: RootState, done: dict[bytes, None]) -> set[Found]:
        problems: set[Found] = set()

        async def fetch(ids: Sequence[bytes], record_type: int) -> dict[bytes, bytes]:
            raws, found = await self._fetch(ids, record_type)
            problems.update(found)
            if found:
                raise SnapshotError("A part of the index is not there.", code=Code.MISSING_BLOB)
            return raws

        try:
            pages, index_ids = await load_index(root.manifest, fetch)
        except SnapshotError:
            return problems or {("manifest-damaged", root.manifest.hex())}
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

    async def _order(self, root: RootState, page_ids: Sequence[bytes]) -> set[Found]:
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

    async def _pages(self, ids: Sequence[bytes]) -> set[Found]:
        problems = await self._places(ids)
        raws, found = await self._fetch(ids, RecordType.PAGE)
        problems |= found
        chunks: set[bytes] = set()
        lists: set[bytes] = set()
        for page_id, raw in raws.items():
            try:
                entries = decode_page(raw)
            except SnapshotError:
                problems.add(("manifest-damaged", page_id.hex()))
                continue
            for e in entries:
                own_chunks, own_lists = entry_records(e)
                chunks.update(own_chunks)
                lists.update(own_lists)
        return problems | await self._content(chunks, lists)

    async def _extras(self, c: Checkpoint) -> set[Found]:
        refs: list[ContentRef] = [c.conversation, *c.artifacts.values()]
        chunks = {i for ref in refs for i in split_ids(ref.chunks)}
        problems = await self._content(chunks, {ref.chunk_list for ref in refs if ref.chunk_list})
        return problems | await self._places([c.record_id])

    async def _content(self, chunks: set[bytes], lists: set[bytes]) -> set[Found]:
        problems: set[Found] = set()
        met: set[bytes] = set()
        try:
            expanded = await self._reader.expand(sorted(lists), met) if lists else {}
        except SnapshotError:
            expanded = {}
            for one in sorted(lists):  # one by one, so that the others are looked at all the same
                try:
                    expanded |= await self._reader.expand([one], met)
                except SnapshotError as error:
                    problems.add(await self._blame(error, one))
        for ids in expanded.values():
            chunks = chunks | set(ids)
        return problems | await self._places(met) | await self._places(chunks)

    async def _fetch(self, ids: Sequence[bytes], record_type: int) -> tuple[dict[bytes, bytes], set[Found]]:
        """The records that can be read, and what is wrong with each of the others."""
        try:
            return await self._reader.fetch(ids, record_type), set()
        except SnapshotError:
            raws: dict[bytes, bytes] = {}
            problems: set[Found] = set()
            for one in ids:
                try:
                    raws |= await self._reader.fetch([one], record_type)
                except SnapshotError as error:
                    problems.add(await self._blame(error, one))
            return raws, problems

    async def _blame(self, error: SnapshotError, record: bytes) -> Found:
        """The problem behind a record that could not be read: its pack's, where the pack is at fault."""
        for problem in await self._places([record]):
            return problem
        kind = {Code.MISSING_BLOB: "record-missing", Code.INVALID_BLOB: "record-damaged"}.get(error.code, "manifest-damaged")
        return kind, record.hex()

    async def _places(self, ids: Iterable[bytes]) -> set[Found]:
        wanted = set(ids)
        located: dict[bytes, Location] = await self._engine.checkpoints.locate(wanted)
        self._report.records += len(located)
        packs = {at.pack_id for at in located.values()}
        if unknown := packs - self._good_packs - self._bad_packs.keys():
            await self._look_again(unknown)
        problems = {("record-missing", i.hex()) for i in wanted if i not in located}
        return problems | {(self._bad_packs[pack_id][0], pack_id) for pack_id in packs & self._bad_packs.keys()}


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
    """Check every pack (present, of the stated size; with `read_data` every byte), that every checkpoint's manifests can be read
    and are well formed, and that all records which they lead to have a place in a pack that is there and is kept for good.
    Contents of files are read with `read_data` only. Changes nothing. An empty repository is fine."""
    return await _Verify(engine, on_progress, read_data=read_data).run()
