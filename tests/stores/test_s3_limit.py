"""The number of S3 requests at once: bounded, halved when the service asks for less, and nothing leaks when callers give up.

Case 32: fewer at once.
"""

import asyncio
import threading

import pytest

from snapcore.stores.s3_limit import AdaptiveLimit, Turn


async def settle() -> None:
    """Let everything that can go on go on."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_no_more_turns_than_the_limit_are_given_and_in_order() -> None:
    limit = AdaptiveLimit(2, 1000)
    turns: list[Turn] = []
    order: list[int] = []

    async def take(number: int) -> None:
        turns.append(await limit.acquire(0))
        order.append(number)

    tasks = [asyncio.create_task(take(number)) for number in range(4)]
    await settle()
    assert (order, limit.running, limit.waiting) == ([0, 1], 2, 2)
    limit.release(turns[0])
    await settle()
    assert (order, limit.running, limit.waiting) == ([0, 1, 2], 2, 1)
    limit.release(turns[1])
    await asyncio.gather(*tasks)
    assert (order, limit.running, limit.waiting) == ([0, 1, 2, 3], 2, 0)


async def test_bytes_at_once_are_bounded_and_what_is_larger_runs_alone() -> None:
    limit = AdaptiveLimit(10, 100)
    first, second = await limit.acquire(60), await limit.acquire(40)
    third = asyncio.create_task(limit.acquire(1))
    await settle()
    assert not third.done()
    limit.release(second)
    large = asyncio.create_task(limit.acquire(500))
    limit.release(await third)
    await settle()
    assert not large.done()
    limit.release(first)
    limit.release(await large)
    assert limit.running == 0


async def test_requests_that_were_under_way_together_halve_it_once() -> None:
    limit = AdaptiveLimit(16, 1000)
    together = [await limit.acquire(0) for _ in range(8)]
    for turn in together:
        limit.slowed(turn)
        limit.release(turn)
    assert limit.limit == 8
    later = await limit.acquire(0)
    limit.slowed(later)
    assert limit.limit == 4
    limit.release(later)


async def test_it_never_falls_below_one_and_creeps_back_to_the_most() -> None:
    limit = AdaptiveLimit(4, 1000)
    for _ in range(10):
        turn = await limit.acquire(0)
        limit.slowed(turn)
        limit.release(turn)
    assert limit.limit == 1
    for _ in range(3):
        limit.succeeded()
    assert 1 < limit.limit < 4
    for _ in range(100):
        limit.succeeded()
    assert limit.limit == 4


@pytest.mark.parametrize("granted", [False, True])
async def test_a_cancelled_wait_takes_no_turn(granted: bool) -> None:
    limit = AdaptiveLimit(1, 1000)
    turn = await limit.acquire(0)
    waiting = asyncio.create_task(limit.acquire(0))
    await settle()
    if granted:
        limit.release(turn)  # the turn is on its way, and the wait is cancelled before it arrives
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    if not granted:
        limit.release(turn)
    assert (limit.running, limit.waiting) == (0, 0)


def test_a_turn_can_be_given_back_by_a_thread_after_its_loop_was_closed() -> None:
    limit = AdaptiveLimit(1, 1000)
    turn = asyncio.run(limit.acquire(0))
    thread = threading.Thread(target=limit.release, args=(turn,))
    thread.start()
    thread.join()
    assert limit.running == 0
    limit.release(asyncio.run(limit.acquire(0)))
