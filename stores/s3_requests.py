"""How a store's requests run: each a blocking boto3 call on a thread of the store, a bounded number at once, repeated."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

from snapcore.errors import Code, RepositoryError

from .s3_address import S3Address
from .s3_client import S3Credentials, S3Settings, make_client
from .s3_errors import SERVICE_ERRORS, Trouble, refusal, retry_after, trouble
from .s3_limit import AdaptiveLimit, Turn
from .s3_retry import RetryPolicy

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

__all__ = ["S3Requests"]

T = TypeVar("T")
THREAD_NAME: Final = "snapcore-s3"


class S3Requests:
    """Runs requests of one store.

    A request that a passing error strikes is repeated until it comes through or the policy's deadline is over; between two
    attempts it holds no turn and no thread. A cancelled one is not repeated; an attempt under way goes on on its thread, and
    keeps its turn until it is over. `close` waits for those.
    """

    def __init__(self, address: S3Address, credentials: S3Credentials | None, settings: S3Settings, retry: RetryPolicy) -> None:
        self._address = address
        self._credentials = credentials
        self._settings = settings
        self._retry = retry
        self._threads = concurrent.futures.ThreadPoolExecutor(settings.requests_at_once, thread_name_prefix=THREAD_NAME)
        self._making = threading.Lock()
        self._client: S3Client | None = None
        self._closed = False
        self.limit = AdaptiveLimit(settings.requests_at_once, settings.bytes_at_once)

    async def run(self, what: str, call: Callable[["S3Client"], T], cost: int = 0) -> T:
        """What `call` returns for the client. `what` begins the message of an error, `cost` is the body's size in bytes.

        Raises `RepositoryError`, and what `call` itself raises that is no error of the service or of the network.
        """
        failures, first_failure, unreachable_since = 0, None, None
        while True:
            turn = await self.limit.acquire(cost)
            try:
                result = await self._attempt(turn, call)
            except SERVICE_ERRORS as caught:
                error = caught
            else:
                self.limit.succeeded()
                return result
            kind, now = trouble(error), self._retry.clock()
            if kind is Trouble.THROTTLED:
                self.limit.slowed(turn)
            failures += 1
            first_failure = now if first_failure is None else first_failure
            unreachable_since = (unreachable_since or now) if kind is Trouble.UNREACHABLE else None
            wait = self._retry.wait(failures, retry_after(error))
            if (
                kind is Trouble.FINAL
                or now + wait - first_failure > self._retry.deadline
                or (unreachable_since is not None and now + wait - unreachable_since > self._retry.unreachable_deadline)
            ):
                raise refusal(error, what, self._address.url) from None
            await self._retry.sleep(wait)

    async def close(self) -> None:
        """Wait for requests that are under way, then let go of threads and connections. Idempotent."""
        self._closed = True
        await asyncio.to_thread(self._threads.shutdown)
        client, self._client = self._client, None
        if client is not None:
            client.close()

    async def _attempt(self, turn: Turn, call: Callable[["S3Client"], T]) -> T:
        try:
            self._check_open()
            running = self._threads.submit(self._work, call)
        except BaseException:
            self.limit.release(turn)
            raise
        # when the thread is done with it, not when the caller stops waiting: the request is under way until then
        running.add_done_callback(lambda _: self.limit.release(turn))
        return await asyncio.wrap_future(running)

    def _work(self, call: Callable[["S3Client"], T]) -> T:
        with self._making:
            if self._client is None:
                self._client = make_client(self._address, self._credentials, self._settings)
            client = self._client
        return call(client)

    def _check_open(self) -> None:
        if self._closed:
            raise RepositoryError(f"The store {self._address.url} is closed.", code=Code.INVALID_REQUEST)
