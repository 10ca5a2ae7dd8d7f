"""Stores that fail, lose answers, or return too little, at each of their calls in turn."""

import asyncio
import gc
import random
import shutil
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import snapcore
import snapcore.packwriter
from snapcore.errors import (
    CheckpointWriterConflictError,
    CheckpointWriterLostError,
    Code,
    RecordsMissingError,
    RepositoryError,
    SnapcoreError,
    SnapshotError,
)
from snapcore.packs import pack_key
from snapcore.repository import Repository
from snapcore.stores.sql import SqlCheckpointStore
from snapcore.testing import Crash, Faults, with_faults
from snapcore.testing.trees import compare_trees

from .crash_helpers import THREAD, Scene, copy_tree, faulty, leaks_nothing, make_scene, sound, stage_names

Plan = Callable[[Faults, int], None]

FAIL: Plan = lambda faults, call: faults.fail("*", call)  # noqa: E731
LOSE: Plan = lambda faults, call: faults.lose_response("*", call)  # noqa: E731
CRASH: Plan = lambda faults, call: faults.crash("*", call)  # noqa: E731
PLANS = {"fails": FAIL, "loses its answer": LOSE, "is the last": CRASH}


@pytest.fixture(autouse=True)
async def nothing_is_left() -> AsyncIterator[None]:
    problems: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
    with leaks_nothing():
        yield
    gc.collect()
    assert {t for t in asyncio.all_tasks() if t is not asyncio.current_task()} == set()
    assert problems == []


@pytest.fixture
async def scene(tmp_path: Path) -> Scene:
    return await make_scene(tmp_path, files=25)


async def outcome(work: Awaitable[object]) -> SnapcoreError | Crash | None:
    try:
        await work
    except (SnapcoreError, Crash) as error:
        return error
    return None


async def next_capture(repo: Repository, work: Path, ttl: float) -> None:
    """A lease whose grant or release was lost is waited for: it runs out."""
    await repo.capture(work, thread_id=THREAD, wait=4 * ttl)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
async def test_a_capture_whose_store_fails_at_any_call(scene: Scene, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapcore.packwriter, "TARGET_PACK_BYTES", 12_000)
    repo_path, work = scene.copies("own")
    ttl = 1.5
    async with snapcore.open_repository(repo_path) as repo:
        ids = [c.id for c in await repo.list(THREAD)]
        for call in range(1, 100):
            for name in range(6):
                (work / f"fresh-{name}").write_bytes(random.Random(100 * call + name).randbytes(5000))
            faults = Faults()
            plan(faults, call)
            async with faulty(repo_path, faults) as unreliable:
                failed = await outcome(unreliable.capture(work, thread_id=THREAD, lease_ttl=ttl))
            assert failed is None or isinstance(failed, Crash) or failed.retryable, call
            now = [c.id for c in await repo.list(THREAD)]
            assert now[: len(ids)] == ids
            assert len(now) <= len(ids) + 1
            committed = len(now) > len(ids)
            assert failed or committed
            if len(faults.log) < call:
                break
            method = faults.log[call - 1]
            if method == "append" and plan in (FAIL, LOSE):
                assert committed, "asked for again"
                assert failed is None
            assert stage_names(work) == []
            try:
                await next_capture(repo, work, ttl)
            except CheckpointWriterConflictError:
                pytest.fail(f"the lease stays after {method}")
            ids = [c.id for c in await repo.list(THREAD)]
        assert call > 10
        assert {"acquire_writer", "add_pack", "append", "put", "known"} <= set(faults.log)
        await sound(repo, work, scene.base / "scratch", ids)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
async def test_a_restore_whose_store_fails_at_any_call(scene: Scene, plan: Plan) -> None:
    repo_path, work = scene.copies("own")
    old, head = scene.checkpoints
    met = set()
    async with snapcore.open_repository(repo_path) as repo:
        for call in range(1, 100):
            faults = Faults()
            plan(faults, call)
            async with faulty(repo_path, faults) as unreliable:
                failed = await outcome(unreliable.restore(work, thread_id=THREAD, checkpoint_id=old.id)) is not None
            assert stage_names(work) == [], call
            same = [compare_trees(work, tree, folder_times=n == 1) == [] for n, tree in enumerate(scene.trees)]
            assert same in ([True, False], [False, True]), call
            met.add((failed, same[0]))
            if not failed:
                assert same[0]
            if len(faults.log) < call:
                break
            await repo.restore(work, thread_id=THREAD, checkpoint_id=head.id)
            shutil.rmtree(work)
            copy_tree(scene.trees[1], work)  # folder times and all
        assert call > 8
        assert (True, False) in met
        assert (await repo.verify(read_data=True)).ok


async def test_an_append_whose_answer_is_lost_each_time_but_the_last_is_found_and_not_doubled(scene: Scene) -> None:
    faults = Faults()
    faults.lose_response("append", 1)
    faults.lose_response("append", 2)
    async with faulty(scene.repo, faults) as repo:
        made = await repo.capture(scene.work, thread_id=THREAD, lease_ttl=5)
        assert faults.calls["append"] == 3
        assert [c.id for c in await repo.list(THREAD)] == [*(c.id for c in scene.checkpoints), made.id]
        assert await repo.capture(scene.work, thread_id=THREAD), "the lease was released by the append"


async def test_an_append_that_is_never_answered_is_an_error_and_leaves_one_checkpoint_at_most(scene: Scene) -> None:
    faults = Faults()
    faults.lose_response("append", None)
    async with faulty(scene.repo, faults) as repo:
        with pytest.raises(RepositoryError) as caught:
            await repo.capture(scene.work, thread_id=THREAD)
        assert caught.value.retryable
        assert len(await repo.list(THREAD)) == 3
        faults.clear()
        await sound(repo, scene.work, scene.base / "scratch", [c.id for c in scene.checkpoints])


# ------------------------------------------------------------------------------------------- records that gc takes away


def collect(repo: Path, *, all_packs: bool = True) -> None:
    """What gc's sweep does to packs, however much alive these are: `deleting`, and no rows of records."""
    connection = sqlite3.connect(repo / "snapcore.db")
    try:
        with connection:
            wanted = "state = 'live'" if all_packs else "state = 'writing'"
            numbers = [row[0] for row in connection.execute(f"select number from packs where {wanted}")]
            marks = ",".join(map(str, numbers))
            connection.execute(f"update packs set state = 'deleting' where number in ({marks})")
            connection.execute(f"delete from chunks where pack_number in ({marks})")
    finally:
        connection.close()


async def test_records_that_vanish_between_look_up_and_commit_are_stored_again(scene: Scene) -> None:
    """The thread that held them was deleted meanwhile: another thread's capture had found them in the store."""
    faults = Faults()

    async def sweep() -> None:
        collect(scene.repo)

    faults.run("append", sweep, 1)
    async with faulty(scene.repo, faults) as repo:
        report = await repo.capture_with_report(scene.work, thread_id="another")
        assert faults.calls["append"] == 2
        assert report.created
        assert [c.id for c in await repo.list("another")] == [report.checkpoint.id]
        assert report.checkpoint.content_id == scene.checkpoints[1].content_id
        await repo.restore(scene.base / "scratch", thread_id="another")
        assert compare_trees(scene.work, scene.base / "scratch") == []
        hurt = {pair for p in (await repo.verify(read_data=True)).problems for pair in p.checkpoints}
        assert "another" not in {thread for thread, _ in hurt}


async def test_records_that_vanish_every_time_are_an_error_that_says_to_try_again(scene: Scene) -> None:
    faults = Faults()

    async def sweep() -> None:
        collect(scene.repo)

    faults.run("append", sweep, 1)
    # what the second and third attempt stored is taken from them too
    for call in (2, 3):
        faults.fail("append", call, RecordsMissingError("1 stored record is gone; nothing was committed.", ids=[bytes(32)]))
    async with faulty(scene.repo, faults) as repo:
        with pytest.raises(RecordsMissingError) as caught:
            await repo.capture(scene.work, thread_id="another")
        assert caught.value.retryable
        assert caught.value.code == Code.RECORDS_MISSING
        assert await repo.list("another") == []
        faults.clear()
        await repo.capture(scene.work, thread_id="another")
        await repo.restore(scene.base / "scratch", thread_id="another")
        assert compare_trees(scene.work, scene.base / "scratch") == []


async def test_a_pack_that_is_collected_while_it_is_written_loses_the_lease(scene: Scene) -> None:
    """Only a dead writer's packs are: whoever finds its own gone has been taken for dead."""
    faults = Faults()

    async def sweep() -> None:
        collect(scene.repo, all_packs=False)

    faults.run("append", sweep, 1)
    async with faulty(scene.repo, faults) as repo:
        with pytest.raises(CheckpointWriterLostError):
            await repo.capture(scene.work, thread_id=THREAD, conversation=["new"])
        await sound(repo, scene.work, scene.base / "scratch", [c.id for c in scene.checkpoints])


# ------------------------------------------------------------------------------------------------------- broken blobs


async def located(repo: Repository, checkpoint: Any, path: bytes) -> tuple[str, int, int, bytes]:
    (entry,) = [e async for e in repo.ls(checkpoint, path)]
    chunk = entry.chunk_ids()[0]
    at = (await repo.checkpoints.locate([chunk]))[chunk]
    return at.pack_id, at.offset, at.stored_size, chunk


def pack_file(scene: Scene, pack_id: str) -> Path:
    return scene.repo / pack_key(pack_id)


async def blocked(repo: Repository, scene: Scene, code: Code) -> SnapshotError:
    """A restore of the first checkpoint fails, and the workspace is exactly as it was."""
    with pytest.raises(SnapshotError) as caught:
        await repo.restore(scene.work, thread_id=THREAD, checkpoint_id=scene.checkpoints[0].id)
    assert caught.value.code == code
    assert compare_trees(scene.work, scene.trees[1], folder_times=True) == []
    assert stage_names(scene.work) == []
    return caught.value


@pytest.fixture
async def changed(scene: Scene) -> bytes:
    """A file that the first checkpoint holds with a content of its own."""
    async with snapcore.open_repository(scene.repo) as repo:
        diff = await repo.diff(*scene.checkpoints)
        return next(e.path for e in diff.changed if e.before is not None and e.before.chunks and e.path != b"app.db")


@pytest.mark.parametrize("how", ["missing", "cut short", "flipped"])
async def test_a_restore_from_a_broken_pack_names_it_and_leaves_the_workspace(scene: Scene, changed: bytes, how: str) -> None:
    async with snapcore.open_repository(scene.repo) as repo:
        pack_id, offset, size, chunk = await located(repo, scene.checkpoints[0], changed)
        path = pack_file(scene, pack_id)
        whole = path.read_bytes()
        if how == "missing":
            path.unlink()
        elif how == "cut short":
            path.write_bytes(whole[: offset + size // 2])
        else:
            at = offset + size // 2
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        error = await blocked(repo, scene, Code.MISSING_BLOB if how == "missing" else Code.INVALID_BLOB)
        assert pack_id in str(error) or chunk.hex()[:16] in str(error)
        path.write_bytes(whole)
        await repo.restore(scene.work, thread_id=THREAD, checkpoint_id=scene.checkpoints[0].id)
        assert compare_trees(scene.work, scene.trees[0]) == []


async def test_a_restore_of_a_record_without_a_place_names_it(scene: Scene, changed: bytes) -> None:
    async with snapcore.open_repository(scene.repo) as repo:
        _, _, _, chunk = await located(repo, scene.checkpoints[0], changed)
        connection = sqlite3.connect(scene.repo / "snapcore.db")
        with connection:
            connection.execute("delete from chunks where id = ?", [chunk])
        connection.close()
        assert chunk.hex()[:16] in str(await blocked(repo, scene, Code.MISSING_BLOB))


async def test_a_read_that_fails_once_leaves_no_wrong_byte(scene: Scene) -> None:
    """Case 47: an error on the way is an error, never zeros; the next try is right."""
    reads = 0
    for call in range(1, 100):
        faults = Faults()
        faults.fail("get", call)
        async with faulty(scene.repo, faults) as repo:
            failed = await outcome(repo.restore(scene.base / f"copy-{call}", thread_id=THREAD))
            if failed is not None:
                assert isinstance(failed, RepositoryError)
                assert failed.retryable
                assert not (scene.base / f"copy-{call}" / "run.sh").exists()
                await repo.restore(scene.base / f"copy-{call}", thread_id=THREAD)
            assert compare_trees(scene.work, scene.base / f"copy-{call}") == []
            reads = faults.calls["get"]
        if reads < call:
            break
    assert call > 2


async def test_a_download_that_is_cut_short_is_refused(scene: Scene) -> None:
    """Case 23: at whichever read, and however little is lost."""
    for call in range(1, 100):
        for keep in (0, 30, -1):
            faults = Faults()
            faults.truncate("get", keep, call)
            target = scene.base / f"copy-{call}-{keep}"
            async with faulty(scene.repo, faults) as repo:
                failed = await outcome(repo.restore(target, thread_id=THREAD))
                if failed is not None:
                    assert isinstance(failed, SnapshotError)
                    assert failed.code == Code.INVALID_BLOB
                    assert not (target / "run.sh").exists()
                    assert not target.exists() or stage_names(target) == []
                    await repo.restore(target, thread_id=THREAD)
                else:
                    assert faults.calls["get"] < call or faults.calls["get"] > 2, "read again, or not cut at all"
                assert compare_trees(scene.work, target) == []
                done = faults.calls["get"] < call
        if done:
            break
    assert call > 2


# --------------------------------------------------------------------------------------------- databases that say no


async def test_a_database_that_is_locked_is_an_error_that_says_to_try_again(scene: Scene) -> None:
    connection = sqlite3.connect(scene.repo / "snapcore.db", isolation_level=None)
    async with snapcore.open_repository(scene.repo) as opened:
        store = SqlCheckpointStore(f"sqlite:///{scene.repo}/snapcore.db", busy_timeout=0.1)
        repo = Repository(opened.blobs, store, opened.config)
        connection.execute("begin immediate")
        try:
            with pytest.raises(RepositoryError) as capture_error:
                await repo.capture(scene.work, thread_id=THREAD)
            with pytest.raises(RepositoryError) as restore_error:
                await repo.restore(scene.work, thread_id=THREAD, checkpoint_id=scene.checkpoints[0].id)
        finally:
            connection.execute("rollback")
            connection.close()
        for error in (capture_error.value, restore_error.value):
            assert error.code == Code.STORE_UNAVAILABLE
            assert error.retryable
        assert compare_trees(scene.work, scene.trees[1], folder_times=True) == []
        await sound(repo, scene.work, scene.base / "scratch", [c.id for c in scene.checkpoints])
        await store.close()
        repo._engine.workers.shutdown()


async def test_a_database_that_gets_locked_before_the_commit_moves_no_head(scene: Scene) -> None:
    faults = Faults()
    locks: list[sqlite3.Connection] = []

    async def lock() -> None:
        locks.append(sqlite3.connect(scene.repo / "snapcore.db", isolation_level=None))
        locks[-1].execute("begin immediate")

    async def unlock() -> None:
        locks.pop().close()

    faults.run("append", lock, 1)
    faults.run("append", unlock, 2)
    async with snapcore.open_repository(scene.repo) as opened:
        store = SqlCheckpointStore(f"sqlite:///{scene.repo}/snapcore.db", busy_timeout=0.1)
        repo = Repository(opened.blobs, with_faults(store, faults), opened.config)
        made = await repo.capture(scene.work, thread_id=THREAD)
        assert faults.calls["append"] == 2
        assert [c.id for c in await repo.list(THREAD)] == [*(c.id for c in scene.checkpoints), made.id]
        await store.close()
        repo._engine.workers.shutdown()


async def test_a_read_only_database_restores_and_captures_nothing(scene: Scene) -> None:
    async with snapcore.open_repository(scene.repo) as opened:
        read_only = RepositoryError("The database is read-only.", code=Code.READ_ONLY)
        faults = Faults()
        for method in ("acquire_writer", "pin", "save_stats"):
            faults.fail(method, None, read_only)
        async with faulty(scene.repo, faults) as repo:
            with pytest.raises(RepositoryError) as caught:
                await repo.capture(scene.work, thread_id=THREAD)
            assert caught.value.code == Code.READ_ONLY
            await repo.restore(scene.work, thread_id=THREAD, checkpoint_id=scene.checkpoints[0].id)
            assert compare_trees(scene.work, scene.trees[0]) == []
        assert len(await opened.list(THREAD)) == 2
