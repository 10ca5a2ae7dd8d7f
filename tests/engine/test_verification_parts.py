"""Verification of a part of the data, of trees that share their pages, and of stores that cannot be read.

Case 48: a repository without a checkpoint passes.
"""

import itertools
import sqlite3
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec
import pytest

import snapcore
from snapcore.chunking import CODEC_RAW, record_id
from snapcore.errors import Code, RepositoryError, SnapshotError, printable
from snapcore.manifest import IndexPage, PageBuilder, build_index
from snapcore.model import Checkpoint, Entry, Kind, PackWrite, RecordType
from snapcore.packs import PackBuilder, pack_key
from snapcore.packwriter import new_pack_id
from snapcore.protocols import PackInfo
from snapcore.repository import Repository
from snapcore.subset import parse_subset
from snapcore.testing import Faults, with_faults
from snapcore.treecheck import TreeCheck

from .repair_helpers import found, pack_file, pack_of

Make = Callable[..., Path]


def packs(number: int) -> list[PackInfo]:
    return [PackInfo(record_id(1, b"%d" % n).hex()[:32], "live", 1 << 20, 1) for n in range(number)]


@pytest.mark.parametrize("parts", [1, 2, 7])
def test_all_parts_together_are_every_pack_once(parts: int) -> None:
    chosen = [i for n in range(parts) for i in parse_subset(f"{n + 1}/{parts}").choose(packs(50))]
    assert sorted(chosen) == sorted(p.pack_id for p in packs(50))
    assert parse_subset(f"1/{parts}").choose(packs(50)) == parse_subset(f"1/{parts}").choose(packs(50))


@pytest.mark.parametrize(("text", "number"), [("100%", 50), ("10%", 5), ("0.1%", 1), ("3M", 3), ("1K", 1), ("1T", 50)])
def test_a_share_or_a_size_is_chosen_at_random(text: str, number: int) -> None:
    assert len(parse_subset(text).choose(packs(50))) == number
    assert parse_subset(text).choose([]) == set()


@pytest.mark.parametrize(
    "text", ["", "0%", "101%", "5", "%", "0/3", "4/3", "1/0", "-1/3", "1/3/3", "0M", "5 %", "1e1%", "٣%", "nan%", "5m", "5\n%"]
)
def test_what_was_mistyped_is_refused(text: str) -> None:
    with pytest.raises(SnapshotError) as caught:
        parse_subset(text)
    assert caught.value.code == Code.INVALID_REQUEST
    assert caught.value.message == f"'{printable(text)}' is no part of the data."


async def test_a_part_reads_its_packs_alone(repo: Repository, make: Make, tmp_path: Path) -> None:
    first = await repo.capture(make({"a": "1" * 5000}), thread_id="t")
    await repo.capture(make({"a": "2" * 5000}), thread_id="t")
    file = pack_file(tmp_path / "repo", await pack_of(repo, first.record_id))
    data = bytearray(file.read_bytes())
    data[70] ^= 1
    file.write_bytes(data)
    whole = await repo.verify(read_data=True)
    parts = [await repo.verify(read_data_subset=part) for part in ("1/2", "2/2")]
    assert sum(part.bytes_read for part in parts) == whole.bytes_read
    assert set().union(*(found(part) for part in parts)) == found(whole) != set()
    with pytest.raises(SnapshotError):
        await repo.verify(read_data=True, read_data_subset="1/2")


async def test_a_store_that_cannot_be_read_is_an_error_and_no_finding(repo: Repository, make: Make) -> None:
    await repo.capture(make({"a": "1"}), thread_id="t")
    for method in ("head", "get"):
        faults = Faults()
        faults.fail(method)
        broken = Repository(with_faults(repo.blobs, faults), repo.checkpoints, repo.config)
        with pytest.raises(RepositoryError) as caught:
            await broken.verify(read_data=True)
        assert caught.value.code == Code.STORE_UNAVAILABLE


async def test_what_many_checkpoints_share_is_looked_at_once(memory_repo: Repository, make: Make) -> None:
    make({f"{n:03}": str(n) for n in range(300)})
    faults = Faults()
    counted = Repository(with_faults(memory_repo.blobs, faults), memory_repo.checkpoints, memory_repo.config)
    reads = []
    for n in range(6):
        for _ in range(5):
            await memory_repo.capture(make({"000": f"state {n} {_}"}), thread_id="t")
        faults.clear()
        report = await counted.verify()
        assert report.ok
        assert report.records == (await memory_repo.checkpoints.record_totals())[0]
        reads.append(faults.calls["get"])
    steps = [b - a for a, b in itertools.pairwise(reads)]
    assert max(steps) <= 5 * 4  # for each checkpoint a page and the index above it, however many there are already


# ---- the order of a manifest, judged from the ends of its pages


def page(*entries: Entry) -> tuple[bytes, bytes]:
    raw = msgspec.msgpack.encode(list(entries))
    return record_id(RecordType.PAGE, raw), raw


def folder(path: bytes) -> Entry:
    return Entry(path, Kind.DIR, 0o755)


def file(path: bytes) -> Entry:
    return Entry(path, Kind.FILE, 0o644)


async def problems(repo: Repository, pages: list[list[Entry]]) -> set[str]:
    """The kinds of problem of a manifest with these pages."""
    records: dict[bytes, tuple[bytes, int]] = {}
    listed = []
    for entries in pages:
        pager = PageBuilder()
        built = [p for e in entries if (p := pager.add(e)) is not None] + [p for p in [pager.finish()] if p is not None]
        page_id, raw = page(*entries)
        records[page_id] = (raw, RecordType.PAGE)
        listed.append(msgspec.structs.replace(built[0].index, page_id=page_id, entries=len(entries)))
    manifest, indexes = build_index(listed)
    if len(listed) > 1:
        manifest, raw = page_of(IndexPage(1, listed))
        indexes = {manifest: raw}
    records |= {i: (raw, RecordType.INDEX) for i, raw in indexes.items()}

    builder = PackBuilder(new_pack_id())
    for record, (raw, record_type) in records.items():
        builder.add(record_type, record, len(raw), CODEC_RAW, raw)
    written = tuple(builder.records)
    data = builder.finish()
    await repo.blobs.put(pack_key(builder.pack_id), data)
    store = repo.checkpoints
    await store.adopt_pack(await store.start_maintenance(), PackWrite(builder.pack_id, len(data), written))

    async def nothing_wrong(ids: Collection[bytes]) -> dict[bytes, tuple[str, str]]:
        return {}

    check = TreeCheck(repo._engine, nothing_wrong)
    root = snapcore.RootState("workspace", "/w", manifest, b"c" * 32)
    (found_here,) = await check.look([Checkpoint(id="c", thread_id="t", roots=(root,), record_id=b"r" * 32)])
    return {kind for kind, _ in found_here}


def page_of(index: IndexPage) -> tuple[bytes, bytes]:
    raw = msgspec.msgpack.encode(index)
    return record_id(RecordType.INDEX, raw), raw


ROOT = folder(b"")


@pytest.mark.parametrize(
    ("pages", "right"),
    [
        ([[ROOT, folder(b"a"), file(b"a/b")], [file(b"a/c"), file(b"d")]], True),
        ([[ROOT, folder(b"a")], [file(b"a/b")], [folder(b"c")], [file(b"c/d")]], True),
        ([[ROOT, folder(b"a"), folder(b"a/b"), file(b"a/b/c")], [file(b"a/d")], [file(b"e")]], True),
        ([[folder(b"a")]], False),  # no root
        ([[ROOT, file(b"a")], [ROOT]], False),
        ([[ROOT, file(b"b")], [file(b"a")]], False),
        ([[ROOT, file(b"a")], [file(b"a")]], False),
        ([[ROOT, file(b"a")], [file(b"a/b")]], False),  # below a file
        ([[ROOT, folder(b"a")], [file(b"a/b/c")]], False),  # below what is not there
        ([[ROOT, folder(b"a"), file(b"a/b")], [file(b"c")], [file(b"a/d")]], False),
        ([[ROOT, folder(b"a"), file(b"a/b")], [file(b"c/d")]], False),
        ([[ROOT, folder(b"a"), file(b"a/b")], [file(b"a/c"), file(b"a/c/d")]], False),
    ],
)
async def test_pages_have_to_follow_one_on_the_other(memory_repo: Repository, pages: list[list[Entry]], right: bool) -> None:
    assert await problems(memory_repo, pages) == (set() if right else {"manifest-damaged"})


async def test_a_checkpoint_that_is_deleted_meanwhile_is_no_problem(repo: Repository, make: Make, tmp_path: Path) -> None:
    c = await repo.capture(make({"a": "1"}), thread_id="t")
    await repo.capture(make({"b": "1"}), thread_id="t")
    (entry,) = [e async for e in repo.ls(c, b"a")]
    with sqlite3.connect(tmp_path / "repo" / "snapcore.db") as database:
        database.execute("DELETE FROM chunks WHERE id = ?", [entry.chunks])
    faults = Faults()

    async def deleted() -> None:
        for one in await repo.list("t"):
            await repo.delete("t", one.id)

    faults.run("locate", deleted)
    watched = Repository(repo.blobs, with_faults(repo.checkpoints, faults), repo.config)
    assert (await watched.verify()).ok
