"""`Repository.usage`: who needs which stored bytes, against an oracle that asks each checkpoint by itself."""

import random
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import snapcore
from snapcore import idmap, sharing
from snapcore import usage as usage_module
from snapcore.idmap import IdMap
from snapcore.maintenance import Roots
from snapcore.model import Checkpoint, ContentRef, PackState, split_ids
from snapcore.packs import pack_key
from snapcore.reachability import Reachability
from snapcore.repository import Repository
from snapcore.sharing import union
from snapcore.usage import CheckpointUsage, ThreadUsage

Make = Callable[..., Path]
PRESENT = (PackState.LIVE, PackState.CONDEMNED)


async def records_of(repo: Repository, c: Checkpoint, sizes: dict[bytes, int]) -> set[bytes]:
    """All records that a checkpoint needs, by a walk of its own."""
    contents: list[ContentRef] = [c.conversation, *c.artifacts.values()]
    walk = Reachability(repo._engine)
    roots = Roots(
        mark=0,
        now=0,
        records=frozenset([c.record_id]),
        manifests=frozenset(root.manifest for root in c.roots),
        chunks=frozenset(i for ref in contents for i in split_ids(ref.chunks)),
        chunk_lists=frozenset(ref.chunk_list for ref in contents if ref.chunk_list),
    )
    await walk.walk(roots)
    return {i for i in sizes if i in walk.live}


async def stored_sizes(repo: Repository) -> dict[bytes, int]:
    sizes: dict[bytes, int] = {}
    after = 0
    while packs := await repo.checkpoints.pack_contents(after):
        after = packs[-1].number
        sizes |= {i: stored for pack in packs if pack.state in PRESENT for i, _, stored in pack.records}
    return sizes


async def agrees_with_the_oracle(repo: Repository) -> None:
    found = await repo.usage(checkpoints=True)
    sizes = await stored_sizes(repo)
    all_of = [c for t in await repo.threads() for c in await repo.list(t.thread_id)]
    all_of.sort(key=lambda c: (c.created_at, c.id.encode()))
    needs = [(c, await records_of(repo, c, sizes)) for c in all_of]

    def total(ids: set[bytes]) -> int:
        return sum(sizes[i] for i in ids)

    expected: list[CheckpointUsage] = []
    before: set[bytes] = set()
    held = await ledger_records(repo)
    for c, ids in needs:
        others = set().union(*(others for other, others in needs if other is not c), set())
        adds, only = total(ids - before), total(ids - others - held)
        expected.append(CheckpointUsage(c.thread_id, c.id, c.created_at, c.label, c.totals.bytes, adds, only))
        before |= ids
    assert list(found.checkpoints) == expected

    names = sorted({c.thread_id for c in all_of})
    for name, thread in zip(names, found.threads, strict=True):
        own: set[bytes] = set().union(*(ids for c, ids in needs if c.thread_id == name))
        others = set().union(*(ids for c, ids in needs if c.thread_id != name), set())
        assert thread == ThreadUsage(
            name,
            sum(c.thread_id == name for c in all_of),
            sum(c.totals.bytes for c in all_of if c.thread_id == name),
            total(own),
            sum(each.adds_bytes for each in expected if each.thread_id == name),
            total(own - others - held),
        )

    packs = [p for p in await repo.checkpoints.packs() if p.state in PRESENT]
    assert found.stored_bytes == sum(p.size for p in packs)
    assert found.content_bytes == sum(sizes.values())
    assert found.needed_bytes == sum(each.adds_bytes for each in found.checkpoints) == total(before)
    parts = found.needed_bytes + found.held_bytes + found.unneeded_bytes + found.overhead_bytes
    assert parts == found.stored_bytes
    assert 0 <= found.overhead_bytes <= 4_096 * len(packs) + 128 * len(sizes)


async def ledger_records(repo: Repository) -> set[bytes]:
    """Records that outputs in the ledger need."""
    found: set[bytes] = set()
    for name in {t.thread_id for t in await repo.threads()}:
        for event in await repo.events(name):
            for output in (event.stdout, event.stderr):
                if output.ref is not None:
                    found |= set(split_ids(output.ref.chunks))
    return found


@contextmanager
def few_at_once() -> Iterator[None]:
    """Tables that fill up after a few records, and reads of a few at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(idmap, "SMALL", 3)
        patch.setattr(sharing, "COMPACT_AT", 4)
        patch.setattr(usage_module, "RECORDS_AT_ONCE", 2)
        patch.setattr(usage_module, "PLACES_AT_ONCE", 5)
        patch.setattr(usage_module, "WINDOW", 11)
        yield


async def random_step(repo: Repository, work: Path, chance: random.Random, number: int) -> None:
    threads = [t.thread_id for t in await repo.threads()]
    thread = chance.choice(threads) if threads and chance.random() < 0.7 else f"t{number}"
    known = await repo.list(thread)
    kind = chance.choice(["capture"] * 4 + ["fork", "rewind", "delete", "gc"])
    if kind == "fork" and known:
        await repo.fork(thread, chance.choice(known).id, to_thread_id=f"fork{number}")
    elif kind == "rewind" and known:
        await repo.rewind(thread, chance.choice(known).id)
    elif kind == "delete" and known:
        await repo.delete(thread, chance.choice(known).id)
    elif kind == "gc":
        await repo.gc(grace=chance.choice([0, 3600]))
    else:
        for _ in range(chance.randrange(4)):
            file = work / f"folder{chance.randrange(3)}" / f"file{chance.randrange(40)}"
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(chance.randbytes(chance.choice([0, 10, 5_000])) if chance.random() < 0.8 else b"the same")
        await repo.capture(
            work, thread_id=thread, conversation=[chance.choice(["a", "b"])], artifacts={"log": chance.randbytes(2)}
        )


@pytest.mark.parametrize("seed", range(4))
async def test_random_histories_agree_with_an_oracle(memory_repo: Repository, work: Path, seed: int) -> None:
    chance = random.Random(seed)
    for i in range(200):
        (work / f"base{i:03}").write_bytes(chance.randbytes(20))
    for number in range(25):
        await random_step(memory_repo, work, chance, number)
    await agrees_with_the_oracle(memory_repo)
    found = await memory_repo.usage(checkpoints=True)
    with few_at_once():
        assert await memory_repo.usage(checkpoints=True) == found


async def test_a_large_file_and_a_tree_of_many_pages(memory_repo: Repository, work: Path, make: Make) -> None:
    chance = random.Random(1)
    # with each of these names a page ends: so many pages need an index of several levels
    names = [name for name in (f"f{i:05}" for i in range(40_000)) if not zlib.crc32(name.encode()) & 63]
    make({name: name for name in names})
    (work / "large").write_bytes(chance.randbytes(70 << 20))  # its ids are in a list
    await memory_repo.capture(work, thread_id="a")
    make({names[7]: "other"})
    await memory_repo.capture(work, thread_id="a")
    await memory_repo.capture(work, thread_id="b", artifacts={"copy": (work / "large").read_bytes()})
    await agrees_with_the_oracle(memory_repo)


async def test_what_a_thread_shares_is_not_its_own(memory_repo: Repository, work: Path, make: Make) -> None:
    make({"shared": random.Random(2).randbytes(100_000)})
    await memory_repo.capture(work, thread_id="a")
    await memory_repo.fork("a", to_thread_id="b")
    make({"new": random.Random(3).randbytes(50_000)})
    await memory_repo.capture(work, thread_id="b")
    a, b = (await memory_repo.usage()).threads
    assert a.logical_bytes == 100_000
    assert b.logical_bytes == 250_000
    assert a.refers_bytes > 100_000
    assert b.refers_bytes > 150_000
    assert a.only_bytes < 5_000
    assert 50_000 < b.only_bytes < 60_000
    assert a.adds_bytes > 100_000
    assert 50_000 < b.adds_bytes < 60_000


async def test_what_goes_with_a_thread_is_what_a_gc_frees(repo: Repository, work: Path, make: Make) -> None:
    make({"shared": random.Random(2).randbytes(300_000)})
    await repo.capture(work, thread_id="a")
    make({"new": random.Random(3).randbytes(200_000)})
    await repo.capture(work, thread_id="b")
    before = await repo.usage()
    await repo.delete_head("b")
    deleted = await repo.usage()
    assert deleted.unneeded_bytes == before.threads[1].only_bytes
    await repo.gc(grace=0)
    after = await repo.usage()
    assert after.unneeded_bytes == 0
    assert after.content_bytes == before.content_bytes - before.threads[1].only_bytes
    assert after.stored_bytes <= before.stored_bytes - before.threads[1].only_bytes


async def test_what_only_a_ledger_needs_is_held(tmp_path: Path) -> None:
    from snapcore.providers.local import LocalProvider

    async with snapcore.open_repository("memory://") as repo:
        async with await repo.session(LocalProvider(tmp_path / "boxes"), thread_id="t") as s:
            await s.exec("head -c 100000 /dev/urandom")
            await s.checkpoint()
        found = await repo.usage(checkpoints=True)
        assert 100_000 <= found.held_bytes < 101_000
        await agrees_with_the_oracle(repo)


async def test_one_thread_is_told_alone_and_counted_among_all(memory_repo: Repository, work: Path, make: Make) -> None:
    make({"a": "x"})
    await memory_repo.capture(work, thread_id="a")
    await memory_repo.capture(work, thread_id="b", label="second")
    found = await memory_repo.usage("b", checkpoints=True)
    assert [t.thread_id for t in found.threads] == ["b"]
    assert [(c.thread_id, c.label) for c in found.checkpoints] == [("b", "second")]
    assert found.checkpoints[0].adds_bytes == found.threads[0].adds_bytes == found.threads[0].only_bytes
    assert found.needed_bytes > found.threads[0].adds_bytes
    assert (await memory_repo.usage()).checkpoints == ()


async def test_an_empty_repository_and_a_thread_without_checkpoints(memory_repo: Repository) -> None:
    found = await memory_repo.usage(checkpoints=True)
    assert (found.threads, found.checkpoints, found.stored_bytes, found.needed_bytes) == ((), (), 0, 0)
    with pytest.raises(snapcore.SnapshotError) as caught:
        await memory_repo.usage("nobody")
    assert caught.value.code == snapcore.Code.MISSING_CHECKPOINT


async def test_pages_that_many_checkpoints_share_are_read_once(memory_repo: Repository, work: Path, make: Make) -> None:
    make({f"f{i:04}": str(i) for i in range(600)})
    for i in range(8):
        make({"f0000": str(i)})
        await memory_repo.capture(work, thread_id="t")
    read: list[int] = []
    await memory_repo.usage(on_progress=lambda told: read.append(told.files))
    records, _ = await memory_repo.checkpoints.record_totals()
    first = len(await records_of(memory_repo, (await memory_repo.list("t"))[0], await stored_sizes(memory_repo)))
    assert read[-1] < 8 * 4 + first - 600  # an index and a page or two for each, beside the pages of the first
    assert records > read[-1]


async def test_a_checkpoint_that_goes_while_it_is_looked_at(
    memory_repo: Repository, work: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    make({"a": "x" * 5_000})
    await memory_repo.capture(work, thread_id="t")
    make({"b": "y" * 5_000})
    await memory_repo.capture(work, thread_id="t")
    listed = memory_repo.checkpoints.checkpoints
    gone = False

    async def checkpoints(thread_id: str) -> list[Checkpoint]:
        nonlocal gone
        found = await listed(thread_id)
        if not gone:
            gone = True
            await memory_repo.delete_head("t")
            await memory_repo.gc(grace=0)
        return found

    monkeypatch.setattr(memory_repo.checkpoints, "checkpoints", checkpoints)
    found = await memory_repo.usage(checkpoints=True)
    assert len(found.checkpoints) == 1


async def test_a_page_that_is_missing_is_an_error(memory_repo: Repository, work: Path, make: Make) -> None:
    make({"a": "x"})
    await memory_repo.capture(work, thread_id="t")
    for pack in await memory_repo.checkpoints.packs():
        await memory_repo.blobs.delete(pack_key(pack.pack_id))
    with pytest.raises(snapcore.SnapshotError) as caught:
        await memory_repo.usage()
    assert caught.value.code in (snapcore.Code.MISSING_BLOB, snapcore.Code.INVALID_BLOB)


def test_unions_of_spans() -> None:
    assert union((0, 1), (1, 2)) == (0, 2)
    assert union((0, 1), (5, 6)) == (0, 1, 5, 6)
    assert union((5, 6), (0, 1)) == (0, 1, 5, 6)
    assert union((0, 3, 8, 9), (8, 9)) == (0, 3, 8, 9)
    chance = random.Random(7)
    for _ in range(500):
        sets = [frozenset(chance.choices(range(12), k=chance.randrange(1, 6))) for _ in range(2)]
        a, b = (spans_of(each) for each in sets)
        assert union(a, b) == spans_of(sets[0] | sets[1]) == union(b, a)


def spans_of(numbers: frozenset[int]) -> tuple[int, ...]:
    spans: list[int] = []
    for number in sorted(numbers):
        if spans and spans[-1] == number:
            spans[-1] = number + 1
        else:
            spans += (number, number + 1)
    return tuple(spans)


def test_a_map_of_many_ids_keeps_each_number() -> None:
    chance = random.Random(4)
    ids = [chance.randbytes(32) for _ in range(2 * idmap.SMALL + 5)]
    found = IdMap()
    found.add(ids[: idmap.SMALL + 3], 7, max)
    found.add(ids, 9, max)
    found.add(ids[:2], 3, max)
    assert len(found) == len(ids)
    assert all(found.get(i) == 9 for i in ids)
    assert found.get(chance.randbytes(32)) is None
    found.renumber(lambda n: n + 1)
    assert dict(found.items()) == dict.fromkeys(ids, 10)
