"""The S3 store does what every blob store does, on moto's server and on the strict one.

Case 29: the strict server refuses checksum headers and streamed bodies.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from snapcore.stores.s3 import S3BlobStore, S3Credentials
from snapcore.testing import BlobStoreTests, StrictS3Server

KEYS: dict[str, Any] = {"aws_access_key_id": "key", "aws_secret_access_key": "secret", "region_name": "us-east-1"}


@pytest.fixture(scope="module")
def moto_url() -> Iterator[str]:
    """moto's server: another implementation of S3, by other people."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(scope="module")
def moto_client(moto_url: str) -> Iterator[Any]:
    client: Any = boto3.session.Session().client("s3", endpoint_url=moto_url, **KEYS)
    yield client
    client.close()


class TestOnMoto(BlobStoreTests):
    @pytest.fixture
    async def store(self, no_aws: None, moto_url: str, moto_client: Any) -> AsyncIterator[S3BlobStore]:
        moto_client.create_bucket(Bucket="blobs")
        store = S3BlobStore(f"s3://blobs/some/prefix?endpoint={moto_url}", credentials=S3Credentials("key", "secret"))
        self.client = moto_client
        yield store
        await store.close()
        for item in moto_client.list_objects_v2(Bucket="blobs").get("Contents", ()):
            moto_client.delete_object(Bucket="blobs", Key=item["Key"])
        moto_client.delete_bucket(Bucket="blobs")

    async def set_raw(self, store: Any, key: str, data: bytes) -> None:
        await asyncio.to_thread(self.client.put_object, Bucket="blobs", Key=f"some/prefix/{key}", Body=data)

    async def get_raw(self, store: Any, key: str) -> bytes | None:
        found = self.client.list_objects_v2(Bucket="blobs", Prefix=f"some/prefix/{key}").get("Contents", ())
        if f"some/prefix/{key}" not in [item["Key"] for item in found]:
            return None
        answer = self.client.get_object(Bucket="blobs", Key=f"some/prefix/{key}")
        with answer["Body"] as body:
            data: bytes = body.read()
        return data


class TestOnTheStrictServer(BlobStoreTests):
    @pytest.fixture
    def store(self, s3: S3BlobStore, strict_server: StrictS3Server) -> S3BlobStore:
        self.server = strict_server
        return s3

    async def set_raw(self, store: Any, key: str, data: bytes) -> None:
        self.server.buckets["bucket"][f"prefix/{key}"] = data

    async def get_raw(self, store: Any, key: str) -> bytes | None:
        return self.server.buckets["bucket"].get(f"prefix/{key}")
