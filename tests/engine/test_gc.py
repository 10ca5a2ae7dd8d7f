"""gc frees what nothing needs, and never what something needs: whatever runs beside it, and wherever it is cut short.

Case 18: fifty captures with one file changed do not grow without bound. Case 34: gc deleted a blob that was being referenced
again.
"""

import functools
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

import snapcore
from snapcore import collecting
from snapcore.collecting import Fate, GcReport
from snapcore.errors import CheckpointWriterLostError, Code, RepositoryError, SnapcoreError, SnapshotError
from snapcore.model import PackState
from snapcore.opening import borrowed
from snapcore.packs import pack_key
from snapcore.repository import Repository
from snapcore.stores.memory import MemoryBlobStore
from snapcore.stores.sql import SqlCheckpointStore
from snapcore.testing import Crash, Faults, ManualClock, with_faults

from .crash_helpers import copy_tree, faulty

Make = Callable[..., Path]
Files = dict[str, bytes]
PRESENT = (PackState.LIVE, PackState.CONDEMNED, PackState.WRITING)
TOKEN, NAME = b"s3cr3t-value", "KEY"


def noise(seed: int, size: int = 50_000) -> bytes:
    return random.Random(seed).randbytes(size)


def files_in(root: Path) -> Files:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


async def capture(repo: Repository, folder: Path, checkpoint_id: str, files: Files, thread_id: str = "t", **options: Any) -> None:
    """Make the folder hold exactly the files, and capture it."""
    folder.mkdir(exist_ok=True)
    for name in files_in(folder).keys() - files.keys():
        (folder / name).unlink()
    for name, content in files.items():
        if not (folder / name).exists() or (folder / name).read_bytes() != content:
            (folder / name).write_bytes(content)
    await repo.capture(folder, thread_id=thread_id, checkpoint_id=checkpoint_id, **options)


async def whole(repo: Repository, expected: dict[str, Files], scratch: Path, thread_id: str = "t") -> None:
    """Every checkpoint of the thread restores to its files, and every stored byte is right."""
    assert [checkpoint.id for checkpoint in await repo.list(thread_id)] == list(expected)
    scratch.mkdir(exist_ok=True)
    for checkpoint_id, files in expected.items():
        await repo.restore(scratch, thread_id=thread_id, checkpoint_id=checkpoint_id, allow_empty=True)
        assert files_in(scratch) == files
    report = await repo.verify(read_data=True)
    assert report.ok, report.problems


async def present(repo: Repository) -> list[str]:
    """Packs that are not given up."""
    return [pack.pack_id for pack in await repo.checkpoints.packs() if pack.state in PRESENT]


async def stored(repo: Repository) -> dict[str, int]:
    """Sizes of the packs in the blob store, by key."""
    return {blob.key: blob.size async for blob in repo.blobs.list("packs/")}


def fates(report: GcReport) -> dict[Fate, int]:
    return {fate: report.count(fate) for fate in Fate if report.count(fate)}


@asynccontextmanager
async def clocked(clock: ManualClock) -> AsyncIterator[Repository]:
    """A repository in memory on a clock of the test's own."""
    store = SqlCheckpointStore("sqlite://", clock=clock)
    async with borrowed(MemoryBlobStore(), store) as opened:
        yield opened
    await store.close()


def beside(repo: Repository, faults: Faults) -> Repository:
    """The same repository, on whose calls `faults` strike."""
    return Repository(with_faults(repo.blobs, faults), with_faults(repo.checkpoints, faults), repo.config)


# ----------------------------------------------------------------------------------------------- garbage and the grace


async def test_what_a_deleted_checkpoint_alone_needed_is_freed(repo: Repository, tmp_path: Path) -> None:
    await capture(repo, tmp_path / "w", "one", {"a": noise(1), "same": noise(0)})
    await capture(repo, tmp_path / "w", "two", {"a": noise(2), "same": noise(0)})
    before = await stored(repo)
    await repo.delete("t", "one")
    report = await repo.gc(grace=0, repack="all")
    after = await stored(repo)
    assert sum(after.values()) <= sum(before.values()) - 49_000
    assert sum(after.values()) < 103_000
    assert report.count(Fate.FREED) == len(before.keys() - after.keys()) > 0
    assert (await repo.checkpoints.record_totals())[0] == report.records
    assert report.size(Fate.FREED) == sum(before[key] for key in before.keys() - after.keys())
    await whole(repo, {"two": {"a": noise(2), "same": noise(0)}}, tmp_path / "out")


async def test_a_pack_stays_for_the_grace(tmp_path: Path) -> None:
    clock = ManualClock()
    async with clocked(clock) as repo:
        for n in (1, 2):
            await capture(repo, tmp_path / "w", str(n), {"a": noise(n)})
        await repo.delete("t", "1")
        before = await stored(repo)
        assert fates(await repo.gc(grace=3600)) == {Fate.REPACKED: 1, Fate.LIVE: 1}  # the page of the root folder is shared
        clock.advance(3599)
        assert fates(await repo.gc(grace=3600)) == {Fate.CONDEMNED: 1, Fate.LIVE: 2}
        assert before.keys() <= (await stored(repo)).keys()
        clock.advance(1)
        assert fates(await repo.gc(grace=3600)) == {Fate.FREED: 1, Fate.LIVE: 2}
        assert len(before.keys() - (await stored(repo)).keys()) == 1
        await whole(repo, {"2": {"a": noise(2)}}, tmp_path / "out")


async def test_a_blob_that_was_put_late_goes_once_its_row_is_old(tmp_path: Path) -> None:
    clock = ManualClock()
    async with clocked(clock) as repo:
        for n in (1, 2):
            await capture(repo, tmp_path / "w", str(n), {"a": noise(n)})
        await repo.delete("t", "1")
        before = await stored(repo)
        await repo.gc(grace=0)
        (freed,) = before.keys() - (await stored(repo)).keys()
        await repo.blobs.put(freed, b"late")
        await repo.gc(grace=0)
        assert freed in await stored(repo)
        clock.advance(24 * 3600)
        await repo.gc(grace=0)
        assert freed not in await stored(repo)
        assert PackState.DELETED not in [pack.state for pack in await repo.checkpoints.packs()]


async def test_gc_of_a_repository_without_checkpoints(repo: Repository) -> None:
    report = await repo.gc(grace=0)
    assert (report.packs, report.records, report.bytes_moved) == ([], 0, 0)


@pytest.mark.parametrize("wrong", [{"grace": -1}, {"grace": float("nan")}, {"repack": "some"}])
async def test_options_that_make_no_sense_are_refused(repo: Repository, wrong: dict[str, Any]) -> None:
    with pytest.raises(SnapshotError) as caught:
        await repo.gc(**wrong)
    assert caught.value.code is Code.INVALID_REQUEST


async def test_fifty_captures_of_a_changing_file_do_not_grow_without_bound(repo: Repository, tmp_path: Path) -> None:
    """Case 18."""
    large = noise(1000, 2_000_000)
    for n in range(50):
        await capture(repo, tmp_path / "w", f"{n:02}", {"a": noise(n, 1_000_000), "same": large})
    assert sum((await stored(repo)).values()) < 52_600_000
    await repo.forget("t", keep_last=3)
    await repo.gc(grace=0)
    assert sum((await stored(repo)).values()) < 6_100_000  # half of what a pack holds may be dead
    await repo.gc(grace=0, repack="all")
    assert sum((await stored(repo)).values()) < 5_100_000
    await whole(repo, {f"{n:02}": {"a": noise(n, 1_000_000), "same": large} for n in (47, 48, 49)}, tmp_path / "out")


# -------------------------------------------------------------------------------------------------------------- repack


@pytest.fixture
async def twelve(repo: Repository, tmp_path: Path) -> dict[str, Files]:
    """Twelve captures of a folder in which one file changes; returns their files by id."""
    all_files: dict[str, Files] = {}
    for n in range(12):
        all_files[f"{n:02}"] = {"a": noise(n, 3000), "same": noise(1000, 3000), "empty": b""}
        await capture(repo, tmp_path / "w", f"{n:02}", all_files[f"{n:02}"])
    return all_files


@pytest.fixture
async def four(repo: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Files]:
    """Four such captures, which are packs enough to be merged."""
    monkeypatch.setattr(collecting, "FEWEST_SMALL", 2)
    all_files: dict[str, Files] = {}
    for n in range(4):
        all_files[str(n)] = {"a": noise(n, 3000), "same": noise(1000, 3000)}
        await capture(repo, tmp_path / "w", str(n), all_files[str(n)])
    return all_files


async def test_many_small_packs_become_few(repo: Repository, twelve: dict[str, Files], tmp_path: Path) -> None:
    assert len(await present(repo)) >= 12
    report = await repo.gc(grace=0)
    assert report.bytes_moved > 12 * 3000
    assert len(await present(repo)) == 1
    assert len(await stored(repo)) == 1
    await whole(repo, twelve, tmp_path / "out")
    again = await repo.gc(grace=0)
    assert (fates(again), again.bytes_moved) == ({Fate.LIVE: 1}, 0)


async def test_without_repack_nothing_moves(repo: Repository, twelve: dict[str, Files]) -> None:
    report = await repo.gc(grace=0, repack="none")
    assert (fates(report), report.bytes_moved) == ({Fate.LIVE: 12}, 0)


async def test_rewriting_all_comes_to_an_end(repo: Repository, tmp_path: Path) -> None:
    await capture(repo, tmp_path / "w", "one", {"a": noise(1), "b": noise(2, 5000)})
    await capture(repo, tmp_path / "w", "two", {"a": noise(1)})
    await repo.delete("t", "one")
    assert (await repo.gc(grace=0, repack="all")).bytes_moved > 0
    assert (await repo.gc(grace=0, repack="all")).bytes_moved == 0
    await whole(repo, {"two": {"a": noise(1)}}, tmp_path / "out")


async def test_a_pack_of_one_small_record_is_not_rewritten_again(repo: Repository, tmp_path: Path) -> None:
    for n in (1, 2):
        await capture(repo, tmp_path / "w", str(n), {"a": noise(n)})
    await repo.delete("t", "1")
    assert 0 < (await repo.gc(grace=0, repack="all")).bytes_moved < 300  # the page of the root folder
    assert (await repo.gc(grace=0, repack="all")).bytes_moved == 0


async def test_a_pack_that_cannot_be_read_is_left_as_it_is(repo: Repository, twelve: dict[str, Files]) -> None:
    (place,) = (await repo.checkpoints.locate([(await repo.list("t"))[5].record_id])).values()
    data = bytearray(await repo.blobs.get(pack_key(place.pack_id)))
    data[place.offset] ^= 1  # of the checkpoint's own record, which no walk reads
    await repo.blobs.put(pack_key(place.pack_id), bytes(data))
    report = await repo.gc(grace=0)
    assert fates(report) == {Fate.FREED: 11, Fate.RECENT: 1}
    assert place.pack_id in await present(repo)


# ------------------------------------------------------------------------------------------------ all that must be kept


async def test_conversations_and_artifacts_are_kept(repo: Repository, tmp_path: Path) -> None:
    talk = [{"role": "user", "content": noise(5).hex()}]
    work = tmp_path / "w"
    work.mkdir()
    one = await repo.capture(work, thread_id="t", conversation=talk, artifacts={"plan": noise(6)})
    for n in range(8):
        await capture(repo, tmp_path / "v", str(n), {"a": noise(n)}, thread_id="u")
    await repo.forget("u", keep_last=1)
    for repack in ("none", "auto", "all"):
        await repo.gc(grace=0, repack=repack)
        assert await repo.read_conversation(one) == talk
        assert await repo.read_artifact(one, "plan") == noise(6)
    assert (await repo.verify(read_data=True)).ok


async def test_files_of_many_chunks_and_many_redactions_are_kept(
    repo: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collecting, "FEWEST_SMALL", 1)  # every pack is rewritten: of what is not marked nothing is left
    small = msgspec.structs.replace(repo.config.chunker, min_size=1024, average_size=4096, max_size=8192)
    own = Repository(repo.blobs, repo.checkpoints, msgspec.structs.replace(repo.config, chunker=small))
    redacted = b"\n".join([TOKEN] * 9000)
    files = {"large": noise(1, 800_000), "redacted": redacted}
    await capture(own, tmp_path / "w", "one", files, secrets={NAME: TOKEN})
    entries = {entry.path: entry async for entry in own.ls((await own.list("t"))[0])}
    assert entries[b"large"].chunk_list
    assert entries[b"redacted"].redaction_chunks or entries[b"redacted"].redaction_list
    await capture(own, tmp_path / "v", "gone", {"a": noise(2)}, thread_id="u")
    await own.delete("u", "gone")
    for repack in ("none", "all"):
        await own.gc(grace=0, repack=repack)
        out = tmp_path / f"out-{repack}"
        out.mkdir()
        await own.restore(out, thread_id="t", reinject=True, secrets={NAME: TOKEN})
        assert files_in(out) == files
    assert (await own.verify(read_data=True)).ok


async def test_forks_and_rewinds_keep_what_they_share(repo: Repository, tmp_path: Path) -> None:
    for n in (1, 2):
        await capture(repo, tmp_path / "w", str(n), {"a": noise(n)})
    await repo.fork("t", "1", to_thread_id="u", new_id="fork")
    await repo.rewind("t", "1", new_id="again")
    await repo.delete("t", "1")
    await repo.delete("t", "2")
    await repo.gc(grace=0)
    await whole(repo, {"again": {"a": noise(1)}}, tmp_path / "out")
    await whole(repo, {"fork": {"a": noise(1)}}, tmp_path / "out", "u")


# ------------------------------------------------------------------------------------------------------- beside readers


Step = Callable[[Repository, list[str]], Awaitable[None]]


async def restores_beside(base: Path, step: Step, checkpoint_id: str, expected: Files) -> AsyncIterator[Path]:
    """Restore once for each call that a restore makes, each from a copy of the repository, with `step` done before that call;
    it is told the calls so far. Yields the copies."""
    call, calls = 0, 1
    while call <= calls:
        faults = Faults()
        path, out = base / f"repo-{call}", base / f"out-{call}"
        copy_tree(base / "repo", path)
        out.mkdir()
        async with snapcore.open_repository(path) as repo:
            if call:
                faults.run("*", functools.partial(step, repo, faults.log), call)
            reader = beside(repo, faults)
            await reader.restore(out, thread_id="t", checkpoint_id=checkpoint_id)
            reader._engine.workers.shutdown()
        calls = calls if call else len(faults.log)
        assert files_in(out) == expected
        yield path
        call += 1
    assert calls > 5


async def test_a_restore_whose_packs_gc_moves_ends_right(repo: Repository, four: dict[str, Files], tmp_path: Path) -> None:
    async def step(other: Repository, _: list[str]) -> None:
        report = await other.gc(grace=0)
        assert report.bytes_moved > 0
        assert report.count(Fate.FREED) == 4

    async for _ in restores_beside(tmp_path, step, "1", four["1"]):
        pass


async def test_what_a_restore_has_pinned_outlives_its_checkpoint(
    repo: Repository, four: dict[str, Files], tmp_path: Path
) -> None:
    async def step(other: Repository, calls: list[str]) -> None:
        if "pin" in calls[:-1]:
            await other.delete("t", "1")
            await other.gc(grace=0)

    left = {n: files for n, files in four.items() if n != "1"}
    freed = 0
    async for path in restores_beside(tmp_path, step, "1", four["1"]):
        async with snapcore.open_repository(path) as after:
            if await after.get("t", "1") is None:
                await after.gc(grace=0, repack="all")
                assert sum((await stored(after)).values()) < 4 * 3000 + 6000  # the pin is gone, and what it held
                await whole(after, left, tmp_path / "out")
                freed += 1
    assert freed > 3


# ------------------------------------------------------------------------------------------------------- beside writers


async def test_a_capture_brings_a_condemned_pack_back(tmp_path: Path) -> None:
    """Case 34."""
    clock = ManualClock()
    async with clocked(clock) as repo:
        for n in (1, 2):
            await capture(repo, tmp_path / "w", str(n), {"a": noise(n)})
        await repo.delete("t", "1")
        assert (await repo.gc(grace=3600)).count(Fate.REPACKED) == 1
        (tmp_path / "w" / "a").write_bytes(noise(1))
        report = await repo.capture_with_report(tmp_path / "w", thread_id="t", checkpoint_id="3")
        assert report.bytes_stored < 5000
        clock.advance(7200)
        await repo.gc(grace=3600)
        await whole(repo, {"2": {"a": noise(2)}, "3": {"a": noise(1)}}, tmp_path / "out")


async def test_gc_at_any_call_of_a_capture_takes_nothing_from_it(repo: Repository, tmp_path: Path) -> None:
    """Case 34: what is captured was deleted, is garbage by then, and is freed at any moment."""
    for n in (1, 2):
        await capture(repo, tmp_path / "w", str(n), {"a": noise(n), "b": noise(n + 10)})
    await repo.delete("t", "1")
    await repo.checkpoints.close()
    wanted = {"a": noise(1), "b": noise(12), "c": noise(30)}
    call, calls = 0, 1
    while call <= calls:
        path = tmp_path / f"repo-{call}"
        copy_tree(tmp_path / "repo", path)
        async with snapcore.open_repository(path) as own:
            faults = Faults()

            async def collected(own: Repository = own) -> None:
                await own.gc(grace=0, repack="all")

            if call:
                faults.run("*", collected, call)
            writer = beside(own, faults)
            await capture(writer, tmp_path / "w", "3", wanted)
            writer._engine.workers.shutdown()
            calls = len(faults.log) if not call else calls
            assert (await own.verify(read_data=True)).ok
            await own.gc(grace=0, repack="all")
            await whole(own, {"2": {"a": noise(2), "b": noise(12)}, "3": wanted}, tmp_path / "out")
        call += 1
    assert calls > 3


@pytest.mark.parametrize("method", ["put", "append"])
async def test_a_capture_whose_lease_ran_out_loses_its_packs_and_is_told(tmp_path: Path, method: str) -> None:
    clock = ManualClock()
    async with clocked(clock) as repo:
        await capture(repo, tmp_path / "w", "1", {"a": noise(1)})
        before = await stored(repo)
        faults = Faults()

        async def late() -> None:
            clock.advance(121)
            report = await repo.gc(grace=0)
            assert report.count(Fate.FREED) == 1

        faults.run(method, late)
        with pytest.raises(CheckpointWriterLostError):
            await capture(beside(repo, faults), tmp_path / "w", "2", {"a": noise(2)})
        await whole(repo, {"1": {"a": noise(1)}}, tmp_path / "out")
        clock.advance(24 * 3600)
        await repo.gc(grace=0)
        assert await stored(repo) == before  # what was put late is gone as well


async def test_packs_of_a_running_capture_are_left_alone(tmp_path: Path) -> None:
    async with clocked(ManualClock()) as repo:
        faults = Faults()
        seen: list[dict[Fate, int]] = []

        async def meanwhile() -> None:
            seen.append(fates(await repo.gc(grace=0)))

        faults.run("append", meanwhile)
        await capture(beside(repo, faults), tmp_path / "w", "1", {"a": noise(1)})
        assert seen == [{Fate.WRITING: 1}]
        await whole(repo, {"1": {"a": noise(1)}}, tmp_path / "out")


# ------------------------------------------------------------------------------------------------- gc that is cut short


async def test_gc_that_ends_at_any_call_leaves_all_right_and_the_next_completes(
    repo: Repository, four: dict[str, Files], tmp_path: Path
) -> None:
    await repo.forget("t", keep_last=3)
    await repo.checkpoints.close()
    left = {n: files for n, files in four.items() if int(n) >= 1}
    call, calls = 0, 1
    while call <= calls:
        path = tmp_path / f"repo-{call}"
        copy_tree(tmp_path / "repo", path)
        faults = Faults()
        if call:
            faults.crash("*", call)
        async with faulty(path, faults) as own:
            if call:
                with pytest.raises(Crash):
                    await own.gc(grace=0)
            else:
                await own.gc(grace=0)
                calls = len(faults.log)
        async with snapcore.open_repository(path) as own:
            assert (await own.verify(read_data=True)).ok
            await own.gc(grace=0)
            assert len(await stored(own)) == len(await present(own)) <= 2
            await whole(own, left, tmp_path / "out")
        call += 1
    assert calls > 12


MAINTENANCE_CALLS = [
    "deleted_before",
    "condemn_abandoned",
    "condemn",
    "reserve_maintenance_packs",
    "move_records",
    "sweep",
    "mark_deleted",
    "expire_caches",
]


@pytest.mark.parametrize("method", MAINTENANCE_CALLS)
async def test_of_two_gcs_the_first_stops(repo: Repository, four: dict[str, Files], tmp_path: Path, method: str) -> None:
    await repo.forget("t", keep_last=2)
    faults = Faults()

    async def second() -> None:
        await repo.gc(grace=0)

    faults.run(method, second)
    with pytest.raises(RepositoryError) as caught:
        await beside(repo, faults).gc(grace=0)
    assert caught.value.code is Code.MAINTENANCE_LOST
    assert caught.value.hint
    left = {n: files for n, files in four.items() if int(n) >= 2}
    await whole(repo, left, tmp_path / "out")


@pytest.mark.parametrize("damage", ["gone", "torn"])
async def test_a_manifest_that_cannot_be_read_stops_gc_and_nothing_is_freed(
    repo: Repository, four: dict[str, Files], damage: str
) -> None:
    await repo.delete("t", "0")
    (root,) = (await repo.list("t"))[1].roots
    (place,) = (await repo.checkpoints.locate([root.manifest])).values()
    if damage == "gone":
        await repo.blobs.delete(pack_key(place.pack_id))
    else:
        await repo.blobs.put(pack_key(place.pack_id), (await repo.blobs.get(pack_key(place.pack_id)))[: place.offset])
    before, rows = await stored(repo), await repo.checkpoints.packs()
    for dry_run in (True, False):
        with pytest.raises(RepositoryError) as caught:
            await repo.gc(grace=0, dry_run=dry_run)
        assert caught.value.code is Code.DAMAGED
        assert "verify" in caught.value.hint
    assert (await stored(repo), await repo.checkpoints.packs()) == (before, rows)


async def test_a_checkpoint_that_is_deleted_while_gc_walks_does_not_stop_it(
    repo: Repository, four: dict[str, Files], tmp_path: Path
) -> None:
    (root,) = (await repo.list("t"))[1].roots
    (place,) = (await repo.checkpoints.locate([root.manifest])).values()
    faults = Faults()

    async def deleted() -> None:
        await repo.delete("t", "1")
        await repo.blobs.delete(pack_key(place.pack_id))

    faults.run("get", deleted)
    await beside(repo, faults).gc(grace=0)
    await repo.gc(grace=0)  # the first kept what it had met before the deletion
    await whole(repo, {n: files for n, files in four.items() if n != "1"}, tmp_path / "out")


async def test_a_store_that_fails_is_told_and_a_later_gc_completes(
    repo: Repository, four: dict[str, Files], tmp_path: Path
) -> None:
    await repo.forget("t", keep_last=2)
    for method in ("get", "put", "delete"):
        faults = Faults()
        faults.fail(method)
        with pytest.raises(SnapcoreError) as caught:
            await beside(repo, faults).gc(grace=0)
        assert caught.value.retryable
    await repo.gc(grace=0)
    assert len(await stored(repo)) == len(await present(repo))
    await whole(repo, {n: files for n, files in four.items() if int(n) >= 2}, tmp_path / "out")


# ------------------------------------------------------------------------------------------------------------- dry runs


@pytest.mark.parametrize("grace", [0, 3600])
@pytest.mark.parametrize("repack", ["auto", "all", "none"])
async def test_a_dry_run_changes_nothing_and_says_what_the_real_run_does(
    repo: Repository, four: dict[str, Files], tmp_path: Path, grace: float, repack: Any
) -> None:
    await repo.forget("t", keep_last=3)
    await capture(repo, tmp_path / "v", "gone", {"a": noise(9)}, thread_id="u")
    await repo.delete("u", "gone")
    rows, blobs = await repo.checkpoints.packs(), await stored(repo)
    plan = await repo.gc(grace=grace, repack=repack, dry_run=True)
    assert (await repo.checkpoints.packs(), await stored(repo)) == (rows, blobs)
    done = await repo.gc(grace=grace, repack=repack)
    assert plan.packs == done.packs
    assert (plan.dry_run, done.dry_run, plan.records) == (True, False, done.records)
    going = {pack_key(pack.pack_id) for pack in plan.packs if pack.fate is Fate.FREED}
    assert blobs.keys() - (await stored(repo)).keys() == going
    assert bool(going) == (grace == 0)


async def test_progress_is_told(repo: Repository, four: dict[str, Files]) -> None:
    told: list[snapcore.Progress] = []
    await repo.gc(grace=0, on_progress=told.append)
    marked = [report for report in told if report.phase == "mark"]
    assert (marked[-1].files >= 8, marked[-1].unit) == (True, "record")
    assert {report.phase for report in told} <= {"mark", "repack"}


async def test_caches_of_sandboxes_that_nobody_uses_any_more_go(tmp_path: Path) -> None:
    clock = ManualClock()
    async with clocked(clock) as repo:
        await capture(repo, tmp_path / "w", "1", {"a": noise(1)})
        assert (await repo.gc()).caches_dropped == 0
        clock.advance(collecting.UNUSED_CACHE)
        assert (await repo.gc()).caches_dropped == 1
        await capture(repo, tmp_path / "w", "2", {"a": noise(2)})
        assert len(os.listdir(tmp_path / "w")) == 1
