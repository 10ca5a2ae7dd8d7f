"""forget: which checkpoints the rules keep, and how the rest goes.

Case 52: a mistyped rule is refused, and forgets nothing.
"""

import datetime
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import snapcore
from snapcore import forgetting
from snapcore.durations import parse_duration
from snapcore.errors import (
    CheckpointWriterConflictError,
    CheckpointWriterLostError,
    Code,
    RepositoryError,
    SnapshotError,
)
from snapcore.forgetting import KeepRules, judge
from snapcore.model import Checkpoint
from snapcore.repository import Repository
from snapcore.testing import Crash, Faults, with_faults

Make = Callable[..., Path]
PERIODS = ("hourly", "daily", "weekly", "monthly", "yearly")


def at(time: str) -> int:
    """Microseconds since the epoch, of an ISO time in UTC."""
    when = datetime.datetime.fromisoformat(time).replace(tzinfo=datetime.UTC)
    return (when - datetime.datetime.fromtimestamp(0, datetime.UTC)) // datetime.timedelta(microseconds=1)


def thread(*times: str) -> list[Checkpoint]:
    return [Checkpoint(id=str(n), thread_id="t", created_at=at(time)) for n, time in enumerate(times)]


def kept(checkpoints: Sequence[Checkpoint], rules: KeepRules, head_id: str | None = None) -> list[int]:
    """Places of those that are kept."""
    return [n for n, verdict in enumerate(judge(checkpoints, rules, head_id)) if verdict.kept_by]


# ---------------------------------------------------------------------------------------------------------- rules


@pytest.mark.parametrize(
    ("rules", "times", "expected"),
    [
        ({"last": 2}, ["2024-01-01", "2024-01-02", "2024-01-03"], [1, 2]),
        ({"last": 9}, ["2024-01-01", "2024-01-02"], [0, 1]),
        # the newest of each hour; hours without a checkpoint do not count
        ({"hourly": 2}, ["2024-01-01T09:59", "2024-01-01T10:00", "2024-01-01T10:59:59.999999", "2024-01-01T23:00"], [2, 3]),
        ({"hourly": 3}, ["2024-01-01T09:59", "2024-01-01T10:00", "2024-01-01T10:59:59.999999", "2024-01-01T23:00"], [0, 2, 3]),
        # days end at midnight UTC, also where clocks were put forward (31 March 2024) and back (27 October 2024)
        ({"daily": 2}, ["2024-03-30T23:59:59.999999", "2024-03-31T00:00", "2024-03-31T23:59"], [0, 2]),
        ({"daily": 2}, ["2024-10-26T23:30", "2024-10-27T00:30", "2024-10-27T23:30"], [0, 2]),
        # a leap day is a day of its own, and of February
        ({"daily": 3}, ["2024-02-28T12:00", "2024-02-29T12:00", "2024-03-01T00:00"], [0, 1, 2]),
        ({"monthly": 2}, ["2024-02-28T12:00", "2024-02-29T23:59:59", "2024-03-01T00:00"], [1, 2]),
        ({"monthly": 2}, ["2023-03-05", "2024-03-05"], [0, 1]),
        # weeks begin on Mondays: 5 May 2024 was a Sunday
        ({"weekly": 2}, ["2024-04-28T23:59", "2024-04-29T00:00", "2024-05-05T23:59:59", "2024-05-06T00:00"], [2, 3]),
        # ISO week 53 of 2020 went from 28 December to 3 January 2021
        (
            {"weekly": 3},
            ["2020-12-27T23:59", "2020-12-28", "2020-12-31", "2021-01-01", "2021-01-03T23:59", "2021-01-04"],
            [0, 4, 5],
        ),
        # 30 December 2019 was in week 1 of 2020, which is not the week of December 2020
        ({"weekly": 2}, ["2019-12-30", "2020-01-05", "2020-12-30"], [1, 2]),
        ({"yearly": 2}, ["2019-12-31T23:59:59", "2020-12-31T23:59:59.999999", "2021-01-01T00:00", "2021-06-01"], [1, 3]),
        # relative to the newest; what is exactly that old is no longer within
        ({"within": "2d"}, ["2001-01-01", "2001-01-02", "2001-01-02T00:00:01", "2001-01-04"], [2, 3]),
        ({"within": "1d12h"}, ["2024-02-28T11:59", "2024-02-28T12:01", "2024-03-01T00:00"], [1, 2]),
        ({"within": "1d12h"}, ["2024-02-28T12:00", "2024-02-28T12:00:01", "2024-02-29T00:00"], [0, 1, 2]),
        ({"within": 90}, ["2024-01-01T00:00:00", "2024-01-01T00:00:01", "2024-01-01T00:01:30"], [1, 2]),
        # before 1970 too
        ({"daily": 2}, ["1969-12-30T01:00", "1969-12-31T01:00", "1969-12-31T23:00", "1970-01-01T00:00"], [2, 3]),
        ({"weekly": 2}, ["1969-12-28T23:59", "1969-12-29", "1970-01-04T23:59", "1970-01-05"], [2, 3]),
        # what one rule keeps is kept
        ({"last": 1, "yearly": 3}, ["2020-05-01", "2021-05-01", "2021-06-01", "2022-01-01", "2022-01-02"], [0, 2, 4]),
    ],
)
def test_the_rules_by_the_calendar(rules: dict[str, Any], times: list[str], expected: list[int]) -> None:
    assert kept(thread(*times), KeepRules(**rules)) == expected


def test_of_equally_old_checkpoints_the_last_in_the_list_is_the_newest() -> None:
    same = thread(*["2024-01-01T10:00"] * 4)
    assert kept(same, KeepRules(last=2)) == [2, 3]
    for rule in PERIODS:
        rules: dict[str, Any] = {rule: 5}
        assert kept(same, KeepRules(**rules)) == [3]
    assert kept(same, KeepRules(within="1h")) == [0, 1, 2, 3]


def test_labels() -> None:
    labels = (None, "a", "b", None, "a", None)
    line = [Checkpoint(id=str(n), thread_id="t", created_at=n, label=label) for n, label in enumerate(labels)]
    assert kept(line, KeepRules(last=1)) == [1, 2, 4, 5]
    assert kept(line, KeepRules(last=1, labeled=False)) == [5]
    assert kept(line, KeepRules(last=1, labeled=False, labels=["b"])) == [2, 5]
    assert kept(line, KeepRules(labels=["a"], labeled=False), "5") == [1, 4, 5]
    assert kept(line, KeepRules(labels=["A*", "a"], labeled=False), None) == [1, 4]  # names, not patterns


def test_every_reason_is_told() -> None:
    line = [
        Checkpoint(id="old", thread_id="t", created_at=at("2023-01-01")),
        Checkpoint(id="gone", thread_id="t", created_at=at("2024-01-01T00:00")),
        Checkpoint(id="kept", thread_id="t", created_at=at("2024-01-01T00:01"), label="L"),
    ]
    rules = KeepRules(last=1, hourly=1, daily=1, weekly=1, monthly=1, yearly=2, within="10s", labels=("L",))
    old, gone, newest = judge(line, rules, "kept")
    assert old.kept_by == ("yearly",)
    assert gone.kept_by == ()
    assert newest.kept_by == ("head", "label", "labeled", "last", "within", *PERIODS)


COUNTS = st.one_of(st.none(), st.integers(1, 6))
RULES = st.fixed_dictionaries(
    {**dict.fromkeys(("last", *PERIODS), COUNTS), "within": st.one_of(st.none(), st.integers(1, 10**7)), "labeled": st.booleans()}
).filter(lambda rules: any(value is not None for name, value in rules.items() if name != "labeled"))
LINES = st.lists(
    st.tuples(st.integers(-(10**15), 4 * 10**15) | st.integers(0, 10**12), st.sampled_from([None, None, "a", "b"])), max_size=25
)


def made(line: list[tuple[int, str | None]]) -> list[Checkpoint]:
    ordered = sorted(line, key=lambda each: each[0])
    return [Checkpoint(id=f"{n:03}", thread_id="t", created_at=time, label=label) for n, (time, label) in enumerate(ordered)]


@settings(max_examples=150, deadline=None)
@given(LINES, RULES, st.data())
def test_more_rules_and_larger_numbers_keep_more_and_never_the_head_goes(
    line: list[tuple[int, str | None]], rules: dict[str, Any], data: st.DataObject
) -> None:
    checkpoints = made(line)
    head = data.draw(st.sampled_from(checkpoints)).id if checkpoints else None
    stays = set(kept(checkpoints, KeepRules(**rules), head))
    always = {n for n, c in enumerate(checkpoints) if c.id == head or (c.label and rules["labeled"])}
    assert always <= stays
    given_rules = {name: value for name, value in rules.items() if value is not None and name != "labeled"}
    alone = [set(kept(checkpoints, KeepRules(**{name: value}, labeled=False))) for name, value in given_rules.items()]
    assert stays == always.union(*alone)
    for name, value in given_rules.items():
        assert set(kept(checkpoints, KeepRules(**{**rules, name: value + 1}), head)) >= stays
        if name != "within":
            assert len(kept(checkpoints, KeepRules(**{name: value}, labeled=False))) <= value


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"labeled": False},
        *({name: wrong} for name in ("last", *PERIODS) for wrong in (0, -1, True, 1.5, "3", "x")),
        *({"within": wrong} for wrong in ("3x", "", "x", "3", "-3d", "3d 4h", "4h3d", "3d3d", "0", "0d", "3M", "3m", "1d٣h")),
        *({"within": wrong} for wrong in (0, -1.0, float("nan"), float("inf"), True, 10**30)),
        {"labels": "a"},
        {"labels": [""]},
        {"labels": [3]},
        {"labels": 3},
        {"last": 1, "labeled": "yes"},
        {"last": 3, "daily": 0},
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(rules: dict[str, Any]) -> None:
    """Case 52."""
    with pytest.raises(SnapshotError) as caught:
        KeepRules(**rules)
    assert caught.value.code is Code.INVALID_REQUEST


def test_durations() -> None:
    assert parse_duration("30d12h", "x") == 30.5 * 86_400
    assert parse_duration("1y1w1d1h1min1s", "x") == (366 + 7 + 1) * 86_400 + 3600 + 61
    assert parse_duration("15m", "x") == 900
    assert parse_duration("0", "x", zero=True) == 0
    assert parse_duration(1.5, "x") == 1.5
    with pytest.raises(SnapshotError, match="months or for minutes"):
        parse_duration("15m", "x", months=True)


# ------------------------------------------------------------------------------------------------------- the work


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
async def faulty(repo: Repository, faults: Faults, make: Make) -> Repository:
    """Thread `t` with checkpoints 1 to 5, of which 2 is labelled, behind a database that fails when told to."""
    for n in "12345":
        await repo.capture(make({"a": n}), thread_id="t", checkpoint_id=n, label="L" if n == "2" else None)
    return Repository(repo.blobs, with_faults(repo.checkpoints, faults), repo.config)


async def ids(repo: Repository, thread_id: str = "t") -> str:
    return "".join(checkpoint.id for checkpoint in await repo.list(thread_id))


async def test_what_no_rule_keeps_is_gone_and_the_rest_restores(faulty: Repository, tmp_path: Path) -> None:
    report = await faulty.forget("t", keep_last=2)
    assert [verdict.checkpoint_id for verdict in report.forgotten] == ["1", "3"]
    assert [(verdict.checkpoint_id, verdict.kept_by) for verdict in report.kept] == [
        ("2", ("labeled",)),
        ("4", ("last",)),
        ("5", ("head", "last")),
    ]
    assert await ids(faulty) == "245"
    (tmp_path / "out").mkdir()
    for left in "245":
        await faulty.restore(tmp_path / "out", thread_id="t", checkpoint_id=left)
        assert (tmp_path / "out" / "a").read_text() == left
    assert (await faulty.verify(read_data=True)).ok


async def test_a_dry_run_says_the_same_and_changes_nothing(faulty: Repository, faults: Faults) -> None:
    plan = await faulty.forget("t", keep_last=2, dry_run=True)
    assert (plan.dry_run, await ids(faulty)) == (True, "12345")
    assert not {"acquire_writer", "delete"} & set(faults.calls)
    done = await faulty.forget("t", keep_last=2)
    assert done.verdicts == plan.verdicts


async def test_the_head_is_kept_whatever_the_rules(faulty: Repository) -> None:
    await faulty.forget("t", keep_labels=["L"], keep_labeled=False)
    assert await ids(faulty) == "25"
    await faulty.forget("t", keep_last=1, keep_labeled=False)
    assert await ids(faulty) == "5"
    assert (await faulty.forget("t", keep_within="1s")).forgotten == []


async def test_a_refused_rule_forgets_nothing(faulty: Repository) -> None:
    """Case 52."""
    wrong: list[dict[str, Any]] = [{}, {"keep_last": 0}, {"keep_within": "3x"}, {"keep_labels": ["M"]}, {"keep_labeled": False}]
    wrong += [{"keep_last": 1, "keep_labeled": False, "keep_labels": ["L", "M"]}]
    for rules in wrong:
        with pytest.raises(SnapshotError) as caught:
            await faulty.forget("t", **rules)
        assert caught.value.code is Code.INVALID_REQUEST
    with pytest.raises(TypeError, match="keep_dialy"):
        await faulty.forget("t", keep_last=1, keep_dialy=2)  # type: ignore[call-arg]
    for where in ({}, {"thread_id": "t", "all_threads": True}):
        with pytest.raises(SnapshotError, match="one thread"):
            await faulty.forget(**where, keep_last=1)  # type: ignore[arg-type]
    assert await ids(faulty) == "12345"


async def test_a_thread_that_is_not_there_is_told(faulty: Repository) -> None:
    with pytest.raises(SnapshotError) as caught:
        await faulty.forget("T", keep_last=1)
    assert caught.value.code is Code.MISSING_CHECKPOINT


async def test_a_label_that_only_adds_to_what_is_kept_need_not_be_there(faulty: Repository) -> None:
    await faulty.forget("t", keep_last=1, keep_labels=["M"])
    assert await ids(faulty) == "25"


async def test_all_threads_each_by_itself(faulty: Repository, make: Make) -> None:
    for n in "678":
        await faulty.capture(make({"a": n}), thread_id="u", checkpoint_id=n)
    held = await faulty.checkpoints.acquire_writer("u")
    report = await faulty.forget(all_threads=True, keep_last=1)
    assert [skipped.thread_id for skipped in report.skipped] == ["u"]
    assert (await ids(faulty), await ids(faulty, "u")) == ("25", "678")
    await faulty.checkpoints.release_writer(held.lease)
    report = await faulty.forget(all_threads=True, keep_last=1)
    assert (report.skipped, await ids(faulty), await ids(faulty, "u")) == ([], "25", "8")


async def test_of_all_threads_those_without_the_only_label_stay_as_they_are(faulty: Repository, make: Make) -> None:
    for n in "678":
        await faulty.capture(make({"a": n}), thread_id="u", checkpoint_id=n)
    with pytest.raises(SnapshotError) as caught:
        await faulty.forget(all_threads=True, keep_labels=["M"])
    assert caught.value.code is Code.INVALID_REQUEST
    report = await faulty.forget(all_threads=True, keep_labels=["L"])
    assert [skipped.thread_id for skipped in report.skipped] == ["u"]
    assert (await ids(faulty), await ids(faulty, "u")) == ("25", "678")


async def test_a_thread_that_another_writer_holds_is_left_alone(faulty: Repository) -> None:
    held = await faulty.checkpoints.acquire_writer("t")
    with pytest.raises(CheckpointWriterConflictError):
        await faulty.forget("t", keep_last=1)
    assert await ids(faulty) == "12345"
    await faulty.checkpoints.release_writer(held.lease)
    await faulty.forget("t", keep_last=1)
    await faulty.checkpoints.acquire_writer("t")  # the lease was given up


@pytest.mark.parametrize("fault", ["lose_response", "fail"])
async def test_it_is_done_once_whatever_becomes_of_an_answer(
    faulty: Repository, faults: Faults, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forgetting, "AT_ONCE", 2)
    for call in (1, 3):
        getattr(faults, fault)("delete", call)
    report = await faulty.forget("t", keep_last=1)
    assert [verdict.checkpoint_id for verdict in report.forgotten] == ["1", "3", "4"]
    assert await ids(faulty) == "25"


async def test_a_database_that_stays_away_leaves_what_is_whole(
    faulty: Repository, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forgetting, "AT_ONCE", 2)
    faults.run("delete", _unreachable, 2)
    for call in (3, 4):
        faults.fail("delete", call)
    with pytest.raises(RepositoryError):
        await faulty.forget("t", keep_last=1)
    assert await ids(faulty) == "245"
    await faulty.forget("t", keep_last=1)
    assert await ids(faulty) == "25"


async def _unreachable() -> None:
    raise RepositoryError("The store did not answer.", code=Code.STORE_UNAVAILABLE, retryable=True)


async def test_a_process_that_ends_half_way_leaves_what_is_whole(
    faulty: Repository, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forgetting, "AT_ONCE", 1)
    faults.crash("delete", 1)
    with pytest.raises(Crash):
        await faulty.forget("t", keep_last=1)
    assert await ids(faulty) == "2345"
    assert (await faulty.verify()).ok


async def test_a_checkpoint_that_appeared_after_the_lease_was_lost_stays(
    faulty: Repository, faults: Faults, repo: Repository, make: Make
) -> None:
    async def taken_over() -> None:
        (lease,) = leases
        await repo.checkpoints.release_writer(lease)
        await repo.capture(make({"a": "6"}), thread_id="t", checkpoint_id="6")

    leases = []
    acquire = repo.checkpoints.acquire_writer

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(faulty.checkpoints, name)

        async def acquire_writer(self, thread_id: str, **options: Any) -> Any:
            grant = await acquire(thread_id, **options)
            leases.append(grant.lease)
            return grant

    faults.run("delete", taken_over, 1)
    watched: Any = Watched()
    with pytest.raises(CheckpointWriterLostError):
        await Repository(repo.blobs, watched, repo.config).forget("t", keep_last=1)
    assert await ids(faulty) == "123456"


async def test_it_blocks_where_asked_to(tmp_path: Path, make: Make) -> None:
    with snapcore.blocking.open_repository(tmp_path / "other") as repo:
        for n in "123":
            repo.capture(make({"a": n}), thread_id="t", checkpoint_id=n)
        report = repo.forget("t", keep_last=1)
        assert [verdict.checkpoint_id for verdict in report.forgotten] == ["1", "2"]
        assert repo.gc(grace=0).count(snapcore.Fate.FREED) >= 2


async def test_deletions_are_noted_by_the_next_capture(faulty: Repository, make: Make) -> None:
    await faulty.forget("t", keep_last=2)
    assert (await faulty.capture(make({"a": "6"}), thread_id="t")).deleted == ("1", "3")


async def test_thousands_in_one_thread_go_in_few_transactions(memory_repo: Repository, make: Make, faults: Faults) -> None:
    first = await memory_repo.capture(make({"a": "1"}), thread_id="t")
    run = await memory_repo.checkpoints.start_maintenance()
    more = [msgspec.structs.replace(first, id=f"{n:05}", created_at=first.created_at + n) for n in range(1, 2001)]
    assert len(await memory_repo.checkpoints.adopt_checkpoints(run, more)) == 2000
    await memory_repo.checkpoints.mend_heads(run)
    watched = Repository(memory_repo.blobs, with_faults(memory_repo.checkpoints, faults), memory_repo.config)
    report = await watched.forget("t", keep_last=1)
    assert len(report.forgotten) == 2000
    assert [c.id for c in await memory_repo.list("t")] == ["02000"]
    assert faults.calls["delete"] == 4
