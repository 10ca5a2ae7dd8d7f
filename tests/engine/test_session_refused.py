"""What a session refuses before anything is recorded or done."""

from pathlib import Path
from typing import Any

import pytest

import snapcore
from snapcore import Repository
from snapcore.errors import Code, RepositoryError, SnapcoreError, SnapshotError

from .session_helpers import local, whole_ledger

LONE = "a\ud800b"
NUL = "a\0b"


@pytest.mark.parametrize(
    ("command", "options"),
    [
        (f"echo {LONE}", {}),
        (["echo", LONE], {}),
        ("true", {"cwd": NUL}),
        ("true", {"cwd": LONE}),
        ("true", {"user": NUL}),
        ("true", {"user": LONE}),
        ("true", {"environment": {"A": LONE}}),
    ],
)
async def test_what_no_system_can_pass_on_is_refused_and_in_no_ledger(
    repo: Repository, tmp_path: Path, command: Any, options: dict[str, Any]
) -> None:
    async with await repo.session(local(tmp_path), thread_id="t") as session:
        with pytest.raises(SnapshotError) as raised:
            await session.exec(command, **options)
        assert raised.value.code == Code.INVALID_REQUEST
        assert session.uncertain == ()
        assert len(await whole_ledger(repo, "t")) == 1


@pytest.mark.parametrize(("path", "data"), [(LONE, b""), (NUL, b""), ("f", LONE)])
async def test_files_that_cannot_be_written_are_refused(repo: Repository, tmp_path: Path, path: str, data: bytes | str) -> None:
    async with await repo.session(local(tmp_path), thread_id="t") as session:
        with pytest.raises(SnapshotError) as raised:
            await session.write_file(path, data)
        assert raised.value.code == Code.INVALID_REQUEST
        with pytest.raises(TypeError):
            await session.write_file("f", 3)  # type: ignore[arg-type]
        assert len(await whole_ledger(repo, "t")) == 1


async def test_bytes_that_are_no_text_reach_a_command(repo: Repository, tmp_path: Path) -> None:
    async with await repo.session(local(tmp_path), thread_id="t") as session:
        assert (await session.exec(["printf", "%s", "a\udcffb"])).stdout == b"a\xffb"


async def test_a_command_that_is_too_long_for_the_host_has_not_been_run(repo: Repository, tmp_path: Path) -> None:
    async with await repo.session(local(tmp_path), thread_id="t") as session:
        for command, variables in ((["true", "x" * 4_000_000], {}), (["true"], {f"A{i}": "x" * 100_000 for i in range(100)})):
            with pytest.raises(SnapshotError) as raised:
                await session.exec(command, environment=variables)
            assert raised.value.code == Code.INVALID_REQUEST
            assert "stdin" in raised.value.hint
        assert session.uncertain == ()


async def test_a_session_whose_repository_was_closed_says_so(tmp_path: Path) -> None:
    async with snapcore.open_repository("memory://") as repo:
        session = await repo.session(local(tmp_path), thread_id="t")
        handle = session.handle
    for work in (session.exec("true"), session.write_file("f", "x"), session.checkpoint(), session.fork("u"), session.close()):
        with pytest.raises(RepositoryError) as raised:
            await work
        assert raised.value.code == Code.STORE_UNAVAILABLE
    with pytest.raises(SnapcoreError):
        await handle.exec("true")  # it was let go of all the same
