"""Listing a bucket on services that lie: each blob is listed once, and every listing ends.

Nothing that has to be right depends on it.
"""

import pytest

from snapcore.protocols import BlobInfo
from snapcore.stores.s3 import S3BlobStore
from snapcore.testing import StrictS3Server

KEYS = [f"packs/{n % 5:02x}/{n:04x}" for n in range(57)]


@pytest.fixture
def server(strict_server: StrictS3Server) -> StrictS3Server:
    strict_server.buckets["bucket"].update({f"prefix/{key}": b"x" * n for n, key in enumerate(KEYS)})
    strict_server.buckets["bucket"].update({"prefix2/packs/other": b"", "prefiw/packs/other": b""})
    strict_server.faults.page_size = 10
    return strict_server


async def listed(store: S3BlobStore, prefix: str = "") -> list[BlobInfo]:
    return sorted([info async for info in store.list(prefix)], key=lambda info: info.key)


ALL = sorted((BlobInfo(key, n) for n, key in enumerate(KEYS)), key=lambda info: info.key)


async def test_many_pages_are_listed_by_their_tokens(server: StrictS3Server, s3: S3BlobStore) -> None:
    assert await listed(s3) == ALL
    assert server.requests["LIST"] == 6
    assert await listed(s3, "packs/01/") == [info for info in ALL if info.key.startswith("packs/01/")]


@pytest.mark.parametrize("style", ["ignored", "refused"])
async def test_a_service_of_the_first_version_is_listed(server: StrictS3Server, s3: S3BlobStore, style: str) -> None:
    server.faults.first_version_only = style
    assert await listed(s3) == ALL


@pytest.mark.parametrize("style", ["", "ignored", "refused"])
async def test_keys_that_come_twice_are_listed_once(server: StrictS3Server, s3: S3BlobStore, style: str) -> None:
    server.faults.first_version_only = style
    server.faults.duplicates = True
    assert await listed(s3) == ALL


async def test_a_token_that_comes_again_does_not_end_the_listing_early(server: StrictS3Server, s3: S3BlobStore) -> None:
    server.faults.repeat_tokens = True
    assert await listed(s3) == ALL
    assert server.requests["LIST"] < 20


@pytest.mark.parametrize("style", ["", "ignored", "refused"])
async def test_a_service_that_gives_the_first_page_for_ever_is_left(server: StrictS3Server, s3: S3BlobStore, style: str) -> None:
    server.faults.first_version_only = style
    server.faults.stuck_pages = True
    assert await listed(s3) == ALL[:10]
    assert server.requests["LIST"] < 20


async def test_keys_outside_the_prefix_and_foreign_objects_are_left_out(server: StrictS3Server, s3: S3BlobStore) -> None:
    server.faults.foreign = ["another/prefix/packs/00", "prefix", "prefix/", "zzz"]
    server.buckets["bucket"].update(
        {"prefix/Read Me.txt": b"", "prefix/packs/": b"", "prefix/.hidden": b"", "prefix/a&b<c>": b""}
    )
    assert await listed(s3) == ALL


async def test_what_a_listing_lacks_is_there_all_the_same(server: StrictS3Server, s3: S3BlobStore) -> None:
    server.faults.hidden = {f"prefix/{KEYS[8]}"}
    assert await listed(s3) == [info for info in ALL if info.key != KEYS[8]]
    assert await s3.head(KEYS[8]) == BlobInfo(KEYS[8], 8)
    assert await s3.get(KEYS[8]) == b"x" * 8


async def test_a_listing_goes_on_after_a_failure_in_its_middle(server: StrictS3Server, s3: S3BlobStore) -> None:
    server.faults.refuse("LIST", 3)
    server.faults.drop("LIST", 5)
    assert await listed(s3) == ALL


async def test_a_bucket_without_a_prefix_is_listed(server: StrictS3Server, open_store) -> None:  # type: ignore[no-untyped-def]
    keys = {info.key for info in await listed(open_store("bucket"))}
    assert keys == set(server.buckets["bucket"])
