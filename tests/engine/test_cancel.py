"""A capture or a restore that is cancelled, at each await."""

import asyncio
import gc
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

import snapcore
import snapcore.packwriter
from snapcore.capturing import CaptureReport
from snapcore.engine import finish
from snapcore.providers.direct import DirectWorkspace
from snapcore.repository import Repository
from snapcore.restoring import Receipt
from snapcore.testing.trees import compare_trees, make_tree

from .crash_helpers import THREAD, Scene, cancelled_at, leaks_nothing, make_scene, sound, stage_names

MANY = 5000


@pytest.fixture(autouse=True)
async def nothing_is_left() -> AsyncIterator[None]:
    """No task goes on, and no exception of one was never looked at."""
    problems: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
    yield
    gc.collect()
    assert other_tasks() == set()
    assert problems == []


def other_tasks() -> set[asyncio.Task[Any]]:
    return {t for t in asyncio.all_tasks() if t is not asyncio.current_task() and "async_finalizer" not in repr(t)}


@pytest.fixture
async def scene(tmp_path: Path) -> Scene:
    return await make_scene(tmp_path, files=25)


async def captured(repo: Repository, work: Path, *at: int) -> CaptureReport | None:
    return await cancelled_at(repo.capture_with_report(work, thread_id=THREAD, conversation=[{"at": at}]), *at)


@pytest.mark.parametrize("again", [(), (1,), (1, 2, 3)], ids=["once", "twice", "four times"])
async def test_a_capture_cancelled_at_any_await_moves_no_head_or_commits(
    scene: Scene, again: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapcore.packwriter, "TARGET_PACK_BYTES", 6_000)
    repo_path, work = scene.copies("own")
    with leaks_nothing():
        async with snapcore.open_repository(repo_path) as repo:
            ids = [c.id for c in await repo.list(THREAD)]
            step = 1 if not again else 3
            for at in range(1, MANY, step):
                (work / "fresh").write_text(f"{at} {again}" * 2000)
                report = await captured(repo, work, at, *(at + more for more in again))
                now = [c.id for c in await repo.list(THREAD)]
                assert now[: len(ids)] == ids
                assert len(now) <= len(ids) + 1, at
                assert not other_tasks(), at
                assert stage_names(work) == []
                if report is not None:
                    assert now == [*ids, report.checkpoint.id]
                    break
                if at % 7 == 1:
                    await sound(repo, work, scene.base / "scratch", ids)
                ids = [c.id for c in await repo.list(THREAD)]
            assert at > 20
            await sound(repo, work, scene.base / "scratch", ids)


@pytest.mark.parametrize("again", [(), (1,), (1, 2, 3)], ids=["once", "twice", "four times"])
async def test_a_restore_cancelled_at_any_await_leaves_the_old_tree_or_the_new(scene: Scene, again: tuple[int, ...]) -> None:
    repo_path, work = scene.copies("own")
    old, head = scene.checkpoints
    met: set[str] = set()
    with leaks_nothing():
        async with snapcore.open_repository(repo_path) as repo:
            step = 1 if not again else 3
            for at in range(1, MANY, step):
                assert compare_trees(work, scene.trees[1]) == []
                receipt: Receipt | None = await cancelled_at(
                    repo.restore(work, thread_id=THREAD, checkpoint_id=old.id), at, *(at + more for more in again)
                )
                assert not other_tasks(), at
                if stage_names(work):
                    met.add("sealed")
                    assert await DirectWorkspace(work).recover() == "finished", at
                outcome = [n for n in (0, 1) if compare_trees(work, scene.trees[n]) == []]
                assert len(outcome) == 1, at
                met.add(("done", "untouched")[outcome[0]])
                assert stage_names(work) == [], at
                if receipt is not None:
                    assert outcome == [0]
                    break
                if outcome == [0]:
                    saved = await repo.capture(work, thread_id=THREAD, skip_unchanged=True)
                    assert saved.content_id == old.content_id
                    await repo.restore(work, thread_id=THREAD, checkpoint_id=head.id)
            assert at > 20
            assert met >= {"done", "untouched"}
            assert (await repo.verify(read_data=True)).ok


async def test_cancelled_opens_leave_nothing_open(tmp_path: Path) -> None:
    async def use(path: Path) -> bool:
        async with snapcore.open_repository(path):
            return True

    with leaks_nothing():
        for at in range(1, MANY):
            done = await cancelled_at(use(tmp_path / f"repo-{at}"), at)
            if done:
                break
            assert await use(tmp_path / f"repo-{at}"), "a creation that was cut short goes on"
            assert not other_tasks()
        assert at > 3


async def test_other_operations_can_be_cancelled_at_any_await(tmp_path: Path) -> None:
    make_tree(tmp_path / "work", files=10)
    async with snapcore.open_repository(tmp_path / "repo") as repo:
        first = await repo.capture(tmp_path / "work", thread_id=THREAD, label="one")
        operations: list[Callable[[int], Coroutine[Any, Any, object]]] = [
            lambda at: repo.verify(read_data=True),
            lambda at: repo.fork(THREAD, first.id, to_thread_id=f"fork-{at}"),
            lambda at: repo.rewind(THREAD, first.id),
            lambda at: repo.label(THREAD, first.id, f"label-{at}"),
        ]
        for operation in operations:
            for at in range(1, 100):
                done = await cancelled_at(operation(at), at)
                assert not other_tasks(), at
                if done is not None:
                    break
            assert 2 < at < 99
        assert (await repo.verify(read_data=True)).ok
        for thread in await repo.threads():
            assert {c.content_id for c in await repo.list(thread.thread_id)} == {first.content_id}
            await repo.restore(tmp_path / "scratch", thread_id=thread.thread_id)
            assert compare_trees(tmp_path / "work", tmp_path / "scratch") == []
        shutil.rmtree(tmp_path / "scratch")


async def test_work_that_must_end_ends_however_often_its_caller_is_cancelled() -> None:
    steps: list[int] = []

    async def work() -> bool:
        for number in range(5):
            await asyncio.sleep(0)
            steps.append(number)
        return True

    assert await cancelled_at(finish(work()), 1, 2, 3) is None
    assert steps == [0, 1, 2, 3, 4]
