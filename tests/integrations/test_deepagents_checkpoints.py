"""Checkpoints around the calls that an agent makes on a backend, over deepagents' own backends."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from deepagents.backends import LocalShellBackend, StateBackend
from deepagents.backends.protocol import (
    BackendProtocol,
    ExecuteResponse,
    SandboxBackendProtocol,
    execute_accepts_timeout,
)

import snapcore
from snapcore import FilePolicy, blocking
from snapcore.errors import Code, ProviderError, SnapcoreError, SnapshotError
from snapcore.integrations.deepagents import CheckpointedBackend, checkpointed, sandbox_of


@pytest_asyncio.fixture
async def repo() -> AsyncIterator[snapcore.Repository]:
    async with snapcore.open_repository("memory://") as opened:
        yield opened


@pytest.fixture
def backend(tmp_path: Path) -> LocalShellBackend:
    (tmp_path / "root").mkdir()
    return LocalShellBackend(tmp_path / "root", env={"PATH": os.environ["PATH"]})


async def count(repo: snapcore.Repository) -> int:
    return len(await repo.list("thread"))


CHANGES: dict[str, Callable[[CheckpointedBackend], Any]] = {
    "execute": lambda backend: backend.aexecute("echo 1 >>by-execute", timeout=60),
    "write": lambda backend: backend.awrite("/written.txt", "text"),
    "edit": lambda backend: backend.aedit("/there.txt", "old", "new"),
    "delete": lambda backend: backend.adelete("/there.txt"),
    "upload": lambda backend: backend.aupload_files([("/uploaded", b"\xff")]),
}
READS: dict[str, Callable[[CheckpointedBackend], Any]] = {
    "read": lambda backend: backend.aread("/there.txt", 0, 10),
    "ls": lambda backend: backend.als("/"),
    "glob": lambda backend: backend.aglob("*.txt", "/"),
    "grep": lambda backend: backend.agrep("old", "/", "*.txt", max_count=3),
    "download": lambda backend: backend.adownload_files(["/there.txt"]),
}
BLOCKING_CHANGES: dict[str, Callable[[CheckpointedBackend], Any]] = {
    "execute": lambda backend: backend.execute("echo 1 >>by-execute", timeout=60),
    "write": lambda backend: backend.write("/written.txt", "text"),
    "edit": lambda backend: backend.edit("/there.txt", "old", "new"),
    "delete": lambda backend: backend.delete("/there.txt"),
    "upload": lambda backend: backend.upload_files([("/uploaded", b"\xff")]),
}
BLOCKING_READS: dict[str, Callable[[CheckpointedBackend], Any]] = {
    "read": lambda backend: backend.read("/there.txt", 0, 10),
    "ls": lambda backend: backend.ls("/"),
    "glob": lambda backend: backend.glob("*.txt", "/"),
    "grep": lambda backend: backend.grep("old", "/", "*.txt", max_count=3),
    "download": lambda backend: backend.download_files(["/there.txt"]),
}


@pytest.mark.parametrize("name", CHANGES)
async def test_a_call_that_changes_files_has_a_checkpoint_before_and_after(
    repo: snapcore.Repository, backend: LocalShellBackend, name: str
) -> None:
    backend.write("/there.txt", "old")
    wrapped = checkpointed(backend, repo, thread_id="thread")
    result = await CHANGES[name](wrapped)
    assert "error" not in str(result) or "error=None" in str(result)
    baseline, after = await repo.list("thread")
    diff = await repo.diff(baseline, after)
    assert diff.added or diff.changed or diff.removed
    await repo.restore(sandbox_of(backend), thread_id="thread", checkpoint_id=baseline.id)
    assert backend.execute("cat there.txt; ls").output == "oldthere.txt\n"


@pytest.mark.parametrize("name", BLOCKING_CHANGES)
def test_the_same_without_async(backend: LocalShellBackend, name: str) -> None:
    backend.write("/there.txt", "old")
    with blocking.open_repository("memory://") as repo:
        BLOCKING_CHANGES[name](checkpointed(backend, repo, thread_id="thread"))
        assert len(repo.list("thread")) == 2


@pytest.mark.parametrize("name", READS)
async def test_a_call_that_reads_has_none(repo: snapcore.Repository, backend: LocalShellBackend, name: str) -> None:
    backend.write("/there.txt", "old")
    wrapped = checkpointed(backend, repo, thread_id="thread")
    assert await READS[name](wrapped) == await READS[name](backend)  # type: ignore[arg-type]
    assert BLOCKING_READS[name](wrapped) == BLOCKING_READS[name](backend)  # type: ignore[arg-type]
    assert await count(repo) == 0


async def test_blocking_calls_from_other_threads_capture_on_the_loop_of_the_repository(
    repo: snapcore.Repository, backend: LocalShellBackend
) -> None:
    wrapped = checkpointed(backend, repo, thread_id="thread")
    await asyncio.to_thread(wrapped.write, "/a", "1")
    assert await count(repo) == 2


async def test_every_so_many_calls_and_what_is_left_at_the_end(repo: snapcore.Repository, backend: LocalShellBackend) -> None:
    async with checkpointed(backend, repo, thread_id="thread", every=3) as wrapped:
        seen = []
        for i in range(7):
            assert (await wrapped.aedit("/not there", "a", "b")).error  # does not count
            await wrapped.awrite(f"/{i}", "x")
            seen.append(await count(repo))
        assert seen == [1, 1, 2, 2, 2, 3, 3]
    assert [c.totals.files for c in await repo.list("thread")] == [0, 3, 6, 7]


def test_the_end_without_async(backend: LocalShellBackend) -> None:
    with blocking.open_repository("memory://") as repo:
        with checkpointed(backend, repo, thread_id="thread", every=100) as wrapped:
            wrapped.write("/a", "1")
        assert [c.totals.files for c in repo.list("thread")] == [0, 1]


async def test_what_changed_nothing_makes_no_checkpoint(repo: snapcore.Repository, backend: LocalShellBackend) -> None:
    async with checkpointed(backend, repo, thread_id="thread") as wrapped:
        await wrapped.aexecute("true")
        assert (await wrapped.aedit("/not-there", "a", "b")).error
        await wrapped.aexecute("ls")
    assert await count(repo) == 1


async def test_a_failed_capture_fails_no_call_and_is_made_up_for(repo: snapcore.Repository, backend: LocalShellBackend) -> None:
    failures: list[SnapcoreError] = []
    wrapped = checkpointed(
        backend, repo, thread_id="thread", every=2, on_failure=failures.append, policy=FilePolicy(on_unsupported="error")
    )
    await wrapped.aexecute("mkfifo pipe")
    assert (await wrapped.aexecute("echo hello")).output == "hello\n"
    assert [each.code for each in failures] == [Code.UNSUPPORTED_ENTRY]
    assert wrapped.failures == failures
    await wrapped.aexecute("rm pipe; touch file")
    assert [c.totals.files for c in await repo.list("thread")] == [0, 1]


async def test_what_a_users_own_part_raises_fails_no_call(repo: snapcore.Repository, backend: LocalShellBackend) -> None:
    wrapped = checkpointed(backend, repo, thread_id="thread", policy="no policy")
    assert (await wrapped.awrite("/a", "1")).error is None
    assert [type(each) for each in wrapped.failures] == [SnapshotError] * 2


async def test_who_is_told_and_fails_fails_no_call(repo: snapcore.Repository, backend: LocalShellBackend) -> None:
    def told(error: SnapcoreError) -> None:
        raise BrokenPipeError

    seen: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: seen.append(context["exception"]))
    wrapped = checkpointed(backend, repo, thread_id="thread", policy="no policy", on_failure=told)
    assert (await wrapped.awrite("/a", "1")).error is None
    assert (await asyncio.to_thread(wrapped.write, "/b", "2")).error is None
    assert [type(each) for each in seen] == [BrokenPipeError] * 3
    assert len(wrapped.failures) == 3


def test_calls_outlive_the_loop_that_opened_the_repository(backend: LocalShellBackend) -> None:
    async def begin() -> CheckpointedBackend:
        return checkpointed(backend, await snapcore.open_repository("memory://"), thread_id="thread")

    wrapped = asyncio.run(begin())
    assert asyncio.run(wrapped.awrite("/a", "1")).error is None
    assert wrapped.write("/b", "2").error is None
    assert ["loop" in str(each) and "has ended" in str(each) for each in wrapped.failures] == [True] * 3


async def test_a_thread_that_is_held_by_another_writer_is_left_alone(
    repo: snapcore.Repository, backend: LocalShellBackend
) -> None:
    wrapped = checkpointed(backend, repo, thread_id="thread", wait=None)
    grant = await repo.checkpoints.acquire_writer("thread")
    assert (await wrapped.awrite("/a", "1")).error is None
    assert [each.code for each in wrapped.failures] == [Code.WRITER_HELD] * 2
    await repo.checkpoints.release_writer(grant.lease)
    await wrapped.awrite("/b", "2")
    assert [c.totals.files for c in await repo.list("thread")] == [2]


async def test_of_calls_at_once_the_last_to_end_captures(repo: snapcore.Repository, backend: LocalShellBackend) -> None:
    wrapped = checkpointed(backend, repo, thread_id="thread")
    waits = wrapped.aexecute("n=0; while [ ! -e go ] && [ $n -lt 600 ]; do n=$((n+1)); sleep 0.1; done; touch end")
    waiting = asyncio.create_task(waits)
    async with asyncio.timeout(60):
        while not await count(repo):  # noqa: ASYNC110 (a store tells nobody of its checkpoints)
            await asyncio.sleep(0.01)
    await wrapped.awrite("/a", "1")
    assert await count(repo) == 1
    await wrapped.awrite("/go", "1")
    await waiting
    assert [c.totals.files for c in await repo.list("thread")] == [0, 3]


async def test_no_call_begins_before_the_baseline_is_taken(repo: snapcore.Repository, backend: LocalShellBackend) -> None:
    wrapped = checkpointed(backend, repo, thread_id="thread")
    await asyncio.gather(*(wrapped.awrite(f"/{i}", "x") for i in range(8)))
    baseline = (await repo.list("thread"))[0]
    assert baseline.totals.files == 0


async def test_a_call_that_raises_counts(repo: snapcore.Repository, backend: LocalShellBackend) -> None:
    async with checkpointed(backend, repo, thread_id="thread") as wrapped:
        with pytest.raises(ValueError, match="timeout"):
            await wrapped.aexecute("touch a", timeout=-1)
        backend.write("/by-itself", "as a command that was cut off would")
    assert [c.totals.files for c in await repo.list("thread")] == [0, 1]


class Bare(SandboxBackendProtocol):
    """A backend of the first days: no timeout, no delete."""

    @property
    def id(self) -> str:
        return "bare"

    def execute(self, command: str) -> ExecuteResponse:  # type: ignore[override]
        return ExecuteResponse(command, 0)


async def test_what_a_backend_cannot_do_is_not_made_up(repo: snapcore.Repository, backend: LocalShellBackend) -> None:
    wrapped = checkpointed(Bare(), repo, thread_id="thread")
    assert type(wrapped).delete is BackendProtocol.delete
    assert type(checkpointed(backend, repo, thread_id="thread")).delete is not BackendProtocol.delete
    assert not execute_accepts_timeout(Bare)
    assert (await wrapped.aexecute("x", timeout=5)).output == "x"
    assert wrapped.id == "bare"


async def test_settings_that_make_no_sense_are_refused(repo: snapcore.Repository, backend: LocalShellBackend) -> None:
    with pytest.raises(SnapshotError, match="every"):
        checkpointed(backend, repo, every=0)
    with pytest.raises(ProviderError) as caught:
        checkpointed(StateBackend(), repo)  # type: ignore[arg-type]
    assert caught.value.code == Code.NOT_CAPABLE


async def test_without_a_thread_calls_go_through_and_it_is_reported(
    repo: snapcore.Repository, backend: LocalShellBackend
) -> None:
    wrapped = checkpointed(backend, repo)
    assert (await wrapped.awrite("/a", "1")).error is None
    assert [each.code for each in wrapped.failures] == [Code.INVALID_REQUEST]
    assert await repo.threads() == []


@pytest.mark.parametrize("module", ["deepagents", "deepagents_shell", "deepagents_captures", "deepagents_checkpoints"])
def test_without_the_package_the_error_says_what_to_install(module: str) -> None:
    code = f"import sys; sys.modules['deepagents.backends.protocol'] = None; import snapcore.integrations.{module}"
    failed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert "pip install 'snapcore[deepagents]'" in failed.stderr.splitlines()[-1]
