"""A capture or a restore whose process is killed, at any point."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy.engine.default import DefaultDialect

import snapcore
import snapcore.packwriter
import snapcore.stores.local
import snapcore.stores.sql_transactions
from snapcore.stores.local import LocalBlobStore
from snapcore.testing.trees import compare_trees, mutate_tree

from .crash_helpers import (
    ON_DISK,
    THREAD,
    Point,
    Scene,
    copy_tree,
    count_calls,
    die_at,
    join_threads,
    leaks_nothing,
    make_scene,
    run_forked,
    sound,
    stage_names,
)

STORE_CALLS = [
    (LocalBlobStore, "_put"),
    (os, "replace"),
    (os, "write"),
    (snapcore.stores.local, "_sync"),
    (snapcore.stores.sql_transactions, "_lock"),
    (DefaultDialect, "do_commit"),
]
COMMITS = STORE_CALLS[-1:]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    join_threads()
    with leaks_nothing():
        yield


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    made = asyncio.run(make_scene(tmp_path))
    join_threads()
    return made


def spread(calls: int, wanted: int) -> list[int]:
    """About `wanted` of the numbers that `die_at` takes, the first and the last among them, both parities alike."""
    every = range(2 * calls)
    if len(every) <= wanted:
        return list(every)
    return sorted({0, len(every) - 1, *random.Random(3).sample(every, wanted - 2)})


@pytest.mark.parametrize("points", [STORE_CALLS, COMMITS], ids=["any call", "any commit"])
def test_a_capture_killed_at_any_store_call_leaves_the_old_head_or_the_new(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, points: list[Point]
) -> None:
    monkeypatch.setattr(snapcore.packwriter, "TARGET_PACK_BYTES", 12_000)  # several packs: the long way
    mutate_tree(scene.work, seed=8)
    before = [c.id for c in scene.checkpoints]

    async def capture(repo: Path, work: Path) -> None:
        async with snapcore.open_repository(repo) as opened:
            await opened.capture(work, thread_id=THREAD)

    repo, work = scene.copies("counted")
    calls = count_calls(lambda: capture(repo, work), points)
    assert calls > (20 if points is STORE_CALLS else 3)
    new = {True: 0, False: 0}
    for at in spread(calls, 24):
        repo, work = scene.copies(f"at-{at}")

        async def dying(at: int = at, repo: Path = repo, work: Path = work) -> None:
            die_at(at, points)
            await capture(repo, work)

        assert run_forked(dying) in (-signal.SIGKILL, 0), at
        assert compare_trees(scene.work, work, folder_times=True) == [], at
        new[asyncio.run(_sound(repo, work, before))] += 1
    assert new[False]
    if points is COMMITS:  # of all calls, how many come after the last commit differs from run to run
        assert new[True], "some deaths come after the commit"


async def _sound(repo: Path, work: Path, before: list[str]) -> bool:
    async with snapcore.open_repository(repo) as opened:
        grown = len(await opened.list(THREAD)) > len(before)
        await sound(opened, work, work.parent / "scratch", before)
        return grown


def test_a_first_capture_killed_at_any_store_call_leaves_no_thread_or_a_whole_checkpoint(scene: Scene) -> None:
    """From nothing: the repository's own creation is cut short as well."""

    async def capture(repo: Path) -> None:
        async with snapcore.open_repository(repo) as opened:
            await opened.capture(scene.work, thread_id=THREAD)

    calls = count_calls(lambda: capture(scene.base / "counted"), STORE_CALLS)
    for at in spread(calls, 12):
        repo = scene.base / f"at-{at}"

        async def dying(at: int = at, repo: Path = repo) -> None:
            die_at(at, STORE_CALLS)
            await capture(repo)

        assert run_forked(dying) in (-signal.SIGKILL, 0), at
        repo.mkdir(exist_ok=True)
        asyncio.run(_sound(repo, scene.work, []))
        join_threads()


@pytest.mark.parametrize("follow_up", ["restore", "another restore", "capture"])
def test_a_restore_killed_at_any_call_is_undone_or_finished_by_whoever_comes_next(scene: Scene, follow_up: str) -> None:
    old, head = scene.checkpoints

    async def restore(repo: Path, work: Path) -> None:
        async with snapcore.open_repository(repo) as opened:
            await opened.restore(work, thread_id=THREAD, checkpoint_id=old.id)

    async def next_comes(repo: Path, work: Path, at: int) -> str:
        sealed = (work / ".snapcore-stage" / "journal").exists()
        done = bool(compare_trees(work, scene.trees[1]))
        async with snapcore.open_repository(repo) as opened:
            if follow_up == "capture":
                saved = await opened.capture(work, thread_id=THREAD)
                if sealed:
                    assert saved.content_id == old.content_id, at
                assert saved.content_id in (old.content_id, head.content_id), at
                tree = scene.trees[0] if saved.content_id == old.content_id else scene.trees[1]
            else:
                wanted = old if follow_up == "restore" else head
                await opened.restore(work, thread_id=THREAD, checkpoint_id=wanted.id)
                tree = scene.trees[0] if wanted is old else scene.trees[1]
                saved = await opened.capture(work, thread_id=THREAD)
                assert saved.content_id == wanted.content_id
            assert compare_trees(work, tree) == [], at
            assert stage_names(work) == [], at
            assert (work / ".env").exists()
            assert (work / "node_modules").exists()
            assert (await opened.verify(read_data=True)).ok
        return "sealed" if sealed else "done" if done else "untouched"

    repo, work = scene.copies("counted")
    calls = count_calls(lambda: restore(repo, work), ON_DISK)
    met = set()
    for at in spread(calls, 16):
        repo, work = scene.copies(f"at-{at}")

        async def dying(at: int = at, repo: Path = repo, work: Path = work) -> None:
            die_at(at, ON_DISK)
            await restore(repo, work)

        assert run_forked(dying) in (-signal.SIGKILL, 0), at
        met.add(asyncio.run(next_comes(repo, work, at)))
        join_threads()
    assert met == {"sealed", "done", "untouched"}


CHILD = """
import asyncio, sys, snapcore
async def main():
    async with snapcore.open_repository(sys.argv[1]) as repo:
        print("ready", flush=True)
        if sys.argv[3] == "capture":
            await repo.capture(sys.argv[2], thread_id="thread", reread=True)
        else:
            await repo.restore(sys.argv[2], thread_id="thread", checkpoint_id=sys.argv[4])
        print("done", flush=True)
asyncio.run(main())
"""


def run_and_kill(seconds: float, *arguments: str | Path) -> None:
    """Run the child, and kill it so many seconds after it has opened its repository."""
    child = subprocess.Popen([sys.executable, "-c", CHILD, *arguments], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    time.sleep(seconds)
    child.kill()
    child.communicate()


def test_captures_killed_at_random_moments(scene: Scene) -> None:
    repo, work = scene.copies("one")
    moments = random.Random(11)
    before = [c.id for c in scene.checkpoints]
    for seed in range(6):
        mutate_tree(work, seed=20 + seed)
        run_and_kill(moments.uniform(0, 0.15), repo, work, "capture")
        asyncio.run(_sound(repo, work, before))
        before = asyncio.run(_ids(repo))
        join_threads()


async def _ids(repo: Path) -> list[str]:
    async with snapcore.open_repository(repo) as opened:
        return [c.id for c in await opened.list(THREAD)]


def test_restores_killed_at_random_moments(scene: Scene) -> None:
    old, head = scene.checkpoints
    moments = random.Random(12)

    async def finish(repo: Path, work: Path) -> None:
        async with snapcore.open_repository(repo) as opened:
            saved = await opened.capture(work, thread_id=THREAD)
            assert saved.content_id in (old.content_id, head.content_id)
            tree = scene.trees[0] if saved.content_id == old.content_id else scene.trees[1]
            assert compare_trees(work, tree) == []
            assert stage_names(work) == []

    for number in range(6):
        repo, work = scene.copies(f"r-{number}")
        run_and_kill(moments.uniform(0, 0.25), repo, work, "restore", old.id)
        asyncio.run(finish(repo, work))
        join_threads()


def test_many_deaths_in_a_row_do_no_harm(scene: Scene) -> None:
    """The same workspace and thread, restored and captured by processes that keep dying."""
    repo, work = scene.copies("one")
    dice = random.Random(13)

    async def act(capture: bool) -> None:
        async with snapcore.open_repository(repo) as opened:
            if capture:
                await opened.capture(work, thread_id=THREAD)
            else:
                await opened.restore(work, thread_id=THREAD, checkpoint_id=scene.checkpoints[dice.randrange(2)].id)

    for _ in range(25):
        at, capture = dice.randrange(500), dice.random() < 0.4

        async def dying(at: int = at, capture: bool = capture) -> None:
            die_at(at, [*ON_DISK, *STORE_CALLS])
            await act(capture)

        assert run_forked(dying) in (-signal.SIGKILL, 0)

    async def end() -> None:
        async with snapcore.open_repository(repo) as opened:
            contents = {c.content_id for c in await opened.list(THREAD)}
            assert contents == {c.content_id for c in scene.checkpoints}, "no capture saved anything in between"
            for checkpoint, tree in zip(scene.checkpoints, scene.trees, strict=True):
                await opened.restore(work, thread_id=THREAD, checkpoint_id=checkpoint.id)
                assert compare_trees(work, tree) == []
            await sound(opened, work, scene.base / "scratch", [c.id for c in await opened.list(THREAD)])

    asyncio.run(end())


def test_a_copy_is_like_its_original(scene: Scene, tmp_path: Path) -> None:
    """The other tests rest on this."""
    copy_tree(scene.work, tmp_path / "copy")
    assert compare_trees(scene.work, tmp_path / "copy", folder_times=True) == []
    assert compare_trees(*scene.trees) != []
