"""Faults in a store: what a wrapper with the same interface can make go wrong, at a call chosen by its number.

    faults = Faults()
    faults.lose_response("append", 1)
    store = with_faults(store, faults)

Methods are named as in the protocol; `"*"` stands for all of them and counts them together. Calls are numbered from 1;
`None` means each call.
"""

import asyncio
import inspect
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from snapcore.errors import Code, RepositoryError

__all__ = ["Crash", "Faults", "with_faults"]

S = TypeVar("S")


class Crash(BaseException):
    """The process "ended" here. Not an `Exception`, so that no handler of errors goes on after it."""


@dataclass(frozen=True, slots=True)
class _Fault:
    method: str
    call: int | None
    before: Callable[[], Awaitable[None]] | None = None
    after: Callable[[Any], Any] | None = None

    def strikes(self, method: str, number: int, total: int) -> bool:
        if self.method == "*":
            return self.call in (None, total)
        return self.method == method and self.call in (None, number)


class Faults:
    """A plan of faults, and a count of the calls that were made.

    `calls` counts by method; `log` names the methods in the order of their calls.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.log: list[str] = []
        self._faults: list[_Fault] = []

    def clear(self) -> None:
        """Forget the plan and the counts."""
        self.calls.clear()
        self.log.clear()
        self._faults.clear()

    def fail(self, method: str, call: int | None = 1, error: BaseException | None = None) -> None:
        """Raise `error` (a retryable `STORE_UNAVAILABLE`) instead of doing the work."""

        async def before() -> None:
            raise error or _unavailable()

        self._faults.append(_Fault(method, call, before=before))

    def lose_response(self, method: str, call: int | None = 1) -> None:
        """Do the work, then raise a retryable `STORE_UNAVAILABLE`: the answer was lost on its way."""

        def after(result: Any) -> Any:
            raise _unavailable()

        self._faults.append(_Fault(method, call, after=after))

    def crash(self, method: str, call: int | None = 1, *, exit_code: int | None = None, work_done: bool = True) -> None:
        """End after the work (or before it): raise `Crash`, or leave the process at once with `exit_code`."""

        def end(result: Any = None) -> Any:
            if exit_code is not None:
                os._exit(exit_code)
            raise Crash

        async def before() -> None:
            end()

        fault = _Fault(method, call, after=end) if work_done else _Fault(method, call, before=before)
        self._faults.append(fault)

    def delay(self, method: str, seconds: float, call: int | None = None) -> None:
        """Wait before the work."""

        async def before() -> None:
            await asyncio.sleep(seconds)

        self._faults.append(_Fault(method, call, before=before))

    def truncate(self, method: str, keep: int, call: int | None = 1) -> None:
        """Return only the first `keep` bytes of what the method returns."""
        self._faults.append(_Fault(method, call, after=lambda result: result[:keep]))

    def run(self, method: str, action: Callable[[], Awaitable[None]], call: int | None = 1) -> None:
        """Do something of the test's own before the work: another writer's step, for one."""
        self._faults.append(_Fault(method, call, before=action))

    def _started(self, method: str) -> list[_Fault]:
        self.calls[method] += 1
        self.log.append(method)
        return [fault for fault in self._faults if fault.strikes(method, self.calls[method], len(self.log))]


def with_faults(store: S, faults: Faults) -> S:
    """The store behind a wrapper with the same interface, on which `faults` strike."""
    return cast("S", _Faulty(store, faults))


class _Faulty:
    def __init__(self, inner: object, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._inner, name)
        if inspect.isasyncgenfunction(member):
            return lambda *args, **kwargs: self._iterate(name, member(*args, **kwargs))
        if inspect.iscoroutinefunction(member):
            return lambda *args, **kwargs: self._call(name, member, args, kwargs)
        return member

    async def _call(self, name: str, method: Callable[..., Awaitable[Any]], args: Any, kwargs: Any) -> Any:
        struck = self._faults._started(name)
        await _strike_before(struck)
        return _strike_after(struck, await method(*args, **kwargs))

    async def _iterate(self, name: str, items: AsyncIterator[Any]) -> AsyncIterator[Any]:
        struck = self._faults._started(name)
        await _strike_before(struck)
        for item in _strike_after(struck, [item async for item in items]):
            yield item


async def _strike_before(struck: list[_Fault]) -> None:
    for fault in struck:
        if fault.before is not None:
            await fault.before()


def _strike_after(struck: list[_Fault], result: Any) -> Any:
    for fault in struck:
        if fault.after is not None:
            result = fault.after(result)
    return result


def _unavailable() -> RepositoryError:
    return RepositoryError("The store did not answer.", code=Code.STORE_UNAVAILABLE, retryable=True)
