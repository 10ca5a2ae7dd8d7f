"""`forget` and `gc`: what they do, what they say, and how they end."""

import asyncio
import os
import re
from pathlib import Path

import pytest

import snapcore
from snapcore.packs import pack_key

from .conftest import Run


@pytest.fixture
def five(run: Run, tmp_path: Path) -> Run:
    """Thread `t` with checkpoints 1 to 5 of a file with 20 kB that changes; 2 is labelled."""
    run("init")
    work = tmp_path / "work"
    work.mkdir()
    for n in "12345":
        (work / "a").write_bytes(os.urandom(20_000))
        run("capture", str(work), "-t", "t", "--id", n, *(["--label", "L"] if n == "2" else []))
    return run


def ids(run: Run, thread: str = "t") -> str:
    return "".join(each["id"] for each in run("list", "-t", thread, "--json").json)


def stored(run: Run) -> int:
    return int(run("stats", "--json").json["stored_bytes"])


def test_forget_and_gc_make_room(five: Run, tmp_path: Path) -> None:
    before = stored(five)
    told = five("forget", "--thread", "t", "--keep-last", "2").text
    assert told == "forgot 2 checkpoints, kept 3\n'snapcore gc' frees what only they needed\n"
    assert ids(five) == "245"
    assert stored(five) == before
    told = five("gc", "--grace", "0").text
    assert re.search(r"^freed +\d+ packs +4\d\.\d kB  nothing needs them", told, re.MULTILINE)
    assert re.search(r"^freed 4\d\.\d kB in \d packs", told, re.MULTILINE)
    assert stored(five) < before - 39_000
    for n in "245":
        five("restore", str(tmp_path / "work"), "-t", "t", "-c", n)
    five("verify", "--read-data")


def test_packs_that_a_capture_had_only_begun_are_told_as_such(five: Run, repo: Path) -> None:
    async def begin() -> None:
        async with snapcore.open_repository(str(repo)) as opened:
            grant = await opened.checkpoints.acquire_writer("t", ttl=600)
            await opened.checkpoints.reserve_packs(grant.lease, [f"{n:032x}" for n in (1, 2)])
            await opened.checkpoints.release_writer(grant.lease)

    asyncio.run(begin())
    told = five("gc", "--grace", "0").text
    assert re.search(r"^freed +2 packs +-  nothing needs them", told, re.MULTILINE)
    assert told.endswith("freed 0 B in 0 packs, and 2 packs that had only been begun\n")


def test_a_dry_run_of_forget_says_why_each_stays(five: Run) -> None:
    text = five("forget", "-t", "t", "--keep-last", "2", "--keep-daily", "1", "--dry-run").text
    rows = [line.split() for line in text.splitlines()[1:-1]]
    assert [(row[1], " ".join(row[3:])) for row in rows] == [
        ("1", "(forgotten)"),
        ("2", "L labeled"),
        ("3", "(forgotten)"),
        ("4", "last"),
        ("5", "head, last, daily"),
    ]
    assert text.splitlines()[-1] == "would forget 2 checkpoints, keep 3"
    assert ids(five) == "12345"
    assert five("forget", "-t", "t", "--keep-last", "2", "-v").text.count("(forgotten)") == 2


def test_forget_as_json(five: Run) -> None:
    answer = five("forget", "-t", "t", "--keep-last", "1", "--json").json
    assert {key: answer[key] for key in ("message_type", "dry_run", "kept", "forgotten", "skipped")} == {
        "message_type": "forget",
        "dry_run": False,
        "kept": 2,
        "forgotten": 3,
        "skipped": [],
    }
    assert [each["kept_by"] for each in answer["checkpoints"]] == [[], ["labeled"], [], [], ["head", "last"]]
    assert answer["checkpoints"][1].keys() == {"thread_id", "id", "created_at", "label", "kept_by"}
    assert five("forget", "-t", "t", "--keep-last", "1", "-q").text == ""


def test_every_rule_has_its_option(five: Run) -> None:
    for rule in ("hourly", "daily", "weekly", "monthly", "yearly"):
        answer = five("forget", "-t", "t", f"--keep-{rule}", "9", "-n", "--json").json
        assert rule in answer["checkpoints"][-1]["kept_by"]
    answer = five("forget", "-t", "t", "--keep-within", "1y30d12h", "-n", "--json").json
    assert all("within" in each["kept_by"] for each in answer["checkpoints"])
    answer = five("forget", "-t", "t", "--keep-label", "L", "--forget-labeled", "-n", "--json").json
    assert [each["kept_by"] for each in answer["checkpoints"]] == [[], ["label"], [], [], ["head"]]
    answer = five("forget", "-t", "t", "--keep-last", "1", "--forget-labeled", "-n", "--json").json
    assert answer["forgotten"] == 4


@pytest.mark.parametrize(
    "rules",
    [
        [],
        ["--keep-dialy", "3"],
        ["--keep-last", "x"],
        ["--keep-last", "-1"],
        ["--keep-last", "0"],
        ["--keep-last", ""],
        ["--keep-last", "1.5"],
        ["--keep-last"],
        ["--keep", "3"],
        ["--keep-within", "3x"],
        ["--keep-within", "3m"],
        ["--keep-within", ""],
        ["--keep-within", "-3d"],
        ["--keep-label", ""],
        ["--keep-label", "M"],
        ["--forget-labeled"],
        ["--keep-last", "1", "--keep-label", "M", "--forget-labeled"],
        ["--keep-last", "1", "--keep-daily", "0"],
        ["--keep-last", "1", "--all"],
        ["--keep-last", "1", "2"],
    ],
)
def test_a_rule_that_makes_no_sense_forgets_nothing(five: Run, rules: list[str]) -> None:
    """Case 52."""
    assert five("forget", "--thread", "t", *rules, code=2).stderr
    assert ids(five) == "12345"


def test_all_threads_are_named_as_such(five: Run, tmp_path: Path) -> None:
    five("fork", "-t", "t", "--to", "u")
    five("forget", "--keep-last", "1", code=2)
    assert ids(five) == "12345"
    answer = five("forget", "--all", "--keep-last", "1", "--json").json
    assert (answer["forgotten"], answer["kept"]) == (3, 3)
    assert ids(five) == "25"


def test_forget_of_a_thread_that_is_not_there(five: Run) -> None:
    assert "[MISSING_CHECKPOINT]" in five("forget", "-t", "T", "--keep-last", "1", code=1).stderr


def test_a_thread_that_is_held_is_told_or_skipped(five: Run, repo: Path) -> None:
    async def hold(release: bool) -> None:
        async with snapcore.open_repository(repo) as opened:
            if release:
                await opened.checkpoints.release_writer(leases.pop())
            else:
                leases.append((await opened.checkpoints.acquire_writer("t", ttl=600)).lease)

    leases: list[snapcore.model.WriterLease] = []
    asyncio.run(hold(release=False))
    assert "[WRITER_HELD]" in five("forget", "-t", "t", "--keep-last", "1", code=11).stderr
    assert "skipped thread t" in five("forget", "--all", "--keep-last", "1", code=3).text
    (skipped,) = five("forget", "--all", "--keep-last", "1", "--json", code=3).json["skipped"]
    assert skipped["thread_id"] == "t"
    assert skipped["reason"]
    assert ids(five) == "12345"
    asyncio.run(hold(release=True))
    five("forget", "-t", "t", "--keep-last", "1", "--wait", "5")


def test_gc_says_what_it_would_do_and_why_the_rest_stays(five: Run) -> None:
    five("forget", "-t", "t", "--keep-last", "2")
    before = stored(five)
    text = five("gc", "--dry-run").text
    assert re.search(r"^condemned +1 pack +2\d\.\d kB  not needed; a gc after the grace frees them$", text, re.MULTILINE)
    assert re.search(r"^repacked +1 pack ", text, re.MULTILINE)
    assert re.search(r"^live +3 packs +6\d\.\d kB  needed$", text, re.MULTILINE)
    assert text.splitlines()[-1] == "would free 0 B in 0 packs"
    assert stored(five) == before
    each = five("gc", "-n", "-v").text
    assert len(re.findall(r"^[0-9a-f]{32}  \w+ +\d", each, re.MULTILINE)) == 5
    assert five("gc", "-q").text == ""


def test_gc_as_json(five: Run) -> None:
    five("forget", "-t", "t", "--keep-last", "2")
    answer = five("gc", "--grace", "90s", "--json").json
    assert (answer["message_type"], answer["dry_run"], answer["grace"]) == ("gc", False, 90)
    assert set(answer["totals"]) == {str(fate) for fate in snapcore.Fate}
    assert answer["totals"]["live"]["packs"] == 3
    assert answer["packs"][0].keys() == {"id", "fate", "bytes", "live_bytes", "condemned_at"}
    assert answer.keys() >= {"records", "bytes_moved", "caches_dropped"}
    later = five("gc", "--json").json
    assert [each["condemned_at"][:2] for each in later["packs"] if each["fate"] == "condemned"] == ["20", "20"]


def test_repack_can_be_asked_for_and_left_out(five: Run) -> None:
    five("forget", "-t", "t", "--keep-last", "2")
    assert five("gc", "--no-repack", "--json").json["bytes_moved"] == 0
    assert five("gc", "--repack", "--json").json["bytes_moved"] > 0


def test_prune_is_gc(five: Run) -> None:
    assert five("prune", "--json").json["message_type"] == "gc"


@pytest.mark.parametrize("grace", ["3x", "-1", "", "1", "1h30", "x"])
def test_a_grace_that_makes_no_sense_is_refused(five: Run, grace: str) -> None:
    five("gc", "--grace", grace, code=2)


def test_a_repository_that_cannot_be_read_is_told_with_what_to_do(five: Run, repo: Path) -> None:
    async def remove() -> None:
        async with snapcore.open_repository(repo) as opened:
            (root,) = (await opened.list("t"))[0].roots
            (place,) = (await opened.checkpoints.locate([root.manifest])).values()
            await opened.blobs.delete(pack_key(place.pack_id))

    asyncio.run(remove())
    stderr = five("gc", code=1).stderr
    assert "[DAMAGED]" in stderr
    assert "snapcore verify" in stderr
    assert five("gc", "--json", code=1).error["code"] == "DAMAGED"


def test_there_is_a_repository_or_not(run: Run) -> None:
    run("gc", code=10)
    run("forget", "-t", "t", "--keep-last", "1", code=10)
