"""What is saved beside the files of a checkpoint: the conversation and artifacts. Case 23's kind: what was damaged on its way is
an error, never another text."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from snapcore.errors import Code, SnapshotError
from snapcore.model import Checkpoint
from snapcore.repository import Repository

Make = Callable[..., Path]
NOISE = os.urandom(300_000)  # of several chunks, none of which can be compressed


def flip(repo_path: Path, needle: bytes) -> None:
    """Flip a bit of these stored bytes, wherever they are."""
    found = 0
    for path in repo_path.rglob("*"):
        if path.is_file() and path.suffix != ".db":
            data = bytearray(path.read_bytes())
            if (at := data.find(needle)) >= 0:
                found += 1
                data[at + len(needle) // 2] ^= 1
                path.chmod(0o644)
                path.write_bytes(data)
    assert found


async def saved(repo: Repository, make: Make) -> Checkpoint:
    return await repo.capture(
        make({"a": "1"}), thread_id="t", conversation=[NOISE[:200_000].hex()], artifacts={"noise": NOISE, "other": b"x" * 100}
    )


@pytest.mark.parametrize("place", [0, 150_000, 299_000])
async def test_an_artifact_of_which_a_bit_was_flipped_is_refused(
    repo: Repository, make: Make, tmp_path: Path, place: int
) -> None:
    checkpoint = await saved(repo, make)
    assert await repo.read_artifact(checkpoint, "noise") == NOISE
    flip(tmp_path / "repo", NOISE[place : place + 64])
    with pytest.raises(SnapshotError) as caught:
        await repo.read_artifact(checkpoint, "noise")
    assert caught.value.code == Code.INVALID_BLOB
    assert await repo.read_artifact(checkpoint, "other") == b"x" * 100


async def test_a_damaged_artifact_is_refused_in_every_copy(repo: Repository, make: Make, tmp_path: Path) -> None:
    """A fork and a rewind have the same bytes, and no file bytes of their own."""
    checkpoint = await saved(repo, make)
    fork = await repo.fork("t", to_thread_id="u")
    back = await repo.rewind("t", checkpoint.id)
    for copy in (checkpoint, fork, back):
        assert await repo.read_artifact(copy, "noise") == NOISE
    flip(tmp_path / "repo", NOISE[:64])
    for copy in (checkpoint, fork, back):
        with pytest.raises(SnapshotError) as caught:
            await repo.read_artifact(copy, "noise")
        assert caught.value.code == Code.INVALID_BLOB


async def test_a_lost_pack_is_told(repo: Repository, make: Make, tmp_path: Path) -> None:
    checkpoint = await saved(repo, make)
    packs = [path for path in (tmp_path / "repo").rglob("*") if path.is_file() and NOISE[:64] in path.read_bytes()]
    for path in packs:
        path.unlink()
    with pytest.raises(SnapshotError) as caught:
        await repo.read_artifact(checkpoint, "noise")
    assert caught.value.code == Code.MISSING_BLOB
    with pytest.raises(SnapshotError) as caught:
        await repo.read_conversation(checkpoint)
    assert caught.value.code == Code.MISSING_BLOB


async def test_later_captures_and_deletions_change_none(repo: Repository, make: Make) -> None:
    """Artifacts of the same names, an empty conversation, a checkpoint deleted, garbage collected."""
    first = await saved(repo, make)
    work = make({"a": "2"})
    second = await repo.capture(work, thread_id="t", conversation=["later"], artifacts={"noise": b"later"})
    await repo.capture(work, thread_id="t", conversation=[], artifacts={})
    await repo.fork("t", first.id, to_thread_id="u")
    await repo.delete("t", second.id)
    await repo.gc(grace=0, repack="all")
    assert await repo.read_artifact(first, "noise") == NOISE
    assert await repo.read_conversation(first) == [NOISE[:200_000].hex()]
    await repo.delete("t", first.id)
    await repo.gc(grace=0, repack="all")
    (fork,) = await repo.list("u")
    assert await repo.read_artifact(fork, "noise") == NOISE
    assert await repo.read_conversation(fork) == [NOISE[:200_000].hex()]
