"""A thread's ledger in Postgres: workers on several machines share it."""

import asyncio
from pathlib import Path

import pytest

import snapcore
from snapcore.errors import CheckpointWriterLostError
from snapcore.session import Session

from .session_helpers import Counter, contents, local


async def test_a_session_is_taken_over_replayed_and_resumed(tmp_path: Path, postgres_url: str) -> None:
    counter = Counter(tmp_path / "runs")

    async def program(session: Session) -> list[bool]:
        first = await session.exec(counter("a", "seq 50000"))
        await session.write_file("f", "x")
        await session.checkpoint("one")
        second = await session.exec(counter("b", "echo b > b"))
        assert len(first.stdout) == 288894
        return [first.replayed, second.replayed]

    async with (
        snapcore.open_repository(tmp_path / "repo", database=postgres_url) as here,
        snapcore.open_repository(tmp_path / "repo", database=postgres_url) as there,
    ):
        old = await here.session(local(tmp_path), thread_id="t")
        assert await program(old) == [False, False]
        async with await there.session(local(tmp_path), thread_id="t", replay="strict") as new:
            with pytest.raises(CheckpointWriterLostError):
                await old.exec(counter("x"))
            assert await program(new) == [True, True]
            await new.checkpoint("two")
        await old.close()
        async with await here.resume(new.sandbox_id, provider=local(tmp_path)) as resumed:
            assert await program(resumed) == [True, True]
            assert contents(resumed) == {"f": b"x", "b": b"b\n"}
            await asyncio.gather(*(resumed.exec(f"echo {n} >> log") for n in range(5)))
        assert (await here.verify(read_data=True)).ok
        assert counter.runs == ["a", "b"]
        events = await there.events("t")
        assert [event.sequence for event in events] == list(range(1, len(events) + 1))
