"""Much of everything: a capture that succeeds can be restored, and packs keep to their sizes, whatever the workspace holds."""

import asyncio
import random
import tracemalloc
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest

from snapcore import ingest, packs, packwriter
from snapcore.chunking import CODEC_RAW, MAX_RECORD_BYTES, record_id
from snapcore.contents import ContentStager, FileTask
from snapcore.errors import Code, SnapshotError
from snapcore.leases import WriterHold
from snapcore.model import Entry, FileStat, Kind, Note, RecordType
from snapcore.opening import borrowed
from snapcore.packwriter import NewRecord, PackWriter, new_pack_id
from snapcore.protocols import Buffer, ScanSelection
from snapcore.providers.direct import DirectWorkspace
from snapcore.records import RecordReader, entry_records
from snapcore.redaction import Redactor
from snapcore.repository import Repository
from snapcore.selection import FilePolicy
from snapcore.stores import sql_packs
from snapcore.stores.memory import MemoryBlobStore
from snapcore.stores.sql import SqlCheckpointStore
from snapcore.stores.sql_transactions import Transaction

Make = Callable[..., Path]
Settle = Callable[[Path], None]
NAME = "TOKEN-" + "n" * 120
TOKEN = "ghp_0123456789"
LOG = (f"GET /?t={TOKEN} 200\n" * 80_000).encode()
"""With the secret's name in each, its redactions take more than a record may hold."""


# ---- redactions


@pytest.fixture(params=["ids", "list"])
def kept_as(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The ids of the redactions' chunks are in the entry, or in a chunk list as those of very many would be."""
    if request.param == "list":
        monkeypatch.setattr(ingest, "CONTENT_IDS_IN_ENTRY", 1)
    return str(request.param)


@pytest.mark.parametrize("size", ["whole", "in pieces"])
async def test_a_log_full_of_secrets_can_be_restored(
    repo: Repository, make: Make, settle: Settle, tmp_path: Path, kept_as: str, size: str
) -> None:
    """Case 28: the list of what was taken out is no part of the page, or nothing on the page could be read again."""
    log = LOG if size == "whole" else LOG * 4
    work = make({"log": log, "beside": "content"})
    settle(work)
    secrets: dict[str, str | bytes] = {NAME: TOKEN}
    checkpoint = await repo.capture(work, thread_id="t", secrets=secrets)
    entry = {e.path: e async for e in repo.ls(checkpoint)}[b"log"]
    assert entry.redactions == ()
    assert bool(entry.redaction_list) == (kept_as == "list")
    assert bool(entry.redaction_chunks) == (kept_as == "ids")

    target = tmp_path / "target"
    receipt = await repo.restore(target, thread_id="t")
    assert receipt is not None
    assert receipt.redacted == (b"log",)
    assert (target / "log").read_bytes() == log.replace(TOKEN.encode(), bytes(len(TOKEN)))
    receipt = await repo.restore(target, thread_id="t", reinject=True, secrets=secrets, verify="content")
    assert receipt is not None
    (target / "log").unlink()
    receipt = await repo.restore(target, thread_id="t", reinject=True, secrets=secrets)
    assert receipt is not None
    assert receipt.redacted == ()
    assert (target / "log").read_bytes() == log

    (work / "log").touch()
    receipt = await repo.restore(work, thread_id="t", dry_run=True)
    assert receipt is not None
    assert receipt.bytes_written == 0
    report = await repo.verify(read_data=True)
    assert report.ok


async def test_redactions_stored_apart_are_taken_over_with_the_file(
    repo: Repository, make: Make, settle: Settle, tmp_path: Path
) -> None:
    """Unchanged, beside a file that changed; and from a checkpoint that is no longer the head."""
    work = make({"log": LOG, "beside": "content"})
    settle(work)
    secrets: dict[str, str | bytes] = {NAME: TOKEN}
    await repo.capture(work, thread_id="t", secrets=secrets)
    (work / "beside").write_text("changed")
    report = await repo.capture_with_report(work, thread_id="t", secrets=secrets)
    assert report.files_read == 1
    await repo.capture(make({"other": "x"}, tmp_path / "other"), thread_id="t", secrets=secrets)
    settle(work)
    report = await repo.capture_with_report(work, thread_id="t", secrets=secrets)
    assert report.files_read <= 1
    await repo.restore(tmp_path / "target", thread_id="t", reinject=True, secrets=secrets)
    assert (tmp_path / "target/log").read_bytes() == LOG


async def test_a_few_redactions_stay_in_the_entry(memory_repo: Repository, make: Make) -> None:
    work = make({"few": TOKEN.encode() * 64, "many": TOKEN.encode() * 65})
    (work / "few").write_bytes((TOKEN.encode() + b"\n") * 64)
    (work / "many").write_bytes((TOKEN.encode() + b"\n") * 65)
    checkpoint = await memory_repo.capture(work, thread_id="t", secrets={NAME: TOKEN})
    found = {e.path: e async for e in memory_repo.ls(checkpoint)}
    assert (len(found[b"few"].redactions), found[b"few"].redaction_chunks) == (64, b"")
    assert (found[b"many"].redactions, len(found[b"many"].redaction_chunks)) == ((), 32)
    reader = RecordReader(memory_repo._engine)
    assert len(await reader.redactions(found[b"many"])) == 65
    assert len(await reader.redactions(found[b"few"])) == 64


def test_the_records_of_an_entry_include_those_of_its_redactions() -> None:
    ids = [bytes([n]) * 32 for n in range(6)]
    entry = Entry(b"f", Kind.FILE, chunks=ids[0] + ids[1], redaction_chunks=ids[2] + ids[3])
    assert entry_records(entry) == (ids[:4], [])
    entry = Entry(b"f", Kind.FILE, chunk_list=ids[4], redaction_list=ids[5])
    assert entry_records(entry) == ([], ids[4:])


# ---- records


class Unreadable(DirectWorkspace):
    """A folder with very many files that cannot be read."""

    async def scan(self, selection: ScanSelection, *, cross_mounts: bool = False) -> AsyncIterator[Sequence[FileStat]]:
        async for batch in super().scan(selection, cross_mounts=cross_mounts):
            yield batch
        yield [FileStat(b"z%099d" % n, Kind.FILE, note=Note.UNREADABLE) for n in range(90_000)]


async def test_too_many_skipped_paths_are_refused(memory_repo: Repository, make: Make) -> None:
    """The record that lists them could never be read again."""
    with pytest.raises(SnapshotError, match="90000 skipped paths") as caught:
        await memory_repo.capture(Unreadable(make({"f": "x"})), thread_id="t", policy=FilePolicy(on_unreadable="skip"))
    assert caught.value.code == Code.LIMIT_EXCEEDED
    assert "Exclude" in str(caught.value)
    assert await memory_repo.get("t") is None


@pytest.mark.parametrize("record_type", [RecordType.PAGE, RecordType.INDEX, RecordType.CHUNK_LIST, RecordType.CHECKPOINT])
async def test_no_record_over_the_limit_is_stored(memory_repo: Repository, record_type: int) -> None:
    engine, pack_id = memory_repo._engine, new_pack_id()
    raw = bytes(MAX_RECORD_BYTES + 1)
    async with WriterHold(engine, "t", pack_id=pack_id) as hold:
        writer = PackWriter(engine, hold.lease, pack_id, lookups=False)
        for add in (
            lambda: writer.add_record(raw, record_type),
            lambda: writer.add_structure({record_id(record_type, raw): raw}, record_type),
        ):
            with pytest.raises(SnapshotError) as caught:
                await add()
            assert caught.value.code == Code.LIMIT_EXCEEDED
        assert (await writer.finish()).packs == ()


# ---- packs


class SlowBlobs(MemoryBlobStore):
    """Others go on for long while a blob is put. Keeps the sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    async def put(self, key: str, data: Buffer) -> None:
        if key.startswith("packs/"):
            self.sizes.append(len(data))
        for _ in range(200):
            await asyncio.sleep(0)
        await super().put(key, data)


@pytest.mark.parametrize("kind", ["content", "structure", "both"])
async def test_packs_are_full_and_not_too_full_however_many_wait(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Every reader that waits for an upload would else add one more record, and then flush a pack with little in it."""
    target = 1 << 20
    for module in (packs, packwriter):
        monkeypatch.setattr(module, "TARGET_PACK_BYTES", target)
    blobs = SlowBlobs()
    async with borrowed(blobs, SqlCheckpointStore("sqlite://")) as repo:
        engine, pack_id = repo._engine, new_pack_id()
        async with WriterHold(engine, "t", pack_id=pack_id) as hold:
            writer = PackWriter(engine, hold.lease, pack_id, lookups=False)
            rng = random.Random(1)

            async def add(number: int) -> None:
                for step in range(12):
                    raw = rng.randbytes(target // 4)
                    if kind == "content" or (kind == "both" and (number + step) % 2):
                        await writer.add(
                            [NewRecord(RecordType.CHUNK, record_id(RecordType.CHUNK, raw), len(raw), CODEC_RAW, raw)]
                        )
                    else:
                        await writer.add_structure({record_id(RecordType.PAGE, raw): raw}, RecordType.PAGE)

            await asyncio.gather(*(add(n) for n in range(8)))
            await writer.finish()
    assert sum(blobs.sizes) > 8 * 12 * (target // 4)
    assert max(blobs.sizes) < 2 * target
    small = [size for size in blobs.sizes[:-1] if size < target]
    assert len(small) <= (0 if kind == "content" else 1 if kind == "structure" else len(blobs.sizes) // 3)
    assert min(blobs.sizes) > target // 4


async def test_a_failed_upload_fails_every_reader_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """And none of them for ever."""
    for module in (packs, packwriter):
        monkeypatch.setattr(module, "TARGET_PACK_BYTES", 1 << 16)

    class Failing(SlowBlobs):
        async def put(self, key: str, data: Buffer) -> None:
            if key.startswith("packs/"):
                raise SnapshotError("The disk is full.", code=Code.MISSING_BLOB)
            await super().put(key, data)

    async with borrowed(Failing(), SqlCheckpointStore("sqlite://")) as repo:
        engine, pack_id = repo._engine, new_pack_id()
        async with WriterHold(engine, "t", pack_id=pack_id) as hold:
            writer = PackWriter(engine, hold.lease, pack_id, lookups=False)

            async def add(number: int) -> None:
                for step in range(8):
                    raw = bytes([number, step]) * (1 << 15)
                    await writer.add([NewRecord(RecordType.CHUNK, record_id(RecordType.CHUNK, raw), len(raw), CODEC_RAW, raw)])

            results = await asyncio.gather(*(add(n) for n in range(4)), return_exceptions=True)
            assert all(isinstance(r, SnapshotError) for r in results)
            await writer.abandon()


# ---- memory


def test_putting_secrets_back_copies_only_what_holds_one(memory_repo: Repository) -> None:
    """A sparse file repeats one chunk of zeros at thousands of places."""
    redactor = Redactor.build({NAME: TOKEN})
    clean, records = redactor.redact(b"f", TOKEN.encode() + b"\n")
    stager = ContentStager(memory_repo._engine, RecordReader(memory_repo._engine), None, owners=False, reinject=redactor)  # type: ignore[arg-type]
    task = FileTask(b"s", Entry(b"f", Kind.FILE, redactions=records), redactions=records)
    zeros = bytes(1 << 20)
    assert stager._put_back(task, 1 << 20, zeros) is zeros
    assert stager._put_back(task, 0, bytes(clean)) == TOKEN.encode() + b"\n"


async def test_a_commit_with_very_many_references_looks_them_up_in_parts(tmp_path: Path) -> None:
    store = SqlCheckpointStore(f"sqlite:///{tmp_path / 'db'}")
    async with borrowed(MemoryBlobStore(), store) as repo:
        engine = repo._engine
        ids = [record_id(RecordType.CHUNK, b"%d" % n) for n in range(60_000)]
        pack_id = new_pack_id()
        async with WriterHold(engine, "t", pack_id=pack_id) as hold:
            writer = PackWriter(engine, hold.lease, pack_id, lookups=False)
            await writer.add(NewRecord(RecordType.CHUNK, i, 1, CODEC_RAW, b"x") for i in ids)
            await writer.finish()

            def peak(tx: Transaction) -> tuple[int, int]:
                tracemalloc.start()
                count = sum(1 for _ in sql_packs._rows_of(tx, ids))
                size = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
                return count, size

            count, size = await store._transactions.read(peak)
            assert count >= 48_000  # the last pack is entered by the commit
            assert size < 12 << 20
