"""The faults that other tests rely on strike where they are told to, and nowhere else."""

import subprocess
import sys

import pytest

from snapcore.errors import Code, RepositoryError
from snapcore.protocols import BlobInfo
from snapcore.stores.memory import MemoryBlobStore
from snapcore.testing import Crash, Faults, with_faults


@pytest.fixture
def inner() -> MemoryBlobStore:
    return MemoryBlobStore()


@pytest.fixture
def faults() -> Faults:
    return Faults()


async def test_without_faults_the_wrapper_only_counts(inner: MemoryBlobStore, faults: Faults) -> None:
    store = with_faults(inner, faults)
    await store.put("a", b"data")
    assert await store.get("a", 1, length=2) == b"at"
    assert [info async for info in store.list("a")] == [BlobInfo("a", 4)]
    assert store.url == inner.url
    assert faults.log == ["put", "get", "list"]
    assert faults.calls == {"put": 1, "get": 1, "list": 1}


async def test_a_call_fails_by_its_number_without_doing_the_work(inner: MemoryBlobStore, faults: Faults) -> None:
    faults.fail("put", 2)
    store = with_faults(inner, faults)
    await store.put("a", b"1")
    with pytest.raises(RepositoryError) as caught:
        await store.put("b", b"2")
    assert (caught.value.code, caught.value.retryable) == (Code.STORE_UNAVAILABLE, True)
    await store.put("c", b"3")
    assert list(inner.blobs) == ["a", "c"]


async def test_all_methods_are_counted_together(inner: MemoryBlobStore, faults: Faults) -> None:
    faults.fail("*", 3, OSError("third"))
    store = with_faults(inner, faults)
    await store.put("a", b"1")
    assert await store.head("a")
    with pytest.raises(OSError, match="third"):
        _ = [info async for info in store.list()]
    assert await store.head("a")


async def test_a_lost_response_has_done_the_work(inner: MemoryBlobStore, faults: Faults) -> None:
    faults.lose_response("put")
    with pytest.raises(RepositoryError):
        await with_faults(inner, faults).put("a", b"1")
    assert inner.blobs == {"a": b"1"}


@pytest.mark.parametrize("work_done", [True, False])
async def test_a_crash_is_no_error_that_a_handler_would_catch(inner: MemoryBlobStore, faults: Faults, work_done: bool) -> None:
    faults.crash("put", work_done=work_done)
    with pytest.raises(Crash):
        await with_faults(inner, faults).put("a", b"1")
    assert bool(inner.blobs) is work_done
    assert not issubclass(Crash, Exception)


def test_a_crash_can_end_the_process() -> None:
    script = """
import asyncio
from snapcore.stores.memory import MemoryBlobStore
from snapcore.testing import Faults, with_faults
faults = Faults()
faults.crash("put", exit_code=7)
asyncio.run(with_faults(MemoryBlobStore(), faults).put("a", b"1"))
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 7


async def test_a_body_is_cut_short_once(inner: MemoryBlobStore, faults: Faults) -> None:
    faults.truncate("get", 2)
    store = with_faults(inner, faults)
    await store.put("a", b"data")
    assert [await store.get("a") for _ in range(2)] == [b"da", b"data"]


async def test_a_cleared_plan_strikes_no_more(inner: MemoryBlobStore, faults: Faults) -> None:
    faults.fail("put", None)
    store = with_faults(inner, faults)
    for _ in range(2):
        with pytest.raises(RepositoryError):
            await store.put("a", b"1")
    faults.clear()
    await store.put("a", b"1")
    assert faults.calls == {"put": 1}


async def test_a_delay_comes_before_the_work(inner: MemoryBlobStore, faults: Faults) -> None:
    faults.delay("put", 0.001)
    await with_faults(inner, faults).put("a", b"1")
    assert inner.blobs == {"a": b"1"}
