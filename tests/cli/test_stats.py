"""`snapcore stats`: totals, what threads and checkpoints need, in words and as JSON."""

import re
from pathlib import Path

import pytest

from snapcore.cli.output import short_ids

from .conftest import Run

OLD_KEYS = {"message_type", "threads", "checkpoints", "packs", "records", "logical_bytes", "raw_bytes", "stored_bytes"}
PARTS = ("needed_bytes", "held_bytes", "unneeded_bytes", "overhead_bytes")


@pytest.fixture
def forked(made: Run) -> Run:
    """Two checkpoints of `t`, and a fork of the first of them."""
    made("fork", "--thread", "t", "--to", "other", "-c", "one")
    return made


def test_parts_add_up_to_what_is_stored(forked: Run) -> None:
    found = forked("stats", "--json").json
    assert set(found) >= OLD_KEYS
    assert sum(found[part] for part in PARTS) == found["stored_bytes"]
    assert found["dedup_ratio"] == round(found["logical_bytes"] / found["raw_bytes"], 3)
    assert found["compression_ratio"] == round(found["raw_bytes"] / found["content_bytes"], 3)
    assert "by_thread" not in found


def test_threads_and_checkpoints(forked: Run) -> None:
    found = forked("stats", "--threads", "--checkpoints", "--json").json
    assert [t["thread_id"] for t in found["by_thread"]] == ["other", "t"]
    assert [c["id"] for c in found["by_checkpoint"]][:2] == ["one", "two"]
    assert sum(c["adds_bytes"] for c in found["by_checkpoint"]) == found["needed_bytes"]
    assert sum(t["adds_bytes"] for t in found["by_thread"]) == found["needed_bytes"]
    first = found["by_checkpoint"][0]
    assert set(first) == {"thread_id", "id", "created_at", "label", "logical_bytes", "adds_bytes", "only_bytes"}
    assert first["label"] == "first"
    assert set(found["by_thread"][0]) == {
        "thread_id",
        "checkpoints",
        "logical_bytes",
        "refers_bytes",
        "adds_bytes",
        "only_bytes",
    }


def test_one_thread(forked: Run) -> None:
    found = forked("stats", "--thread", "other", "--checkpoints", "--json").json
    assert [t["thread_id"] for t in found["by_thread"]] == ["other"]
    assert [c["thread_id"] for c in found["by_checkpoint"]] == ["other"]
    lines = forked("stats", "--thread", "t", "--checkpoints").text.splitlines()
    assert lines[0].split() == ["THREAD", "CHECKPOINTS", "FILES", "NEEDS", "ADDS", "ONLY", "IT"]
    assert lines[2] == ""
    assert [line.split()[0] for line in lines[3:]] == ["ID", "one", "two"]


def test_quick_looks_at_no_tree(made: Run, repo: Path) -> None:
    for pack in (repo / "packs").rglob("*"):
        if pack.is_file():
            pack.unlink()
    found = made("stats", "--quick", "--json").json
    assert found["threads"] == 1
    assert not set(found) & {*PARTS, "compression_ratio"}
    assert made("stats", "--json", code=1).error["code"] == "MISSING_BLOB"


def test_an_empty_repository(run: Run) -> None:
    run("init")
    found = run("stats", "--threads", "--checkpoints", "--json").json
    assert (found["by_thread"], found["by_checkpoint"], found["dedup_ratio"]) == ([], [], None)
    assert "0 checkpoints in 0 threads" in run("stats", "--threads", "--checkpoints").text


def test_what_makes_no_sense_together(made: Run) -> None:
    made("stats", "--quick", "--threads", code=2)
    made("stats", "--thread", "t", "--threads", code=2)
    assert made("stats", "--thread", "nobody", "--json", code=1).error["code"] == "MISSING_CHECKPOINT"


def test_a_thread_of_the_environment_is_not_meant(forked: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SNAPCORE_THREAD", "t")
    assert "2 threads" in forked("stats").text


def test_quiet_says_nothing(made: Run) -> None:
    outcome = made("stats", "--threads", "-q")
    assert (outcome.stdout, outcome.stderr) == (b"", "")


def test_ids_are_short_in_words_and_whole_on_demand(made: Run, tree: Path) -> None:
    made("capture", str(tree), "--thread", "t")
    whole = made("list", "--thread", "t", "--json").json[-1]["id"]
    for words in (("list", "--thread", "t"), ("threads",), ("stats", "--checkpoints")):
        text = made(*words).text
        (short,) = re.findall(rf"\b{whole[:8]}\w*", text)
        assert 8 <= len(short) < len(whole)
        assert made("show", short, "--json").json["id"] == whole
        assert whole in made(*words, "-v").text


def test_short_ids_tell_ids_apart_and_look_like_no_number() -> None:
    alike = ["a1" * 16, "a1" * 8 + "b2" * 8]
    assert short_ids(alike) == ["a1" * 8 + "a", "a1" * 8 + "b"]
    assert short_ids(["0123456789a" + "0" * 21, "chosen-by-somebody", ""]) == ["0123456789a", "chosen-by-somebody", ""]


@pytest.mark.parametrize("words", [("list", "--thread", "t"), ("threads",), ("stats", "--threads", "--checkpoints")])
def test_eighty_columns_are_enough(made: Run, tree: Path, words: tuple[str, ...]) -> None:
    made("capture", str(tree), "--thread", "t", "--label", "after-install")
    assert max(map(len, made(*words).text.splitlines())) <= 80


def test_control_characters_of_labels_are_escaped(made: Run, tree: Path) -> None:
    made("capture", str(tree), "--thread", "t\u009b1m", "--label", "l\u009b2m")
    for words in (("threads",), ("stats", "--threads", "--checkpoints")):
        assert "\u009b" not in made(*words).text
