"""Trying out a user's blob store: what it supports, what of that snapcore needs, how fast it is.

Everything is written under a random name and removed again.
"""

import asyncio
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

from snapcore.errors import Code, SnapcoreError, SnapshotError
from snapcore.protocols import BlobInfo, BlobStore
from snapcore.registry import open_blobs, split_scheme

from .keys import MAX_KEY_LENGTH

__all__ = ["Check", "DiffersError", "ProbeReport", "probe", "probe_store"]

LARGE: Final = 16 << 20  # a pack
ROUNDS: Final = 5
Step = tuple[str, bool, Callable[[], Awaitable[str]]]  # name, whether snapcore needs it, the check


class DiffersError(Exception):
    """The store did something else than it should."""


@dataclass(frozen=True, slots=True)
class Check:
    """One ability, whether snapcore needs it, and whether it is there; `seen` says in words what came of it."""

    name: str
    needed: bool
    works: bool
    seen: str = ""


@dataclass(slots=True)
class ProbeReport:
    """What a probe found. Times are medians in seconds, rates are bytes a second; None when that did not work."""

    address: str
    checks: list[Check] = field(default_factory=list)
    put_seconds: float | None = None
    get_seconds: float | None = None
    upload_rate: float | None = None
    download_rate: float | None = None
    left_behind: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether all that snapcore needs works."""
        return all(check.works for check in self.checks if check.needed)


async def probe(address: str) -> ProbeReport:
    """Open the store at an address, try it out, and close it. Raises what opening raises."""
    scheme, rest = split_scheme(address)
    if scheme == "s3":
        from .s3 import RetryPolicy, S3BlobStore

        # somebody is waiting for this: not for minutes
        store: Any = S3BlobStore(address, retry=RetryPolicy(deadline=30.0, unreachable_deadline=5.0))
    else:
        store = open_blobs(address)
    folder = f"snapcore-test-{secrets.token_hex(8)}"
    try:
        if scheme != "file":
            return await probe_store(store, folder)
        with _folders_removed(os.path.abspath(os.path.expanduser(rest)), folder):
            return await probe_store(store, folder)
    finally:
        await store.close()


@contextmanager
def _folders_removed(root: str, folder: str) -> Iterator[None]:
    """Afterwards the folder of the probe is gone, and those that the store made for it: in other stores there are none."""
    made = [path for path in (os.path.join(root, ".tmp"), root) if not os.path.exists(path)]
    try:
        yield
    finally:
        for path in (os.path.join(root, folder), *made):
            with suppress(OSError):  # it holds something by now, or was never made
                os.rmdir(path)


async def probe_store(store: BlobStore, folder: str) -> ProbeReport:
    """Try out an open store, under `folder`, which must be a part of a key that nothing else uses."""
    run = _Probe(store, folder)
    try:
        await run.everything()
    finally:
        await run.clean_up()
    return run.report


class _Probe:
    def __init__(self, store: BlobStore, folder: str) -> None:
        self.store = store
        self.folder = folder
        self.report = ProbeReport(store.url)
        self.used: set[str] = set()

    async def everything(self) -> None:
        """All checks. Raises the error of the first: when nothing can be stored, nothing else can be tried."""
        await self.put()
        self.report.checks.append(Check("store a blob", True, True))
        steps: list[Step] = [
            ("read it back at once", True, self.read_after_write),
            ("tell its size", True, self.size),
            ("read a part of it", True, self.part),
            ("replace it", True, self.replace),
            ("tell that a blob is missing", True, self.missing),
            (f"a key of {MAX_KEY_LENGTH} characters", True, self.longest_key),
            (f"a blob of {LARGE >> 20} MiB in one request", True, self.large),
            ("delete a blob", True, self.delete),
            ("list what is there", False, self.listing),
        ]
        from .s3 import S3BlobStore

        if isinstance(self.store, S3BlobStore):
            from .s3_probe import S3Probe

            steps += S3Probe(self.store, self.key).steps()
        for name, needed, step in steps:
            try:
                self.report.checks.append(Check(name, needed, True, await step()))
            except DiffersError as error:
                self.report.checks.append(Check(name, needed, False, str(error)))
            except SnapcoreError as error:
                self.report.checks.append(Check(name, needed, False, f"{error} [{error.code}]"))

    async def clean_up(self) -> None:
        """Remove every blob that may have been stored."""
        for key in sorted(self.used):
            try:
                await self.store.delete(key)
            except SnapcoreError:
                if not self.report.checks:
                    return  # nothing was stored, and its error is the one to be told
                self.report.left_behind.append(key)

    def key(self, name: str) -> str:
        """A key of this probe; it is removed in the end."""
        key = f"{self.folder}/{name}"
        self.used.add(key)
        return key

    async def put(self) -> None:
        """Store small blobs, and measure how long one takes."""
        times = [await _timed(self.store.put(self.key(f"small-{n}"), b"0123456789")) for n in range(ROUNDS)]
        self.report.put_seconds = sorted(times)[ROUNDS // 2]

    async def read_after_write(self) -> str:
        times = []
        for number in range(ROUNDS):
            key, data = self.key(f"fresh-{number}"), secrets.token_bytes(100)
            await self.store.put(key, data)
            began = time.monotonic()
            _expect(await self.store.get(key) == data, "another content came back")
            times.append(time.monotonic() - began)
        self.report.get_seconds = sorted(times)[ROUNDS // 2]
        return ""

    async def size(self) -> str:
        key = self.key("small-0")
        _expect(await self.store.head(key) == BlobInfo(key, 10), "another size was told")
        return ""

    async def part(self) -> str:
        key = self.key("small-0")
        _expect(await self.store.get(key, 3, 4) == b"3456", "other bytes came back")
        with suppress(SnapshotError):
            await self.store.get(key, 8, 5)
            raise DiffersError("a part that lies beyond the end came back")
        return ""

    async def replace(self) -> str:
        key = self.key("small-1")
        await self.store.put(key, b"replaced")
        _expect(await self.store.get(key) == b"replaced", "the old content came back")
        return ""

    async def missing(self) -> str:
        key = self.key("never-stored")
        _expect(await self.store.head(key) is None, "a size was told")
        try:
            await self.store.get(key)
        except SnapshotError as error:
            _expect(error.code is Code.MISSING_BLOB, f"it was told as {error.code}")
            return ""
        raise DiffersError("something came back")

    async def longest_key(self) -> str:
        key = self.key("x" * (MAX_KEY_LENGTH - len(self.folder) - 1))
        await self.store.put(key, b"data")
        _expect(await self.store.get(key) == b"data", "another content came back")
        return ""

    async def large(self) -> str:
        key, data = self.key("large"), await asyncio.to_thread(secrets.token_bytes, LARGE)
        self.report.upload_rate = LARGE / max(await _timed(self.store.put(key, data)), 1e-6)
        began = time.monotonic()
        back = await self.store.get(key)
        self.report.download_rate = LARGE / max(time.monotonic() - began, 1e-6)
        _expect(back == data, "another content came back")
        return ""

    async def delete(self) -> str:
        key = self.key("small-2")
        await self.store.delete(key)
        _expect(await self.store.head(key) is None, "it is still there")
        await self.store.delete(key)
        return ""

    async def listing(self) -> str:
        wanted = [self.key(f"listed-{number}") for number in range(2)]
        for key in wanted:
            await self.store.put(key, b"data")
        found = {info.key async for info in self.store.list(f"{self.folder}/listed-")}
        _expect(found == set(wanted), "not all that was stored is told")
        return "for 'snapcore repair'"


def _expect(true: bool, otherwise: str) -> None:
    if not true:
        raise DiffersError(otherwise)


async def _timed(work: Awaitable[Any]) -> float:
    began = time.monotonic()
    await work
    return time.monotonic() - began
