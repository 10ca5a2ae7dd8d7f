"""Repair of a repository as a whole: which database is it, is it there, and what becomes of it.

A database that is rebuilt, or that was found to be an older copy, gets another id, so that the one that was lost is refused
should it turn up: two databases over one blob store would destroy each other's checkpoints. `snapcore.json` says which one
counts and is written last. Until then a blob beside it tells whoever comes next what was going on.
"""

import contextlib
import dataclasses
import os
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

import msgspec

from .config import CONFIG_KEY, REBUILDING_KEY, RENAMING_KEY, RepositoryConfig, encode_config, read_config, without_config
from .databases import inner_database, new_own_database
from .engine import Engine, finish
from .errors import Code, RepositoryError
from .maintenance import Maintenance
from .protocols import BlobStore, CheckpointStore, ProgressCallback, StoreIdentity
from .registry import open_blobs, open_database
from .repairing import Repairer, RepairReport
from .repairplan import RepairAction, RepairPlan, Step, survey

__all__ = ["plan_repair", "repair_repository"]

_CREATE: Final = RepairAction(
    Step.CREATE_DATABASE,
    "",
    "Create a new database from what the packs tell, since there is none. One that is lost and turns up again is refused from"
    " then on; if it is only elsewhere, give its URL instead.",
)
_WRITE: Final = RepairAction(Step.WRITE_CONFIG, CONFIG_KEY, f"Name the new database in {CONFIG_KEY}, as the last step.")
_RENAME: Final = RepairAction(
    Step.RENAME_DATABASE,
    "",
    "Give the database, which was an older copy, another id: the newer one is refused should it turn up.",
)


@dataclass(slots=True)
class _Place:
    """A repository to be repaired: its stores, what its configuration says, and whether its database is (being) made anew."""

    engine: Engine
    identity: StoreIdentity | None
    rebuilding: RepositoryConfig | None
    renaming: RepositoryConfig | None

    @property
    def config(self) -> RepositoryConfig:
        return self.engine.config

    @property
    def blobs(self) -> BlobStore:
        return self.engine.blobs

    @property
    def store(self) -> CheckpointStore:
        return self.engine.checkpoints

    @property
    def is_rebuilt(self) -> bool:
        return self.identity is None or (self.identity != self.config.identity and not self.is_renamed)

    @property
    def is_renamed(self) -> bool:
        """Whether a database was renamed and only `snapcore.json` does not say so yet."""
        return self.renaming is not None and self.identity == self.renaming.identity

    @property
    def is_half_renamed(self) -> bool:
        """Whether a database was about to be renamed."""
        return self.renaming is not None and self.identity == self.config.identity


async def plan_repair(
    url: str | os.PathLike[str],
    *,
    database: str | None = None,
    read_data: bool = False,
    on_progress: ProgressCallback | None = None,
) -> RepairPlan:
    """What `repair_repository` would do with the repository at `url` as it is now. Changes nothing.

    Works where `open_repository` refuses: without a database too. `read_data` reads every byte of every pack. Raises
    `RepositoryError`: `NO_REPOSITORY`; `WRONG_DATABASE` for one of another repository; `DAMAGED` without a `snapcore.json` that
    can be read; and whatever keeps the stores from being read, which is never taken for a loss.
    """
    async with _opened(os.fspath(url), database) as place:
        return await _plan(place, read_data=read_data, on_progress=on_progress)


async def repair_repository(
    url: str | os.PathLike[str],
    *,
    database: str | None = None,
    read_data: bool = False,
    on_progress: ProgressCallback | None = None,
) -> RepairReport:
    """Do what can be done to make the repository at `url` whole, and say what stays hurt.

    Sets lost packs aside, keeps what is sound of damaged ones, uses packs that the database does not know, corrects rows and
    heads, and makes a new database from the packs alone when there is none. Deletes no blob. What is lost for good is stored
    again by the next capture of the same files. Safe beside captures and restores. One that is cut short goes on when it is
    repeated. Raises as `plan_repair` does, with nothing changed, and `MAINTENANCE_LOST` when a gc or another repair was started
    meanwhile.
    """
    async with _opened(os.fspath(url), database) as place:
        plan = await _plan(place, read_data=read_data, on_progress=on_progress) if place.identity is None else None
        config = await _begin_rebuild(place) if place.is_rebuilt else None
        run = await place.store.start_maintenance()
        if place.is_renamed:
            await _write_config(place, run, place.renaming or place.config, RENAMING_KEY)
        repairer = Repairer(place.engine, run)
        report = await repairer.repair(
            _scratch, first=plan, rebuilding=config is not None, read_data=read_data, on_progress=on_progress
        )
        if config is not None:
            await _write_config(place, run, config, REBUILDING_KEY)
            report.done = [_CREATE, *report.done, _WRITE] if plan is not None else [*report.done, _WRITE]
        elif any(action.step == Step.ENTER_CHECKPOINTS for action in report.done) or place.is_half_renamed:
            await _rename(place, run)
            report.done.append(_RENAME)
        if config is None and place.rebuilding is not None:
            await place.blobs.delete(REBUILDING_KEY)  # of a rebuild that is over, or not needed any more
        return report


async def _plan(place: _Place, *, read_data: bool, on_progress: ProgressCallback | None) -> RepairPlan:
    plan = await survey(
        place.engine,
        _scratch,
        has_database=place.identity is not None,
        rebuilding=place.is_rebuilt,
        read_data=read_data,
        on_progress=on_progress,
    )
    if place.is_rebuilt:
        plan.actions = [*([_CREATE] if place.identity is None else []), *plan.actions, _WRITE]
    elif place.is_renamed:
        plan.actions.append(_WRITE)
    elif any(action.step == Step.ENTER_CHECKPOINTS for action in plan.actions) or place.is_half_renamed:
        plan.actions.append(_RENAME)
    return plan


# ---- which database


@contextlib.asynccontextmanager
async def _opened(url: str, database: str | None) -> AsyncIterator[_Place]:
    blobs: BlobStore = open_blobs(url)
    try:
        config = await read_config(blobs)
        if config is None:
            raise await without_config(blobs, url)
        store: CheckpointStore = open_database(database or inner_database(url) or new_own_database(config.repository_id))
        engine = Engine(blobs, store, config)
        try:
            yield await _look(engine)
        finally:
            engine.workers.shutdown(wait=False, cancel_futures=True)
            await finish(store.close())
    finally:
        await finish(blobs.close())


async def _look(engine: Engine) -> _Place:
    """Which database it is. What is read one after the other may be of before and after another repair's last steps: what does
    not fit together is believed when it is read twice."""
    place = await _read_place(engine)
    while (error := _wrong_database(place)) is not None:
        again = await _read_place(engine)
        if again == place:
            raise error
        place = again
    return place


async def _read_place(engine: Engine) -> _Place:
    identity = await engine.checkpoints.identity()
    rebuilding, renaming, config = [await read_config(engine.blobs, key) for key in (REBUILDING_KEY, RENAMING_KEY, CONFIG_KEY)]
    return _Place(dataclasses.replace(engine, config=config or engine.config), identity, rebuilding, renaming)


def _wrong_database(place: _Place) -> RepositoryError | None:
    identity = place.identity
    if identity is None or identity == place.config.identity or place.is_renamed:
        return None
    if identity.repository_id != place.config.repository_id:
        return RepositoryError(
            "The database belongs to another repository: it is neither changed nor used.",
            code=Code.WRONG_DATABASE,
            hint="Give the right --database; if that one is lost, the URL of a new one.",
        )
    if place.rebuilding is None:
        return RepositoryError(
            "The database was replaced by a rebuilt one: it is neither changed nor used.",
            code=Code.WRONG_DATABASE,
            hint="Give the --database that counts now; if that one is lost, the URL of a new one.",
        )
    return None


# ---- a new one


async def _begin_rebuild(place: _Place) -> RepositoryConfig:
    """Create the database, or find the one that an earlier rebuild has created. What will be `snapcore.json`."""
    config = place.rebuilding
    if config is None or config.repository_id != place.config.repository_id or config.identity == place.config.identity:
        config = msgspec.structs.replace(place.config, database_id=secrets.token_hex(16))
        await place.blobs.put(REBUILDING_KEY, encode_config(config))
    identity = await place.store.initialize(config.identity)
    if identity.repository_id != config.repository_id or identity == place.config.identity:
        raise RepositoryError(
            "Somebody else has put a database there just now.", code=Code.MAINTENANCE_LOST, hint="Look at it, then start again."
        )
    if identity != config.identity:  # of a rebuild that was begun at the same time, or earlier
        config = msgspec.structs.replace(config, database_id=identity.database_id)
        await place.blobs.put(REBUILDING_KEY, encode_config(config))
    return config


async def _rename(place: _Place, run: Maintenance) -> None:
    config = msgspec.structs.replace(place.config, database_id=secrets.token_hex(16))
    await place.blobs.put(RENAMING_KEY, encode_config(config))
    await place.store.rename_database(run, config.database_id)
    await _write_config(place, run, config, RENAMING_KEY)


async def _write_config(place: _Place, run: Maintenance, config: RepositoryConfig, marker: str) -> None:
    await place.store.mend_heads(run)  # raises when another repair has taken over
    await place.blobs.put(CONFIG_KEY, encode_config(config))
    await place.blobs.delete(marker)


@contextlib.asynccontextmanager
async def _scratch() -> AsyncIterator[CheckpointStore]:
    store: CheckpointStore = open_database("sqlite:///:temporary:")  # nothing is synced: it is of no use afterwards
    try:
        yield store
    finally:
        await finish(store.close())
