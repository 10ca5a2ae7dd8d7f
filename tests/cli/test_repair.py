"""`repair` and the parts that `verify` reads, as users type them."""

import os
from pathlib import Path

import pytest

from .conftest import Run


@pytest.fixture
def captured(run: Run, tree: Path) -> list[str]:
    """Ids of two checkpoints of thread `t`."""
    run("init")
    (tree / "large").write_bytes(os.urandom(20_000))
    first = run("capture", str(tree), "--thread", "t", "--json").json["id"]
    (tree / "large").write_bytes(os.urandom(30_000))
    return [first, run("capture", str(tree), "--thread", "t", "--json").json["id"]]


def without_database(repo: Path) -> None:
    for file in repo.glob("snapcore.db*"):
        file.unlink()


def test_nothing_to_do_is_told_and_no_failure(run: Run, captured: list[str]) -> None:
    assert run("repair").text == "nothing to do\n"
    assert run("repair", "--yes", "--read-data").text == "nothing to do\n"
    answer = run("repair", "--json").json
    assert (answer["message_type"], answer["dry_run"], answer["actions"], answer["hurt"]) == ("repair", True, [], [])


def test_a_lost_database_is_planned_for_and_made_anew(run: Run, repo: Path, captured: list[str]) -> None:
    without_database(repo)
    assert "snapcore repair" in run("list", "--thread", "t", code=1).stderr
    plan = run("repair", code=1)
    assert "would: Create a new database" in plan.text
    assert "would: Enter 2 checkpoints of thread t" in plan.text
    assert "run it again with --yes" in plan.text
    assert not list(repo.glob("snapcore.db*"))
    assert "did: Create a new database" in run("repair", "--yes").text
    checkpoints = run("list", "--thread", "t", "--json").json
    assert [c["id"] for c in checkpoints] == captured
    assert all(c["recovered"] for c in checkpoints)
    assert "recovered" in run("show", captured[0]).text
    run("verify", "--read-data")


def test_what_stays_hurt_is_named(run: Run, repo: Path, tree: Path, captured: list[str]) -> None:
    largest = max((p for p in (repo / "packs").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    largest.unlink()
    answer = run("repair", "--yes", "--json", code=1).json
    assert {a["step"] for a in answer["actions"]} >= {"lose-pack"}
    assert {"thread_id": "t", "id": captured[1]} in answer["hurt"]
    told = run("repair", code=1)
    assert f"checkpoint {captured[1]} of thread t is hurt" in told.text
    run("capture", str(tree), "--thread", "t")
    assert captured[1] not in run("verify").text
    run("repair")


def test_many_actions_of_a_kind_are_counted(run: Run, repo: Path, tree: Path) -> None:
    run("init")
    for n in range(15):
        (tree / "notes.txt").write_text(str(n))
        run("capture", str(tree), "--thread", "t", "-q")
    without_database(repo)
    text = run("repair", code=1).text
    assert "would: 5 more of adopt-pack" in text
    assert text.count("would: Enter pack") == 10


def test_a_part_of_the_data_is_read(run: Run, captured: list[str]) -> None:
    parts = [run("verify", "--read-data-subset", part, "--json").json["bytes_read"] for part in ("1/2", "2/2")]
    assert sum(parts) == run("verify", "--read-data", "--json").json["bytes_read"] > 0
    assert run("verify", "--read-data-subset", "100%", "--json").json["bytes_read"] == sum(parts)
    for mistyped in ("3/2", "0%", "half"):
        assert "INVALID_REQUEST" in run("verify", "--read-data-subset", mistyped, code=2).stderr
    run("verify", "--read-data", "--read-data-subset", "1/2", code=2)


def test_a_repository_that_is_not_there_is_told(run: Run) -> None:
    run("repair", code=10)
