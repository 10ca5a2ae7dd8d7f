"""Listing a checkpoint as a tree: of each entry, whether it is the last of its folder."""

import random
from collections.abc import Callable
from pathlib import Path

from snapcore.repository import Repository

Make = Callable[..., Path]


def last_of_their_folders(paths: list[bytes], top: bytes) -> list[bool]:
    """What is expected, from all paths at once."""
    last = {path.rpartition(b"/")[0]: path for path in paths if path != top}
    return [path == top or last[path.rpartition(b"/")[0]] == path for path in paths]


async def test_the_last_of_each_folder_is_known_wherever_pages_end(memory_repo: Repository, make: Make) -> None:
    dice = random.Random(1)
    names = {
        "/".join(f"n{dice.randrange(4)}" for _ in range(dice.randrange(1, 6))) + f"/f{dice.randrange(9)}" for _ in range(1_500)
    }
    checkpoint = await memory_repo.capture(make(dict.fromkeys(names, "")), thread_id="t")
    for top in (b"", b"n1", b"n2/n3"):
        paths = [entry.path async for entry in memory_repo.ls(checkpoint, top)]
        listed = [(entry.path, last) async for entry, last in memory_repo.tree(checkpoint, top)]
        assert listed == list(zip(paths, last_of_their_folders(paths, top), strict=True))
