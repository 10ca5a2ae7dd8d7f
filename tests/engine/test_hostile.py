"""Checkpoints that were forged: a restore refuses them, or does what they say inside the root, never outside."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from snapcore.capturing import commit_checkpoint, new_checkpoint_id
from snapcore.errors import Code, SnapshotError
from snapcore.leases import WriterHold
from snapcore.manifest import PageBuilder, build_index, content_id, page_totals
from snapcore.model import Checkpoint, Entry, Kind, RecordType, RootState
from snapcore.packwriter import PackWriter, new_pack_id
from snapcore.repository import Repository

Make = Callable[..., Path]
ROOT = Entry(b"", Kind.DIR, 0o755)


async def forge(repo: Repository, entries: Sequence[Entry]) -> Checkpoint:
    """Commit a checkpoint of thread `t` whose manifest lists `entries` as they are, in this order."""
    engine, pack_id = repo._engine, new_pack_id()
    async with WriterHold(engine, "t", pack_id=pack_id) as hold:
        writer = PackWriter(engine, hold.lease, pack_id, lookups=False)
        pager = PageBuilder()
        pages = [page for e in entries if (page := pager.add(e)) is not None]
        if (last := pager.finish()) is not None:
            pages.append(last)
        await writer.add_structure({page.index.page_id: page.raw for page in pages}, RecordType.PAGE)
        manifest, records = build_index([page.index for page in pages])
        await writer.add_structure(records, RecordType.INDEX)
        whole = content_id([page.index for page in pages])
        bare = Checkpoint(
            id=new_checkpoint_id(),
            thread_id="t",
            parent_id=hold.grant.head.id if hold.grant.head else None,
            created_at=hold.lease.acquired_at,
            roots=(RootState("workspace", "/workspace", manifest, whole, totals=page_totals(entries)),),
            content_id=whole,
        )
        record_id = await writer.add_record(msgspec.msgpack.encode(bare), RecordType.CHECKPOINT)
        commit = await writer.finish()
        return await commit_checkpoint(engine, hold, msgspec.structs.replace(bare, record_id=record_id), commit)


def file(path: bytes, **fields: object) -> Entry:
    return msgspec.structs.replace(Entry(path, Kind.FILE, 0o644), **fields)


def folder(path: bytes) -> Entry:
    return Entry(path, Kind.DIR, 0o755)


INVALID = {
    "dots": [ROOT, file(b"../escaped")],
    "dots below a folder": [ROOT, folder(b"a"), file(b"a/../../escaped")],
    "a dot": [ROOT, file(b"./a")],
    "absolute": [ROOT, file(b"/tmp/escaped")],
    "an empty part": [ROOT, folder(b"a"), file(b"a//b")],
    "a slash at the end": [ROOT, folder(b"a/")],
    "a NUL": [ROOT, file(b"a\0b")],
    "twice": [ROOT, file(b"a"), file(b"a")],
    "a folder twice": [ROOT, folder(b"a"), folder(b"a")],
    "out of order": [ROOT, file(b"b"), file(b"a")],
    "below a file": [ROOT, file(b"a"), file(b"a/b")],
    "below a link": [ROOT, Entry(b"a", Kind.LINK, target=b"../outside"), file(b"a/escaped")],
    "below nothing": [ROOT, file(b"a/b")],
    "no root": [file(b"a")],
    "a root that is a link": [Entry(b"", Kind.LINK, target=b"/tmp")],
    "a link without a target": [ROOT, Entry(b"a", Kind.LINK)],
    "a hard link to the outside": [ROOT, file(b"a", hardlink=b"../outside/file")],
    "a hard link to an absolute path": [ROOT, file(b"a", hardlink=b"/etc/passwd")],
}


@pytest.fixture
def outside(make: Make, tmp_path: Path) -> Path:
    return make({"file": "not ours"}, base=tmp_path / "outside")


@pytest.mark.parametrize("what", INVALID)
async def test_a_manifest_with_impossible_paths_is_refused(memory_repo: Repository, make: Make, outside: Path, what: str) -> None:
    """The whole manifest is validated before anything is touched, also in a dry run."""
    work = make({"kept": "x"})
    await forge(memory_repo, INVALID[what])
    for dry_run in (True, False):
        with pytest.raises(SnapshotError) as caught:
            await memory_repo.restore(work, thread_id="t", dry_run=dry_run)
        assert caught.value.code in (Code.INVALID_PATH, Code.INVALID_BLOB)
    assert os.listdir(work) == ["kept"]
    assert sorted(os.listdir(work.parent)) == ["outside", "work"]
    assert (outside / "file").read_text() == "not ours"
    assert not (await memory_repo.verify()).ok


BROKEN = {
    "content that is nowhere": ([ROOT, file(b"a", size=5, chunks=b"\1" * 32)], Code.MISSING_BLOB),
    "a chunk list that is nowhere": ([ROOT, file(b"a", size=5, chunk_list=b"\2" * 32)], Code.MISSING_BLOB),
    "a size without content": ([ROOT, file(b"a", size=5)], Code.INVALID_BLOB),
}


@pytest.mark.parametrize("what", BROKEN)
async def test_a_manifest_of_content_that_is_not_there_leaves_the_workspace(
    memory_repo: Repository, make: Make, what: str
) -> None:
    work = make({"kept": "x"})
    entries, code = BROKEN[what]
    try:
        await forge(memory_repo, entries)
    except SnapshotError:
        return
    with pytest.raises(SnapshotError) as caught:
        await memory_repo.restore(work, thread_id="t")
    assert caught.value.code == code
    assert os.listdir(work) == ["kept"]


async def test_links_are_written_as_they_are_and_never_followed(memory_repo: Repository, make: Make, outside: Path) -> None:
    """A forged link may say anything; files beside it, and what it leads to, are another matter."""
    work = make({"kept": "x"})
    await forge(memory_repo, [ROOT, Entry(b"a", Kind.LINK, target=b"../outside"), file(b"b")])
    await memory_repo.restore(work, thread_id="t")
    await memory_repo.restore(work, thread_id="t")
    assert os.readlink(work / "a") == "../outside"
    assert os.listdir(outside) == ["file"]


@pytest.mark.parametrize("first", [b"none", b"folder", b"z-later"])
async def test_a_hard_link_to_what_is_no_first_member_harms_nothing(memory_repo: Repository, make: Make, first: bytes) -> None:
    """It is refused, or restored as a file of its own."""
    work = make({"kept": "x"})
    await forge(memory_repo, [ROOT, file(b"a", hardlink=first), folder(b"folder"), file(b"z-later")])
    try:
        await memory_repo.restore(work, thread_id="t")
    except SnapshotError:
        assert os.listdir(work) == ["kept"]
        return
    assert sorted(os.listdir(work)) == ["a", "folder", "z-later"]
    assert (work / "folder").is_dir()
