"""`snapcore cron run` as a process of its own, and what it says while it runs."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

import snapcore
from snapcore.runs import JobRun
from snapcore.testing.trees import compare_trees

DEADLINE = 60.0
Event = dict[str, Any]


class Scheduler:
    """A running scheduler. What it logs is kept in `events` as it comes. `before` begins the command that starts it."""

    def __init__(self, file: Path, *options: str, env: Mapping[str, str] | None = None, before: Sequence[str] = ()) -> None:
        self.file = file
        self.events: list[Event] = []
        self.noise: list[str] = []  # what is no event
        self._more = threading.Condition()
        self.process = subprocess.Popen(
            [*before, sys.executable, "-m", "snapcore.cli", "cron", "run", file, "--log-format", "json", "--verbose", *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, **(env or {})},
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._more:
                try:
                    self.events.append(json.loads(line))
                except ValueError:
                    self.noise.append(line.decode())
                self._more.notify_all()
        with self._more:
            self._more.notify_all()

    def find(self, **fields: object) -> list[Event]:
        """The events so far with these fields."""
        return [event for event in list(self.events) if all(event.get(key) == value for key, value in fields.items())]

    def wait_for(self, count: int = 1, **fields: object) -> Event:
        """The `count`-th event with these fields, once it is there."""
        deadline = time.monotonic() + DEADLINE
        with self._more:
            while len(found := self.find(**fields)) < count:
                left = deadline - time.monotonic()
                assert left > 0, (fields, self.events[-20:], self.noise)
                assert self.process.poll() is None or self._reader.is_alive(), (fields, self.events[-20:], self.noise)
                self._more.wait(min(left, 0.2))
        return found[count - 1]

    def wait_for_another(self, **fields: object) -> Event:
        """The next event with these fields that is not there yet."""
        return self.wait_for(len(self.find(**fields)) + 1, **fields)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Stop it; its exit code."""
        self.send(number)
        return self.code()

    def code(self) -> int:
        """Its exit code, once it has ended."""
        code = self.process.wait(DEADLINE)
        self._reader.join(DEADLINE)
        assert not any("Traceback" in line for line in self.noise), self.noise
        return code

    def kill(self) -> None:
        """As a crash does."""
        self.process.kill()
        self.process.wait(DEADLINE)
        self._reader.join(DEADLINE)
        assert not self._reader.is_alive(), "something that it started still runs"
        assert self.process.stderr is not None
        self.process.stderr.close()


@contextmanager
def scheduler(file: Path, *options: str, env: Mapping[str, str] | None = None, before: Sequence[str] = ()) -> Iterator[Scheduler]:
    """A scheduler that does not outlive the block."""
    running = Scheduler(file, *options, env=env, before=before)
    try:
        yield running
    finally:
        running.kill()


def once(file: Path, *options: str, env: Mapping[str, str] | None = None) -> tuple[int, list[Event]]:
    """`--once`: the exit code and the events."""
    with scheduler(file, "--once", *options, env=env) as running:
        return running.code(), running.events


def get(port: int, path: str) -> tuple[int, bytes]:
    """The status and the body of a page."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=DEADLINE) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


async def sound(repo: Path, trees: Mapping[str, Path], scratch: Path) -> None:
    """The repository is in order, and the head of each thread is what its folder holds."""
    async with snapcore.open_repository(repo, create=False) as opened:
        report = await opened.verify(read_data=True)
        assert report.ok, report
        for thread_id, tree in trees.items():
            target = scratch / thread_id
            await opened.restore(target, thread_id=thread_id)
            assert compare_trees(tree, target) == []


async def recorded(repo: Path, **which: Any) -> list[JobRun]:
    """The runs in the repository, newest first."""
    async with snapcore.open_repository(repo, create=False) as opened:
        return await opened.checkpoints.runs(**which)


def free_port() -> int:
    """A port where nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


# An address behind this waits, in the middle of a capture, as long as the file `hold` is there.
HOLD = 'touch "$0.begun"; while [ -e "$0" ]; do sleep 0.05; done; exec "$@"'


def write(folder: Path, text: str) -> Path:
    file = folder / "jobs.toml"
    fresh = folder / "jobs.new"
    fresh.write_text('repo = "repo"\n' + text)
    return fresh.replace(file)


def held(folder: Path, work: Path) -> str:
    """The address of a folder whose captures wait for `release`."""
    (folder / "hold").touch()
    script = folder / "hold.sh"
    script.write_text(HOLD)
    return f"exec:sh -c '{HOLD}' {folder}/hold {work}".replace('"', '\\"')


def wait_until(path: Path) -> None:
    deadline = time.monotonic() + DEADLINE
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)


def wait_until_ended(pid_file: Path) -> None:
    deadline = time.monotonic() + DEADLINE
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(int(pid_file.read_text()), 0)
            assert time.monotonic() < deadline
            time.sleep(0.02)


def metrics(port: int) -> dict[tuple[str, tuple[str, ...]], float]:
    """The value of each sample by its name and the values of its labels in the order of their names."""
    found = {}
    for family in text_string_to_metric_families(get(port, "/metrics")[1].decode()):
        for sample in family.samples:
            found[sample.name, tuple(value for _, value in sorted(sample.labels.items()))] = sample.value
    return found
