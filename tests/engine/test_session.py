"""Sessions in local sandboxes: what they do, what they record, and how they end. Cases 4, 5, 7 and 24."""

import asyncio
import io
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import snapcore
from snapcore import FilePolicy, Repository
from snapcore.errors import CheckpointConflictError, Code, ProviderError, SnapshotError
from snapcore.ledger import EventKind
from snapcore.providers.local import LocalProvider
from snapcore.sandboxes import SandboxHandle, SandboxSpec
from snapcore.session import Session
from snapcore.testing.trees import compare_trees, make_tree, mutate_tree

from .crash_helpers import copy_tree
from .session_helpers import Counter, contents, local, whole_ledger


@pytest.fixture
def provider(tmp_path: Path) -> LocalProvider:
    return local(tmp_path)


@pytest.fixture
def counter(tmp_path: Path) -> Counter:
    return Counter(tmp_path / "runs")


@pytest.fixture
async def session(repo: Repository, provider: LocalProvider) -> AsyncIterator[Session]:
    async with await repo.session(provider, thread_id="t") as opened:
        yield opened


# ------------------------------------------------------------------------------------------------------- operations


async def test_what_a_command_came_to_is_returned_and_recorded(session: Session, repo: Repository) -> None:
    done = await session.exec("echo out; echo err >&2; exit 3")
    assert (done.exit_code, done.stdout, done.stderr, done.truncated, done.replayed) == (3, b"out\n", b"err\n", False, False)
    started, completed = (await whole_ledger(repo, "t"))[-2:]
    assert (started.kind, completed.kind) == (EventKind.EXEC_STARTED, EventKind.EXEC_COMPLETED)
    assert completed.started_id == started.id
    assert completed.sequence == done.sequence
    assert (completed.exit_code, completed.stdout.data, completed.stderr.data) == (3, b"out\n", b"err\n")
    assert started.operation is not None
    assert started.operation.command == ("sh", "-c", "echo out; echo err >&2; exit 3")


async def test_arguments_input_folder_environment_and_user_reach_the_command(session: Session) -> None:
    await session.exec(["mkdir", "inner"])
    done = await session.exec(
        ["sh", "-c", 'cat; pwd; echo "$GREETING $1"', "sh", "a b"],
        stdin=b"typed\n",
        cwd="inner",
        environment={"GREETING": "hello"},
    )
    assert done.stdout == f"typed\n{session.handle.workspace_root}/inner\nhello a b\n".encode()


async def test_output_is_handed_on_while_the_command_runs(session: Session, tmp_path: Path) -> None:
    pieces: list[tuple[str, bytes]] = []
    go = tmp_path / "go"

    def take(stream: str, piece: bytes) -> None:
        pieces.append((stream, piece))
        go.touch()  # the command waits for it: had the output been kept back, it would never end

    done = await session.exec(
        f"echo first; while [ ! -e {go} ]; do sleep 0.01; done; echo second >&2", on_output=take, timeout=60
    )
    assert b"".join(piece for stream, piece in pieces if stream == "stdout") == done.stdout == b"first\n"
    assert b"".join(piece for stream, piece in pieces if stream == "stderr") == done.stderr == b"second\n"


async def test_output_goes_to_a_file_and_through_a_pipe(session: Session, tmp_path: Path) -> None:
    gathered = io.BytesIO()
    await session.exec("echo one; echo two", on_output=gathered)
    assert gathered.getvalue() == b"one\ntwo\n"
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb", buffering=0) as pipe:
        await session.exec("echo piped", on_output=pipe)
    with os.fdopen(reading, "rb") as end:
        assert end.read() == b"piped\n"


async def test_output_goes_through_a_stream_writer(session: Session) -> None:
    received = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.set_result(await reader.read())
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    await session.exec("head -c 300000 /dev/zero", on_output=writer)
    writer.close()
    assert await received == bytes(300_000)
    server.close()
    await server.wait_closed()


async def test_an_odd_place_for_output_is_refused_before_anything_runs(session: Session, counter: Counter) -> None:
    with pytest.raises(SnapshotError) as caught:
        await session.exec(counter("run"), on_output=7)  # type: ignore[arg-type]
    assert caught.value.code == Code.INVALID_REQUEST
    assert counter.runs == []


async def test_a_large_output_goes_to_the_blob_store_and_comes_back(session: Session, repo: Repository) -> None:
    done = await session.exec("seq 200000; seq 100000 >&2")
    event = (await whole_ledger(repo, "t"))[-1]
    assert event.stdout.ref is not None
    assert event.stdout.data == b""
    assert event.stdout.size == len(done.stdout)
    assert await repo.read_output(event.stdout) == done.stdout == b"".join(b"%d\n" % n for n in range(1, 200_001))
    assert await repo.read_output(event.stderr) == done.stderr
    await repo.gc(grace=0, repack="all")
    await repo.gc(grace=0, repack="all")
    assert await repo.read_output(event.stdout) == done.stdout
    assert (await repo.verify(read_data=True)).ok


async def test_output_beyond_the_limit_is_dropped_and_said_so(session: Session, repo: Repository) -> None:
    done = await session.exec("seq 1000", max_output=10)
    assert (done.stdout, done.truncated) == (b"1\n2\n3\n4\n5\n", True)
    assert (await whole_ledger(repo, "t"))[-1].truncated


async def test_a_command_that_takes_too_long_has_ended(session: Session, repo: Repository) -> None:
    with pytest.raises(ProviderError) as caught:
        await session.exec("sleep 600", timeout=0.1)
    assert caught.value.code == Code.EXEC_TIMEOUT
    assert (await whole_ledger(repo, "t"))[-1].error == "EXEC_TIMEOUT"
    assert session.uncertain == ()


async def test_files_are_written_by_absolute_and_relative_paths(session: Session, tmp_path: Path) -> None:
    await session.write_file("a/b/c.txt", "text")
    await session.write_file(f"{session.handle.workspace_root}/d", b"\0bytes")
    await session.write_file(str(tmp_path / "outside"), b"x")
    assert contents(session) == {"a/b/c.txt": b"text", "d": b"\0bytes"}
    assert (tmp_path / "outside").read_bytes() == b"x"


async def test_whether_a_file_lies_in_the_captured_roots_is_recorded(
    repo: Repository, provider: LocalProvider, tmp_path: Path
) -> None:
    async with await repo.session(provider, thread_id="t", roots={"kept": "kept"}) as session:
        await session.write_file("kept/in", "1")
        await session.write_file("beside", "2")
        await session.write_file(str(tmp_path / "outside"), "3")
    assert [e.outside for e in await whole_ledger(repo, "t") if e.kind == EventKind.FILE_WRITTEN] == [False, True, True]


async def test_operations_run_one_at_a_time_in_the_order_they_were_asked_for(session: Session) -> None:
    slow = "echo in >> log; sleep 0.05; echo out >> log"
    await asyncio.gather(*(session.exec(slow) for _ in range(5)), session.write_file("x", "x"), session.checkpoint("c"))
    assert contents(session)["log"] == b"in\nout\n" * 5


async def test_steps_count_what_affects_the_sandbox(session: Session) -> None:
    await session.exec("echo 1 > a")
    await session.exec("cat a", affects=False)
    await session.write_file("b", "2")
    assert session.step == 2
    assert (await session.checkpoint()).step == 2


# ----------------------------------------------------------------------------------------------- captures and resumes


async def test_the_example(repo: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As users write it, with a provider that keeps its sandboxes where this user's data is, and pip without a network."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    with zipfile.ZipFile(tmp_path / "requests-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("requests/__init__.py", "answer = 42\n")
        wheel.writestr("requests-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: requests\nVersion: 1\n")
        wheel.writestr(
            "requests-1.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("requests-1.dist-info/RECORD", "")
    offline = f"--no-index --find-links {tmp_path} --disable-pip-version-check --root-user-action=ignore"
    install = f"{sys.executable} -m pip install {offline} -q --target deps requests"
    use = [sys.executable, "-c", "import sys; sys.path.insert(0, 'deps'); import requests; print(requests.answer)"]

    async with await repo.session(LocalProvider(), thread_id="t") as s:
        result = await s.exec(install)
        assert (result.exit_code, result.stdout) == (0, b"")
        await s.checkpoint("after-install")
        first = s.sandbox_id
        assert s.handle.workspace_root.startswith(str(tmp_path / "data"))
    async with await repo.resume("t", label="after-install") as s:
        assert s.sandbox_id != first
        assert (await s.exec(install)).replayed
        await s.checkpoint("after-install")
        assert (await s.exec(use)).stdout == b"42\n"


async def test_a_resume_says_what_it_restored_or_raises(repo: Repository, session: Session, provider: LocalProvider) -> None:
    """Case 5: in the new sandbox is what was said to be there."""
    await session.write_file("a/b", "x")
    await session.write_file("c", "yy")
    checkpoint = await session.checkpoint()
    async with await repo.resume("t") as resumed:
        assert resumed.restored is not None
        assert (resumed.restored.files, resumed.restored.folders, resumed.restored.bytes) == (2, 1, 3)
        assert resumed.restored.content_id == checkpoint.content_id
        assert contents(resumed) == {"a/b": b"x", "c": b"yy"}
    wrongs: list[dict[str, Any]] = [{"label": "none"}, {"checkpoint_id": "none"}]
    for wrong in wrongs:
        with pytest.raises(SnapshotError) as caught:
            await repo.resume("t", **wrong)
        assert caught.value.code == Code.MISSING_CHECKPOINT


async def test_without_a_checkpoint_there_is_nothing_to_resume(repo: Repository, session: Session, tmp_path: Path) -> None:
    made = sorted((tmp_path / "sandboxes").iterdir())
    for name in ("t", "unknown", session.sandbox_id):
        with pytest.raises(SnapshotError) as caught:
            await repo.resume(name)
        assert caught.value.code == Code.MISSING_CHECKPOINT
    assert sorted((tmp_path / "sandboxes").iterdir()) == made
    await session.exec("echo the session goes on")


async def test_a_resume_that_fails_leaves_no_sandbox(repo: Repository, session: Session, tmp_path: Path) -> None:
    await session.write_file("a", os.urandom(5000))
    await session.checkpoint()
    made = sorted((tmp_path / "sandboxes").iterdir())
    for pack in (tmp_path / "repo").rglob("packs/**/*"):
        if pack.is_file():
            pack.unlink()
    with pytest.raises(SnapshotError) as caught:
        await repo.resume("t")
    assert caught.value.code == Code.MISSING_BLOB
    assert sorted((tmp_path / "sandboxes").iterdir()) == made


async def test_five_rounds_of_resume_change_and_checkpoint(repo: Repository, provider: LocalProvider, tmp_path: Path) -> None:
    """Case 4: equal each time."""
    expected = tmp_path / "expected"
    async with await repo.session(provider, thread_id="t", policy=FilePolicy.everything()) as session:
        root = Path(session.handle.workspace_root)
        make_tree(root, seed=1, files=30)
        await session.checkpoint("round")
        copy_tree(root, expected)
    for number in range(5):
        async with await repo.resume("t", policy=FilePolicy.everything(), replay="off") as session:
            root = Path(session.handle.workspace_root)
            compare_trees(expected, root)
            mutate_tree(root, seed=number)
            await session.exec(f"echo {number} >> rounds")
            await session.checkpoint("round")
            shutil.rmtree(expected)
            copy_tree(root, expected)
    async with await repo.resume("t", label="round", policy=FilePolicy.everything()) as session:
        compare_trees(expected, Path(session.handle.workspace_root))
        assert contents(session)["rounds"] == b"0\n1\n2\n3\n4\n"


RESUME = """
import asyncio, sys, snapcore
from snapcore.providers.local import LocalProvider

async def main(repository, name, base):
    async with snapcore.open_repository(repository) as repo:
        async with await repo.resume(name, provider=LocalProvider(base)) as session:
            first = await session.exec("echo first")
            await session.write_file("kept", "it is here")
            second = await session.exec("cat kept")
            print(first.replayed, second.replayed, second.stdout.decode())

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("by", ["thread", "sandbox"])
async def test_a_fresh_process_resumes_by_the_id_of_the_thread_or_of_its_sandbox(
    repo: Repository, provider: LocalProvider, tmp_path: Path, by: str
) -> None:
    """Case 7: nothing but the id is needed."""
    async with await repo.session(provider, thread_id="t") as session:
        await session.exec("echo first")
        await session.write_file("kept", "it is here")
        await session.checkpoint()
        name = "t" if by == "thread" else session.sandbox_id
    arguments = [sys.executable, "-c", RESUME, str(tmp_path / "repo"), name, str(tmp_path / "sandboxes")]
    done = await asyncio.to_thread(lambda: subprocess.run(arguments, capture_output=True, text=True, check=False))
    assert (done.stdout, done.stderr) == ("True False it is here\n", "")


async def test_captures_of_a_session_never_change_the_tree(repo: Repository, session: Session, tmp_path: Path) -> None:
    """Case 24: not with `.git` and rebuildable trees there, either."""
    root = Path(session.handle.workspace_root)
    make_tree(root, seed=3, files=30)
    for name in (".git/HEAD", "node_modules/m/index.js", ".venv/pyvenv.cfg"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    before = tmp_path / "before"
    copy_tree(root, before)
    await session.checkpoint("one")
    fork = await session.fork("u")
    await fork.close()
    compare_trees(before, root)


async def test_rebuildable_trees_are_kept_since_an_install_is_not_done_again(repo: Repository, session: Session) -> None:
    for name in ("node_modules/m/index.js", ".venv/bin/python", ".git/HEAD", ".env"):
        await session.write_file(name, "x")
    await session.checkpoint()
    async with await repo.resume("t") as resumed:
        assert sorted(contents(resumed)) == [".venv/bin/python", "node_modules/m/index.js"]


async def test_declared_roots_are_captured_and_restored_to_their_places(repo: Repository, provider: LocalProvider) -> None:
    async with await repo.session(provider, thread_id="t", roots={"a": "one", "b": "two/deep"}) as session:
        for name in ("one/x", "two/deep/y", "two/z"):
            await session.write_file(name, name)
        checkpoint = await session.checkpoint()
        assert {root.name: root.totals.files for root in checkpoint.roots} == {"a": 1, "b": 1}
    async with await repo.resume("t", replay="off") as resumed:
        assert contents(resumed) == {"one/x": b"one/x", "two/deep/y": b"two/deep/y"}
        assert {root.name for root in (await resumed.checkpoint()).roots} == {"a", "b"}


async def test_conversation_artifacts_and_run_are_saved_with_a_checkpoint(repo: Repository, session: Session) -> None:
    made = await session.checkpoint("x", conversation=[{"role": "user"}], artifacts={"report": b"r"}, run_id="run")
    assert await repo.read_conversation(made) == [{"role": "user"}]
    assert await repo.read_artifact(made, "report") == b"r"
    assert (made.run_id, made.label) == ("run", "x")
    assert await session.list_checkpoints() == [made]


# ------------------------------------------------------------------------------------------------------------- forks


async def test_a_fork_of_a_live_sandbox_is_independent(repo: Repository, session: Session, counter: Counter) -> None:
    await session.exec(counter("before", "echo common > common"))
    async with await session.fork("u", label="start") as fork:
        assert fork.sandbox_id != session.sandbox_id
        assert contents(fork) == {"common": b"common\n"}
        await asyncio.gather(fork.exec("echo fork > own; rm common"), session.exec("echo first > own"))
        assert contents(fork) == {"own": b"fork\n"}
        assert contents(session) == {"common": b"common\n", "own": b"first\n"}
        await fork.checkpoint("fork's")
        assert fork.step == 2
    await session.checkpoint("first's")
    assert [c.label for c in await repo.list("t")] == ["start", "first's"]
    assert [c.label for c in await repo.list("u")] == ["start", "fork's"]
    await fork.destroy()
    assert contents(session) == {"common": b"common\n", "own": b"first\n"}
    # what led to the fork is its past too
    async with await repo.resume("u") as again:
        assert (await again.exec(counter("before", "echo common > common"))).replayed
        assert (await again.exec("echo fork > own; rm common")).replayed
    assert counter.runs == ["before"]


async def test_a_fork_needs_an_empty_thread(repo: Repository, session: Session) -> None:
    await session.checkpoint()
    with pytest.raises(CheckpointConflictError):
        await session.fork("t")
    await (await session.fork("u")).close()
    with pytest.raises(CheckpointConflictError) as caught:
        await session.fork("u")
    assert caught.value.code == Code.DESTINATION_NOT_EMPTY
    await session.exec("true")


async def test_a_fork_goes_to_another_provider(repo: Repository, session: Session, tmp_path: Path) -> None:
    await session.write_file("a", "x")
    async with await session.fork("u", provider=LocalProvider(tmp_path / "elsewhere")) as fork:
        assert fork.handle.workspace_root.startswith(str(tmp_path / "elsewhere"))
        assert contents(fork) == {"a": b"x"}


# ------------------------------------------------------------------------------------------------ beginning and ending


async def test_the_same_sandbox_is_opened_again_without_a_checkpoint(repo: Repository, provider: LocalProvider) -> None:
    async with await repo.session(provider, thread_id="t") as session:
        await session.write_file("a", "x")
        first = session.sandbox_id
    async with await repo.session(provider, thread_id="t") as session:
        assert session.sandbox_id == first
        assert contents(session) == {"a": b"x"}
        assert session.step == 1
    assert [e.kind for e in await whole_ledger(repo, "t")] == [
        "sandbox.created", "file.written", "sandbox.closed", "sandbox.opened", "sandbox.closed",
    ]  # fmt: skip
    assert await repo.list("t") == []


async def test_a_closed_session_does_nothing_more(session: Session, counter: Counter) -> None:
    root = Path(session.handle.workspace_root)
    await session.close()
    await session.close()
    jobs: list[Any] = [
        session.exec(counter("x")),
        session.write_file("x", "x"),
        session.checkpoint(),
        session.fork("u"),
        session.pause(),
    ]
    for job in jobs:
        with pytest.raises(ProviderError) as caught:
            await job
        assert caught.value.code == Code.SANDBOX_UNAVAILABLE
    with pytest.raises(ProviderError):
        _ = session.handle
    assert counter.runs == []
    assert list(root.iterdir()) == []


async def test_a_destroyed_sandbox_is_gone_and_the_next_session_makes_another(repo: Repository, provider: LocalProvider) -> None:
    session = await repo.session(provider, thread_id="t")
    root = Path(session.handle.workspace_root)
    await session.destroy()
    await session.destroy()
    assert not root.exists()
    async with await repo.session(provider, thread_id="t") as second:
        assert second.sandbox_id != session.sandbox_id


async def test_a_thread_with_checkpoints_and_no_sandbox_is_resumed_and_not_begun_anew(
    repo: Repository, provider: LocalProvider, work: Path
) -> None:
    await repo.capture(work, thread_id="captured by hand")
    session = await repo.session(provider, thread_id="destroyed")
    await session.checkpoint()
    await session.destroy()
    gone = await repo.session(provider, thread_id="gone")
    await gone.checkpoint()
    await gone.close()
    await provider.destroy(gone.binding)
    for thread in ("captured by hand", "destroyed", "gone"):
        with pytest.raises(ProviderError, match="resume") as caught:
            await repo.session(provider, thread_id=thread)
        assert caught.value.code == Code.NO_SANDBOX
        async with await repo.resume(thread, provider=provider) as resumed:
            assert resumed.restored is not None


async def test_a_sandbox_that_is_gone_is_told_by_the_ledger(repo: Repository, provider: LocalProvider) -> None:
    async with await repo.session(provider, thread_id="t") as session:
        await session.exec("true")
    await provider.destroy(session.binding)
    async with await repo.session(provider, thread_id="t") as second:
        assert second.sandbox_id != session.sandbox_id
    assert [(e.kind, e.destroyed) for e in await whole_ledger(repo, "t")][-3:] == [
        ("sandbox.closed", True), ("sandbox.created", False), ("sandbox.closed", False),
    ]  # fmt: skip


async def test_the_sandbox_of_another_provider_is_not_replaced_by_a_new_one(repo: Repository, session: Session) -> None:
    await session.close()

    class Other(LocalProvider):
        @property
        def name(self) -> str:
            return "other"

    with pytest.raises(ProviderError, match="one of file") as caught:
        await repo.session(Other(), thread_id="t")
    assert caught.value.code == Code.NO_SANDBOX


async def test_pausing_needs_a_provider_that_can(session: Session) -> None:
    with pytest.raises(ProviderError) as caught:
        await session.pause()
    assert caught.value.code == Code.NOT_CAPABLE
    await session.exec("true")


async def test_hooks_run_when_a_sandbox_is_made_and_when_it_is_opened(repo: Repository, tmp_path: Path) -> None:
    log: list[str] = []

    def noting(word: str) -> Any:
        async def hook(handle: SandboxHandle) -> None:
            seen = sorted(path.name for path in Path(handle.workspace_root).iterdir())
            log.append(f"{word} {' '.join(seen)}".strip())

        return hook

    options: dict[str, Any] = {"on_create": [noting("create")], "on_open": [noting("open 1"), noting("open 2")]}
    provider = local(tmp_path, on_create=[noting("provider create")], on_open=[noting("provider open")])
    async with await repo.session(provider, thread_id="t", **options) as session:
        await session.write_file("a", "x")
        await session.checkpoint()
    assert log == ["provider create", "provider open", "create", "open 1", "open 2"]
    log.clear()
    await (await repo.session(provider, thread_id="t", **options)).close()
    assert log == ["provider open a", "open 1 a", "open 2 a"]
    log.clear()
    await (await repo.resume("t", **options)).close()
    assert log == ["provider create", "provider open", "create", "open 1 a", "open 2 a"]


async def test_a_hook_that_fails_leaves_no_new_sandbox_and_no_open_one(
    repo: Repository, provider: LocalProvider, tmp_path: Path
) -> None:
    async def fails(handle: SandboxHandle) -> None:
        raise ValueError("not today")

    hooks: list[dict[str, Any]] = [{"on_create": [fails]}, {"on_open": [fails]}]
    for options in hooks:
        with pytest.raises(ValueError, match="not today"):
            await repo.session(provider, thread_id="t", **options)
    assert not list((tmp_path / "sandboxes").iterdir())
    async with await repo.session(provider, thread_id="t") as session:
        await session.checkpoint()
    with pytest.raises(ValueError, match="not today"):
        await repo.session(provider, thread_id="t", on_open=[fails])
    for options in hooks:
        with pytest.raises(ValueError, match="not today"):
            await repo.resume("t", **options)
    assert [path.name for path in (tmp_path / "sandboxes").iterdir()] == [Path(session.binding.workspace_root).name]
    async with await repo.session(provider, thread_id="t") as again:
        assert again.sandbox_id == session.sandbox_id


async def test_a_new_sandbox_is_like_the_recorded_one_without_its_environment(repo: Repository, provider: LocalProvider) -> None:
    spec = SandboxSpec(name="mine", environment={"TOKEN": "s3cr3t-value", "A": "1"})
    async with await repo.session(provider, thread_id="t", spec=spec) as session:
        assert (await session.exec("echo $A")).stdout == b"1\n"
        await session.checkpoint()
    async with await repo.resume("t") as resumed:
        assert any("A, TOKEN" in warning and "spec=" in warning for warning in resumed.warnings)
        assert Path(resumed.handle.workspace_root).name != "mine"
    async with await repo.resume("t", spec=SandboxSpec(environment={"A": "2"}), replay="off") as given:
        assert (await given.exec("echo $A")).stdout == b"2\n"
    created = (await whole_ledger(repo, "t"))[0].spec
    assert created is not None
    assert created.environment == ("A", "TOKEN")


async def test_options_that_are_not_recorded_have_to_be_given_again(repo: Repository, provider: LocalProvider) -> None:
    class Taking(LocalProvider):
        async def create(self, spec: SandboxSpec) -> SandboxHandle:
            return await super().create(SandboxSpec())

    taking = Taking(provider._base)
    spec = SandboxSpec(options={"network_mode": "none"})
    async with await repo.session(taking, thread_id="t", spec=spec) as session:
        await session.checkpoint()
    with pytest.raises(SnapshotError, match="network_mode") as caught:
        await repo.resume("t")
    assert caught.value.code == Code.INVALID_REQUEST
    await (await repo.resume("t", spec=spec)).close()


async def test_a_snapshot_that_the_spec_names_is_not_taken_for_that_of_the_checkpoint(
    repo: Repository, tmp_path: Path, counter: Counter
) -> None:
    class Taking(LocalProvider):
        async def create(self, spec: SandboxSpec) -> SandboxHandle:
            return await super().create(SandboxSpec())

    taking = Taking(tmp_path / "sandboxes")
    async with await repo.session(taking, thread_id="t") as session:
        await session.exec(counter("outside"), outside=True)
        await session.checkpoint()
    async with await repo.resume("t", spec=SandboxSpec(snapshot="a snapshot of another place")) as resumed:
        assert not (await resumed.exec(counter("outside"), outside=True)).replayed
    assert [event.snapshot for event in await whole_ledger(repo, "t") if event.kind == EventKind.RESUMED] == [None]


async def test_a_provider_is_known_by_its_name_or_has_to_be_given(
    repo: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))

    class Own(LocalProvider):
        @property
        def name(self) -> str:
            return "own"

    for thread, provider in (("local", local(tmp_path)), ("own", Own(tmp_path / "own"))):
        async with await repo.session(provider, thread_id=thread) as session:
            await session.checkpoint()
    async with snapcore.open_repository(tmp_path / "repo") as fresh, await fresh.resume("local") as resumed:
        assert resumed.handle.workspace_root.startswith(str(tmp_path / "data"))


async def test_an_unknown_option_is_a_type_error(repo: Repository, provider: LocalProvider) -> None:
    with pytest.raises(TypeError, match="rootss"):
        await repo.session(provider, thread_id="t", rootss={})  # type: ignore[call-arg]
    with pytest.raises(SnapshotError):
        await repo.session(provider, thread_id="t", replay="twice")  # type: ignore[arg-type]


def test_sessions_without_async(tmp_path: Path) -> None:
    provider = local(tmp_path)
    seen: list[bytes] = []
    with snapcore.blocking.open_repository(tmp_path / "repo") as repo:
        with repo.session(provider, thread_id="t") as session:
            assert session.exec("echo hi", on_output=lambda _, piece: seen.append(piece)).stdout == b"hi\n"
            session.write_file("a", "x")
            checkpoint = session.checkpoint("one")
            with session.fork("u") as fork:
                assert fork.exec("cat a").stdout == b"x"
            assert session.list_checkpoints() == [checkpoint, *repo.list("t")[1:]]
        with repo.resume("t", label="one") as resumed:
            assert resumed.exec("echo hi").replayed
            assert resumed.replaying == 2
    assert seen == [b"hi\n"]
