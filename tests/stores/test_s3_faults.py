"""The S3 store against a service that throttles, fails, breaks off, forgets its answers and knows only a part of S3.

Cases 29 to 33, 45 and 47. Waits between attempts are counted, not slept.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from snapcore.errors import Code, RepositoryError, SnapshotError
from snapcore.protocols import BlobInfo
from snapcore.stores.s3 import RetryPolicy, S3BlobStore
from snapcore.testing import StrictS3Server

KEY = "packs/0a/0a1b"
DATA = bytes(range(256)) * 40
Work = Callable[[S3BlobStore], Awaitable[Any]]


async def _list(store: S3BlobStore) -> list[BlobInfo]:
    return [info async for info in store.list()]


# what each request does, and what is true once it came through
VERBS: dict[str, tuple[Work, Any]] = {
    "GET": (lambda store: store.get(KEY, 3, 9000), DATA[3:9003]),
    "HEAD": (lambda store: store.head(KEY), BlobInfo(KEY, len(DATA))),
    "PUT": (lambda store: store.put(KEY, DATA), None),
    "DELETE": (lambda store: store.delete(KEY), None),
    "LIST": (_list, [BlobInfo(KEY, len(DATA))]),
}
each_verb = pytest.mark.parametrize("verb", VERBS)


@pytest.fixture
def server(strict_server: StrictS3Server) -> StrictS3Server:
    """The server, with one blob."""
    strict_server.buckets["bucket"][f"prefix/{KEY}"] = DATA
    return strict_server


async def check(server: StrictS3Server, store: S3BlobStore, verb: str, attempts: int = 2) -> None:
    """The request does what it should, at the given attempt."""
    work, expected = VERBS[verb]
    assert await work(store) == expected
    assert server.buckets["bucket"] == ({} if verb == "DELETE" else {f"prefix/{KEY}": DATA})
    assert server.requests[verb] == attempts


PASSING = [
    (503, "SlowDown"),
    (503, "ServiceUnavailable"),
    (429, "TooManyRequests"),
    (499, "ClientClosedRequest"),
    (400, "RequestTimeout"),
    (408, "RequestTimeout"),
    (500, "InternalError"),
    (502, "BadGateway"),
    (504, "GatewayTimeout"),
    (409, "OperationAborted"),
]
TOLD_BY_CODE = (400, 409)  # an answer to HEAD has no body, and so no code that would tell these from a wrong request


@pytest.mark.parametrize(
    ("verb", "status", "code"),
    [(verb, *error) for verb in VERBS for error in PASSING if verb != "HEAD" or error[0] not in TOLD_BY_CODE],
)
async def test_a_passing_error_is_no_error(server: StrictS3Server, s3: S3BlobStore, verb: str, status: int, code: str) -> None:
    """Cases 32 and 47: nothing is lost, and nothing is taken for missing."""
    server.faults.refuse(verb, status=status, code=code)
    await check(server, s3, verb)


@each_verb
async def test_a_connection_that_closes_before_the_work_is_no_error(server: StrictS3Server, s3: S3BlobStore, verb: str) -> None:
    server.faults.drop(verb)
    await check(server, s3, verb)


@each_verb
async def test_a_lost_answer_is_no_error(server: StrictS3Server, s3: S3BlobStore, verb: str) -> None:
    server.faults.lose_response(verb)
    await check(server, s3, verb)


@pytest.mark.parametrize("verb", ["GET", "LIST"])
@pytest.mark.parametrize("keep", [0, 1, 100])
async def test_a_body_that_is_cut_short_is_read_again(server: StrictS3Server, s3: S3BlobStore, verb: str, keep: int) -> None:
    """Case 33: neither a short body nor one of zeros is ever returned."""
    server.faults.cut_body(verb, keep)
    await check(server, s3, verb)


@pytest.mark.parametrize("keep", [0, 5000, len(DATA) - 1])
async def test_a_whole_blob_that_is_cut_short_is_read_again(server: StrictS3Server, s3: S3BlobStore, keep: int) -> None:
    server.faults.cut_body("GET", keep)
    assert await s3.get(KEY) == DATA
    assert server.requests["GET"] == 2


@pytest.mark.parametrize("verb", ["GET", "LIST", "PUT", "DELETE"])
async def test_a_page_of_a_proxy_says_nothing_about_the_blob(server: StrictS3Server, s3: S3BlobStore, verb: str) -> None:
    """Case 47: a 404 that is not the service's own does not make a blob missing."""
    server.faults.answer_with_a_page(verb)
    await check(server, s3, verb)


async def test_a_service_that_does_not_know_ranges_is_read_right(server: StrictS3Server, s3: S3BlobStore) -> None:
    server.faults.ignore_ranges = True
    assert await s3.get(KEY, 3, 4) == DATA[3:7]
    assert await s3.get(KEY, 10_000) == DATA[10_000:]
    for offset, length in ((len(DATA), 1), (len(DATA) + 5, None), (0, len(DATA) + 1)):
        with pytest.raises(SnapshotError) as caught:
            await s3.get(KEY, offset, length)
        assert caught.value.code is Code.INVALID_BLOB


async def test_only_the_services_own_word_makes_a_blob_missing(server: StrictS3Server, s3: S3BlobStore) -> None:
    with pytest.raises(SnapshotError) as caught:
        await s3.get("packs/other")
    assert caught.value.code is Code.MISSING_BLOB
    assert server.requests["GET"] == 1  # and is not asked for again


# ---- throttling


async def test_it_backs_off_for_minutes_before_it_gives_up(server: StrictS3Server, s3: S3BlobStore, pauses: Any) -> None:
    """Case 32: waits double up to a limit, for five minutes in all."""
    server.faults.refuse("PUT", None)
    with pytest.raises(RepositoryError) as caught:
        await s3.put("packs/new", b"data")
    assert (caught.value.code, caught.value.retryable) == (Code.STORE_UNAVAILABLE, True)
    assert pauses.waits[:6] == [0.5, 1, 2, 4, 8, 16]
    assert set(pauses.waits[6:]) == {20}
    assert 270 < sum(pauses.waits) <= 300
    assert "prefix/packs/new" not in server.buckets["bucket"]  # case 45: not even an empty one


async def test_waits_are_random_up_to_their_length() -> None:
    shortest, longest = RetryPolicy(part=lambda: 0.0), RetryPolicy(part=lambda: 1.0)
    assert [shortest.wait(n, 0) for n in (1, 3, 50)] == [0, 0, 0]
    assert [longest.wait(n, 0) for n in (1, 3, 50, 5000)] == [0.5, 2, 20, 20]
    assert len({RetryPolicy().wait(5, 0) for _ in range(10)}) > 1


async def test_the_wait_that_the_service_asks_for_is_kept(server: StrictS3Server, s3: S3BlobStore, pauses: Any) -> None:
    server.faults.refuse("GET", 1, headers={"Retry-After": "7"})
    server.faults.refuse("GET", 2, headers={"Retry-After": "86400"})
    assert await s3.get(KEY) == DATA
    assert pauses.waits == [7, 20]


async def test_fewer_requests_run_at_once_after_the_service_asked_for_less(server: StrictS3Server, s3: S3BlobStore) -> None:
    """Case 32: and as many as before after a while without complaints."""
    server.faults.refuse("HEAD", 1)
    server.faults.refuse("HEAD", 2)
    server.faults.refuse("HEAD", 3)
    assert s3.requests_at_once == 16
    await s3.head(KEY)
    assert s3.requests_at_once == 2
    for _ in range(200):
        await s3.head(KEY)
    assert s3.requests_at_once == 16


async def test_other_failures_do_not_lower_the_number_of_requests(server: StrictS3Server, s3: S3BlobStore) -> None:
    server.faults.drop("HEAD", 1)
    server.faults.refuse("HEAD", 2, status=500, code="InternalError")
    await s3.head(KEY)
    assert s3.requests_at_once == 16


async def test_nothing_is_lost_when_a_third_of_all_requests_is_refused(server: StrictS3Server, s3: S3BlobStore) -> None:
    """Case 32."""
    server.faults.refuse("*", None, every=3)

    async def round_trip(number: int) -> bytes:
        await s3.put(f"packs/{number}", b"%d" % number)
        return await s3.get(f"packs/{number}")

    assert await asyncio.gather(*(round_trip(n) for n in range(60))) == [b"%d" % n for n in range(60)]
    assert {info.key for info in await _list(s3)} == {KEY, *(f"packs/{n}" for n in range(60))}
    assert s3.requests_at_once < 16


async def test_writes_of_one_key_at_once_all_come_through(server: StrictS3Server, open_store: Callable[..., S3BlobStore]) -> None:
    """Case 31: each is refused with 429 until the one before is long enough ago."""
    server.faults.write_interval = 0.05
    store = open_store(retry=RetryPolicy(first=0.02, longest=0.1))
    values = [bytes([number]) * 1000 for number in range(8)]
    await asyncio.gather(*(store.put("snapcore.json", value) for value in values))
    assert server.buckets["bucket"]["prefix/snapcore.json"] in values
    assert server.requests["PUT"] > 8


# ---- what is out of reach


async def test_a_service_that_cannot_be_reached_is_told_after_half_a_minute(no_aws: None, pauses: Any) -> None:
    with StrictS3Server() as server:
        address = server.address("bucket")
    from snapcore.stores.s3 import S3Credentials

    store = S3BlobStore(address, credentials=S3Credentials("key", "secret"), retry=pauses.policy())
    with pytest.raises(RepositoryError) as caught:
        await store.get(KEY)
    await store.close()
    assert (caught.value.code, caught.value.retryable) == (Code.STORE_UNAVAILABLE, True)
    assert "cannot be reached" in str(caught.value)
    assert 10 < sum(pauses.waits) <= 30


async def test_a_service_that_is_away_for_a_moment_while_it_throttles_is_not_given_up(
    server: StrictS3Server, s3: S3BlobStore, pauses: Any
) -> None:
    for call in range(1, 8):
        server.faults.refuse("GET", call)
    server.faults.answer_with_a_page("GET", 8)  # counts as out of reach, for which it waits half a minute only
    assert await s3.get(KEY) == DATA
    assert sum(pauses.waits) > 30


# ---- what a service refuses


async def test_requests_are_accepted_where_checksums_and_streams_are_not(server: StrictS3Server, s3: S3BlobStore) -> None:
    """Case 29: the server answers 501 to `x-amz-checksum-*`, to trailers and to `aws-chunked`."""
    for verb in VERBS:
        await VERBS[verb][0](s3)
    assert server.requests == {"GET": 1, "HEAD": 1, "PUT": 1, "DELETE": 1, "LIST": 1}


async def test_a_large_blob_is_one_request_with_its_bytes_as_the_body(server: StrictS3Server, s3: S3BlobStore) -> None:
    """Case 29: no multipart upload, whose parts some services want to have equal in size."""
    data = bytes(24 << 20)
    await s3.put("packs/large", data)
    assert server.requests == {"PUT": 1}
    assert server.buckets["bucket"]["prefix/packs/large"] == data


async def test_blobs_are_deleted_one_by_one(server: StrictS3Server, s3: S3BlobStore) -> None:
    """Case 30: the server refuses batch deletes without Content-MD5, which boto3 does not send."""
    for number in range(5):
        await s3.put(f"packs/{number}", b"data")
    await asyncio.gather(*(s3.delete(f"packs/{number}") for number in range(5)))
    assert server.requests["DELETE"] == 5
    assert server.requests["POST"] == 0
    assert list(server.buckets["bucket"]) == [f"prefix/{KEY}"]


async def test_the_strict_server_refuses_what_it_is_there_to_refuse(server: StrictS3Server) -> None:
    """Cases 29 and 30: a client as boto3 makes it is refused."""
    import boto3
    from botocore.exceptions import ClientError

    client: Any = boto3.session.Session().client(
        "s3", endpoint_url=server.url, region_name="auto", aws_access_key_id="key", aws_secret_access_key="secret"
    )
    batch = {"Objects": [{"Key": f"prefix/{KEY}"}]}
    calls: list[Callable[[], Any]] = [
        lambda: client.put_object(Bucket="bucket", Key="key", Body=b"data"),
        lambda: client.delete_objects(Bucket="bucket", Delete=batch),
        lambda: client.create_multipart_upload(Bucket="bucket", Key="key"),
    ]
    for call in calls:
        with pytest.raises(ClientError) as caught:
            await asyncio.to_thread(call)
        assert "NotImplemented" in str(caught.value) or "InvalidRequest" in str(caught.value)
    client.close()
    assert server.buckets["bucket"] == {f"prefix/{KEY}": DATA}


# ---- how much at once


async def test_requests_at_once_are_bounded(server: StrictS3Server, open_store: Callable[..., S3BlobStore]) -> None:
    store = open_store(requests_at_once=3)
    server.faults.delay("GET", 0.01)
    await asyncio.gather(*(store.get(KEY, n, 1) for n in range(30)))
    assert server.most_at_once <= 3
    assert server.requests["GET"] == 30


async def test_bytes_at_once_are_bounded(server: StrictS3Server, open_store: Callable[..., S3BlobStore]) -> None:
    store = open_store(bytes_at_once=20_000)
    server.faults.delay("*", 0.01)
    await asyncio.gather(
        *(store.get(KEY, 0, 10_000) for _ in range(6)),
        *(store.put(f"packs/{n}", bytes(10_000)) for n in range(6)),
        *(store.get(KEY) for _ in range(2)),  # of unknown size: alone
    )
    assert server.most_at_once <= 2


async def test_the_event_loop_goes_on_while_requests_wait(server: StrictS3Server, s3: S3BlobStore) -> None:
    server.faults.delay("GET", 0.2)
    turns = 0
    reading = asyncio.create_task(s3.get(KEY))
    while not reading.done():
        turns += 1
        await asyncio.sleep(0.001)
    assert reading.result() == DATA
    assert turns > 5


# ---- giving up


@pytest.mark.parametrize("verb", ["GET", "PUT"])
async def test_a_cancelled_request_ends_at_once_and_close_waits_for_its_thread(
    server: StrictS3Server, s3: S3BlobStore, verb: str
) -> None:
    await s3.head(KEY)  # the client is made
    server.faults.delay(verb, 0.3)
    tasks = [asyncio.ensure_future(VERBS[verb][0](s3)) for _ in range(40)]
    while not server.requests[verb]:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    for task in tasks:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(result) for result in ended} == {asyncio.CancelledError}
    await s3.close()
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("snapcore-s3")] == []
    assert server.requests[verb] <= 16  # those that waited for their turn were never made
    assert s3._requests.limit.running == 0
    assert server.buckets["bucket"] == {f"prefix/{KEY}": DATA}


async def test_a_request_that_waits_to_be_repeated_can_be_cancelled(
    server: StrictS3Server, open_store: Callable[..., S3BlobStore]
) -> None:
    waiting = asyncio.Event()

    async def sleep(seconds: float) -> None:
        waiting.set()
        await asyncio.Event().wait()

    store = open_store(retry=RetryPolicy(sleep=sleep))
    server.faults.refuse("GET", None)
    reading = asyncio.create_task(store.get(KEY))
    await asyncio.wait_for(waiting.wait(), 30)
    assert store._requests.limit.running == 0  # it holds no turn while it waits
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert server.requests["GET"] == 1


async def test_a_closed_store_says_so(s3: S3BlobStore) -> None:
    await s3.close()
    with pytest.raises(RepositoryError) as caught:
        await s3.get(KEY)
    assert caught.value.code is Code.INVALID_REQUEST


def test_a_store_outlives_an_event_loop(server: StrictS3Server, no_aws: None) -> None:
    from snapcore.stores.s3 import S3Credentials

    store = S3BlobStore(server.address("bucket/prefix"), credentials=S3Credentials("key", "secret"))
    assert asyncio.run(store.get(KEY)) == DATA
    assert asyncio.run(store.get(KEY)) == DATA
    asyncio.run(store.close())
