"""Blobs as objects in a bucket of S3, or of a service that speaks its protocol: R2, MinIO, GCS, Ceph, Tigris.

A blob is one object, put in one request with its bytes as the body: no multipart upload, no stream, so that a put is atomic
everywhere and needs no checksum trailers. Nothing that has to be right depends on listing, on conditional puts or on batch
deletes, which services do not agree on. Repeating any request is safe: a blob's bytes never change, so a put whose answer
was lost is put again.
"""

from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, TypeVar

from snapcore.errors import Code, SnapshotError
from snapcore.protocols import BlobInfo, Buffer

from .keys import validate_key, validate_prefix, validate_range
from .s3_address import S3Address, parse_address
from .s3_client import S3Credentials, S3Settings, missing_extra
from .s3_retry import RetryPolicy

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

    from .s3_requests import S3Requests

__all__ = ["RetryPolicy", "S3BlobStore", "S3Credentials", "S3Settings", "open_s3"]

T = TypeVar("T")
UNKNOWN_COST = 32 << 20  # a get to the end of a blob: no pack is larger


class S3BlobStore:
    """A `BlobStore` in a bucket, under a prefix. `address` is `s3://bucket/prefix?endpoint=https://...&region=...`.

    Without `credentials`, boto3 finds them: environment, profile, role. The bucket must exist. Requests run on threads of
    the store; the first makes the client. A put copies what is not `bytes`, so that nothing changes under a request.

    Besides what `BlobStore` says, calls raise `RepositoryError`: `NO_BUCKET`, `WRONG_REGION`, `CLOCK_SKEW`, `ACCESS_DENIED`,
    `STORE_FULL`, and `STORE_UNAVAILABLE` once a passing error has lasted longer than `retry` allows.
    """

    def __init__(
        self,
        address: str,
        *,
        credentials: S3Credentials | None = None,
        settings: S3Settings | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        self._address: S3Address = parse_address(address)
        self._settings = settings or S3Settings()
        self._requests = _make_requests(self._address, credentials, self._settings, retry or RetryPolicy())
        self._prefix = self._address.prefix + "/" if self._address.prefix else ""

    def __repr__(self) -> str:
        return f"S3BlobStore({self.url!r})"

    @property
    def url(self) -> str:
        """The address of this store, which never holds credentials."""
        return self._address.url

    @property
    def uploads_at_once(self) -> int:
        """How many puts at once serve it best."""
        return self._settings.uploads_at_once

    @property
    def requests_at_once(self) -> int:
        """How many requests run at once at most at present: fewer after the service asked for less."""
        return self._requests.limit.limit

    async def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes of a range of a blob; see `BlobStore`."""
        validate_key(key)
        validate_range(offset, length)
        from . import s3_reading

        name = self._prefix + key
        if length == 0:
            size = await self._size(key, "read")
            data = b""
        else:
            data, size = await self._requests.run(
                f"The blob {key!r} cannot be read",
                lambda client: s3_reading.read(client, self._address.bucket, name, offset, length),
                cost=UNKNOWN_COST if length is None else length,
            )
        if size is None:
            raise SnapshotError(f"There is no blob {key!r} in {self.url}.", code=Code.MISSING_BLOB)
        end = size if length is None else offset + length
        if end > size or offset > size:
            raise SnapshotError(f"The blob {key!r} ends at byte {size}, before {max(end, offset)}.", code=Code.INVALID_BLOB)
        return data

    async def head(self, key: str) -> BlobInfo | None:
        """Key and size, or None."""
        validate_key(key)
        size = await self._size(key, "looked at")
        return None if size is None else BlobInfo(key, size)

    async def put(self, key: str, data: Buffer) -> None:
        """Store `data` as one object."""
        validate_key(key)
        body, name = data if isinstance(data, bytes) else bytes(data), self._prefix + key

        def put(client: "S3Client") -> None:
            client.put_object(Bucket=self._address.bucket, Key=name, Body=body, ContentType="application/octet-stream")

        await self._requests.run(f"The blob {key!r} cannot be stored", put, cost=len(body))

    async def delete(self, key: str) -> None:
        """Remove the blob if it is there. One request each: services refuse batches without Content-MD5, and boto3 sends none."""
        validate_key(key)
        from . import s3_reading

        name = self._prefix + key
        await self._requests.run(
            f"The blob {key!r} cannot be deleted", lambda client: s3_reading.delete(client, self._address.bucket, name)
        )

    async def list(self, prefix: str = "") -> AsyncIterator[BlobInfo]:
        """All blobs whose key starts with `prefix`. Objects whose names are no blob keys are left out."""
        validate_prefix(prefix)
        from .s3_listing import Listing

        listing = Listing(self._address.bucket, self._prefix + prefix)
        while not listing.done:
            page = await self._requests.run(f"The blobs under {prefix!r} cannot be listed", listing.ask)
            for name, size in listing.take(page):
                key = name.removeprefix(self._prefix)
                if _is_key(key):
                    yield BlobInfo(key, size)

    async def close(self) -> None:
        """Wait for requests under way, then release threads and connections. Idempotent."""
        await self._requests.close()

    async def request(self, what: str, call: Callable[["S3Client", str, str], T]) -> T:
        """Make a request of one's own as the store makes its own, repeated and bounded: `call` gets the client, the bucket, and
        what begins the name of each object. `what` begins the message of an error."""
        return await self._requests.run(what, lambda client: call(client, self._address.bucket, self._prefix))

    async def _size(self, key: str, done: str) -> int | None:
        from . import s3_reading

        name = self._prefix + key
        return await self._requests.run(
            f"The blob {key!r} cannot be {done}", lambda client: s3_reading.size_of(client, self._address.bucket, name)
        )


def open_s3(address: str) -> S3BlobStore:
    """The store at `s3://bucket/prefix`, with the credentials that boto3 finds."""
    return S3BlobStore(address)


def _make_requests(
    address: S3Address, credentials: S3Credentials | None, settings: S3Settings, retry: RetryPolicy
) -> "S3Requests":
    try:
        from .s3_requests import S3Requests  # loads a part of botocore; boto3 is loaded by the first request, on its thread
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "botocore":
            raise
        raise missing_extra() from None
    return S3Requests(address, credentials, settings, retry)


def _is_key(text: str) -> bool:
    try:
        validate_key(text)
    except SnapshotError:
        return False
    return True
