"""Many processes on one repository: a folder with SQLite, and S3 with Postgres. Cases 35, 36 and 38.

Processes are real, each with connections of its own; what they did is read back by this one.
"""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import snapcore
from snapcore.opening import OpenRepository
from snapcore.testing import StrictS3Server

PROCESSES = 8
TURNS = 5
PREAMBLE = """
import asyncio, contextlib, json, os, sys, time
if skew := float(os.environ.get("TEST_CLOCK_SKEW", 0)):
    real, real_ns = time.time, time.time_ns
    time.time, time.time_ns = lambda: real() + skew, lambda: real_ns() + int(skew * 10**9)
import snapcore
from snapcore.testing import Faults, with_faults
address, database, folder, *arguments = sys.argv[1:]

async def ask(question):
    print(question, flush=True)
    return await asyncio.to_thread(sys.stdin.readline)
"""


@dataclass(frozen=True)
class Place:
    """Where a repository is, and its workspaces."""

    address: str
    database: str | None
    folder: Path

    def open(self) -> OpenRepository:
        return snapcore.open_repository(self.address, database=self.database)

    def launch(self, body: str, *arguments: object, skew: float = 0) -> "subprocess.Popen[str]":
        """A process that runs the body of an async function on `repo`."""
        lines = "".join(f"        {line}\n" for line in body.strip("\n").splitlines())
        opening = "    async with snapcore.open_repository(address, database=database or None) as repo:\n"
        script = f"{PREAMBLE}\nasync def main():\n{opening}{lines}\nasyncio.run(main())\n"
        command = [sys.executable, "-c", script, self.address, self.database or "", str(self.folder), *map(str, arguments)]
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"TEST_CLOCK_SKEW": str(skew)}
        )


@pytest.fixture(params=["folder and SQLite", "S3 and Postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    work = tmp_path / "work"
    work.mkdir()
    if request.param == "folder and SQLite":
        yield Place(str(tmp_path / "repository"), None, work)
        return
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with StrictS3Server() as server:
        yield Place(server.address("bucket/many"), request.getfixturevalue("postgres_url"), work)


def make_tree(folder: Path, name: str) -> Path:
    """A small workspace: some files that all have, and one of its own."""
    tree = folder / name
    (tree / "shared").mkdir(parents=True)
    for number in range(5):
        (tree / "shared" / f"file{number}").write_bytes(b"the same everywhere %d\n" % number * 200)
    (tree / "own").write_text(f"only in {name}\n")
    return tree


def answer_of(process: "subprocess.Popen[str]") -> str:
    """The last line of a process that ended well."""
    output, _ = process.communicate()
    assert process.returncode == 0
    return output.strip().splitlines()[-1]


def line_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def go_on(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


CAPTURE_THREADS = """
todo = iter(arguments)
failed = []
async def work():
    for thread in todo:
        try:
            await repo.capture(f"{folder}/{thread}", thread_id=thread)
        except snapcore.SnapcoreError as error:
            failed.append((thread, error.code, str(error)))
await asyncio.gather(*(work() for _ in range(4)))
print(json.dumps(failed))
"""


async def test_a_thousand_threads_from_eight_processes_never_get_in_each_others_way(place: Place) -> None:
    # a thousand where many machines meet; one machine's own database takes turns, however many there are
    threads = [f"thread-{number:04}" for number in range(1_000 if place.database else 250)]
    for thread in threads:
        make_tree(place.folder, thread)
    async with place.open():
        pass
    processes = [place.launch(CAPTURE_THREADS, *threads[part::PROCESSES]) for part in range(PROCESSES)]
    assert [json.loads(answer_of(process)) for process in processes] == [[]] * PROCESSES
    async with place.open() as repo:
        assert [info.thread_id for info in await repo.threads()] == threads
        await repo.gc(grace=0)
        report = await repo.verify(read_data=True)
        assert report.problems == []
        assert report.checkpoints == len(threads)
        for thread in random.Random(1).sample(threads, 10):
            out = place.folder / f"restored-{thread}"
            await repo.restore(str(out), thread_id=thread)
            assert (out / "own").read_text() == f"only in {thread}\n"
            assert sorted(p.name for p in (out / "shared").iterdir()) == [f"file{n}" for n in range(5)]


CAPTURE_ONE_THREAD = """
made, refused = [], 0
for number in range(int(arguments[2])):
    try:
        checkpoint = await repo.capture(f"{folder}/{arguments[0]}", thread_id="one", wait=float(arguments[1]))
        made.append(checkpoint.id)
    except snapcore.CheckpointWriterConflictError:
        refused += 1
print(json.dumps([made, refused]))
"""


@pytest.mark.parametrize("wait", [0, 120])
async def test_processes_on_one_thread_take_turns_and_lose_nothing(place: Place, wait: float) -> None:
    names = [f"tree-{number}" for number in range(PROCESSES)]
    for name in names:
        make_tree(place.folder, name)
    async with place.open():
        pass
    processes = [place.launch(CAPTURE_ONE_THREAD, name, wait, TURNS) for name in names]
    answers = [json.loads(answer_of(process)) for process in processes]
    made = {checkpoint_id for ids, _ in answers for checkpoint_id in ids}
    refused = sum(count for _, count in answers)
    assert len(made) + refused == TURNS * PROCESSES
    assert not wait or refused == 0
    async with place.open() as repo:
        checkpoints = await repo.list("one")
        assert {c.id for c in checkpoints} == made, "each that was acknowledged is there, and no other"
        assert [c.parent_id for c in checkpoints] == [None, *(c.id for c in checkpoints[:-1])], "one line, no fork in it"
        assert (await repo.verify(read_data=True)).problems == []


FREEZE = """
faults = Faults()
async def stop_here():
    await ask("stopped")
faults.run(arguments[0], stop_here, call=int(arguments[1]))
engine = repo._engine
slow = snapcore.Repository(with_faults(engine.blobs, faults), with_faults(engine.checkpoints, faults), engine.config)
try:
    await slow.capture(f"{folder}/frozen", thread_id="t", lease_ttl=2.0)
    print("committed")
except snapcore.SnapcoreError as error:
    print(error.code)
slow._engine.workers.shutdown(wait=True)
"""


@pytest.mark.parametrize("method", ["put", "append"])
async def test_a_writer_that_was_frozen_and_overtaken_is_told_and_changes_nothing(place: Place, method: str) -> None:
    make_tree(place.folder, "frozen")
    make_tree(place.folder, "other")
    async with place.open() as repo:
        process = place.launch(FREEZE, method, 1)
        assert line_of(process) == "stopped"
        os.kill(process.pid, signal.SIGSTOP)
        # waits until the lease has run out by the database's clock: the holder is not gone, only still
        taken = await repo.capture(str(place.folder / "other"), thread_id="t", wait=60)
        os.kill(process.pid, signal.SIGCONT)
        go_on(process)
        assert answer_of(process) == "WRITER_LOST"
        assert [c.id for c in await repo.list("t")] == [taken.id]
        await repo.gc(grace=0)
        assert (await repo.verify(read_data=True)).problems == []
        await repo.restore(str(place.folder / "out"), thread_id="t")
        assert (place.folder / "out" / "own").read_text() == "only in other\n"


async def test_a_lease_that_runs_out_between_the_check_and_the_write_is_lost(place: Place) -> None:
    """Nobody took it over, and still it may not write: whoever asks next would believe the thread free."""
    make_tree(place.folder, "frozen")
    async with place.open() as repo:
        process = place.launch(FREEZE, "append", 1)
        assert line_of(process) == "stopped"
        os.kill(process.pid, signal.SIGSTOP)
        grant = await _acquired(repo)
        await repo.checkpoints.release_writer(grant.lease)
        os.kill(process.pid, signal.SIGCONT)
        go_on(process)
        assert answer_of(process) == "WRITER_LOST"
        assert await repo.list("t") == []


async def _acquired(repo: snapcore.Repository) -> "snapcore.protocols.Grant":
    while True:
        try:
            return await repo.checkpoints.acquire_writer("t")
        except snapcore.CheckpointWriterConflictError:
            continue


HOLD = """
faults = Faults()
async def stop_here():
    await ask("holding")
faults.run("append", stop_here)
engine = repo._engine
slow = snapcore.Repository(engine.blobs, with_faults(engine.checkpoints, faults), engine.config)
checkpoint = await slow.capture(f"{folder}/held", thread_id="t")
slow._engine.workers.shutdown(wait=True)
print(checkpoint.created_at)
"""

TRY = """
try:
    checkpoint = await repo.capture(f"{folder}/held", thread_id=arguments[0])
    print(checkpoint.created_at)
except snapcore.SnapcoreError as error:
    print(error.code)
"""


@pytest.mark.parametrize("skew", [10 * 365 * 86400.0, -10 * 365 * 86400.0], ids=["ahead", "behind"])
async def test_a_hosts_wrong_clock_breaks_no_healthy_lease(
    skew: float, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(str(tmp_path / "repository"), request.getfixturevalue("postgres_url"), tmp_path)
    make_tree(tmp_path, "held")
    async with place.open() as repo:
        holder = place.launch(HOLD)
        assert line_of(holder) == "holding"
        assert answer_of(place.launch(TRY, "t", skew=skew)) == "WRITER_HELD"
        before = await repo.checkpoints.now()
        created = int(answer_of(place.launch(TRY, "other", skew=skew)))
        assert before <= created <= await repo.checkpoints.now(), "the database's clock stamps checkpoints"
        go_on(holder)
        assert int(answer_of(holder)) <= await repo.checkpoints.now()
