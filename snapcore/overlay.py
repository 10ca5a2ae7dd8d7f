"""A repository as it would be: what its database knows, and over it what was found in packs that it knows nothing of."""

from collections.abc import Collection
from typing import cast

import msgspec

from .maintenance import PackContents
from .model import Checkpoint, Location, ThreadInfo
from .protocols import CheckpointStore, PackInfo

__all__ = ["overlay"]

AFTER_ALL: int = 1 << 48  # numbers of the found packs come after those of the database


class _Overlay:
    """What a verification asks of a `CheckpointStore`. Without a database there is only what was found."""

    def __init__(self, database: CheckpointStore | None, found: CheckpointStore) -> None:
        self._database = database
        self._found = found

    async def locate(self, ids: Collection[bytes]) -> dict[bytes, Location]:
        located = await self._database.locate(ids) if self._database is not None else {}
        if len(located) < len(ids):
            located |= await self._found.locate([i for i in ids if i not in located])
        return located

    async def packs(self) -> list[PackInfo]:
        own = await self._database.packs() if self._database is not None else []
        new = {p.pack_id: p for p in await self._found.packs()}
        return [p for p in own if p.pack_id not in new] + list(new.values())

    async def pack_contents(self, after: int = 0, limit: int = 64) -> list[PackContents]:
        if self._database is not None and after < AFTER_ALL:
            own = await self._database.pack_contents(after, limit)
            if own:
                return own
        new = await self._found.pack_contents(max(0, after - AFTER_ALL), limit)
        return [msgspec.structs.replace(p, number=p.number + AFTER_ALL) for p in new]

    async def threads(self) -> list[ThreadInfo]:
        return await self._database.threads() if self._database is not None else []

    async def checkpoints(self, thread_id: str) -> list[Checkpoint]:
        return await self._database.checkpoints(thread_id) if self._database is not None else []

    async def astray_heads(self) -> list[str]:
        return await self._database.astray_heads() if self._database is not None else []


def overlay(database: CheckpointStore | None, found: CheckpointStore) -> CheckpointStore:
    """A view for reading: the database's records where it has them, else those of `found`."""
    return cast("CheckpointStore", _Overlay(database, found))
