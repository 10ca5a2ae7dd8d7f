"""Capture: what is read, what is recorded, what fails, and that it changes nothing."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import snapcore
from snapcore.errors import (
    CheckpointConflictError,
    CheckpointWriterConflictError,
    CheckpointWriterLostError,
    Code,
    RepositoryError,
    SnapcoreError,
    SnapshotError,
)
from snapcore.model import FileStat, Progress
from snapcore.protocols import ReadBlock, ScanSelection
from snapcore.providers.direct import DirectWorkspace
from snapcore.repository import Repository
from snapcore.selection import FilePolicy
from snapcore.stores.memory import MemoryBlobStore
from snapcore.stores.sql import SqlCheckpointStore
from snapcore.testing.clock import ManualClock
from snapcore.testing.faults import Faults, with_faults
from snapcore.testing.trees import make_tree, mutate_tree

Make = Callable[..., Path]
Settle = Callable[[Path], None]


# ---- incremental


async def test_only_what_changed_is_read(repo: Repository, work: Path, settle: Settle) -> None:
    """Of a tree of 300 files three change; the second capture reads three, the third none."""
    make_tree(work, files=300)
    settle(work)
    first = await repo.capture_with_report(work, thread_id="t", policy=FilePolicy.everything())
    assert first.files_read > 300
    assert (await repo.capture_with_report(work, thread_id="t", policy=FilePolicy.everything())).files_read == 0
    for number in range(3):
        (work / f"added-{number}").write_text(str(number))
    report = await repo.capture_with_report(work, thread_id="t", policy=FilePolicy.everything())
    assert (report.files_read, report.bytes_read) == (3, 3)
    assert report.bytes_stored < 20_000
    assert report.packs == 1


async def test_each_incremental_capture_equals_a_fresh_one(memory_repo: Repository, work: Path, settle: Settle) -> None:
    """Through many steps of an agent, in every one of which all kinds of change happen."""
    make_tree(work, files=150, seed=9)
    for step in range(6):
        settle(work)
        checkpoint = await memory_repo.capture(work, thread_id="t")
        fresh = await memory_repo.capture(work, thread_id=f"fresh-{step}", reread=True)
        assert checkpoint.content_id == fresh.content_id
        assert [e async for e in memory_repo.ls(checkpoint)] == [e async for e in memory_repo.ls(fresh)]
        mutate_tree(work, seed=step)


async def test_captures_of_two_sandboxes_into_one_thread_do_not_mix(
    memory_repo: Repository, make: Make, settle: Settle, tmp_path: Path
) -> None:
    """Stats belong to a sandbox: the same names elsewhere are read, and the first sandbox's stay known."""
    one = make({"a": "1", "b": "2"})
    two = make({"a": "x", "b": "y"}, base=tmp_path / "two")
    for folder in (one, two):
        settle(folder)
    assert (await memory_repo.capture_with_report(one, thread_id="t")).files_read == 2
    other = await memory_repo.capture_with_report(two, thread_id="t")
    assert other.files_read == 2
    assert await memory_repo.read_file(other.checkpoint, b"a") == b"x"
    back = await memory_repo.capture_with_report(one, thread_id="t")
    assert back.files_read == 0
    assert await memory_repo.read_file(back.checkpoint, b"a") == b"1"


async def test_reread_trusts_no_stat(memory_repo: Repository, make: Make, settle: Settle) -> None:
    work = make({"a": "1", "b": "2"})
    settle(work)
    await memory_repo.capture(work, thread_id="t")
    report = await memory_repo.capture_with_report(work, thread_id="t", reread=True)
    assert report.files_read == 2


@pytest.mark.parametrize("how", ["restore", "fork", "restore over"])
async def test_the_first_capture_after_a_restore_or_fork_is_incremental(
    memory_repo: Repository, work: Path, settle: Settle, how: str
) -> None:
    make_tree(work, files=60)
    settle(work)
    await memory_repo.capture(work, thread_id="t")
    thread, place = "t", work.parent / "target"
    if how == "fork":
        await memory_repo.fork("t", to_thread_id="u")
        thread = "u"
        await memory_repo.restore(place, thread_id=thread)
    elif how == "restore over":
        mutate_tree(work, seed=1)
        place = work
        await memory_repo.restore(place, thread_id=thread)
    else:
        await memory_repo.restore(place, thread_id=thread)
    report = await memory_repo.capture_with_report(place, thread_id=thread)
    assert report.files_read == 0
    (place / "run.sh").write_text("changed")
    assert (await memory_repo.capture_with_report(place, thread_id=thread)).files_read == 1


async def test_metadata_changes_are_captured(memory_repo: Repository, make: Make, settle: Settle) -> None:
    """A mode or a time alone makes another checkpoint; the content is found stored already."""
    work = make({"a": "x" * 1000, "b": "y"})
    settle(work)
    first = await memory_repo.capture(work, thread_id="t")
    (work / "a").chmod(0o755)
    os.utime(work / "b", ns=(5, 5))
    report = await memory_repo.capture_with_report(work, thread_id="t")
    entries = {e.path: e async for e in memory_repo.ls(report.checkpoint)}
    assert (entries[b"a"].mode, entries[b"b"].mtime_ns) == (0o755, 5)
    assert report.checkpoint.content_id != first.content_id


async def test_folder_times_alone_make_no_new_content(memory_repo: Repository, make: Make) -> None:
    """Temporary files that come and go do not change the content id."""
    work = make({"folder/a": "x"})
    first = await memory_repo.capture(work, thread_id="t")
    (work / "folder" / "temporary").write_text("x")
    (work / "folder" / "temporary").unlink()
    report = await memory_repo.capture_with_report(work, thread_id="t", skip_unchanged=True)
    assert not report.created
    assert report.checkpoint.id == first.id


# ---- nothing is changed


async def test_a_capture_never_changes_the_tree(memory_repo: Repository, make: Make) -> None:
    """Case 24: not a name, a byte, a time, not even with `.git` captured, and not when it fails or is cancelled."""
    work = make({".git/HEAD": "ref", ".git/index": "x", "a": "1", "sub/b": "2"})

    def state() -> dict[str, tuple[int, ...]]:
        return {
            str(path): (st.st_ino, st.st_mode, st.st_size, st.st_mtime_ns, st.st_ctime_ns)
            for path in [work, *work.rglob("*")]
            for st in [path.lstat()]
        }

    before = state()
    await memory_repo.capture(work, thread_id="t", policy=FilePolicy.with_git())
    assert state() == before
    task = asyncio.create_task(memory_repo.capture(work, thread_id="t", reread=True))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert state() == before
    os.mkfifo(work / "fifo")
    before = state()
    with pytest.raises(SnapshotError):
        await memory_repo.capture(work, thread_id="t")
    assert state() == before


# ---- durable, or not there


@pytest.mark.parametrize("method", ["put", "append", "acquire_writer", "add_pack"])
async def test_no_record_without_durable_bytes(make: Make, method: str) -> None:
    """Cases 6 and 47: whatever store call fails, the capture says so, the head stays, and the next one is whole."""
    work = make({"a": os.urandom(100_000), "b": os.urandom(40 << 20)})
    faults = Faults()
    blobs, store = with_faults(MemoryBlobStore(), faults), with_faults(SqlCheckpointStore("sqlite://"), faults)
    await snapcore.capture(
        handle=str(work), checkpoints=store, blobs=blobs, thread_id="seed", policy=FilePolicy.patterns(["/none"])
    )
    faults.clear()
    error = RepositoryError("The store is on fire.", code=Code.STORE_FULL)
    faults.fail(method, 1, error)
    with pytest.raises(RepositoryError) as caught:
        await snapcore.capture(handle=str(work), checkpoints=store, blobs=blobs, thread_id="t")
    assert caught.value.code == Code.STORE_FULL
    assert await store.head("t") is None
    faults.clear()
    await snapcore.capture(handle=str(work), checkpoints=store, blobs=blobs, thread_id="t")
    target = work.parent / "target"
    await snapcore.restore(handle=str(target), checkpoints=store, blobs=blobs, thread_id="t", verify="content")
    assert (target / "b").read_bytes() == (work / "b").read_bytes()
    await store.close()


async def test_a_commit_whose_answer_is_lost_is_one_checkpoint(make: Make) -> None:
    """The append is asked for again and found done."""
    work = make({"a": "1"})
    faults = Faults()
    blobs, store = MemoryBlobStore(), with_faults(SqlCheckpointStore("sqlite://"), faults)
    faults.lose_response("append", 1)
    checkpoint = await snapcore.capture(handle=str(work), checkpoints=store, blobs=blobs, thread_id="t")
    assert [c.id for c in await store.checkpoints("t")] == [checkpoint.id]
    await store.close()


async def test_a_passing_read_error_never_becomes_zeros(make: Make) -> None:
    """Case 47: a read that fails once makes a restore fail, the workspace as it was; the second try is right."""
    work = make({"a": "1" * 5000, "b": "2"})
    faults = Faults()
    blobs, store = with_faults(MemoryBlobStore(), faults), SqlCheckpointStore("sqlite://")
    await snapcore.capture(handle=str(work), checkpoints=store, blobs=blobs, thread_id="t")
    (work / "a").write_text("changed")
    faults.clear()
    faults.fail("get", None)
    with pytest.raises(SnapcoreError):
        await snapcore.restore(handle=str(work), checkpoints=store, blobs=blobs, thread_id="t")
    assert (work / "a").read_text() == "changed"
    assert os.listdir(work.parent) == ["work"]
    faults.clear()
    await snapcore.restore(handle=str(work), checkpoints=store, blobs=blobs, thread_id="t")
    assert (work / "a").read_text() == "1" * 5000
    await store.close()


# ---- writers


class PausingWorkspace(DirectWorkspace):
    """Lets a test act in the middle of a capture."""

    def __init__(self, root: Path, meanwhile: Callable[[], Any]) -> None:
        super().__init__(root)
        self._meanwhile = meanwhile

    async def scan(self, selection: ScanSelection, *, cross_mounts: bool = False) -> AsyncIterator[Sequence[FileStat]]:
        async for batch in super().scan(selection, cross_mounts=cross_mounts):
            yield batch

    async def read(self, files: Sequence[FileStat]) -> AsyncIterator[Sequence[ReadBlock]]:
        await self._meanwhile()
        async for batch in super().read(files):
            yield batch


@pytest.mark.parametrize("taken_over", [True, False])
async def test_a_writer_whose_lease_ran_out_has_lost(make: Make, taken_over: bool) -> None:
    """Cases 35, 36 and 38: frozen, its time passes by the database's clock, another takes over or not, thawed: it is told,
    in the commit itself, and the head has not moved on its account."""
    work = make({"a": "1"})
    clock = ManualClock()
    blobs, store = MemoryBlobStore(), SqlCheckpointStore("sqlite://", clock=clock)
    first = await snapcore.capture(handle=str(work), checkpoints=store, blobs=blobs, thread_id="t")
    winners = [first.id]

    async def freeze() -> None:
        clock.advance(121)
        if taken_over:
            other = await snapcore.capture(handle=str(work), checkpoints=store, blobs=blobs, thread_id="t")
            winners.append(other.id)

    (work / "a").write_text("changed")
    with pytest.raises(CheckpointWriterLostError):
        await snapcore.capture(handle=PausingWorkspace(work, freeze), checkpoints=store, blobs=blobs, thread_id="t")
    assert [c.id for c in await store.checkpoints("t")] == winners
    again = await snapcore.capture(handle=str(work), checkpoints=store, blobs=blobs, thread_id="t")
    assert again.parent_id == winners[-1]
    await store.close()


async def test_a_second_writer_of_a_thread_is_refused_at_once_or_waits(memory_repo: Repository, make: Make) -> None:
    work = make({"a": "1"})
    inside: list[SnapcoreError] = []

    async def meanwhile() -> None:
        with pytest.raises(CheckpointWriterConflictError) as caught:
            await memory_repo.capture(work, thread_id="t")
        inside.append(caught.value)
        await memory_repo.capture(work, thread_id="another")

    checkpoint = await memory_repo.capture(PausingWorkspace(work, meanwhile), thread_id="t")
    assert inside[0].code == Code.WRITER_HELD
    assert inside[0].retryable
    assert [c.id for c in await memory_repo.list("t")] == [checkpoint.id]

    both = await asyncio.gather(*(memory_repo.capture(work, thread_id="t", wait=20) for _ in range(3)))
    assert len({c.id for c in both}) == 3
    parents = [c.parent_id for c in await memory_repo.list("t")]
    assert parents == [None, *[c.id for c in await memory_repo.list("t")][:-1]]


# ---- options


async def test_a_label_makes_a_checkpoint_a_named_one(memory_repo: Repository, make: Make) -> None:
    work = make({"a": "1"})
    plain = await memory_repo.capture(work, thread_id="t", run_id="run-1", step=3)
    named = await memory_repo.capture(work, thread_id="t", label="after install")
    assert (plain.reason, plain.label, plain.run_id, plain.step) == ("automatic", None, "run-1", 3)
    assert (named.reason, named.label, named.run_id, named.step) == ("named", "after install", None, None)
    assert named.parent_id == plain.id
    assert named.created_at > plain.created_at


async def test_skip_unchanged_returns_the_head(memory_repo: Repository, make: Make) -> None:
    """Only while nothing at all differs: files, secrets, conversation, artifacts."""
    work = make({"a": "1"})
    first = await memory_repo.capture(work, thread_id="t")
    same: list[dict[str, Any]] = [{}, {"label": "ignored"}, {"artifacts": {}}]
    for options in same:
        report = await memory_repo.capture_with_report(work, thread_id="t", skip_unchanged=True, **options)
        assert (report.created, report.checkpoint) == (False, first)
    different: list[dict[str, Any]] = [
        {"conversation": [{"role": "user"}]},
        {"artifacts": {"a": b"1"}},
        {"secrets": {"A": "a-secret"}},
    ]
    for options in different:
        report = await memory_repo.capture_with_report(work, thread_id="t", skip_unchanged=True, **options)
        assert report.created
    assert len(await memory_repo.list("t")) == 4
    (work / "a").write_text("2")
    assert (await memory_repo.capture_with_report(work, thread_id="t", skip_unchanged=True)).created


async def test_what_was_left_out_counts_as_a_change(memory_repo: Repository, make: Make) -> None:
    """A restore of the head must not remove what only a later capture knew to be skipped."""
    work = make({"a": "1"})
    policy = FilePolicy(on_unsupported="skip")
    await memory_repo.capture(work, thread_id="t", policy=policy)
    os.mkfifo(work / "pipe")
    report = await memory_repo.capture_with_report(work, thread_id="t", policy=policy, skip_unchanged=True)
    assert report.created
    await memory_repo.restore(work, thread_id="t")
    assert (work / "pipe").is_fifo()
    assert not (await memory_repo.capture_with_report(work, thread_id="t", policy=policy, skip_unchanged=True)).created


async def test_an_idempotency_key_is_looked_up_before_the_scan(memory_repo: Repository, make: Make, tmp_path: Path) -> None:
    """A hit returns that checkpoint though the workspace is gone; per thread; freed when the checkpoint is deleted."""
    work = make({"a": "1"})
    first = await memory_repo.capture(work, thread_id="t", idempotency_key="step-1")
    (work / "a").write_text("2")
    report = await memory_repo.capture_with_report(tmp_path / "gone", thread_id="t", idempotency_key="step-1")
    assert (report.created, report.checkpoint) == (False, first)
    other = await memory_repo.capture_with_report(work, thread_id="u", idempotency_key="step-1")
    assert other.created
    fork = await memory_repo.fork("t", to_thread_id="v")
    assert (await memory_repo.capture_with_report(work, thread_id="v", idempotency_key="step-1")).created
    assert fork.idempotency_key is None
    await memory_repo.delete_head("t")
    again = await memory_repo.capture_with_report(work, thread_id="t", idempotency_key="step-1")
    assert again.created
    assert await memory_repo.read_file(again.checkpoint, b"a") == b"2"


async def test_ids_made_by_the_client(memory_repo: Repository, make: Make) -> None:
    work = make({"a": "1"})
    checkpoint = await memory_repo.capture(work, thread_id="t", checkpoint_id="my-id")
    assert checkpoint.id == "my-id"
    (work / "a").write_text("2")
    with pytest.raises(CheckpointConflictError) as caught:
        await memory_repo.capture(work, thread_id="t", checkpoint_id="my-id")
    assert caught.value.code == Code.DUPLICATE_ID
    assert await memory_repo.list("t") == [checkpoint]


@pytest.mark.parametrize("bad", ["", "a/b", "a:b", "latest", "new\nline", "x" * 513, "\ud800"])
async def test_ids_that_cannot_be_are_refused(memory_repo: Repository, make: Make, bad: str) -> None:
    work = make({"a": "1"})
    with pytest.raises(SnapshotError) as caught:
        await memory_repo.capture(work, thread_id="t", checkpoint_id=bad)
    assert caught.value.code == Code.INVALID_ID
    if bad in ("", "new\nline", "x" * 513, "\ud800"):
        with pytest.raises(SnapshotError) as caught:
            await memory_repo.capture(work, thread_id=bad)
        assert caught.value.code == Code.INVALID_ID
    assert await memory_repo.threads() == []


async def test_conversation_and_artifacts_are_kept_as_they_were(memory_repo: Repository, make: Make) -> None:
    """Immutable: what the caller or a later capture does changes nothing; copied by fork and rewind; empty by default."""
    work = make({"a": "1"})
    messages: list[Any] = [{"role": "user", "content": "naïve 文\n"}, {"n": [1, 2.5, None, True]}]
    artifacts = {"log.txt": b"line", "empty": b"", "big": os.urandom(9 << 20), "odd name/..": b"x"}
    first = await memory_repo.capture(work, thread_id="t", conversation=messages, artifacts=artifacts)
    messages.append({"role": "late"})
    second = await memory_repo.capture(work, thread_id="t", conversation=[], artifacts={"log.txt": b"other"})
    third = await memory_repo.capture(work, thread_id="t")
    fork = await memory_repo.fork("t", first.id, to_thread_id="u")
    back = await memory_repo.rewind("t", first.id)
    for checkpoint in (first, fork, back):
        assert await memory_repo.read_conversation(checkpoint) == messages[:2]
        assert {name: await memory_repo.read_artifact(checkpoint, name) for name in checkpoint.artifacts} == artifacts
    assert await memory_repo.read_artifact(second, "log.txt") == b"other"
    assert await memory_repo.read_conversation(third) == []
    with pytest.raises(SnapshotError) as caught:
        await memory_repo.read_artifact(first, "none")
    assert "log.txt" in str(caught.value)


@pytest.mark.parametrize("conversation", [[object()], [{"x": {1, 2}.__iter__()}], ["\ud800"]])
async def test_a_conversation_that_is_no_json_is_refused(memory_repo: Repository, make: Make, conversation: Any) -> None:
    with pytest.raises(SnapshotError) as caught:
        await memory_repo.capture(make({"a": "1"}), thread_id="t", conversation=conversation)
    assert caught.value.code == Code.INVALID_REQUEST
    assert await memory_repo.threads() == []


async def test_progress_ends_with_what_was_done(memory_repo: Repository, make: Make, settle: Callable[[Path], None]) -> None:
    seen: list[Progress] = []
    work = make({f"f{number}": "x" * 10 for number in range(50)})
    settle(work)
    report = await memory_repo.capture_with_report(work, thread_id="t", on_progress=seen.append)
    assert (seen[-1].phase, seen[-1].files, seen[-1].bytes) == ("capture", 50, 500)
    assert (report.files_read, report.bytes_read) == (50, 500)
    seen.clear()
    await memory_repo.capture(work, thread_id="t", on_progress=seen.append)  # nothing has changed: there is but a scan to tell of
    assert (seen[-1].phase, seen[-1].files, seen[-1].bytes) == ("scan", 50, 0)
    seen.clear()
    await memory_repo.restore(work.parent / "target", thread_id="t", on_progress=seen.append)
    assert (seen[-1].phase, seen[-1].files, seen[-1].bytes, seen[-1].total_files) == ("restore", 50, 500, 50)


async def test_totals_count_what_is_there(memory_repo: Repository, make: Make) -> None:
    work = make({"a": "12345", "sub/b": "1", "empty/": ""})
    os.link(work / "a", work / "a2")
    (work / "link").symlink_to("a")
    totals = (await memory_repo.capture(work, thread_id="t")).totals
    assert (totals.files, totals.folders, totals.links) == (3, 2, 1)
    assert totals.bytes == 6  # the names of one file count once
