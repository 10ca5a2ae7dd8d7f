"""Blobs in memory: for tests and first steps. They live as long as the store object."""

from collections.abc import AsyncIterator

from snapcore.errors import Code, SnapshotError
from snapcore.protocols import BlobInfo, Buffer

from .keys import validate_key, validate_prefix, validate_range

__all__ = ["MemoryBlobStore", "open_memory"]


class MemoryBlobStore:
    """A `BlobStore` in a dictionary, which `blobs` exposes for tests: bytes by key."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}

    @property
    def url(self) -> str:
        """The address of this store."""
        return "memory://"

    @property
    def uploads_at_once(self) -> int:
        """One: a second put at the same time would only take memory and turns on the disk."""
        return 1

    async def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes of a range of a blob; see `BlobStore`."""
        validate_key(key)
        validate_range(offset, length)
        blob = self.blobs.get(key)
        if blob is None:
            raise SnapshotError(f"There is no blob {key!r} in memory.", code=Code.MISSING_BLOB)
        end = len(blob) if length is None else offset + length
        if end > len(blob) or offset > len(blob):
            raise SnapshotError(f"The blob {key!r} ends at byte {len(blob)}, before {max(end, offset)}.", code=Code.INVALID_BLOB)
        return blob[offset:end]

    async def head(self, key: str) -> BlobInfo | None:
        """Key and size, or None."""
        validate_key(key)
        blob = self.blobs.get(key)
        return None if blob is None else BlobInfo(key, len(blob))

    async def put(self, key: str, data: Buffer) -> None:
        """Store a copy of `data`."""
        validate_key(key)
        self.blobs[key] = bytes(data)

    async def delete(self, key: str) -> None:
        """Remove the blob if it is there."""
        validate_key(key)
        self.blobs.pop(key, None)

    async def list(self, prefix: str = "") -> AsyncIterator[BlobInfo]:
        """All blobs whose key starts with `prefix`, as they were when the first was asked for."""
        validate_prefix(prefix)
        for info in [BlobInfo(key, len(blob)) for key, blob in self.blobs.items() if key.startswith(prefix)]:
            yield info

    async def close(self) -> None:
        """Nothing to release; the blobs stay."""


def open_memory(address: str) -> MemoryBlobStore:
    """A new store in memory, whatever follows `memory://` in the address."""
    del address
    return MemoryBlobStore()
