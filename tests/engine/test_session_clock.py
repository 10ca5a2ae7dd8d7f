"""Captures by hand beside a session, while the database's clock is set forward and back: what is replayed is what they hold."""

from pathlib import Path

import pytest

from snapcore.opening import borrowed
from snapcore.providers.local import LocalProvider
from snapcore.stores.memory import MemoryBlobStore
from snapcore.stores.sql import SqlCheckpointStore
from snapcore.testing import ManualClock

from .session_helpers import contents


@pytest.mark.parametrize("jumps", [(0, 0, 0), (-3600, 0, 0), (3600, -7200, 0), (0, 3600, -3600), (100, -3600, -3600)])
async def test_a_capture_by_hand_is_resumed_with_what_came_before_it(tmp_path: Path, jumps: tuple[float, float, float]) -> None:
    clock = ManualClock()
    store = SqlCheckpointStore("sqlite://", clock=clock)
    provider = LocalProvider(tmp_path / "sandboxes")
    async with borrowed(MemoryBlobStore(), store) as repo:
        session = await repo.session(provider, thread_id="t")
        await session.exec("echo 1 >> log")
        clock.advance(jumps[0])
        await session.exec("echo 2 >> log")
        clock.advance(jumps[1])
        await repo.capture(session.handle, thread_id="t", label="by hand")
        clock.advance(jumps[2])
        await session.exec("echo 3 >> log")
        await session.close()
        async with await repo.resume("t", label="by hand", provider=provider) as session:
            assert contents(session) == {"log": b"1\n2\n"}
            assert session.replaying == 2
            assert [(await session.exec(f"echo {n} >> log")).replayed for n in (1, 2, 3)] == [True, True, False]
            assert contents(session) == {"log": b"1\n2\n3\n"}
    await store.close()
