"""`snapcore.blocking`: an interrupted call ends cleanly before the interrupt goes on."""

import asyncio
import inspect
import signal
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest

import snapcore
from snapcore.autocheckpoint import CheckpointEvery
from snapcore.blocking import BlockingCheckpointEvery, BlockingRepository, BlockingSession
from snapcore.model import FileStat
from snapcore.protocols import ReadBlock
from snapcore.providers.direct import DirectWorkspace
from snapcore.providers.local import LocalProvider
from snapcore.repository import Repository
from snapcore.session import Session

Make = Callable[..., Path]


class Interrupting(DirectWorkspace):
    """Interrupts the main thread when files are read, as Ctrl-C does, and then waits to be cancelled."""

    async def read(self, files: Sequence[FileStat]) -> AsyncIterator[Sequence[ReadBlock]]:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        await asyncio.sleep(600)
        async for blocks in super().read(files):
            yield blocks


def test_an_interrupted_capture_has_given_its_lease_back(make: Make, tmp_path: Path) -> None:
    work = make({"a": "x", "b": "y"})
    with snapcore.blocking.open_repository(tmp_path / "repo") as repo:
        with pytest.raises(KeyboardInterrupt):
            repo.capture(Interrupting(work), thread_id="t")
        assert repo.list("t") == []
        assert repo.capture(work, thread_id="t").totals.files == 2


def test_calls_from_several_threads(make: Make, tmp_path: Path) -> None:
    work = make({"a": "x"})
    with snapcore.blocking.open_repository(tmp_path / "repo") as repo:
        threads = [threading.Thread(target=repo.capture, args=(work,), kwargs={"thread_id": f"t{n}"}) for n in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [t.thread_id for t in repo.threads()] == [f"t{n}" for n in range(5)]


def test_a_callback_that_calls_back_is_refused_and_waits_for_nobody(tmp_path: Path) -> None:
    refused: list[snapcore.SnapcoreError] = []

    def ask(stream: str, piece: bytes) -> None:
        with pytest.raises(snapcore.SnapshotError) as caught:
            repo.threads()
        refused.append(caught.value)

    with (
        snapcore.blocking.open_repository(tmp_path / "repo") as repo,
        repo.session(LocalProvider(tmp_path / "sandboxes"), thread_id="t") as session,
    ):
        assert session.exec("echo said", on_output=ask).stdout == b"said\n"
        assert [error.code for error in refused] == [snapcore.Code.INVALID_REQUEST]


@pytest.mark.parametrize(
    ("inner", "facade"),
    [(Repository, BlockingRepository), (Session, BlockingSession), (CheckpointEvery, BlockingCheckpointEvery)],
)
def test_nothing_that_is_public_has_to_be_awaited(inner: type, facade: type) -> None:
    """What an asynchronous class answers with is either passed through `_blocking`, or has a method of the facade's own."""
    for name in [name for name in dir(inner) if not name.startswith("_")]:
        method = inspect.getattr_static(inner, name)
        answer = str(getattr(method, "__annotations__", {}).get("return", ""))
        if "AsyncIterator" in answer:
            assert name in ("ls", "open_file", "patches", "tree"), name
        elif name in vars(facade):
            assert not inspect.iscoroutinefunction(vars(facade)[name]), name
        else:
            assert "Session" not in answer, name
            assert "CheckpointEvery" not in answer, name
            assert facade is not BlockingCheckpointEvery or not inspect.iscoroutinefunction(method), name


def test_errors_are_those_of_the_repository(tmp_path: Path) -> None:
    with snapcore.blocking.open_repository(tmp_path / "repo") as repo, pytest.raises(snapcore.SnapshotError) as caught:
        repo.rewind("t", "0" * 32)
    assert caught.value.code == snapcore.Code.MISSING_CHECKPOINT


def test_iterators_are_plain(make: Make, tmp_path: Path) -> None:
    work = make({"a": "x", "f/b": "yy"})
    with snapcore.blocking.open_repository(tmp_path / "repo") as repo:
        checkpoint = repo.capture(work, thread_id="t")
        assert [entry.path for entry in repo.ls(checkpoint)] == [b"", b"a", b"f", b"f/b"]
        assert b"".join(repo.open_file(checkpoint, b"f/b")) == b"yy"
