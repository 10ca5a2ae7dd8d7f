"""History calls whose answer is lost, and ids that the caller chooses."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from snapcore import restoring
from snapcore.errors import CheckpointConflictError, Code, RepositoryError, SnapshotError
from snapcore.repository import Repository
from snapcore.testing import Faults, with_faults

Make = Callable[..., Path]


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
async def faulty(repo: Repository, faults: Faults, make: Make) -> Repository:
    """A repository whose database fails when told to; thread `t` has two checkpoints, with the ids `one` and `two`."""
    for name in ("one", "two"):
        await repo.capture(make({"a": name}), thread_id="t", checkpoint_id=name)
    return Repository(repo.blobs, with_faults(repo.checkpoints, faults), repo.config)


@pytest.mark.parametrize("fault", ["lose_response", "fail"])
async def test_history_calls_are_done_once_whatever_becomes_of_the_answer(
    faulty: Repository, faults: Faults, fault: str, tmp_path: Path
) -> None:
    for method in ("fork", "set_label", "delete"):
        getattr(faults, fault)(method, 1)
    forked = await faulty.fork("t", "one", to_thread_id="u")
    assert await faulty.list("u") == [forked]
    assert forked.source_id == "one"
    labelled = await faulty.label("t", "one", "kept")
    assert (labelled.label, labelled.reason) == ("kept", "named")
    assert await faulty.get("t", label="kept") == labelled
    assert (await faulty.delete_head("t")).id == "two"
    assert [c.id for c in await faulty.list("t")] == ["one"]
    # every lease was given up, once
    await faulty.capture(tmp_path / "work", thread_id="t")
    await faulty.capture(tmp_path / "work", thread_id="u")
    assert (await faulty.verify(read_data=True)).ok


async def test_a_database_that_stays_out_of_reach_is_told(faulty: Repository, faults: Faults) -> None:
    faults.fail("fork", None)
    with pytest.raises(RepositoryError) as caught:
        await faulty.fork("t", to_thread_id="u")
    assert caught.value.retryable
    faults.clear()
    assert await faulty.list("u") == []
    assert (await faulty.fork("t", to_thread_id="u")).source_id == "two"


async def test_forks_and_rewinds_take_the_id_that_is_given(faulty: Repository) -> None:
    fork = await faulty.fork("t", "one", to_thread_id="u", new_id="mine")
    rewind = await faulty.rewind("t", "one", new_id="again")
    assert (fork.id, rewind.id) == ("mine", "again")
    assert await faulty.get("u", "mine") == fork
    assert await faulty.get("t") == rewind
    with pytest.raises(CheckpointConflictError) as taken:
        await faulty.rewind("t", "one", new_id="two")
    assert taken.value.code == Code.DUPLICATE_ID
    with pytest.raises(SnapshotError) as invalid:
        await faulty.rewind("t", "one", new_id="a/b")
    assert invalid.value.code == Code.INVALID_ID
    with pytest.raises(SnapshotError) as invalid:
        await faulty.fork("t", to_thread_id="v", new_id="latest")
    assert invalid.value.code == Code.INVALID_ID


async def test_a_pin_is_renewed_again_after_a_renewal_that_failed(
    faulty: Repository, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restore may take hours; one lost connection must not leave its content to gc."""
    monkeypatch.setattr(restoring, "PIN_SECONDS", 0.03)
    renewed = asyncio.Event()

    async def tell() -> None:
        renewed.set()

    faults.fail("renew_pin", 1)
    faults.run("renew_pin", tell, 3)
    async with restoring.pinned(faulty._engine, (await faulty.list("t"))[0]):
        await asyncio.wait_for(renewed.wait(), 20)
