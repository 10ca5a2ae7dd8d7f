"""Verification names what is wrong: the damaged record, not its neighbour, and all of it in one run."""

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

import snapcore
from snapcore.manifest import decode_page
from snapcore.model import DIGEST_BYTES, Checkpoint, Location, RecordType
from snapcore.packs import pack_key
from snapcore.records import RecordReader
from snapcore.repository import Repository
from snapcore.verification import VerifyReport

Make = Callable[..., Path]


async def flip(repo: Repository, at: Location) -> None:
    """Damage the record there."""
    key = pack_key(at.pack_id)
    data = bytearray(await repo.blobs.get(key))
    data[at.offset + at.stored_size // 2] ^= 0xFF
    await repo.blobs.put(key, bytes(data))


async def page_ids(repo: Repository, checkpoint: Checkpoint) -> list[bytes]:
    pages, _ = await RecordReader(repo._engine).index(checkpoint.roots[0].manifest)
    return [page.page_id for page in pages]


def found(report: VerifyReport) -> set[tuple[str, str]]:
    return {(problem.kind, problem.subject) for problem in report.problems}


@pytest.fixture
async def captured(repo: Repository, make: Make) -> Checkpoint:
    """A checkpoint of several pages."""
    checkpoint = await repo.capture(make({f"{n // 100}/{n:05}": str(n) for n in range(1200)}), thread_id="t")
    assert len(await page_ids(repo, checkpoint)) > 3
    return checkpoint


async def test_each_damaged_page_is_named_and_the_other_pages_content_is_looked_at(
    repo: Repository, captured: Checkpoint, tmp_path: Path
) -> None:
    ids = await page_ids(repo, captured)
    located = await repo.checkpoints.locate(ids)
    for page_id in (ids[1], ids[-1]):
        await flip(repo, located[page_id])
    raws = await RecordReader(repo._engine).fetch([ids[2]], RecordType.PAGE)
    (chunk,) = next(e for e in decode_page(raws[ids[2]]) if e.chunks).chunk_ids()
    with sqlite3.connect(tmp_path / "repo" / "snapcore.db") as database:
        assert database.execute("DELETE FROM chunks WHERE id = ?", [chunk]).rowcount == 1
    report = await repo.verify()
    assert found(report) == {
        ("record-damaged", ids[1].hex()),
        ("record-damaged", ids[-1].hex()),
        ("record-missing", chunk.hex()),
    }
    assert {pair for problem in report.problems for pair in problem.checkpoints} == {("t", captured.id)}


async def test_an_index_whose_pack_is_gone_is_told_as_that(repo: Repository, captured: Checkpoint) -> None:
    at = (await repo.checkpoints.locate([captured.roots[0].manifest]))[captured.roots[0].manifest]
    await repo.blobs.delete(pack_key(at.pack_id))
    (problem,) = (await repo.verify()).problems
    assert (problem.kind, problem.subject) == ("pack-missing", at.pack_id)
    assert problem.checkpoints == (("t", captured.id),)


async def test_an_index_without_a_row_is_told_as_that(repo: Repository, captured: Checkpoint, tmp_path: Path) -> None:
    manifest = captured.roots[0].manifest
    with sqlite3.connect(tmp_path / "repo" / "snapcore.db") as database:
        assert database.execute("DELETE FROM chunks WHERE id = ?", [manifest]).rowcount == 1
    assert found(await repo.verify()) == {("record-missing", manifest.hex())}


@pytest.mark.parametrize("blob", ["there", "gone"])
async def test_a_needed_pack_that_is_not_kept_for_good_is_a_problem(
    repo: Repository, captured: Checkpoint, tmp_path: Path, blob: str
) -> None:
    at = (await repo.checkpoints.locate([captured.roots[0].manifest]))[captured.roots[0].manifest]
    with sqlite3.connect(tmp_path / "repo" / "snapcore.db") as database:
        database.execute("UPDATE packs SET state = 'writing'")
    if blob == "gone":
        await repo.blobs.delete(pack_key(at.pack_id))
    report = await repo.verify()
    assert ("pack-state", at.pack_id) in found(report)
    assert {pair for problem in report.problems for pair in problem.checkpoints} == {("t", captured.id)}


async def test_what_a_killed_writer_left_is_no_problem_once_gc_has_seen_it(repo: Repository, captured: Checkpoint) -> None:
    """A pack that was being stored, and one that was not stored yet: their rows have no size, and nothing needs them."""
    grant = await repo.checkpoints.acquire_writer("t", ttl=600)
    begun, unstored = "0" * 31 + "1", "0" * 31 + "2"
    await repo.checkpoints.reserve_packs(grant.lease, [begun, unstored])
    await repo.blobs.put(pack_key(begun), b"begun")
    await repo.checkpoints.release_writer(grant.lease)  # as when its lease ends
    assert (await repo.verify(read_data=True)).ok
    await repo.gc()
    assert {pack.state for pack in await repo.checkpoints.packs() if pack.pack_id in (begun, unstored)} == {"condemned"}
    assert (await repo.verify(read_data=True)).ok


async def test_a_pack_that_is_committed_while_verification_runs_is_no_problem(
    repo: Repository, captured: Checkpoint, make: Make
) -> None:
    """A capture that ends between the look at the packs and the look at the checkpoints."""
    told: list[object] = []

    async with snapcore.open_repository(repo.blobs.url) as other:
        threads = repo.checkpoints.threads

        async def capture_first() -> object:
            if not told:
                told.append(await other.capture(make({"new": "content"}), thread_id="t"))
            return await threads()

        object.__setattr__(repo.checkpoints, "threads", capture_first)
        report = await repo.verify()
    assert report.ok, report.problems
    assert (len(told), report.checkpoints, report.packs) == (1, 2, 2)


async def test_the_list_of_what_was_redacted_is_looked_for_too(repo: Repository, make: Make, tmp_path: Path) -> None:
    """A file of many redactions has them in a record of its own."""
    work = make({"log": "the token is s3cr3t-value today\n" * 3000})
    checkpoint = await repo.capture(work, thread_id="t", secrets={"token": "s3cr3t-value"})
    (entry,) = [e async for e in repo.ls(checkpoint, b"log")]
    chunk = entry.redaction_chunks[:DIGEST_BYTES]
    assert (await repo.verify()).ok
    with sqlite3.connect(tmp_path / "repo" / "snapcore.db") as database:
        assert database.execute("DELETE FROM chunks WHERE id = ?", [chunk]).rowcount == 1
    assert found(await repo.verify()) == {("record-missing", chunk.hex())}
