"""`snapcore log`: the ledger of a thread, as it is and as it grows. Case 51: what a command is called steers no terminal."""

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import snapcore
from snapcore.cli.log import EventLines
from snapcore.ledger import Event, EventKind, Operation
from snapcore.providers.local import LocalProvider

from .conftest import Run, spawn

PATIENCE = 60.0
STEER = "printf '\x1b[2J\x07'; true\nrm -rf /"
BYTES = b"\xff\x00" + b"x" * 10_000


@pytest.fixture
def ledger(run: Run, repo: Path, tmp_path: Path) -> Run:
    """A thread `t` with some of everything."""
    run("init")
    odd = tmp_path / "odd"
    odd.write_bytes(BYTES)

    async def work() -> None:
        async with snapcore.open_repository(repo) as opened:
            provider = LocalProvider(tmp_path / "sandboxes")
            async with await opened.session(provider, thread_id="t", secrets={"TOKEN": "hunter-22"}) as session:
                await session.exec("echo to-stdout; echo to-stderr >&2; exit 3")
                await session.exec(["printf", "%s", "two words"], affects=False)
                await session.exec(STEER)
                await session.exec("true hunter-22")
                await session.exec(["cat", str(odd)])
                await session.write_file("notes.txt", "x")
                await session.checkpoint("after-notes")
            async with await opened.resume("t", provider=provider, auto=snapcore.AutoCheckpoint()) as session:
                await session.destroy()

    asyncio.run(work())
    return run


def test_one_line_an_event(ledger: Run) -> None:
    lines = ledger("log", "t").text.splitlines()
    assert [line.split()[:2] for line in lines] == [[line.split()[0], str(n)] for n, line in enumerate(lines, 1)]
    kinds = [line.split()[2] for line in lines]
    assert kinds == [
        EventKind.CREATED,
        *[EventKind.EXEC_STARTED, EventKind.EXEC_COMPLETED] * 5,
        EventKind.FILE_WRITTEN,
        EventKind.CHECKPOINT,
        EventKind.CLOSED,
        EventKind.RESUMED,
        EventKind.CHECKPOINT,
        EventKind.CLOSED,
    ]
    failed = lines[2].split(maxsplit=8)
    assert failed[3:5] == ["exit", "3"]
    assert failed[5].endswith("s")
    assert float(failed[5][:-1]) >= 0
    assert failed[6:8] == ["step", "1"]
    assert failed[8] == "echo to-stdout; echo to-stderr >&2; exit 3"
    assert lines[4].endswith("step 1     printf %s two words")
    assert lines[11].endswith("notes.txt")
    assert lines[12].endswith("after-notes")
    assert "from checkpoint" in lines[14]
    assert lines[15].endswith("(automatic)")
    assert lines[16].endswith("(destroyed)")


def test_nothing_steers_the_terminal_and_no_secret_is_shown(ledger: Run) -> None:
    shown = ledger("log", "t").text
    assert all(ch.isprintable() for ch in shown.replace("\n", ""))
    assert r"printf '\x1b[2J\x07'; true\nrm -rf /" in shown
    assert "true {secret:TOKEN}" in shown
    assert "hunter" not in shown + ledger("log", "t", "--json").text


def test_json_is_a_line_an_event(ledger: Run) -> None:
    events = [json.loads(line) for line in ledger("log", "t", "--json").text.splitlines()]
    assert {event["message_type"] for event in events} == {"event"}
    assert {event["thread_id"] for event in events} == {"t"}
    assert [event["sequence"] for event in events] == list(range(1, len(events) + 1))
    began, ended = events[1:3]
    assert began["operation"] == ended["operation"]
    assert began["operation"]["command"] == ["sh", "-c", "echo to-stdout; echo to-stderr >&2; exit 3"]
    assert ended["started_id"] == began["id"]
    assert (ended["exit_code"], ended["stdout_bytes"], ended["stderr_bytes"]) == (3, 10, 10)
    assert began["seconds"] is None
    assert ended["seconds"] >= 0
    checkpoint = ledger("list", "--thread", "t", "--json").json[0]
    assert events[12]["checkpoint_id"] == checkpoint["id"] == events[14]["checkpoint_id"]
    assert events[-1]["destroyed"]


def test_nothing_is_said_of_events_where_nobody_asks(ledger: Run) -> None:
    assert ledger("log", "none", "--json").stdout == b""
    assert ledger("log", "t", "-q").stdout == b""


def test_what_a_command_wrote_is_printed_as_it_is(ledger: Run) -> None:
    """By the number of its beginning or its end; large outputs come from the blob store."""
    for sequence in ("2", "3"):
        shown = ledger("log", "t", "--output", sequence)
        assert (shown.stdout, shown.stderr) == (b"to-stdout\n", "to-stderr\n")
    assert ledger("log", "t", "--output", "10").stdout == BYTES
    told = ledger("log", "t", "--output", "3", "--json").json
    assert told == {
        "message_type": "output",
        "thread_id": "t",
        "sequence": 3,
        "exit_code": 3,
        "stdout": "to-stdout\n",
        "stderr": "to-stderr\n",
        "truncated": False,
    }
    odd = ledger("log", "t", "--output", "11", "--json").json
    assert odd["stdout"].startswith(r"\xff")
    assert odd["stdout_b64"].startswith("/wB4eHh4")


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["--output", "1"], 1, "sandbox.created"),
        (["--output", "0"], 1, "no event 0"),
        (["--output", "99"], 1, "no event 99"),
        (["--output", str(2**70)], 1, f"no event {2**70}"),
        (["--output", "3", "--follow"], 2, "exclude"),
    ],
)
def test_an_output_that_there_is_not(ledger: Run, args: list[str], code: int, said: str) -> None:
    assert said in ledger("log", "t", *args, code=code).stderr


def test_an_event_that_there_is_not_is_answered_with_where_to_look(ledger: Run) -> None:
    assert "'snapcore log t' shows" in ledger("log", "t", "--output", "99", code=1).stderr


def test_a_command_that_was_ended_has_its_error_and_its_time() -> None:
    """Nothing is remembered of what has ended: a thread may have millions of events."""
    lines = EventLines()
    operation = Operation(kind="exec", command=("sh", "-c", "sleep 9"))
    began = Event(id="1" * 32, kind=EventKind.EXEC_STARTED, sequence=1, at=10_000_000, operation=operation)
    ended = Event(
        id="2" * 32, kind=EventKind.EXEC_COMPLETED, sequence=2, at=11_500_000, started_id="1" * 32, error="EXEC_TIMEOUT"
    )
    assert lines.parts(began)[-1] == "sleep 9"
    assert [part.strip() for part in lines.parts(ended)[3:5]] == ["EXEC_TIMEOUT", "1.50s"]
    assert [part.strip() for part in lines.parts(ended)[3:5]] == ["EXEC_TIMEOUT", ""]


def test_a_command_that_has_not_ended_has_no_output_yet(run: Run, repo: Path, tmp_path: Path) -> None:
    run("init")

    async def work() -> None:
        begun = asyncio.Event()
        provider = LocalProvider(tmp_path / "sandboxes")
        async with snapcore.open_repository(repo) as opened, await opened.session(provider, thread_id="t") as session:
            running = asyncio.create_task(session.exec("echo; sleep 600", on_output=lambda stream, piece: begun.set()))
            await asyncio.wait_for(begun.wait(), PATIENCE)
            running.cancel()
            await asyncio.wait([running])

    asyncio.run(work())
    assert "has not ended" in run("log", "t", "--output", "2", code=1).stderr


# ---- following


WORKER = """
import asyncio, sys
import snapcore
from snapcore.providers.local import LocalProvider
repo, base = sys.argv[1:]

async def main():
    async with snapcore.open_repository(repo) as opened:
        async with await opened.session(LocalProvider(base), thread_id="t") as session:
            print("open", flush=True)
            for line in sys.stdin:
                await session.exec(line.strip())
                print("done", flush=True)

asyncio.run(main())
"""


class Worker:
    """A process of its own that works in a sandbox of the thread, a command at a time."""

    def __init__(self, repo: Path, base: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(repo), str(base)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.read("open\n")

    def read(self, expected: str) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == expected

    def run(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        self.read("done\n")

    def end(self) -> None:
        self._process.communicate(timeout=PATIENCE)


@pytest.fixture
def worker(run: Run, repo: Path, tmp_path: Path) -> Iterator[Worker]:
    run("init")
    made = Worker(repo, tmp_path / "sandboxes")
    yield made
    made.end()


class Lines:
    """The lines that a process prints, each waited for."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdout is not None
        self._fd = process.stdout.fileno()  # past its buffer, which `select` does not see
        self._rest = b""

    def next(self) -> str:
        while b"\n" not in self._rest:
            assert select.select([self._fd], [], [], PATIENCE)[0], self._rest
            piece = os.read(self._fd, 1 << 16)
            assert piece, self._rest
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()


@pytest.mark.parametrize("as_json", [False, True])
def test_a_process_follows_while_another_works_and_is_interrupted(worker: Worker, as_json: bool) -> None:
    worker.run("true first")
    process = spawn("log", "t", "--follow", *(["--json"] if as_json else []))
    try:
        lines = Lines(process)
        for about in ("sandbox.created", "true first", "true first"):
            assert about in lines.next()
        for number in range(3):
            worker.run(f"true {number}")
            for kind in ("exec.started", "exec.completed"):
                line = lines.next()
                assert f"true {number}" in line
                assert kind in line
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert (process.returncode, stdout, stderr) == (130, b"", b"interrupted\n")


def test_following_ends_when_the_reader_goes_away_even_if_nothing_happens(worker: Worker) -> None:
    worker.run("true first")
    process = spawn("log", "t", "-f")
    try:
        lines = Lines(process)
        for _ in range(3):
            lines.next()
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(PATIENCE) == 141
        assert process.stderr is not None
        assert process.stderr.read() == b""
        process.stderr.close()
    finally:
        process.kill()


def test_following_a_thread_that_is_yet_to_come(run: Run, repo: Path, tmp_path: Path) -> None:
    run("init")
    process = spawn("log", "t", "--follow")
    try:
        worker = Worker(repo, tmp_path / "sandboxes")
        worker.run("true first")
        lines = Lines(process)
        assert [lines.next().split()[2] for _ in range(3)] == ["sandbox.created", "exec.started", "exec.completed"]
        worker.end()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == 143
