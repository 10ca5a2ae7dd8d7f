"""The log: one line an event, without control characters and without secrets, whoever writes them."""

import base64
import io
import json
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from snapcore.cron.logs import Events, LogFormat, Scrubber, logging_to
from snapcore.redaction import Redactor
from snapcore.runs import JobRun, Outcome

TOKEN = "token-0123456789"


@contextmanager
def written(form: LogFormat, level: int = logging.INFO) -> Iterator[tuple[Events, list[str]]]:
    """Events, and the lines that they became once the block has ended."""
    stream, lines, scrubber = io.StringIO(), list[str](), Scrubber()
    scrubber.learn("web", Redactor.build({"TOKEN": TOKEN}))
    with logging_to(stream, form, level, scrubber):
        yield Events(), lines
    lines += stream.getvalue().split("\n")
    assert lines.pop() == ""


def run(**changes: Any) -> JobRun:
    values = {"id": "0" * 32, "job": "web", "started_at": 1_000_000, "ended_at": 2_500_000, "outcome": Outcome.CAPTURED}
    return JobRun(**{**values, **changes})


def test_a_run_as_json() -> None:
    with written("json") as (events, lines):
        events.ran(run(sandbox="/srv/work", thread_id="web", bytes_read=7, bytes_stored=3, checkpoint_id="abc"))
    line = json.loads(lines[0])
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "info",
        "event": "captured",
        "job": "web",
        "sandbox": "/srv/work",
        "thread": "web",
        "outcome": "captured",
        "seconds": 1.5,
        "bytes": 7,
        "stored": 3,
        "checkpoint": "abc",
    }


def test_a_failure_as_text() -> None:
    with written("text") as (events, lines):
        events.ran(run(outcome=Outcome.FAILED, sandbox="/srv/my work", error="NO_SANDBOX", message="It is gone."))
    assert lines[0].split(" ", 1)[1] == ('error   failed job=web sandbox="/srv/my work" seconds=1.5 code=NO_SANDBOX: It is gone.')


@pytest.mark.parametrize("form", ["json", "text"])
@pytest.mark.parametrize("hidden", [TOKEN, base64.b64encode(TOKEN.encode()).decode()])
def test_no_secret_is_written_by_whomever(form: LogFormat, hidden: str) -> None:
    with written(form) as (events, lines):
        events.tell("failed", f"no route to {hidden}", job="web", sandbox=f"/srv/{hidden}", thread=hidden)
        logging.getLogger("some.library").warning("refused %s", hidden)
        try:
            raise ValueError(hidden)
        except ValueError:
            logging.getLogger("some.library").exception("it broke")
    assert len(lines) == 3
    for line in lines:
        assert hidden not in line
    assert "{secret:TOKEN}" in lines[0]
    assert "{secret:TOKEN}" in lines[1]
    assert "it broke (ValueError)" in lines[2]


@pytest.mark.parametrize("form", ["json", "text"])
def test_control_characters_are_escaped(form: LogFormat) -> None:
    with written(form) as (events, lines):
        events.tell("failed", "a\nb\x1b[31mred\u202e", job="web", thread="x\ry")
    assert len(lines) == 1
    assert lines[0].isprintable()


def test_other_packages_are_heard_when_they_warn() -> None:
    with written("json") as (events, lines):
        logging.getLogger("some.library").info("chatter")
        logging.getLogger("some.library").warning("trouble")
        events.tell("capturing", level=logging.DEBUG)
    assert [json.loads(line)["message"] for line in lines] == ["trouble"]


def test_a_log_that_cannot_be_written_stops_nothing() -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    with logging_to(Full(), "json", logging.INFO, Scrubber()):
        Events().tell("started")


def test_a_log_that_nobody_reads_holds_up_nobody_and_what_is_lost_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snapcore.cron.lines.MAX_WAITING", 100_000)
    reading, writing = os.pipe()
    count, received = 2000, list[str]()
    with open(reading) as reader, open(writing, "w") as stream:
        with logging_to(stream, "json", logging.INFO, Scrubber()):
            for number in range(count):  # more than the pipe and the memory for it take
                Events().tell("captured", "x" * 100, job=str(number))
            drain = threading.Thread(target=lambda: received.extend(reader))
            drain.start()
        stream.close()
        drain.join()
    events = [json.loads(line) for line in received]
    written = [event["job"] for event in events if event["event"] == "captured"]
    assert written == sorted(set(written), key=int)  # some room comes and goes as the pipe takes lines
    assert written[0] == "0"
    assert events[-1]["event"] == "lost"
    assert events[-1]["message"] == f"{count - len(written)} lines of this log could not be written."


def test_a_log_that_fails_for_a_while_tells_what_it_lost() -> None:
    class Failing(io.StringIO):
        tries = 0

        def write(self, text: str) -> int:
            self.tries += 1
            if self.tries <= 2:
                raise OSError(28, "No space left on device")
            return super().write(text)

    stream = Failing()
    with logging_to(stream, "json", logging.INFO, Scrubber()):
        for event in ("one", "two", "three"):
            Events().tell(event)
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["three", "lost"]
