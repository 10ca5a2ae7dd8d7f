"""The blob stores do what every blob store does."""

from pathlib import Path
from typing import Any

import pytest

from snapcore.stores.local import LocalBlobStore
from snapcore.stores.memory import MemoryBlobStore
from snapcore.testing import BlobStoreTests


class TestMemoryBlobStore(BlobStoreTests):
    @pytest.fixture
    def store(self) -> MemoryBlobStore:
        return MemoryBlobStore()

    async def set_raw(self, store: Any, key: str, data: bytes) -> None:
        store.blobs[key] = data

    async def get_raw(self, store: Any, key: str) -> bytes | None:
        blob: bytes | None = store.blobs.get(key)
        return blob


class TestLocalBlobStore(BlobStoreTests):
    @pytest.fixture
    def store(self, tmp_path: Path) -> LocalBlobStore:
        return LocalBlobStore(tmp_path / "blobs")

    async def set_raw(self, store: Any, key: str, data: bytes) -> None:
        path = Path(store.url.removeprefix("file://")) / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    async def get_raw(self, store: Any, key: str) -> bytes | None:
        path = Path(store.url.removeprefix("file://")) / key
        return path.read_bytes() if path.is_file() else None
