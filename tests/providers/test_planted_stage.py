"""A folder that comes with a stage made by someone else: nothing outside it changes, nothing hangs, every refusal is typed."""

import asyncio
import contextlib
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from snapcore.errors import Code, SnapcoreError, SnapshotError
from snapcore.protocols import PlaceStep, RemoveStep, SetMetaStep, Workspace
from snapcore.providers.direct import DirectWorkspace
from snapcore.providers.folders import FOLDER_FLAGS, FolderCache
from snapcore.providers.journal import MAX_FRAME, Journal, frame
from snapcore.providers.perfile import PerFileWorkspace

from .test_perfile import PlainHandle

MakeWorkspace = Callable[[Path], Workspace]


def per_file(root: Path) -> Workspace:
    return PerFileWorkspace(PlainHandle(), str(root))


both = pytest.mark.parametrize("make_workspace", [DirectWorkspace, per_file])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A workspace with a stage that nobody holds, and a sealed journal without steps."""
    root = tmp_path / "root"
    for name in ("new", "trash"):
        (root / ".snapcore-stage" / name).mkdir(parents=True)
    (root / ".snapcore-stage" / "owner").write_text(
        json.dumps({"host": "gone", "pid": 1, "boot_id": "", "started": 0, "token": "", "released": True})
    )
    (root / ".snapcore-stage" / "journal").write_bytes(Journal.encode([]))
    os.utime(root / ".snapcore-stage" / "owner", (1_000_000_000, 1_000_000_000))
    return root


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o700)
    (outside / "secret").write_text("safe")
    return outside


def modes_file(root: Path, *notes: object) -> None:
    (root / ".snapcore-stage" / "modes").write_bytes(b"".join(frame(msgspec.msgpack.encode(note)) for note in notes))


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def recover(workspace: Workspace) -> str:
    return await asyncio.wait_for(workspace.recover(), 30)


# ---- modes


@pytest.mark.parametrize("path", [b"../outside", b"sub/../../outside", b"sub/..", b"/etc", b"./sub", b"sub//x"])
async def test_a_noted_mode_never_leads_out_of_the_root(root: Path, outside: Path, path: bytes) -> None:
    (root / "sub").mkdir()
    modes_file(root, (path, 0o077), (path, 0o777))
    assert await recover(DirectWorkspace(root)) == "finished"
    assert mode_of(outside) == 0o700


async def test_a_noted_mode_gives_no_right_that_the_folder_does_not_give(root: Path) -> None:
    for name, mode in (("private", 0o700), ("shared", 0o755), ("was-read-only", 0o755), ("nameless", 0o700)):
        (root / name).mkdir()
        (root / name).chmod(mode)
    root.chmod(0o700)
    modes_file(root, (b"", 0o777), (b"private", 0o777), (b"shared", 0o6755), (b"was-read-only", 0o555), (b"nameless", 1 << 20))
    assert await recover(DirectWorkspace(root)) == "finished"
    assert mode_of(root) == 0o700
    assert {path.name: mode_of(path) for path in root.iterdir()} == {
        "private": 0o700,
        "shared": 0o755,
        "was-read-only": 0o555,
        "nameless": 0o700,
    }


@pytest.mark.parametrize("note", ["text", (b"x",), {"a": 1}, (b"x", "mode"), (b"x", -1), (b"\0", 0o500)])
async def test_notes_that_no_restore_writes_are_passed_over(root: Path, note: object) -> None:
    modes_file(root, note)
    assert await recover(DirectWorkspace(root)) == "finished"
    assert os.listdir(root) == []


async def test_notes_in_another_users_stage_are_passed_over(root: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only the superuser may give a folder away")
    (root / "read-only").mkdir(mode=0o755)
    modes_file(root, (b"read-only", 0o055))
    os.chown(root / ".snapcore-stage", 65534, 65534)
    assert await recover(DirectWorkspace(root)) == "finished"
    assert mode_of(root / "read-only") == 0o755


def test_a_folder_is_never_reached_through_dots(root: Path) -> None:
    (root / "sub").mkdir()
    with FolderCache(os.open(root, FOLDER_FLAGS)) as folders:
        for path in (b"..", b"sub/..", b".", b"sub/.", b"/sub", b"sub//sub"):
            with pytest.raises(NotADirectoryError):
                folders.fd(path)


# ---- the journal


@both
@pytest.mark.parametrize(
    "step",
    [
        RemoveStep(b"../outside/secret", False),
        PlaceStep(b"../../../outside/secret", b"taken"),
        PlaceStep(b"0", b".snapcore-stage/owner"),
        SetMetaStep(b"../outside", 0o777, None),
        SetMetaStep(b"sub", 0o10777, None),
        SetMetaStep(b"sub", -1, None),
        SetMetaStep(b"sub", None, None, (1 << 40, 0)),
    ],
)
async def test_a_step_that_no_restore_writes_is_refused(
    root: Path, outside: Path, step: RemoveStep | PlaceStep | SetMetaStep, make_workspace: MakeWorkspace
) -> None:
    (root / "sub").mkdir()
    (root / ".snapcore-stage" / "journal").write_bytes(Journal.encode([step]))
    with pytest.raises(SnapshotError) as caught:
        await recover(make_workspace(root))
    assert caught.value.code == Code.RESTORE_BLOCKED
    assert mode_of(outside) == 0o700
    assert (outside / "secret").read_text() == "safe"


@both
@pytest.mark.parametrize("name", ["journal", "owner"])
async def test_a_fifo_is_refused_and_never_waited_for(root: Path, name: str, make_workspace: MakeWorkspace) -> None:
    (root / ".snapcore-stage" / name).unlink()
    os.mkfifo(root / ".snapcore-stage" / name)
    with pytest.raises(SnapshotError) as caught:
        await recover(make_workspace(root))
    assert caught.value.code == Code.RESTORE_BLOCKED


async def test_a_fifo_in_place_of_the_notes_is_passed_over(root: Path) -> None:
    os.mkfifo(root / ".snapcore-stage" / "modes")
    assert await recover(DirectWorkspace(root)) == "finished"
    assert os.listdir(root) == []


async def test_a_folder_in_place_of_the_notes_is_swept(root: Path) -> None:
    (root / ".snapcore-stage" / "modes" / "sub").mkdir(parents=True)
    assert await recover(DirectWorkspace(root)) == "finished"
    assert os.listdir(root) == []


async def test_a_length_that_would_not_fit_into_memory_is_not_believed(root: Path) -> None:
    size = 1 << 40
    for name in ("journal", "modes"):
        (root / ".snapcore-stage" / name).write_bytes((size - 40).to_bytes(8, "little") + bytes(32))
        os.truncate(root / ".snapcore-stage" / name, size)
    with pytest.raises(SnapshotError) as caught:
        await recover(DirectWorkspace(root))
    assert caught.value.code == Code.RESTORE_BLOCKED


def test_many_steps_are_written_in_frames_that_are_believed(tmp_path: Path) -> None:
    steps = [RemoveStep(b"%d/" % number + b"x" * 900_000, False) for number in range(40)]
    with open(tmp_path / "journal", "wb+") as file:
        file.write(Journal.encode(steps))
        file.flush()
        assert [path for _, path in Journal(file.fileno()).removals()] == [step.path for step in steps]
        assert file.seek(0, os.SEEK_END) > 2 * MAX_FRAME


# ---- links in the stage


@both
@pytest.mark.parametrize("name", ["new", "trash", "owner", "journal"])
async def test_nothing_goes_through_a_link_in_the_stage(
    root: Path, outside: Path, name: str, make_workspace: MakeWorkspace
) -> None:
    (root / "victim").write_text("mine")
    journal = Journal.encode([RemoveStep(b"victim", False), PlaceStep(b"secret", b"taken"), PlaceStep(b"sub/secret", b"too")])
    (root / ".snapcore-stage" / "journal").write_bytes(journal)
    (root / ".snapcore-stage" / "new" / "sub").symlink_to(outside)
    planted = root / ".snapcore-stage" / name
    if planted.is_dir():
        for path in planted.iterdir():
            path.unlink()
        planted.rmdir()
        planted.symlink_to(outside)
    else:
        planted.unlink()
        planted.symlink_to(outside / "secret")
    with contextlib.suppress(SnapcoreError):
        await recover(make_workspace(root))
    assert (outside / "secret").read_text() == "safe"
    assert os.listdir(outside) == ["secret"]
    assert not (root / "taken").exists()
    assert not (root / "too").exists()
