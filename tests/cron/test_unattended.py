"""`snapcore capture --skip-unchanged --skip-locked` as cron, a timer or a CronJob starts it: without a terminal, with nothing on
stdin, in an environment with next to nothing."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

import snapcore

SNAPCORE = os.path.join(os.path.dirname(sys.executable), "snapcore")
ENOUGH = 60.0  # seconds; a process that takes longer hangs
SKIP = ("--skip-unchanged", "--skip-locked", "-q")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with a workspace `w` and a repository where it is when nothing is said."""
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "file").write_text("first")
    assert capture_command(tmp_path, "init", "-q") == (0, "", "")
    return tmp_path


def start(home: Path, *args: str, path: str = "/usr/bin:/bin") -> "subprocess.Popen[str]":
    """As `env -i HOME=... PATH=... snapcore ... < /dev/null` does."""
    return subprocess.Popen(
        [SNAPCORE, *args],
        cwd="/",
        env={"HOME": str(home), "PATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ended(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    stdout, stderr = process.communicate(timeout=ENOUGH)
    return process.returncode, stdout, stderr


def capture_command(home: Path, *args: str) -> tuple[int, str, str]:
    return ended(start(home, *args))


def capture(home: Path, *args: str, workspace: str | None = None) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a capture."""
    return capture_command(home, "capture", workspace or str(home / "w"), "--thread", "t", *SKIP, *args)


def checkpoints(home: Path) -> list[str]:
    async def look() -> list[str]:
        async with snapcore.open_repository(home / ".snapcore", create=False) as repo:
            return [checkpoint.id for checkpoint in await repo.list("t")]

    return asyncio.run(look())


def test_a_capture_that_goes_well_says_nothing(home: Path) -> None:
    assert capture(home) == (0, "", "")
    assert len(checkpoints(home)) == 1
    (home / "w" / "file").write_text("second")
    assert capture(home) == (0, "", "")
    assert len(checkpoints(home)) == 2


def test_what_has_not_changed_makes_no_checkpoint(home: Path) -> None:
    assert [capture(home) for _ in range(3)] == [(0, "", "")] * 3
    assert len(checkpoints(home)) == 1


def test_a_thread_that_another_writer_holds_is_left_alone(home: Path) -> None:
    async def while_held(work: Sequence[str]) -> tuple[int, str, str]:
        async with snapcore.open_repository(home / ".snapcore", create=False) as repo:
            lease = (await repo.checkpoints.acquire_writer("t")).lease
            found = await asyncio.to_thread(capture_command, home, *work)
            await repo.checkpoints.release_writer(lease)
            return found

    line = ("capture", str(home / "w"), "--thread", "t", "-q")
    assert asyncio.run(while_held([*line, "--skip-locked"])) == (0, "", "")
    code, stdout, stderr = asyncio.run(while_held(line))
    assert (code, stdout) == (11, "")
    assert "is being written by another writer" in stderr
    assert checkpoints(home) == []


def test_warnings_have_a_code_of_their_own(home: Path) -> None:
    os.mkfifo(home / "w" / "pipe")
    assert capture(home, "--on-unsupported", "skip")[:2] == (3, "")
    assert len(checkpoints(home)) == 1
    code, stdout, stderr = capture(home)
    assert (code, stdout) == (1, "")
    assert "[UNSUPPORTED_ENTRY]" in stderr


def test_no_repository_has_a_code_of_its_own(home: Path) -> None:
    code, stdout, stderr = capture(home, "--repo", str(home / "none"))
    assert (code, stdout) == (10, "")
    assert "[NO_REPOSITORY]" in stderr


def test_a_sandbox_that_is_gone_is_told(home: Path) -> None:
    code, stdout, stderr = capture(home, workspace=str(home / "gone"))
    assert (code, stdout) == (1, "")
    assert "[MISSING_WORKSPACE]" in stderr
    code, _, stderr = capture(home, workspace="exec:/nowhere/kubectl exec -i pod -- /workspace")
    assert code == 1
    assert "Traceback" not in stderr


def test_a_store_that_cannot_be_reached_is_told(home: Path) -> None:
    code, stdout, stderr = capture(home, "--database", "postgresql://127.0.0.1:1/none")
    assert (code, stdout) == (1, "")
    assert "[STORE_UNAVAILABLE]" in stderr


def test_a_capture_that_is_terminated_gives_up_its_lease(home: Path) -> None:
    """A sandbox that hangs; the next capture of the thread does not wait for the lease to run out."""
    hang = home / "hang"
    hang.write_text(f"#!/bin/sh\necho $$ > {home}/began\nexec sleep 600\n")
    hang.chmod(0o755)
    process = start(home, "capture", f"exec:{hang} -- /workspace", "--thread", "t", *SKIP)
    deadline = time.monotonic() + ENOUGH
    while not (home / "began").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert ended(process) == (143, "", "")
    assert capture(home) == (0, "", "")
    assert len(checkpoints(home)) == 1


def test_secrets_come_from_the_little_that_there_is(home: Path) -> None:
    (home / "token").write_text("token-0123456789\n")
    (home / "w" / "log").write_text("Authorization: token-0123456789")
    assert capture(home, "--secret-file", f"TOKEN={home}/token") == (0, "", "")
    assert capture_command(home, "cat", "latest:log", "--thread", "t")[1] != "Authorization: token-0123456789"
    assert capture(home, "--secret-env", "TOKEN")[0] == 2
