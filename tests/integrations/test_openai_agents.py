"""Sandbox sessions of the real OpenAI Agents SDK, stopped into a repository and started again from it.

The sessions are the SDK's own on this host, the clients, states, runner and remote snapshots the SDK's own too. Cases 4, 5, 7 and
28 in particular.
"""

import asyncio
import functools
import io
import json
import os
import subprocess
import sys
import tarfile
import threading
import traceback
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("agents")

from agents import Agent, RunConfig, Runner, RunState, function_tool
from agents.sandbox import RemoteSnapshotSpec, SandboxAgent, SandboxRunConfig
from agents.sandbox.capabilities import Shell
from agents.sandbox.errors import SnapshotPersistError, SnapshotRestoreError, WorkspaceStopError
from agents.sandbox.sandboxes.unix_local import UnixLocalSandboxClient
from agents.sandbox.session.dependencies import Dependencies, DependenciesMissingDependencyError
from agents.sandbox.session.sandbox_session import SandboxSession
from agents.sandbox.snapshot import SnapshotBase
from agents.sandbox.util.tar_utils import validate_tarfile
from agents.testing import ScriptedModel, assistant_message, function_call

import snapcore
from snapcore.errors import Code, SnapcoreError
from snapcore.integrations.openai_agents import SnapcoreSnapshot, SnapcoreSnapshotSpec, SnapshotClient
from snapcore.repository import Repository

SECRET = "hunter2-is-not-a-password"
KEY = "snapcore"


@pytest.fixture
async def repo(tmp_path: Path) -> AsyncIterator[Repository]:
    async with snapcore.open_repository(tmp_path / "repo") as opened:
        yield opened


@pytest.fixture(params=["address", "dependency", "remote"])
def pair(request: pytest.FixtureRequest, tmp_path: Path, repo: Repository) -> tuple[UnixLocalSandboxClient, Any]:
    """A client of the SDK and a snapshot spec: the three ways that a session can lead to a repository."""
    dependencies = Dependencies().bind_value(KEY, SnapshotClient(repo))
    if request.param == "address":
        return UnixLocalSandboxClient(), SnapcoreSnapshotSpec(repository=str(tmp_path / "repo"))
    if request.param == "dependency":
        return UnixLocalSandboxClient(dependencies=dependencies), SnapcoreSnapshotSpec(client_dependency_key=KEY)
    return UnixLocalSandboxClient(dependencies=dependencies), RemoteSnapshotSpec(client_dependency_key=KEY)


def bound(client: SnapshotClient) -> tuple[UnixLocalSandboxClient, SnapcoreSnapshotSpec]:
    """An SDK client whose sessions find this one, and a spec that asks for it."""
    dependencies = Dependencies().bind_value(KEY, client)
    return UnixLocalSandboxClient(dependencies=dependencies), SnapcoreSnapshotSpec(client_dependency_key=KEY)


async def started(client: UnixLocalSandboxClient, spec: Any) -> SandboxSession:
    session = await client.create(snapshot=spec)
    await session.start()
    return session


async def run(session: SandboxSession, script: str) -> str:
    result = await session.exec("sh", "-c", script, shell=False)
    assert result.exit_code == 0, result.stderr
    return result.stdout.decode()


async def reopened(client: UnixLocalSandboxClient, session: SandboxSession) -> SandboxSession:
    """The session after its sandbox was removed: from nothing but its state as JSON, in a new folder."""
    payload = json.loads(json.dumps(client.serialize_session_state(session.state)))
    await client.delete(session)
    assert not Path(session.state.manifest.root).exists()
    again = await client.resume(client.deserialize_session_state(payload))
    await again.start()
    return again


def tree(folder: Path) -> dict[bytes, tuple[Any, ...]]:
    """What a folder holds: kind, content or target, and the permission bits that the SDK restores."""
    found: dict[bytes, tuple[Any, ...]] = {}
    root = os.fsencode(folder)
    for here, folders, files in os.walk(root):
        for name in [*folders, *files]:
            path = os.path.join(here, name)
            place = os.path.relpath(path, root)
            if os.path.islink(path):
                found[place] = ("link", os.readlink(path))
            elif os.path.isdir(path):
                found[place] = ("folder",)
            else:
                found[place] = ("file", Path(os.fsdecode(path)).read_bytes(), os.stat(path).st_mode & 0o700)
    return found


MAKE = r"""
mkdir -p src/deep empty .git node_modules/m
printf 'one\n' > src/a.txt; printf '#!/bin/sh\n' > src/run; chmod 755 src/run
: > src/deep/none; printf x > .env; printf y > .git/HEAD; printf z > node_modules/m/index.js
ln -s a.txt src/link; ln -s nowhere src/dangling; ln -s deep src/folder-link
ln src/a.txt src/deep/same
printf n > "$(printf 'line\nbreak')"; printf b > "$(printf 'byte-\377')"; printf s > ' space '
"""


async def test_a_session_stops_and_a_new_sandbox_starts_with_the_same_files(
    pair: tuple[UnixLocalSandboxClient, Any], repo: Repository
) -> None:
    """Cases 5, 7, 12, 14, 15 and 17: exact files by the session's id alone."""
    client, spec = pair
    session = await started(client, spec)
    await run(session, MAKE)
    before = tree(Path(session.state.manifest.root))
    assert len(before) == 19
    await session.stop()
    again = await reopened(client, session)
    assert tree(Path(again.state.manifest.root)) == before
    (checkpoint,) = await repo.list(str(session.state.session_id))
    assert checkpoint.totals.files == 10
    await client.delete(again)


async def test_five_rounds_of_stop_and_start_are_five_checkpoints(
    pair: tuple[UnixLocalSandboxClient, Any], repo: Repository
) -> None:
    """Case 4: each round starts with what the last one left, and none is lost."""
    client, spec = pair
    session = await started(client, spec)
    await run(session, "mkdir d; echo 0 > d/0; echo 0 > log")
    for number in range(1, 6):
        await session.stop()
        before = tree(Path(session.state.manifest.root))
        session = await reopened(client, session)
        assert tree(Path(session.state.manifest.root)) == before
        await run(session, f"echo {number} > d/{number}; rm d/{number - 1}; echo {number} >> log; ln -sf {number} d/newest")
    await session.stop()
    history = await repo.list(str(session.state.session_id))
    assert len(history) == 6
    assert await repo.read_file(history[3], b"log") == b"0\n1\n2\n3\n"
    assert [e.path async for e in repo.ls(history[3], b"d")] == [b"d", b"d/3", b"d/newest"]
    await client.delete(session)


async def test_an_absolute_link_outside_and_a_fifo_stop_no_session(
    pair: tuple[UnixLocalSandboxClient, Any], repo: Repository
) -> None:
    """Cases 8, 9 and 10: an outside link and a FIFO are left out and listed; links inside and all the rest come back."""
    client, spec = pair
    session = await started(client, spec)
    root = session.state.manifest.root
    await run(session, f"mkdir d; echo 1 > d/f; ln -s /etc/hostname out; ln -s ../../x up; mkfifo pipe; ln -s {root}/d/f inside")
    await session.stop()
    (checkpoint,) = await repo.list(str(session.state.session_id))
    assert [s.path for s in checkpoint.roots[0].skipped] == [b"out", b"up"]
    again = await reopened(client, session)
    found = tree(Path(again.state.manifest.root))
    assert set(found) == {b"d", b"d/f", b"inside"}
    assert (Path(again.state.manifest.root) / "inside").read_text() == "1\n"
    await client.delete(again)


async def test_thousands_of_files_make_an_archive_that_hydrates(tmp_path: Path) -> None:
    """By the SDK's own rules; that each file is then written where it belongs is shown on smaller trees."""
    client, spec = UnixLocalSandboxClient(), SnapcoreSnapshotSpec(repository=str(tmp_path / "repo"))
    session = await started(client, spec)
    root = Path(session.state.manifest.root)
    expected = {}
    for number in range(2_500):
        folder = root / f"d{number % 100}"
        folder.mkdir(exist_ok=True)
        content = f"{number}\n" * (number % 7)
        (folder / f"f{number}").write_text(content)
        expected[f"./d{number % 100}/f{number}"] = content.encode()
    await session.stop()
    archive = await session.state.snapshot.restore()
    with archive, tarfile.open(fileobj=archive, mode="r:*") as tar:
        validate_tarfile(tar, allow_external_symlink_targets=False)
        found = {m.name: tar.extractfile(m).read() for m in tar if m.isreg()}  # type: ignore[union-attr]
    assert found == expected
    await client.delete(session)


async def test_a_second_stop_stores_only_what_changed(repo: Repository) -> None:
    client, spec = bound(SnapshotClient(repo))
    session = await started(client, spec)
    await run(session, "head -c 3000000 /dev/urandom > large; echo 1 > small")
    await session.stop()
    first = (await repo.stats()).stored_bytes
    await run(session, "echo 2 > small")
    await session.stop()
    assert first > 3_000_000
    assert (await repo.stats()).stored_bytes - first < 100_000
    await client.delete(session)


# ---- in another process


READ_BACK = """
import asyncio, json, sys
import snapcore.integrations.openai_agents
from agents.sandbox.sandboxes.unix_local import UnixLocalSandboxClient

async def main():
    client = UnixLocalSandboxClient()
    session = await client.resume(client.deserialize_session_state(json.load(sys.stdin)))
    await session.start()
    print((await session.exec("cat", "note", shell=False)).stdout.decode())
    await session.stop()
    await client.delete(session)

asyncio.run(main())
"""


async def test_a_fresh_process_finds_the_files_by_the_state_alone(tmp_path: Path) -> None:
    """Case 7: nothing but the state as JSON, read in another folder by a process that has never seen the session."""
    client = UnixLocalSandboxClient()
    spec = SnapcoreSnapshotSpec(repository=os.path.relpath(tmp_path / "repo"))
    session = await started(client, spec)
    await run(session, "printf kept > note")
    await session.stop()
    state = json.dumps(client.serialize_session_state(session.state))
    await client.delete(session)
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", READ_BACK],
        input=state,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        check=False,
    )
    assert done.stdout == "kept\n", done.stderr
    assert len(await SnapshotClient(tmp_path / "repo").history(str(session.state.session_id))) == 2


def test_a_snapshot_survives_json() -> None:
    specs = [SnapcoreSnapshotSpec(repository="s3://bucket/prefix"), SnapcoreSnapshotSpec(client_dependency_key=KEY)]
    for snapshot in [spec.build("thread") for spec in specs]:
        payload = json.loads(snapshot.model_dump_json())
        assert payload["type"] == "snapcore"
        assert SnapshotBase.parse(payload) == snapshot
        assert isinstance(SnapshotBase.parse(payload), SnapcoreSnapshot)


@pytest.mark.parametrize(
    "place",
    [
        {},
        {"repository": "/tmp/r", "client_dependency_key": KEY},
        {"repository": "memory://"},
        {"repository": f"s3://user:{SECRET}@bucket/prefix"},
    ],
    ids=["neither", "both", "memory", "login"],
)
def test_a_spec_that_could_not_be_found_again_is_refused(place: dict[str, Any]) -> None:
    """Case 28: and a login in it is not shown."""
    for make in (SnapcoreSnapshotSpec, functools.partial(SnapcoreSnapshot, id="thread")):
        with pytest.raises(ValueError, match="validation error") as refused:
            make(**place)
        assert SECRET[:7] not in "".join(traceback.format_exception(refused.value))


def test_a_relative_address_means_the_same_in_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert SnapcoreSnapshotSpec(repository="repo").repository == str(tmp_path / "repo")
    assert SnapcoreSnapshotSpec(repository="~/repo").repository == str(tmp_path / "repo")


# ---- secrets


def stored_bytes(folder: Path) -> Iterator[bytes]:
    for path in folder.rglob("*"):
        if path.is_file():
            yield path.read_bytes()


async def test_no_secret_reaches_the_repository_or_the_state(tmp_path: Path, repo: Repository) -> None:
    """Case 28: a secrets file in the workspace is redacted, and put back for the next sandbox."""
    client, spec = bound(SnapshotClient(repo, secrets={"TOKEN": SECRET}, reinject=True))
    session = await started(client, spec)
    (Path(session.state.manifest.root) / ".env").write_text(f"TOKEN={SECRET}\n")
    await session.stop()
    (checkpoint,) = await repo.list(str(session.state.session_id))
    assert await repo.read_file(checkpoint, b".env") == b"TOKEN=" + bytes(len(SECRET)) + b"\n"
    assert all(SECRET.encode() not in data for data in stored_bytes(tmp_path / "repo"))
    assert SECRET not in json.dumps(client.serialize_session_state(session.state))
    again = await reopened(client, session)
    assert (Path(again.state.manifest.root) / ".env").read_text() == f"TOKEN={SECRET}\n"
    await client.delete(again)


async def test_without_reinject_a_secret_stays_out(repo: Repository) -> None:
    client, spec = bound(SnapshotClient(repo, secrets={"TOKEN": SECRET}))
    session = await started(client, spec)
    (Path(session.state.manifest.root) / "config").write_text(f"{SECRET}\nrest\n")
    await session.stop()
    again = await reopened(client, session)
    assert (Path(again.state.manifest.root) / "config").read_bytes() == bytes(len(SECRET)) + b"\nrest\n"
    await client.delete(again)


async def test_a_session_that_asks_for_a_client_saves_nothing_without_it(tmp_path: Path, repo: Repository) -> None:
    client, spec = bound(SnapshotClient(repo, secrets={"TOKEN": SECRET}))
    session = await started(client, spec)
    await session.stop()
    bare = UnixLocalSandboxClient()
    state = bare.deserialize_session_state(json.loads(json.dumps(client.serialize_session_state(session.state))))
    other = await bare.resume(state)
    with pytest.raises(DependenciesMissingDependencyError):
        await other.start()
    with pytest.raises(WorkspaceStopError) as caught:
        await other.stop()
    assert isinstance(caught.value.cause, SnapshotPersistError)
    assert isinstance(caught.value.cause.cause, DependenciesMissingDependencyError)
    assert len(await repo.list(str(session.state.session_id))) == 1
    await client.delete(session)


async def test_a_secret_in_a_file_name_is_named_and_not_shown(repo: Repository) -> None:
    client, spec = bound(SnapshotClient(repo, secrets={"TOKEN": SECRET}))
    session = await started(client, spec)
    (Path(session.state.manifest.root) / SECRET).touch()
    with pytest.raises(WorkspaceStopError) as caught:
        await session.stop()
    assert isinstance(caught.value.cause, SnapshotPersistError)
    assert caught.value.cause.context["code"] == Code.SECRET_IN_NAME
    assert SECRET not in "".join(traceback.format_exception(caught.value)) + str(caught.value.cause.context)
    assert await repo.list(str(session.state.session_id)) == []
    await client.delete(session)


async def test_a_policy_leaves_files_out(repo: Repository) -> None:
    client, spec = bound(SnapshotClient(repo, policy=snapcore.FilePolicy(exclude=["*.log"])))
    session = await started(client, spec)
    await run(session, "echo 1 > kept; echo 2 > a.log; mkdir node_modules venv; touch node_modules/m venv/pyvenv.cfg .env")
    await session.stop()
    again = await reopened(client, session)
    assert set(tree(Path(again.state.manifest.root))) == {b"kept"}
    await client.delete(again)


# ---- going back


async def test_an_older_checkpoint_is_what_the_next_start_restores(
    pair: tuple[UnixLocalSandboxClient, Any], repo: Repository
) -> None:
    client, spec = pair
    snapshots = SnapshotClient(repo)
    session = await started(client, spec)
    snapshot_id = str(session.state.session_id)
    for text in ("good", "bad", "worse"):
        await run(session, f"echo {text} > state")
        await session.stop()
    good, _, _ = await snapshots.history(snapshot_id)
    await repo.label(snapshot_id, good.id, "good")
    session.state.snapshot_fingerprint = "of a sandbox that still runs"
    done = await snapshots.rewind(session, "label:good")
    assert (done.reason, done.source_id) == ("rewind", good.id)
    assert not session.state.snapshot_fingerprint
    again = await reopened(client, session)
    assert (Path(again.state.manifest.root) / "state").read_text() == "good\n"
    await run(again, "echo better > state")
    await again.stop()
    third = await reopened(client, again)
    assert (Path(third.state.manifest.root) / "state").read_text() == "better\n"
    assert len(await snapshots.history(snapshot_id)) == 5
    await client.delete(third)


async def test_another_session_starts_from_a_checkpoint_of_this_one(repo: Repository) -> None:
    snapshots = SnapshotClient(repo)
    client, spec = bound(snapshots)
    session = await started(client, spec)
    for text in ("one", "two"):
        await run(session, f"echo {text} > state")
        await session.stop()
    first, _ = await snapshots.history(str(session.state.session_id))
    await snapshots.fork(str(session.state.session_id), "branch", first.id[:12])
    branch = await started(client, spec.build("branch"))
    assert (Path(branch.state.manifest.root) / "state").read_text() == "one\n"
    await branch.stop()
    assert len(await snapshots.history("branch")) == 2
    assert len(await snapshots.history(str(session.state.session_id))) == 2
    await client.delete(branch)
    await client.delete(session)


# ---- what goes wrong


async def test_a_session_without_a_checkpoint_starts_from_its_manifest(pair: tuple[UnixLocalSandboxClient, Any]) -> None:
    client, spec = pair
    session = await started(client, spec)
    assert not await session.state.snapshot.restorable(dependencies=session.dependencies)
    with pytest.raises(SnapshotRestoreError) as caught:
        await session.state.snapshot.restore(dependencies=session.dependencies)
    assert isinstance(caught.value.cause, SnapcoreError)
    assert caught.value.cause.code == Code.MISSING_CHECKPOINT
    await client.delete(session)


async def test_asking_for_a_checkpoint_makes_no_repository(tmp_path: Path) -> None:
    snapshot = SnapcoreSnapshotSpec(repository=str(tmp_path / "none")).build("thread")
    assert not await snapshot.restorable()
    with pytest.raises(SnapshotRestoreError) as caught:
        await snapshot.restore()
    assert caught.value.context["code"] == Code.NO_REPOSITORY
    assert not (tmp_path / "none").exists()


async def test_a_repository_that_is_not_as_it_should_be_is_no_fresh_start(tmp_path: Path, repo: Repository) -> None:
    """A workspace that began empty because a database was lost would overwrite the session at its next stop."""
    client, spec = UnixLocalSandboxClient(), SnapcoreSnapshotSpec(repository=str(tmp_path / "repo"))
    session = await started(client, spec)
    await session.stop()
    await repo.close()
    (tmp_path / "repo" / "snapcore.db").unlink()
    again = await client.resume(session.state)
    with pytest.raises(SnapcoreError) as caught:
        await again.start()
    assert caught.value.code == Code.WRONG_DATABASE
    await client.delete(session)


async def test_lost_content_is_an_error_and_the_live_files_stay(tmp_path: Path, repo: Repository) -> None:
    """Cases 5 and 6: a restore that cannot be whole changes nothing."""
    client, spec = bound(SnapshotClient(repo))
    session = await started(client, spec)
    await run(session, "head -c 500000 /dev/urandom > data")
    await session.stop()
    for pack in [info async for info in repo.blobs.list("packs/")]:
        data = bytearray(await repo.blobs.get(pack.key))
        data[len(data) // 2] ^= 1
        await repo.blobs.put(pack.key, data)
    before = tree(Path(session.state.manifest.root))
    again = await client.resume(session.state)
    with pytest.raises(SnapshotRestoreError) as caught:
        await again.start()
    assert caught.value.context["code"] == Code.INVALID_BLOB
    assert tree(Path(session.state.manifest.root)) == before
    await client.delete(session)


async def test_stops_of_one_session_at_once_all_end_as_checkpoints(
    pair: tuple[UnixLocalSandboxClient, Any], repo: Repository
) -> None:
    client, spec = pair
    session = await started(client, spec)
    await run(session, "for n in 1 2 3 4 5 6 7 8 9; do echo $n > $n; done")
    await asyncio.gather(*(session.stop() for _ in range(4)))
    history = await repo.list(str(session.state.session_id))
    assert [c.parent_id for c in history] == [None, *(c.id for c in history[:-1])]
    assert len(history) == 4
    assert len({c.content_id for c in history}) == 1
    await client.delete(session)


class HaltedStream(io.RawIOBase):
    """A tar whose reading stops in the middle until it is let go on."""

    def __init__(self, data: bytes) -> None:
        self._data = io.BytesIO(data)
        self._half = len(data) // 2
        self.reached = threading.Event()
        self.released = threading.Event()
        self.in_use = False

    def read(self, size: int = -1) -> bytes:
        self.in_use = True
        if self._data.tell() >= self._half:
            self.reached.set()
            self.released.wait()
        data = self._data.read(min(size, 100_000))
        self.in_use = False
        return data


async def test_a_cancelled_stop_leaves_no_checkpoint_and_no_thread_at_the_stream(repo: Repository) -> None:
    snapshots = SnapshotClient(repo)
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        member = tarfile.TarInfo("./data")
        member.size = 2_000_000
        tar.addfile(member, io.BytesIO(os.urandom(2_000_000)))
    stream = HaltedStream(archive.getvalue())
    saving = asyncio.create_task(snapshots.upload("thread", stream))
    await asyncio.to_thread(stream.reached.wait)
    saving.cancel()
    try:
        for _ in range(50):
            await asyncio.sleep(0)
        assert not saving.done()  # its owner would close the stream, which is being read
    finally:
        stream.released.set()
    with pytest.raises(asyncio.CancelledError):
        await saving
    assert not stream.in_use
    assert not await snapshots.exists("thread")
    await snapshots.upload("thread", io.BytesIO(archive.getvalue()))
    assert await snapshots.exists("thread")


async def test_a_stream_that_breaks_leaves_no_checkpoint(repo: Repository) -> None:
    class Broken(io.RawIOBase):
        def read(self, size: int = -1) -> bytes:
            raise OSError("the connection is gone")

    snapshot = SnapcoreSnapshotSpec(client_dependency_key=KEY).build("thread")
    dependencies = Dependencies().bind_value(KEY, SnapshotClient(repo))
    with pytest.raises(SnapshotPersistError, match="persist") as caught:
        await snapshot.persist(Broken(), dependencies=dependencies)
    assert isinstance(caught.value.cause, OSError)
    assert not await snapshot.restorable(dependencies=dependencies)


# ---- in a run


async def test_a_run_that_was_interrupted_goes_on_in_another_sandbox(tmp_path: Path) -> None:
    """The runner stops its session at the interruption, and starts another from the run's state as text."""
    approved: list[str] = []

    @function_tool(needs_approval=True)
    def deploy(name: str) -> str:
        """Deploy."""
        approved.append(name)
        return "done"

    def agent(*steps: Any) -> SandboxAgent[Any]:
        return SandboxAgent(name="worker", model=ScriptedModel(steps), tools=[deploy], capabilities=[Shell()])

    def config() -> RunConfig:
        spec = SnapcoreSnapshotSpec(repository=str(tmp_path / "repo"))
        return RunConfig(sandbox=SandboxRunConfig(client=UnixLocalSandboxClient(), snapshot=spec), tracing_disabled=True)

    def shell(command: str, call: str) -> Any:
        return function_call("exec_command", {"cmd": command}, call_id=call)

    first = agent([shell("mkdir d; echo made > d/note; ls", "1")], [function_call("deploy", {"name": "site"}, call_id="2")])
    result = await Runner.run(first, "begin", run_config=config())
    assert len(result.interruptions) == 1
    text = result.to_state().to_string()

    second = agent([shell("cat d/note; echo more >> d/note; cat d/note", "3")], [assistant_message("finished")])
    state: RunState[Any, Agent[Any]] = await RunState.from_string(second, text)
    state.approve(state.get_interruptions()[0])
    result = await Runner.run(second, state, run_config=config())
    assert result.final_output == "finished"
    assert approved == ["site"]
    outputs = [str(item.output) for item in result.new_items if item.type == "tool_call_output_item"]
    assert any("made\nmade\nmore" in output for output in outputs)

    async with snapcore.open_repository(tmp_path / "repo") as repo:
        (thread,) = await repo.threads()
        uuid.UUID(thread.thread_id)
        last = (await repo.list(thread.thread_id))[-1]
        assert await repo.read_file(last, b"d/note") == b"made\nmore\n"


async def test_a_secret_in_the_name_of_a_checkpoint_is_not_shown(repo: Repository) -> None:
    snapshots = SnapshotClient(repo, secrets={"TOKEN": SECRET})
    client, spec = bound(snapshots)
    session = await started(client, spec)
    await session.stop()
    thread_id = str(session.state.session_id)
    for asked in (
        snapshots.rewind(thread_id, f"label:{SECRET}"),
        snapshots.fork(thread_id, "another", f"label:{SECRET}"),
        snapshots.history(f"\n{SECRET}"),
    ):
        with pytest.raises(SnapcoreError) as caught:
            await asked
        assert SECRET not in "".join(traceback.format_exception(caught.value))
    await client.delete(session)
