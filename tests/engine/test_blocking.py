"""`snapcore.blocking`: an interrupted call ends cleanly before the interrupt goes on."""

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest

import snapcore
from snapcore.model import FileStat
from snapcore.protocols import ReadBlock
from snapcore.providers.direct import DirectWorkspace

Make = Callable[..., Path]


class Interrupting(DirectWorkspace):
    """Interrupts the main thread when files are read, as Ctrl-C does, and then takes its time."""

    async def read(self, files: Sequence[FileStat]) -> AsyncIterator[Sequence[ReadBlock]]:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        await asyncio.sleep(0.3)
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
