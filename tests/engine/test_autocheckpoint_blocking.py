"""`checkpoint_every` without async."""

from collections.abc import Callable
from pathlib import Path

import pytest

import snapcore

from .manual_sleep import ManualSleep

Make = Callable[..., Path]


def test_the_blocking_form(make: Make, tmp_path: Path) -> None:
    work = make({"a": "0"})
    sleep = ManualSleep()
    with snapcore.blocking.open_repository(tmp_path / "repo") as repo:
        with repo.checkpoint_every(work, thread_id="t", seconds=30, sleep=sleep) as every:
            make({"a": "1"})
            assert every.checkpoint("mine").label == "mine"
            make({"a": "end"})
        assert [repo.read_file(c, b"a") for c in repo.list("t")] == [b"0", b"1", b"end"]
        assert (every.made, every.failures, every.ended) == (3, [], None)


@pytest.mark.parametrize(("error", "kept"), [(ZeroDivisionError, b"half"), (KeyboardInterrupt, b"0")])
def test_the_blocking_form_when_the_block_fails(make: Make, tmp_path: Path, error: type[BaseException], kept: bytes) -> None:
    """An interrupted block ends without a last capture, as a cancelled one."""
    work = make({"a": "0"})

    def block(repo: snapcore.blocking.BlockingRepository) -> None:
        with repo.checkpoint_every(work, thread_id="t", seconds=30):
            make({"a": "half"})
            raise error

    with snapcore.blocking.open_repository(tmp_path / "repo") as repo:
        with pytest.raises(error):
            block(repo)
        assert repo.read_file(repo.get("t"), b"a") == kept
