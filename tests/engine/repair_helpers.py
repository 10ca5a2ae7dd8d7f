"""Damage to a repository, made past the engine: in the files of its packs and the rows of its database."""

import sqlite3
from pathlib import Path

import snapcore
from snapcore.model import Checkpoint, Location
from snapcore.packs import pack_key
from snapcore.repository import Repository
from snapcore.verification import VerifyReport

__all__ = ["everything", "found", "lose_database", "pack_file", "pack_of", "places", "sql"]


def sql(url: Path, statement: str, *values: object) -> int:
    """Change the database of a repository in a folder behind its back; how many rows that changed."""
    with sqlite3.connect(url / "snapcore.db") as database:
        return database.execute(statement, values).rowcount


def lose_database(url: Path) -> None:
    """Delete the database's files."""
    for file in url.glob("snapcore.db*"):
        file.unlink()


def pack_file(url: Path, pack_id: str) -> Path:
    """Where a pack's blob is."""
    return url / pack_key(pack_id)


async def places(repo: Repository, *ids: bytes) -> list[Location]:
    """Where records are."""
    located = await repo.checkpoints.locate(ids)
    return [located[i] for i in ids]


async def pack_of(repo: Repository, record: bytes) -> str:
    """The pack that a record is in."""
    return (await places(repo, record))[0].pack_id


def found(report: VerifyReport) -> set[tuple[str, str]]:
    """Kind and subject of every problem."""
    return {(problem.kind, problem.subject) for problem in report.problems}


async def everything(repo: Repository) -> dict[tuple[str, str], Checkpoint]:
    """All checkpoints by thread and id, as they were before they were recovered."""
    return {
        (c.thread_id, c.id): snapcore.Checkpoint(
            **{name: getattr(c, name) for name in c.__struct_fields__ if name != "recovered"}
        )
        for thread in await repo.threads()
        for c in await repo.list(thread.thread_id)
    }
