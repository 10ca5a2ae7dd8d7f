"""A database that is lost is made anew from the packs alone: every checkpoint that was committed, and none that was not.

Case 45 in its last consequence: what was put whole is found again. Case 7: by thread id, in a fresh process.
"""

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

import snapcore
from snapcore.chunking import compress_many, record_id
from snapcore.config import CONFIG_KEY, REBUILDING_KEY
from snapcore.errors import Code, RepositoryError
from snapcore.model import Checkpoint, RecordType
from snapcore.opening import OpenRepository
from snapcore.packs import MAX_PACK_BYTES, PackBuilder
from snapcore.packwriter import new_pack_id
from snapcore.repository import Repository
from snapcore.stores.memory import MemoryBlobStore
from snapcore.testing.trees import compare_trees, make_tree, mutate_tree

from .repair_helpers import everything, lose_database, pack_file, pack_of, sql

Make = Callable[..., Path]


def opened(url: Path) -> OpenRepository:
    return snapcore.open_repository(url, create=False)


def record_pack(*checkpoints: Checkpoint) -> tuple[str, bytes]:
    """A pack that holds records of these checkpoints, as a writer puts them: id and bytes."""
    builder = PackBuilder(new_pack_id())
    for c in checkpoints:
        raw = msgspec.msgpack.encode(msgspec.structs.replace(c, record_id=b""))
        ((codec, payload),) = compress_many([raw])
        builder.add(RecordType.CHECKPOINT, record_id(RecordType.CHECKPOINT, raw), len(raw), codec, payload)
    return builder.pack_id, builder.finish()


def put(url: Path, pack_id: str, data: bytes) -> None:
    path = pack_file(url, pack_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


@pytest.fixture
async def history(tmp_path: Path, work: Path) -> dict[tuple[str, str], Checkpoint]:
    """Captures, a fork, a rewind, labels that came, changed and went, and deletions, in `repo`."""
    make_tree(work, files=30)
    async with snapcore.open_repository(tmp_path / "repo") as repo:
        ids = []
        for n in range(4):
            mutate_tree(work, n)
            ids.append((await repo.capture(work, thread_id="t", label="first" if not n else None, conversation=[n])).id)
        await repo.fork("t", ids[1], to_thread_id="u")
        await repo.rewind("t", ids[0])
        await repo.label("t", ids[2], "renamed")
        await repo.label("t", ids[2], "again")
        await repo.label("t", ids[0], None)
        await repo.delete("t", ids[1])
        await repo.capture(work, thread_id="t", artifacts={"log": os.urandom(1000)}, idempotency_key="key")
        return await everything(repo)


async def test_every_checkpoint_comes_back_as_it_was_and_is_marked(
    tmp_path: Path, history: dict[tuple[str, str], Checkpoint]
) -> None:
    url = tmp_path / "repo"
    lose_database(url)
    with pytest.raises(RepositoryError, match="snapcore repair"):
        await opened(url)
    report = await snapcore.repair_repository(url)
    assert report.ok, report
    async with opened(url) as repo:
        assert await everything(repo) == history
        assert {c.recovered for t in await repo.threads() for c in await repo.list(t.thread_id)} == {True}
        assert (await repo.verify(read_data=True)).ok
        heads = {t.thread_id: t.head_id for t in await repo.threads()}
        assert heads == {"t": max(history.values(), key=lambda c: c.created_at).id, "u": heads["u"]}
    assert not (await snapcore.repair_repository(url)).done
    assert not (await snapcore.plan_repair(url)).actions


async def test_a_plan_changes_nothing_and_says_what_will_be(tmp_path: Path, history: dict[tuple[str, str], Checkpoint]) -> None:
    url = tmp_path / "repo"
    lose_database(url)
    before = {path: path.read_bytes() for path in url.rglob("*") if path.is_file()}
    plan = await snapcore.plan_repair(url)
    assert {path: path.read_bytes() for path in url.rglob("*") if path.is_file()} == before
    assert {c.id for action in plan.actions for c in action.checkpoints} == {checkpoint_id for _, checkpoint_id in history}
    assert [a.message for a in plan.actions] == [a.message for a in (await snapcore.repair_repository(url)).done]


async def test_the_lost_database_is_refused_when_it_turns_up(tmp_path: Path, history: dict[tuple[str, str], Checkpoint]) -> None:
    url = tmp_path / "repo"
    async with opened(url) as repo:
        assert (await repo.verify()).ok  # and so everything is in the one file once it is closed
    shutil.copy(url / "snapcore.db", tmp_path / "old.db")
    lose_database(url)
    await snapcore.repair_repository(url)
    old = f"sqlite:///{tmp_path / 'old.db'}"
    for use in (snapcore.open_repository(url, database=old)._open, lambda: snapcore.repair_repository(url, database=old)):
        with pytest.raises(RepositoryError) as caught:
            await use()
        assert caught.value.code == Code.WRONG_DATABASE


async def test_a_capture_and_a_restore_go_on_where_the_lost_database_stopped(
    tmp_path: Path, work: Path, history: dict[tuple[str, str], Checkpoint]
) -> None:
    url = tmp_path / "repo"
    lose_database(url)
    await snapcore.repair_repository(url)
    async with opened(url) as repo:
        report = await repo.capture_with_report(work, thread_id="t")
        assert (report.files_read > 0, report.bytes_stored < 20_000) == (True, True)  # all is there
        target = tmp_path / "out"
        target.mkdir()
        await repo.restore(target, thread_id="t")
        assert compare_trees(work, target) == []
        assert (await repo.verify()).ok


async def test_a_database_of_another_repository_is_neither_used_nor_changed(tmp_path: Path, make: Make) -> None:
    url, other = tmp_path / "repo", tmp_path / "other"
    for place in (url, other):
        async with snapcore.open_repository(place) as repo:
            await repo.capture(make({"a": "1"}), thread_id="t")
    lose_database(url)
    database = other / "snapcore.db"
    before = database.read_bytes()
    for use in (snapcore.plan_repair, snapcore.repair_repository):
        with pytest.raises(RepositoryError) as caught:
            await use(url, database=f"sqlite:///{database}")
        assert caught.value.code == Code.WRONG_DATABASE
    assert database.read_bytes() == before


async def test_without_its_configuration_a_repository_is_refused_in_clear_words(tmp_path: Path, make: Make) -> None:
    async with snapcore.open_repository(tmp_path / "repo") as repo:
        await repo.capture(make({"a": "1"}), thread_id="t")
    (tmp_path / "repo" / CONFIG_KEY).unlink()
    with pytest.raises(RepositoryError) as caught:
        await snapcore.repair_repository(tmp_path / "repo")
    assert caught.value.code == Code.DAMAGED
    assert CONFIG_KEY in str(caught.value)
    with pytest.raises(RepositoryError) as caught:
        await snapcore.repair_repository(tmp_path / "nothing")
    assert caught.value.code == Code.NO_REPOSITORY


async def test_an_empty_repository_gets_an_empty_database(tmp_path: Path) -> None:
    """Case 48."""
    url = tmp_path / "repo"
    await (await snapcore.init_repository(url)).close()
    assert not (await snapcore.plan_repair(url)).actions
    lose_database(url)
    assert (await snapcore.repair_repository(url)).ok
    async with opened(url) as repo:
        assert (await repo.verify(read_data=True)).ok
        assert await repo.threads() == []


# ---- what was never committed


async def test_of_two_that_continue_the_same_one_the_one_that_was_continued_is_taken(tmp_path: Path, make: Make) -> None:
    """A capture that was killed after its pack was put, and those that came after it."""
    url = tmp_path / "repo"
    async with snapcore.open_repository(url) as repo:
        first = await repo.capture(make({"a": "1"}), thread_id="t")
        second = await repo.capture(make({"a": "2"}), thread_id="t")
        third = await repo.capture(make({"a": "3"}), thread_id="t")
    killed = msgspec.structs.replace(second, id="killed", created_at=third.created_at + 5)
    put(url, *record_pack(killed))
    lose_database(url)
    report = await snapcore.repair_repository(url)
    assert ([c.id for c in report.uncommitted], report.incomplete) == (["killed"], ())
    async with opened(url) as repo:
        assert [c.id for c in await repo.list("t")] == [first.id, second.id, third.id]
    report = await snapcore.repair_repository(url)
    assert (report.done, report.uncommitted) == ([], ())


async def test_of_two_newest_the_newer_whole_one_is_taken(tmp_path: Path, make: Make) -> None:
    url = tmp_path / "repo"
    async with snapcore.open_repository(url) as repo:
        first = await repo.capture(make({"a": "1"}), thread_id="t")
        second = await repo.capture(make({"a": "2"}), thread_id="t")
    later = msgspec.structs.replace(second, id="later", created_at=second.created_at + 5)
    roots = (msgspec.structs.replace(second.roots[0], manifest=b"?" * 32),)
    torn = msgspec.structs.replace(second, id="torn", created_at=second.created_at + 9, roots=roots)
    alone = msgspec.structs.replace(torn, id="alone", thread_id="other", parent_id=None)
    put(url, *record_pack(later, torn, alone))
    lose_database(url)
    report = await snapcore.repair_repository(url)
    assert {c.id for c in report.uncommitted} == {"torn", second.id}
    assert [c.id for c in report.incomplete] == ["alone"]
    async with opened(url) as repo:
        assert [c.id for c in await repo.list("t")] == [first.id, "later"]
        assert (await repo.verify()).ok


async def test_one_that_is_not_whole_but_was_continued_comes_back_hurt(tmp_path: Path, make: Make) -> None:
    url = tmp_path / "repo"
    async with snapcore.open_repository(url) as repo:
        for n in range(3):
            await repo.capture(make({"a": os.urandom(2000), "b": str(n)}), thread_id="t")
        own = await repo.list("t")
        (entry,) = [e async for e in repo.ls(own[1], b"a")]
        lost = await pack_of(repo, entry.chunk_ids()[0])
    record = msgspec.structs.replace(own[1], recovered=False)
    pack_file(url, lost).unlink()
    put(url, *record_pack(record))
    lose_database(url)
    report = await snapcore.repair_repository(url)
    assert report.hurt == [("t", own[1].id)]
    async with opened(url) as repo:
        assert [c.id for c in await repo.list("t")] == [c.id for c in own]
        assert {pair for p in (await repo.verify()).problems for pair in p.checkpoints} == {("t", own[1].id)}


# ---- an older copy of the database


async def test_an_older_copy_learns_what_came_after_it_and_gets_another_id(tmp_path: Path, work: Path) -> None:
    url = tmp_path / "repo"
    make_tree(work, files=20)
    async with snapcore.open_repository(url) as repo:
        await repo.capture(work, thread_id="t")
    shutil.copy(url / "snapcore.db", tmp_path / "copy.db")
    async with opened(url) as repo:
        for n in range(3):
            mutate_tree(work, n)
            await repo.capture(work, thread_id="t")
        await repo.fork("t", to_thread_id="u")
        all_of_it = await everything(repo)
    shutil.copy(url / "snapcore.db", tmp_path / "newest.db")
    lose_database(url)
    shutil.copy(tmp_path / "copy.db", url / "snapcore.db")
    report = await snapcore.repair_repository(url)
    assert report.ok
    async with opened(url) as repo:
        assert await everything(repo) == all_of_it
        assert sum(c.recovered for c in await repo.list("t")) == 3
        assert (await repo.verify(read_data=True)).ok
    with pytest.raises(RepositoryError) as caught:
        await snapcore.open_repository(url, database=f"sqlite:///{tmp_path / 'newest.db'}")
    assert caught.value.code == Code.WRONG_DATABASE
    assert not (await snapcore.repair_repository(url)).done


# ---- what others may have put there


async def test_forged_packs_and_records_are_told_and_do_no_harm(tmp_path: Path, make: Make) -> None:
    url = tmp_path / "repo"
    async with snapcore.open_repository(url) as repo:
        own = await repo.capture(make({"a": "1"}), thread_id="t")
    (url / "packs" / "zz").mkdir()
    (url / "packs" / "zz" / "stray").write_bytes(b"no pack")
    put(url, "00" + "0" * 30, b"")
    put(url, "01" + "0" * 30, os.urandom(5000))
    put(url, "02" + "0" * 30, b"SNAPPACK\x01\0\0\0" + b"\xff\xff\xff\x7f" + bytes(32) + b"SNAPFOOT")
    with pack_file(url, "02" + "0" * 30).open("r+b") as sparse:
        sparse.truncate(3 * MAX_PACK_BYTES)
    bad = [
        msgspec.structs.replace(own, id="a/b"),
        msgspec.structs.replace(own, thread_id="bad\nthread"),
        msgspec.structs.replace(own, id="short", roots=(msgspec.structs.replace(own.roots[0], manifest=b"short"),)),
        msgspec.structs.replace(own, thread_id="stolen"),
    ]
    put(url, *record_pack(*bad))
    builder = PackBuilder(new_pack_id())
    ((codec, payload),) = compress_many([b"no record at all"])
    builder.add(RecordType.CHECKPOINT, record_id(RecordType.CHECKPOINT, b"no record at all"), 16, codec, payload)
    put(url, builder.pack_id, builder.finish())
    lose_database(url)
    report = await snapcore.repair_repository(url)
    assert report.ok
    assert len(report.notes) >= 7, report.notes
    async with opened(url) as repo:
        stored = {(t.thread_id, c.id) for t in await repo.threads() for c in await repo.list(t.thread_id)}
        assert len(stored) == 1  # an id is one checkpoint's, whoever else claims it
        assert {checkpoint_id for _, checkpoint_id in stored} == {own.id}
    assert not (await snapcore.repair_repository(url)).done


async def test_a_torn_footer_and_a_flipped_bit_cost_only_what_they_hit(tmp_path: Path, make: Make) -> None:
    url = tmp_path / "repo"
    async with snapcore.open_repository(url) as repo:
        hurt = await repo.capture(make({"a": os.urandom(300_000)}), thread_id="hurt")
        torn = await repo.capture(make({"b": os.urandom(300_000)}, base=tmp_path / "b"), thread_id="torn")
        packs = [await pack_of(repo, c.record_id) for c in (hurt, torn)]
    first, second = (pack_file(url, i) for i in packs)
    data = bytearray(first.read_bytes())
    data[100_000] ^= 1
    data[-1] ^= 1
    first.write_bytes(data)
    second.write_bytes(second.read_bytes()[:-30])
    lose_database(url)
    report = await snapcore.repair_repository(url)
    assert [c.id for c in report.incomplete] == [hurt.id]
    async with opened(url) as repo:
        assert [t.thread_id for t in await repo.threads()] == ["torn"]
        assert (await repo.verify(read_data=True)).ok
    assert first.exists()
    assert second.exists()  # set aside, never deleted


async def test_a_rebuild_that_was_left_is_gone_on_with(tmp_path: Path, history: dict[tuple[str, str], Checkpoint]) -> None:
    """The database is there and named by the marker; the configuration still names the lost one."""
    url = tmp_path / "repo"
    lose_database(url)
    config = (url / CONFIG_KEY).read_bytes()
    await snapcore.repair_repository(url)
    (url / REBUILDING_KEY).write_bytes((url / CONFIG_KEY).read_bytes())
    (url / CONFIG_KEY).write_bytes(config)
    assert sql(url, "DELETE FROM checkpoints WHERE thread_id = 'u'") == 1
    with pytest.raises(RepositoryError):
        await opened(url)
    await snapcore.repair_repository(url)
    async with opened(url) as repo:
        assert await everything(repo) == history
    assert not (url / REBUILDING_KEY).exists()


async def hundreds(url: Path, work: Path) -> tuple[dict[tuple[str, str], Checkpoint], dict[bytes, dict[str, str]]]:
    """Put six hundred checkpoints of ten threads, more than are read together, in `url`, without a database: them, and the
    files by content id."""
    files: dict[bytes, dict[str, str]] = {}
    threads = [f"thread-{n}" for n in range(10)]

    async def extend(repo: Repository, thread: str) -> None:
        own = await repo.list(thread)
        for n in range(50):
            await repo.rewind(thread, own[n * 7 % 10].id)

    async with snapcore.open_repository("memory://") as repo:  # commits to a disk would take long
        for n in range(10):
            (work / f"file-{n % 3}").write_text(f"state {n}")
            if n:
                made = await asyncio.gather(*[repo.capture(work, thread_id=t) for t in threads])
            else:
                made = [await repo.capture(work, thread_id=t) for t in threads[:5]]
                for first, t in zip(made, threads[5:], strict=True):
                    await repo.fork(first.thread_id, to_thread_id=t)
            files[made[0].content_id] = {path.name: path.read_text() for path in work.iterdir()}
        await asyncio.gather(*[extend(repo, t) for t in threads])
        before = await everything(repo)
        assert isinstance(repo.blobs, MemoryBlobStore)
        for key, data in repo.blobs.blobs.items():
            (url / key).parent.mkdir(parents=True, exist_ok=True)
            (url / key).write_bytes(data)
    return before, files


async def test_hundreds_of_checkpoints_come_back_and_can_be_restored(tmp_path: Path, work: Path) -> None:
    url = tmp_path / "repo"
    before, files = await hundreds(url, work)
    assert (len(before), len(files)) == (600, 10)
    report = await snapcore.repair_repository(url)
    assert report.ok
    restored: dict[tuple[str, str], bytes] = {}

    async def restore(repo: Repository, thread: str) -> None:
        target = tmp_path / thread
        target.mkdir()
        # each is the same as before; what it restores, a part shows: all contents, old ones and new ones
        for c in (await repo.list(thread))[int(thread.removeprefix("thread-")) :: 15]:
            await repo.restore(target, thread_id=thread, checkpoint_id=c.id)
            assert {path.name: path.read_text() for path in target.iterdir()} == files[c.content_id]
            restored[thread, c.id] = c.content_id

    async with opened(url) as repo:
        assert await everything(repo) == before
        assert (await repo.verify(read_data=True)).ok
        await asyncio.gather(*[restore(repo, t.thread_id) for t in await repo.threads()])
    assert len(restored) == 10 * 4
    assert restored.keys() <= before.keys()
    assert set(restored.values()) == files.keys()
