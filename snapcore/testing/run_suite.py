"""Conformance of the store of runs. Subclass `RunTests` and override the fixture `store`."""

import asyncio
import secrets
from typing import Any, Final

import msgspec
import pytest

from snapcore.errors import CheckpointConflictError, Code, SnapshotError
from snapcore.protocols import CheckpointStore
from snapcore.runs import MAX_MESSAGE, RUNS_KEPT, JobRun, Outcome

from .clock import ManualClock
from .entries import append, state_of

__all__ = ["RunTests", "new_run"]

DAY = 86_400 * 1_000_000


def new_run(started_at: int = 1, job: str = "job", thread_id: str = "thread", **fields: Any) -> JobRun:
    """A run with an id of its own, which took 5 microseconds and found nothing new."""
    given: dict[str, Any] = {"id": secrets.token_hex(16), "ended_at": started_at + 5, "outcome": Outcome.UNCHANGED}
    return JobRun(job=job, thread_id=thread_id, started_at=started_at, **(given | fields))


async def record(store: CheckpointStore, *runs: JobRun) -> list[JobRun]:
    """Record them in order; newest first, as a store lists them."""
    for run in runs:
        await store.record_run(run)
    return sorted(runs, key=lambda run: (run.started_at, run.id), reverse=True)


COMPLETE = JobRun(
    id="0f" * 16,
    job="jöb",
    sandbox="exec:kubectl exec -i pod -- /work space",
    thread_id="thread ü",
    started_at=2**57,
    ended_at=253_402_300_799_999_999,
    outcome=Outcome.FAILED,
    checkpoint_id="checkpoint",
    files_read=1,
    bytes_read=2**60,
    bytes_stored=3,
    forgotten=4,
    warnings=5,
    error="STORE_UNAVAILABLE",
    message="Thé store did not answer.",
)

MALFORMED: Final[tuple[tuple[Code, str, tuple[object, ...]], ...]] = (
    (Code.INVALID_ENTRY, "id", ("", "0" * 31, "0" * 33, "G" * 32, "A" * 32, "0" * 32 + "\n", None)),
    (Code.INVALID_ENTRY, "job", ("", "a\0b", "a\nb", "j" * 513, "a\udc80", 3)),
    (Code.INVALID_ID, "thread_id", ("a\0b", "t" * 513, "a\udc80", None)),
    (Code.INVALID_ID, "checkpoint_id", ("", "a/b", "latest", "a\0b")),
    (Code.INVALID_ENTRY, "outcome", ("", "well", "captured\0", None)),
    (Code.INVALID_ENTRY, "error", ("", "a\0b", "e" * 513)),
    (Code.INVALID_ENTRY, "sandbox", ("a\0b", "a\nb", "a\udc80", "s" * 4097, None)),
    (Code.INVALID_ENTRY, "started_at", (-1, 253_402_300_800_000_000, 1.5, True, None)),
    *((Code.INVALID_ENTRY, name, (-1, "1")) for name in ("ended_at", "files_read", "bytes_read", "bytes_stored")),
    *((Code.INVALID_ENTRY, name, (-1, 2**63, "1")) for name in ("forgotten", "warnings")),
    (Code.INVALID_ENTRY, "message", (None,)),
)

MESSAGES: Final = (
    ("x" * 10_000, "x" * MAX_MESSAGE),
    ("ü" * 10_000, "ü" * MAX_MESSAGE),
    ("a\0b", "a\\x00b"),
    ("a\n\x1b[2Jb", "a\\n\\x1b[2Jb"),
    ("caf\udce9", "caf\\xe9"),
    ("\ud800", "\\ud800"),
    ("\n" * 10_000, ("\\n" * MAX_MESSAGE)[:MAX_MESSAGE]),
)


class RunTests:
    """What scheduled jobs did: the newest runs of each job in each thread."""

    @pytest.fixture
    def clock(self) -> ManualClock:
        """The store's clock."""
        return ManualClock()

    @pytest.fixture
    def store(self, clock: ManualClock) -> CheckpointStore:
        """Override: a store initialised with `IDENTITY` of `snapcore.testing.entries`, on `clock`."""
        pytest.fail("The fixture `store` must be overridden.")

    # ---- recording

    async def test_a_run_is_read_as_it_was_written(self, store: CheckpointStore) -> None:
        await store.record_run(COMPLETE)
        assert await store.runs() == [COMPLETE]
        assert await store.last_runs() == [COMPLETE]

    async def test_a_store_without_runs_has_none(self, store: CheckpointStore) -> None:
        assert await store.runs() == await store.last_runs() == []

    async def test_a_run_that_is_recorded_again_is_there_once(self, store: CheckpointStore) -> None:
        run = new_run(message="x" * (MAX_MESSAGE + 1))
        await record(store, run, new_run(2), run)
        assert len(await store.runs()) == 2

    async def test_another_run_of_the_same_id_is_refused(self, store: CheckpointStore) -> None:
        run = new_run()
        await store.record_run(run)
        for other in ({"job": "other"}, {"outcome": Outcome.FAILED}, {"message": "m"}, {"ended_at": 9}):
            with pytest.raises(CheckpointConflictError) as caught:
                await store.record_run(msgspec.structs.replace(run, **other))
            assert caught.value.code is Code.DUPLICATE_ID
        assert await store.runs() == [run]

    async def test_the_newest_of_each_job_in_each_thread_are_kept(self, store: CheckpointStore) -> None:
        others = [new_run(1, thread_id="other"), new_run(1, job="other"), new_run(1, thread_id="")]
        await record(store, *others)
        runs = await record(store, *(new_run(started) for started in range(RUNS_KEPT + 3)))
        assert await store.runs(job="job", thread_id="thread", limit=1000) == runs[:RUNS_KEPT]
        found = await store.runs(limit=1000)
        assert len(found) == RUNS_KEPT + 3
        assert all(run in found for run in others)

    async def test_a_run_that_is_older_than_all_that_are_kept_goes_at_once(self, store: CheckpointStore) -> None:
        runs = await record(store, *(new_run(started) for started in range(5, RUNS_KEPT + 5)))
        await store.record_run(new_run(1))
        assert await store.runs(limit=1000) == runs

    async def test_the_last_run_that_went_well_outlives_those_that_failed_since(self, store: CheckpointStore) -> None:
        well = [new_run(1), new_run(2, outcome=Outcome.CAPTURED)]
        failed = [new_run(started, outcome=Outcome.FAILED) for started in range(10, RUNS_KEPT + 15)]
        await record(store, *well, *failed)
        assert await store.runs(limit=1000) == [*reversed(failed[-RUNS_KEPT:]), well[1]]
        assert await store.last_runs() == [well[1], failed[-1]]
        again = new_run(10**6)
        await store.record_run(again)
        assert await store.runs(limit=1000) == [again, *reversed(failed[-RUNS_KEPT + 1 :])], "it is not needed any more"

    async def test_a_run_that_is_not_well_formed_is_refused(self, store: CheckpointStore) -> None:
        for code, name, values in MALFORMED:
            for value in values:
                with pytest.raises(SnapshotError) as caught:
                    await store.record_run(msgspec.structs.replace(COMPLETE, **{name: value}))
                assert caught.value.code is code, (name, value)
        assert await store.runs() == []

    async def test_any_message_can_be_kept(self, store: CheckpointStore) -> None:
        for message, kept in MESSAGES:
            run = new_run(job="messages", message=message)
            await record(store, run, run)
            assert msgspec.structs.replace(run, message=kept) in await store.runs(job="messages")
        assert len(await store.runs(job="messages")) == len(MESSAGES)

    async def test_runs_that_are_recorded_at_once_are_all_there(self, store: CheckpointStore) -> None:
        runs = [new_run(started, job=f"job {started % 3}") for started in range(30)]
        await asyncio.gather(*(store.record_run(run) for run in runs))
        assert await store.runs(limit=1000) == list(reversed(runs))

    # ---- listing

    async def test_runs_are_listed_newest_first_by_start_then_by_id(self, store: CheckpointStore) -> None:
        runs = [new_run(started, id=f"{number:032x}") for started in (5, 3, 9) for number in (started, started + 100)]
        expected = await record(store, *runs)
        assert await store.runs() == expected
        assert [run.started_at for run in expected] == [9, 9, 5, 5, 3, 3]

    async def test_runs_are_listed_by_job_and_by_thread(self, store: CheckpointStore) -> None:
        runs = await record(
            store,
            *(new_run(9, job=job, thread_id=thread) for job in ("a", "b") for thread in ("", "t", "u")),
            new_run(3, job="a"),
        )
        for job in ("a", "b", "c"):
            assert await store.runs(job=job) == [run for run in runs if run.job == job]
            for thread_id in ("", "t", "u", "v"):
                expected = [run for run in runs if (run.job, run.thread_id) == (job, thread_id)]
                assert await store.runs(job=job, thread_id=thread_id) == expected
        assert await store.runs(thread_id="") == [run for run in runs if run.thread_id == ""]

    async def test_no_more_are_listed_than_asked_for(self, store: CheckpointStore) -> None:
        runs = await record(store, *(new_run(started) for started in range(60)))
        assert await store.runs() == runs[:50]
        assert await store.runs(limit=1) == runs[:1]
        assert await store.runs(job="job", limit=7) == runs[:7]

    async def test_requests_that_make_no_sense_are_refused(self, store: CheckpointStore) -> None:
        for limit in (0, -1, 2**63):
            with pytest.raises(SnapshotError) as caught:
                await store.runs(limit=limit)
            assert caught.value.code is Code.INVALID_REQUEST
        for job, thread_id in (("", None), ("a\0", None), (None, "a\0")):
            with pytest.raises(SnapshotError) as caught:
                await store.runs(job=job, thread_id=thread_id)
            assert caught.value.code is Code.INVALID_ID

    async def test_the_last_runs_are_the_newest_and_the_newest_that_went_well(self, store: CheckpointStore) -> None:
        only_failed = [new_run(started, "a", outcome=Outcome.FAILED) for started in (1, 2)]
        well_last = [new_run(1, "a", "u", outcome=Outcome.FAILED), new_run(2, "a", "u", outcome=Outcome.CAPTURED)]
        not_well_last = [
            new_run(1, "b", outcome=Outcome.CAPTURED),
            new_run(2, "b"),
            new_run(3, "b", outcome=Outcome.LOCKED),
            new_run(4, "b", outcome=Outcome.INTERRUPTED),
        ]
        gc = [new_run(7, "gc", "", outcome=Outcome.COLLECTED), new_run(8, "gc", "", outcome=Outcome.FAILED)]
        await record(store, *gc, *reversed(not_well_last), *well_last, *only_failed)
        assert await store.last_runs() == [only_failed[1], well_last[1], not_well_last[1], not_well_last[3], *gc]

    async def test_jobs_and_threads_are_ordered_by_their_bytes(self, store: CheckpointStore) -> None:
        names = ["A", "Z", "a", "z", "ä", "\uffee", "\U0001f600"]
        await record(store, *(new_run(job=name) for name in reversed(names)), *(new_run(job="a", thread_id=n) for n in names))
        assert list(dict.fromkeys(run.job for run in await store.last_runs())) == names
        assert [run.thread_id for run in await store.last_runs() if run.job == "a"] == sorted([*names, "thread"])

    # ---- what else happens in the store

    async def test_runs_outlive_their_checkpoints(self, store: CheckpointStore) -> None:
        await append(store, "thread", "first")
        run = new_run(checkpoint_id="first", outcome=Outcome.CAPTURED)
        await store.record_run(run)
        lease = (await store.acquire_writer("thread")).lease
        await store.delete(lease, ["first"])
        assert await store.runs() == [run]

    async def test_runs_change_nothing_else(self, store: CheckpointStore) -> None:
        await append(store, "thread", "first")
        before = await state_of(store)
        await record(store, new_run(), new_run(thread_id="new"))
        assert await state_of(store) == before

    async def test_gc_drops_runs_of_long_ago(self, store: CheckpointStore, clock: ManualClock) -> None:
        runs = await record(store, new_run(clock() - 401 * DAY, "gone"), new_run(clock() - 399 * DAY, "yearly"), new_run(clock()))
        await store.expire_caches(await store.start_maintenance(), unused=0)
        assert await store.runs() == [run for run in runs if run.job != "gone"]
