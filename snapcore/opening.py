"""Opening a repository: by an address, created where there is none, or over stores that are open already."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Generator
from types import TracebackType
from typing import Any, Final

from .config import CONFIG_KEY, CREATING_KEY, RepositoryConfig, encode_config, new_config, read_config, without_config
from .databases import has_own_database, inner_database, new_own_database, own_database
from .engine import finish
from .errors import Code, RepositoryError, printable
from .protocols import BlobStore, CheckpointStore
from .registry import open_blobs, open_database
from .repository import Repository

__all__ = ["OpenRepository", "borrowed", "init_repository", "open_repository"]

CREATION_POLLS: Final = 20
CREATION_PAUSE: Final = 0.05  # seconds
CREATION_SETTLES: Final = 0.5  # seconds: longer than a request and a put of another machine take


class OpenRepository:
    """What `open_repository` returns: await it, or use it with `async with`."""

    def __init__(self, url: str | os.PathLike[str], database: str | None, *, create: bool, exclusive: bool = False) -> None:
        self._url = os.fspath(url)
        self._database = database
        self._create = create
        self._exclusive = exclusive
        self._repository: Repository | None = None

    def __await__(self) -> Generator[Any, None, Repository]:
        return self._open().__await__()

    async def __aenter__(self) -> Repository:
        self._repository = await self._open()
        return self._repository

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._repository is not None:
            await self._repository.close()

    async def _open(self) -> Repository:
        blobs: BlobStore = open_blobs(self._url)
        try:
            config = await read_config(blobs)
            if config is not None and self._exclusive:
                from .addresses import shown_address

                raise RepositoryError(
                    f"There is a repository at {printable(shown_address(self._url))} already.",
                    code=Code.REPOSITORY_EXISTS,
                    hint="Use it as it is.",
                )
            if config is None:
                why = await without_config(blobs, self._url)
                config = await read_config(blobs)  # another process may have created it meanwhile
                if config is None and (not self._create or why.code is Code.DAMAGED):
                    raise why
            database = self._database or inner_database(self._url)
            if database is None:
                config = config or await _create_with_own_database(blobs)
                database = own_database(config.repository_id, self._url)
            store: CheckpointStore = open_database(database)
            try:
                if config is None:
                    config = await _create(blobs, store)
                await _check_identity(store, config)
            except BaseException:
                await finish(store.close())
                raise
        except BaseException:
            await finish(blobs.close())
            raise
        return Repository(blobs, store, config)


def open_repository(
    url: str | os.PathLike[str] = "~/.snapcore", *, database: str | None = None, create: bool = True
) -> OpenRepository:
    """Open the repository at `url` (a folder, `memory://`, or what an installed package adds); created when absent and `create`.

    `database` is a SQLAlchemy URL. By default a folder has a SQLite file inside; for other blob stores it is a file in this
    user's data folder, which other machines lack: name a database for several. Await the result, or use it with
    `async with`. Raises `RepositoryError`: `NO_REPOSITORY`, `WRONG_DATABASE`, `UNSUPPORTED_FORMAT`, `DAMAGED`.
    """
    return OpenRepository(url, database, create=create)


async def init_repository(url: str | os.PathLike[str], *, database: str | None = None) -> Repository:
    """Create a repository and open it. Raises `RepositoryError` `REPOSITORY_EXISTS` when there is one."""
    return await OpenRepository(url, database, create=True, exclusive=True)


async def _create_with_own_database(blobs: BlobStore) -> RepositoryConfig:
    """Create a repository whose database is this machine's own, or return the one that another process was first to create.

    A creation that another machine has begun is not gone on with: two databases would have the same ids then, and each
    machine would take its own for the right one. There is no common database that could decide who is first. So the
    configuration is put only while there is none, and read again once whoever found none at the same time has put its own;
    the last one stays.
    """
    mine = await read_config(blobs, CREATING_KEY)
    if mine is None or not has_own_database(mine.repository_id):
        mine = new_config()
        await blobs.put(CREATING_KEY, encode_config(mine))
    store: CheckpointStore = open_database(new_own_database(mine.repository_id))
    try:
        await store.initialize(mine.identity)
    finally:
        await finish(store.close())
    found = await read_config(blobs)
    if found is None:
        await blobs.put(CONFIG_KEY, encode_config(mine))
        await asyncio.sleep(CREATION_SETTLES)
        found = await read_config(blobs)
    await blobs.delete(CREATING_KEY)
    return found or mine


async def _create(blobs: BlobStore, store: CheckpointStore) -> RepositoryConfig:
    """Create a repository, or go on where a creation was cut short. It exists once both stores have its ids; until then a blob
    of another name holds them, so that whoever comes next uses the same."""
    config = await read_config(blobs, CREATING_KEY)
    if config is None and await store.identity() is None:
        await blobs.put(CREATING_KEY, encode_config(new_config()))
        config = await read_config(blobs, CREATING_KEY)  # another process may have put its own
    if config is None or await store.initialize(config.identity) != config.identity:
        config = await _created_elsewhere(blobs)
        await blobs.delete(CREATING_KEY)  # this process may have put its own when that one was done
        return config
    await blobs.put(CONFIG_KEY, encode_config(config))
    await blobs.delete(CREATING_KEY)
    return config


async def _created_elsewhere(blobs: BlobStore) -> RepositoryConfig:
    """What another process, which was first at the database, is about to put."""
    for _ in range(CREATION_POLLS):
        config = await read_config(blobs)
        if config is not None:
            return config
        await asyncio.sleep(CREATION_PAUSE)
    raise RepositoryError(
        "The database belongs to another repository, or the repository's snapcore.json is gone.",
        code=Code.WRONG_DATABASE,
        hint="Give a fresh --database, or put snapcore.json back.",
    )


async def _check_identity(store: CheckpointStore, config: RepositoryConfig) -> None:
    found = await store.identity()
    if found == config.identity:
        return
    if found is None:
        raise RepositoryError(
            "The database of this repository is empty or missing.",
            code=Code.WRONG_DATABASE,
            hint="Give the right --database, or put its file back. If it is lost, 'snapcore repair' makes a new one from the"
            " packs.",
        )
    raise RepositoryError(
        "The database belongs to another repository, or was replaced by a rebuilt one.",
        code=Code.WRONG_DATABASE,
        hint="Give the right --database. After a repair that was cut short, run 'snapcore repair' again.",
    )


@contextlib.asynccontextmanager
async def borrowed(blobs: BlobStore, checkpoints: CheckpointStore) -> AsyncIterator[Repository]:
    """A repository over a user's own open stores, which stay open. Created when the blob store is empty."""
    config = await read_config(blobs)
    if config is None:
        config = await _create(blobs, checkpoints)
    await _check_identity(checkpoints, config)
    repository = Repository(blobs, checkpoints, config)
    try:
        yield repository
    finally:
        repository._engine.workers.shutdown(wait=False, cancel_futures=True)
