"""Conformance of a blob store.

Subclass `BlobStoreTests`, override the fixture `store`, and give raw access past the store, so that it is never checked
with itself.
"""

import asyncio
from typing import Any

import pytest

from snapcore.errors import Code, SnapshotError
from snapcore.protocols import BlobInfo, BlobStore

__all__ = ["BlobStoreTests"]

KEY = "packs/0a/0a1b2c"

INVALID_KEYS = (
    "",
    "/",
    "/packs",
    "packs/",
    "packs//a",
    ".",
    "..",
    "../packs",
    "packs/../../a",
    "packs/./a",
    ".hidden",
    "packs/.a",
    "Packs",
    "a b",
    "a\\b",
    "a\nb",
    "a\0b",
    "ä",
    "\udc80",
    "a" * 201,
)


class BlobStoreTests:
    """What every blob store does. `store` yields an empty, open store; `set_raw` and `get_raw` go past it."""

    @pytest.fixture
    def store(self) -> BlobStore:
        """Override: an empty store."""
        pytest.fail("The fixture `store` must be overridden.")

    async def set_raw(self, store: Any, key: str, data: bytes) -> None:
        """Override: put a blob where the store keeps it, without the store."""
        pytest.fail("`set_raw` must be overridden.")

    async def get_raw(self, store: Any, key: str) -> bytes | None:
        """Override: the blob's bytes as the store keeps them, read without the store; None when there is none."""
        pytest.fail("`get_raw` must be overridden.")

    async def test_put_stores_the_bytes(self, store: BlobStore) -> None:
        await store.put(KEY, b"some bytes")
        assert await self.get_raw(store, KEY) == b"some bytes"

    async def test_get_returns_the_bytes(self, store: BlobStore) -> None:
        await self.set_raw(store, KEY, b"some bytes")
        assert await store.get(KEY) == b"some bytes"

    @pytest.mark.parametrize("size", [0, 1, 1 << 20, (1 << 24) + 1])
    async def test_blobs_of_any_size_come_back(self, store: BlobStore, size: int) -> None:
        data = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
        await store.put(KEY, data)
        assert await store.get(KEY) == data
        assert await store.head(KEY) == BlobInfo(KEY, size)

    @pytest.mark.parametrize("wrap", [bytearray, memoryview, lambda data: memoryview(bytearray(data))])
    async def test_any_buffer_is_stored(self, store: BlobStore, wrap: Any) -> None:
        await store.put(KEY, wrap(b"some bytes"))
        assert await self.get_raw(store, KEY) == b"some bytes"

    async def test_a_stored_blob_does_not_change_with_the_buffer_it_came_from(self, store: BlobStore) -> None:
        buffer = bytearray(b"some bytes")
        await store.put(KEY, buffer)
        buffer[:4] = b"9999"
        assert await store.get(KEY) == b"some bytes"

    @pytest.mark.parametrize(
        ("offset", "length", "expected"),
        [
            (0, None, b"0123456789"),
            (0, 10, b"0123456789"),
            (3, 4, b"3456"),
            (3, None, b"3456789"),
            (9, 1, b"9"),
            (10, None, b""),
            (10, 0, b""),
            (4, 0, b""),
        ],
    )
    async def test_a_range_is_exactly_that_range(
        self, store: BlobStore, offset: int, length: int | None, expected: bytes
    ) -> None:
        await self.set_raw(store, KEY, b"0123456789")
        assert await store.get(KEY, offset, length) == expected

    @pytest.mark.parametrize(("offset", "length"), [(0, 11), (5, 6), (10, 1), (11, None), (11, 0), (500, 2)])
    async def test_a_range_past_the_end_is_an_invalid_blob(self, store: BlobStore, offset: int, length: int | None) -> None:
        await self.set_raw(store, KEY, b"0123456789")
        with pytest.raises(SnapshotError) as caught:
            await store.get(KEY, offset, length)
        assert caught.value.code is Code.INVALID_BLOB

    @pytest.mark.parametrize(("offset", "length"), [(-1, None), (0, -1)])
    async def test_a_negative_range_is_refused(self, store: BlobStore, offset: int, length: int | None) -> None:
        await self.set_raw(store, KEY, b"0123456789")
        with pytest.raises(SnapshotError) as caught:
            await store.get(KEY, offset, length)
        assert caught.value.code is Code.INVALID_REQUEST

    async def test_an_absent_blob_is_missing(self, store: BlobStore) -> None:
        with pytest.raises(SnapshotError) as caught:
            await store.get(KEY)
        assert caught.value.code is Code.MISSING_BLOB
        assert await store.head(KEY) is None

    async def test_a_part_of_a_key_is_no_blob(self, store: BlobStore) -> None:
        await store.put("packs/0a/0a1b", b"data")
        assert await store.head("packs/0a") is None
        with pytest.raises(SnapshotError) as caught:
            await store.get("packs/0a")
        assert caught.value.code is Code.MISSING_BLOB
        await store.delete("packs/0a")
        assert await store.get("packs/0a/0a1b") == b"data"

    async def test_a_put_over_a_key_replaces_it(self, store: BlobStore) -> None:
        await store.put(KEY, b"a longer value")
        await store.put(KEY, b"short")
        assert await self.get_raw(store, KEY) == b"short"
        assert [info async for info in store.list()] == [BlobInfo(KEY, 5)]

    async def test_readers_of_a_key_that_is_replaced_see_one_whole_value(self, store: BlobStore) -> None:
        values = [bytes([letter]) * 200_000 for letter in b"ab"]
        await store.put(KEY, values[0])

        async def replace() -> None:
            for turn in range(20):
                await store.put(KEY, values[turn % 2])

        async def read() -> None:
            for _ in range(20):
                assert await store.get(KEY) in values

        await asyncio.gather(replace(), read(), read())

    async def test_delete_removes_and_may_be_repeated(self, store: BlobStore) -> None:
        await store.put(KEY, b"data")
        await store.delete(KEY)
        await store.delete(KEY)
        assert await self.get_raw(store, KEY) is None
        assert await store.head(KEY) is None

    async def test_list_gives_each_blob_once(self, store: BlobStore) -> None:
        sizes = {f"packs/{n % 7}{n % 3}/{n:04}": n for n in range(100)}
        await asyncio.gather(*(store.put(key, bytes(size)) for key, size in sizes.items()))
        listed = [info async for info in store.list()]
        assert len(listed) == len(sizes)
        assert {info.key: info.size for info in listed} == sizes

    @pytest.mark.parametrize(
        ("prefix", "expected"),
        [
            ("", ["packs/0a/1", "packs/0a/12", "packs/0b/1", "packsx", "snapcore.json"]),
            ("packs", ["packs/0a/1", "packs/0a/12", "packs/0b/1", "packsx"]),
            ("packs/", ["packs/0a/1", "packs/0a/12", "packs/0b/1"]),
            ("packs/0", ["packs/0a/1", "packs/0a/12", "packs/0b/1"]),
            ("packs/0a/1", ["packs/0a/1", "packs/0a/12"]),
            ("packs/0a/12", ["packs/0a/12"]),
            ("packs/0c/", []),
            ("snapcore.json", ["snapcore.json"]),
            ("snapcore.json/", []),
        ],
    )
    async def test_list_takes_a_prefix_of_the_key(self, store: BlobStore, prefix: str, expected: list[str]) -> None:
        for key in ["packs/0a/1", "packs/0a/12", "packs/0b/1", "packsx", "snapcore.json"]:
            await self.set_raw(store, key, b"data")
        assert sorted([info.key async for info in store.list(prefix)]) == expected

    async def test_an_empty_store_lists_nothing(self, store: BlobStore) -> None:
        assert [info async for info in store.list()] == []

    @pytest.mark.parametrize("key", INVALID_KEYS)
    async def test_invalid_keys_are_refused_everywhere(self, store: BlobStore, key: str) -> None:
        for call in (store.get(key), store.head(key), store.put(key, b"data"), store.delete(key)):
            with pytest.raises(SnapshotError) as caught:
                await call
            assert caught.value.code is Code.INVALID_REQUEST

    @pytest.mark.parametrize("prefix", ["/", "..", "../", "packs/../..", "packs//", ".tmp", "Packs", "a" * 201])
    async def test_invalid_prefixes_are_refused(self, store: BlobStore, prefix: str) -> None:
        with pytest.raises(SnapshotError) as caught:
            _ = [info async for info in store.list(prefix)]
        assert caught.value.code is Code.INVALID_REQUEST

    async def test_the_longest_key_works(self, store: BlobStore) -> None:
        key = "a" * 100 + "/" + "b" * 99
        await store.put(key, b"data")
        assert await store.get(key) == b"data"

    async def test_many_calls_at_once(self, store: BlobStore) -> None:
        async def round_trip(number: int) -> bytes:
            key = f"packs/{number % 16:02x}/{number:032x}"
            await store.put(key, b"%d" % number)
            return await store.get(key)

        assert await asyncio.gather(*(round_trip(n) for n in range(64))) == [b"%d" % n for n in range(64)]

    async def test_a_cancelled_put_leaves_the_whole_blob_or_none(self, store: BlobStore) -> None:
        data = b"x" * (4 << 20)
        tasks = [asyncio.create_task(store.put(f"packs/{n}", data)) for n in range(8)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for n in range(8):
            assert await self.get_raw(store, f"packs/{n}") in (None, data)

    async def test_the_url_names_the_store(self, store: BlobStore) -> None:
        assert "://" in store.url

    async def test_close_may_be_repeated(self, store: BlobStore) -> None:
        await store.close()
        await store.close()
