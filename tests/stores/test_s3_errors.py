"""What the S3 store says when it cannot work: a code, plain words, what to do, and no credential."""

import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from snapcore.errors import Code, RepositoryError, SnapshotError
from snapcore.stores.s3 import S3BlobStore, S3Credentials
from snapcore.stores.s3_address import parse_address
from snapcore.testing import StrictS3Server

KEY = "packs/0a/0a1b"
SECRET = "wJalrXUtnFEMI-K7MDENG-secret"
CALLS: dict[str, Callable[[S3BlobStore], Any]] = {
    "get": lambda store: store.get(KEY),
    "head": lambda store: store.head(KEY),
    "put": lambda store: store.put(KEY, b"data"),
    "delete": lambda store: store.delete(KEY),
    "list": lambda store: anext(store.list(), None),
}


async def failure(work: Any) -> RepositoryError:
    with pytest.raises(RepositoryError) as caught:
        await work
    return caught.value


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("status", "code", "expected", "words"),
    [
        (403, "AccessDenied", Code.ACCESS_DENIED, "s3:ListBucket"),
        (403, "InvalidAccessKeyId", Code.ACCESS_DENIED, "AWS_ACCESS_KEY_ID"),
        (403, "SignatureDoesNotMatch", Code.ACCESS_DENIED, "AWS_SECRET_ACCESS_KEY"),
        (400, "ExpiredToken", Code.ACCESS_DENIED, "expired"),
        (403, "RequestTimeTooSkewed", Code.CLOCK_SKEW, "clock"),
        (404, "NoSuchBucket", Code.NO_BUCKET, "Create the bucket"),
        (301, "PermanentRedirect", Code.WRONG_REGION, "AWS_REGION"),
        (400, "AuthorizationHeaderMalformed", Code.WRONG_REGION, "AWS_REGION"),
        (400, "IllegalLocationConstraintException", Code.WRONG_REGION, "AWS_REGION"),
        (507, "InsufficientStorage", Code.STORE_FULL, "Make room"),
        (403, "QuotaExceeded", Code.STORE_FULL, "quota"),
    ],
)
async def test_what_will_not_change_is_told_at_once_with_what_to_do(
    strict_server: StrictS3Server, s3: S3BlobStore, pauses: Any, call: str, status: int, code: str, expected: Code, words: str
) -> None:
    strict_server.faults.refuse("*", None, status=status, code=code)
    error = await failure(CALLS[call](s3))
    assert error.code is expected
    assert words in str(error)
    assert code in error.message or str(status) in error.message
    assert error.hint
    assert error.retryable == (expected is Code.STORE_FULL)
    assert pauses.waits == []


async def test_a_wrong_access_key_is_told_and_no_key_is_shown(no_aws: None) -> None:
    with StrictS3Server(access_key="the-right-one") as server:
        store = S3BlobStore(server.address(), credentials=S3Credentials("AKIAWRONG", SECRET))
        error = await failure(store.get(KEY))
        await store.close()
    assert error.code is Code.ACCESS_DENIED
    trace = "".join(traceback.format_exception(error))
    shown = f"{error} {error!r} {trace} {store!r} {store.url} {S3Credentials('AKIAWRONG', SECRET)!r}"
    assert SECRET not in shown
    assert "AKIAWRONG" not in shown


async def test_a_region_other_than_the_buckets_is_told(no_aws: None) -> None:
    with StrictS3Server(region="eu-central-1") as server:
        store = S3BlobStore(server.address(region="us-west-2"), credentials=S3Credentials("key", "secret"))
        assert (await failure(store.get(KEY))).code is Code.WRONG_REGION
        await store.close()
        store = S3BlobStore(server.address(region="eu-central-1"), credentials=S3Credentials("key", "secret"))
        await store.put(KEY, b"data")
        await store.close()


async def test_no_credentials_at_all_are_told(strict_server: StrictS3Server) -> None:
    store = S3BlobStore(strict_server.address())
    error = await failure(store.get(KEY))
    await store.close()
    assert error.code is Code.ACCESS_DENIED
    assert "AWS_PROFILE" in error.hint


async def test_an_unknown_profile_is_told(strict_server: StrictS3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    store = S3BlobStore(strict_server.address())
    error = await failure(store.get(KEY))
    await store.close()
    assert error.code is Code.ACCESS_DENIED
    assert "AWS_PROFILE" in error.hint


async def test_credentials_and_endpoint_come_from_the_environment(
    strict_server: StrictS3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", strict_server.url.replace("127.0.0.1", "localhost"))  # bucket.localhost is none
    store = S3BlobStore("s3://bucket/prefix")
    await store.put(KEY, b"data")
    await store.close()
    assert strict_server.buckets["bucket"] == {f"prefix/{KEY}": b"data"}


async def test_the_region_of_the_environment_is_used(no_aws: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    with StrictS3Server(region="eu-central-1") as server:
        store = S3BlobStore(server.address(), credentials=S3Credentials("key", "secret"))
        await store.put(KEY, b"data")
        await store.close()


async def test_a_senseless_endpoint_of_the_environment_is_told(no_aws: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "no url")
    store = S3BlobStore("s3://bucket", credentials=S3Credentials("key", "secret"))
    error = await failure(store.get(KEY))
    await store.close()
    assert error.code is Code.INVALID_REQUEST
    assert "AWS_ENDPOINT_URL" in error.hint


@pytest.mark.parametrize("absent", ["boto3", "botocore"])
def test_a_missing_extra_is_told_with_the_line_that_installs_it(absent: str) -> None:
    script = f"""
import asyncio, sys
sys.modules[{absent!r}] = None
import snapcore
try:
    asyncio.run(snapcore.open_repository("s3://bucket/prefix")._open())
except snapcore.RepositoryError as error:
    print(error.code, error.hint)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "MISSING_EXTRA pip install 'snapcore[s3]'\n"


def test_opening_a_store_loads_no_boto3_on_the_event_loop(no_aws: None) -> None:
    script = """
import asyncio, sys
from snapcore.registry import open_blobs
store = open_blobs("s3://bucket/prefix")
assert "boto3" not in sys.modules
asyncio.run(store.close())
"""
    subprocess.run([sys.executable, "-c", script], check=True)


# ---- addresses


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/", "s3://bucket"),
        ("s3://bucket/a/b/", "s3://bucket/a/b"),
        ("s3://my.bucket-1/Some Prefix/ü", "s3://my.bucket-1/Some Prefix/ü"),
        ("s3://bucket/p?region=eu-west-1", "s3://bucket/p?region=eu-west-1"),
        ("s3://bucket?endpoint=http://localhost:9000/", "s3://bucket?endpoint=http://localhost:9000"),
        ("s3://bucket?endpoint=https%3A%2F%2Fhost&region=x", "s3://bucket?endpoint=https://host&region=x"),
    ],
)
def test_an_address_names_bucket_prefix_endpoint_and_region(address: str, url: str) -> None:
    assert parse_address(address).url == url
    assert parse_address(url).url == url


@pytest.mark.parametrize(
    "address",
    [
        f"s3://AKIAKEY:{SECRET}@bucket/prefix",
        f"s3://bucket/prefix?aws_access_key_id=AKIAKEY&aws_secret_access_key={SECRET}",
        f"s3://bucket?endpoint=https://AKIAKEY:{SECRET}@host",
        f"s3://bucket?endpoint=https://host/?X-Amz-Credential=AKIAKEY%26secret={SECRET}",
        f"s3://bucket?{SECRET}",
    ],
)
def test_an_address_with_credentials_is_refused_and_not_repeated(address: str) -> None:
    with pytest.raises(SnapshotError) as caught:
        S3BlobStore(address)
    assert caught.value.code is Code.INVALID_REQUEST
    assert "AWS_SECRET_ACCESS_KEY" in caught.value.hint
    assert SECRET not in str(caught.value)
    assert "AKIAKEY" not in str(caught.value)


@pytest.mark.parametrize(
    "address",
    [
        "s3://",
        "s3:///prefix",
        "s3://b",
        "s3://bucket/a//b",
        "s3://bucket/../b",
        "s3://bucket/a\nb",
        "s3://bucket/" + "a" * 801,
        "s3://bucket?endpoint=host",
        "s3://bucket?endpoint=ftp://host",
        "s3://bucket?endpoint=https://host:port",
        "s3://bucket?endpoint=",
        "s3://bucket?region=a b",
        "s3://bucket?regoin=eu-west-1",
    ],
)
def test_an_address_that_makes_no_sense_is_refused(address: str) -> None:
    with pytest.raises(SnapshotError) as caught:
        parse_address(address)
    assert caught.value.code is Code.INVALID_REQUEST
    assert caught.value.hint


@pytest.mark.parametrize(
    ("address", "environment", "region"),
    [
        ("s3://bucket", {}, None),
        ("s3://bucket", {"AWS_REGION": "eu-west-1"}, "eu-west-1"),
        ("s3://bucket?region=a", {"AWS_REGION": "eu-west-1"}, "a"),
        ("s3://bucket?endpoint=https://0123.r2.cloudflarestorage.com", {"AWS_REGION": "eu-west-1"}, "auto"),
        ("s3://bucket?endpoint=https://0123.eu.r2.cloudflarestorage.com", {}, "auto"),
        ("s3://bucket", {"AWS_ENDPOINT_URL_S3": "https://0123.r2.cloudflarestorage.com"}, "auto"),
        ("s3://bucket", {"AWS_ENDPOINT_URL": "https://0123.r2.cloudflarestorage.com"}, "auto"),
        ("s3://bucket?endpoint=https://r2.cloudflarestorage.com.example.org", {}, None),
        ("s3://bucket?endpoint=https://0123.r2.cloudflarestorage.com&region=weur", {}, "weur"),
    ],
)
def test_the_region_is_that_of_the_address_or_auto_for_r2(address: str, environment: dict[str, str], region: str | None) -> None:
    assert parse_address(address).effective_region(environment) == region


def test_requests_to_aws_itself_name_the_bucket_in_the_host_and_others_in_the_path(no_aws: None) -> None:
    from snapcore.stores.s3_client import S3Settings, make_client

    def host_of(address: str) -> str:
        client = make_client(parse_address(address), S3Credentials("key", "secret"), S3Settings())
        url: str = client.generate_presigned_url("get_object", Params={"Bucket": "bucket", "Key": "key"})
        client.close()
        return url.partition("?")[0]

    assert host_of("s3://bucket?region=eu-west-1").startswith("https://bucket.s3")
    assert host_of("s3://bucket?endpoint=https://minio.example.org") == "https://minio.example.org/bucket/key"
    assert host_of("s3://bucket?endpoint=https://0.r2.cloudflarestorage.com") == "https://0.r2.cloudflarestorage.com/bucket/key"


async def test_the_number_of_uploads_at_once_is_an_option(s3: S3BlobStore, open_store: Callable[..., S3BlobStore]) -> None:
    assert s3.uploads_at_once == 3
    assert open_store(uploads_at_once=9).uploads_at_once == 9
