"""`snapcore fork --at-step`: what a fork at a place in the ledger lacks is said."""

import asyncio
from pathlib import Path

import pytest

import snapcore
from snapcore.providers.local import LocalProvider

from .conftest import Run


@pytest.fixture
def stepped(run: Run, repo: Path, tmp_path: Path) -> Run:
    """A thread `t` with a checkpoint at step 1, and three more steps."""
    run("init")

    async def work() -> None:
        provider = LocalProvider(tmp_path / "sandboxes")
        async with snapcore.open_repository(repo) as opened, await opened.session(provider, thread_id="t") as session:
            await session.exec("echo 1 > a")
            await session.checkpoint("one")
            await session.exec("printf '\x1b[2J' > b")
            await session.write_file("notes", "x")
            await session.exec("echo 4 > c")

    asyncio.run(work())
    return run


def test_a_fork_that_lacks_nothing_is_done(stepped: Run) -> None:
    shown = stepped("fork", "--thread", "t", "--to", "u", "--at-step", "1").text
    assert len(shown.splitlines()) == 1
    assert stepped("list", "--thread", "u", "--json").json[0]["step"] == 1


def test_what_it_lacks_is_listed_and_is_a_warning(stepped: Run) -> None:
    shown = stepped("fork", "--thread", "t", "--to", "u", "--at-step", "3", code=3).text
    lines = shown.splitlines()
    assert lines[1] == "it lacks 2 operations up to step 3:"
    assert r"exec printf '\x1b[2J' > b (can be run again)" in lines[2]
    assert "write notes (what was written is not in the ledger)" in lines[3]
    told = stepped("fork", "--thread", "t", "--to", "v", "--step", "3", "--json", code=3).json
    assert [(each["step"], each["kind"], each["reason"]) for each in told["uncovered"]] == [
        (2, "exec.completed", ""),
        (3, "file.written", "what was written is not in the ledger"),
    ]
    assert told["message_type"] == "fork"


def test_a_step_before_the_first_checkpoint(stepped: Run) -> None:
    error = stepped("fork", "--thread", "t", "--to", "u", "--at-step", "0", code=1).stderr
    assert "MISSING_CHECKPOINT" in error
    assert "'snapcore log t' shows the steps" in error
    assert stepped("fork", "--thread", "t", "--to", "u", "--at-step", "1", "--checkpoint", "latest", code=2).stdout == b""
