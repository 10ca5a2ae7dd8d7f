"""What E2B's client raises, as snapcore's errors. No message repeats a key or a token, and no cause is kept that might."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

from snapcore.errors import Code, ProviderError, printable

__all__ = ["closed", "e2b_module", "gone", "lost", "of_the_client", "retried", "translated"]

ATTEMPTS: Final = 4
FIRST_PAUSE: Final = 0.2
MAX_WORDS: Final = 300
CLIENT: Final = ("e2b", "httpx", "httpcore", "connectrpc", "pyqwest")

T = TypeVar("T")


def e2b_module() -> Any:
    """The package `e2b`, imported now. Raises `ProviderError` `MISSING_EXTRA`."""
    try:
        import e2b
    except ImportError as error:
        raise ProviderError(
            "E2B's client is not installed.", code=Code.MISSING_EXTRA, hint="Install it: pip install 'snapcore[e2b]'."
        ) from error
    return e2b


def gone(what: str) -> ProviderError:
    """There is no such sandbox, or it does not run any more."""
    return ProviderError(
        f"The E2B sandbox {what} does not run: it was killed, was paused, or reached its timeout.",
        code=Code.NO_SANDBOX,
        hint="Opening it again resumes a paused one. A longer `timeout`, or on_timeout='pause', keeps it from ending.",
    )


def lost(what: str, *, retryable: bool = True) -> ProviderError:
    """The connection failed, or what came over it cannot be right."""
    return ProviderError(
        f"The E2B sandbox cannot be reached: {what}.",
        code=Code.SANDBOX_UNAVAILABLE,
        hint="Try again; if it stays, see whether the sandbox still runs.",
        retryable=retryable,
    )


def closed() -> ProviderError:
    """The handle was closed."""
    return ProviderError("This handle is closed.", code=Code.SANDBOX_UNAVAILABLE, hint="Open the sandbox again.")


def translated(error: BaseException, sandbox_id: str, secrets: tuple[str, ...] = ()) -> ProviderError:
    """The error to raise for one of the client's. `secrets` are what its words must not show."""
    e2b = e2b_module()
    words = _words(error, secrets)
    if isinstance(error, (e2b.SandboxNotFoundException, e2b.SandboxNotRunningException)):
        return gone(sandbox_id)
    if isinstance(error, e2b.AuthenticationException):
        missing = str(error).startswith("API key is required")  # the client raised it, and asked nobody
        return ProviderError(
            "There is no key for E2B." if missing else "E2B does not accept the key.",
            code=Code.ACCESS_DENIED,
            hint="Set E2B_API_KEY, or pass `api_key`, of the team that the sandbox belongs to.",
        )
    if isinstance(error, e2b.RateLimitException):
        return ProviderError(
            f"E2B refuses more for now: {words}",
            code=Code.SANDBOX_UNAVAILABLE,
            hint="Wait, or end sandboxes that are not needed, or raise the team's limits.",
            retryable=True,
        )
    if isinstance(error, e2b.NotEnoughSpaceException):
        return ProviderError("The E2B sandbox's disk is full.", code=Code.SANDBOX_FULL)
    if isinstance(error, e2b.InvalidArgumentException):
        return ProviderError(f"E2B does not take the request: {words}", code=Code.NOT_CAPABLE)
    status = getattr(error, "status_code", None)
    if status == 404:
        return ProviderError(f"E2B does not know what was asked for: {words}", code=Code.NO_SANDBOX)
    if isinstance(status, int) and 400 <= status < 500:
        return ProviderError(f"E2B refuses the request: {words}", code=Code.NOT_CAPABLE)
    return lost(words.rstrip("."))


def _words(error: BaseException, secrets: tuple[str, ...]) -> str:
    text = str(error) or type(error).__name__
    for secret in secrets:
        text = text.replace(secret, "***") if secret else text
    text = printable(" ".join(text.split()))
    return text if len(text) <= MAX_WORDS else text[:MAX_WORDS] + "..."


def of_the_client(error: BaseException) -> bool:
    """Whether E2B's client, or what it is built on, raised this. It raises plain `Exception`s too."""
    return type(error) is Exception or type(error).__module__.partition(".")[0] in CLIENT


async def retried(
    work: Callable[[], Awaitable[T]], sandbox_id: str, secrets: tuple[str, ...] = (), *, attempts: int = ATTEMPTS
) -> T:
    """Do a thing that may be done twice, again when the connection failed. Raises what `translated` makes of the last failure."""
    for attempt in range(attempts):
        try:
            return await work()
        except (ValueError, KeyError, TypeError, AttributeError) as error:  # the client, over an answer it does not expect
            said = lost(f"its answer makes no sense ({type(error).__name__})")
        except Exception as error:
            if not of_the_client(error):
                raise
            said = translated(error, sandbox_id, secrets)
        if not said.retryable or attempt == attempts - 1:
            raise said
        await asyncio.sleep(FIRST_PAUSE * 2**attempt)
    raise AssertionError("unreachable")
