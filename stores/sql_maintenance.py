"""The part of the SQL store that gc and repair call: one transaction a call, the work is in `sql_gc` and `sql_repair`."""

from collections.abc import Sequence

from snapcore.maintenance import Maintenance, PackContents, Roots
from snapcore.model import Checkpoint, PackWrite

from . import checks, sql_gc, sql_repair
from .sql_transactions import Transactions

__all__ = ["SqlMaintenance"]


class SqlMaintenance:
    """A `MaintenanceStore` over running transactions; `SqlCheckpointStore` adds all the rest."""

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions

    async def start_maintenance(self) -> Maintenance:
        """Begin a gc or a repair; whichever ran before is superseded."""
        return await self._transactions.write(sql_gc.start)

    async def roots(self) -> Roots:
        """The mark and all roots, of one state of the store."""
        return await self._transactions.read(sql_gc.roots)

    async def pack_contents(self, after: int = 0, limit: int = 64) -> list[PackContents]:
        """Rows of packs with a number above `after`, with the records whose rows lead to them."""
        return await self._transactions.read(lambda tx: sql_gc.pack_contents(tx, after, limit))

    async def reserve_maintenance_packs(self, run: Maintenance, pack_ids: Sequence[str]) -> None:
        """Enter packs in state `writing`, owned by this run."""
        _check_ids(pack_ids)
        await self._transactions.write(lambda tx: sql_gc.reserve(tx, run, pack_ids))

    # ---- gc

    async def condemn(self, run: Maintenance, mark: int, pack_ids: Sequence[str]) -> list[str]:
        """Condemn those of the packs that are still live with a sequence number up to `mark`."""
        _check_ids(pack_ids)
        return await self._transactions.write(lambda tx: sql_gc.condemn(tx, run, mark, pack_ids))

    async def condemn_abandoned(self, run: Maintenance) -> list[str]:
        """Condemn every pack in state `writing` whose writer cannot commit any more."""
        return await self._transactions.write(lambda tx: sql_gc.condemn_abandoned(tx, run))

    async def move_records(self, run: Maintenance, mark: int, pack: PackWrite, sources: Sequence[str]) -> list[str]:
        """Move records into a new pack and condemn those they lay in; see `MaintenanceStore`."""
        checks.check_pack(pack)
        _check_ids(sources)
        return await self._transactions.write(lambda tx: sql_gc.move_records(tx, run, mark, pack, sources))

    async def sweep(self, run: Maintenance, *, grace: float, limit: int = 100) -> list[str]:
        """Packs whose blobs are to be deleted now; see `MaintenanceStore`."""
        age = checks.microseconds(grace)
        return await self._transactions.write(lambda tx: sql_gc.sweep(tx, run, age, limit))

    async def mark_deleted(self, run: Maintenance, pack_ids: Sequence[str]) -> None:
        """Their blobs are gone."""
        _check_ids(pack_ids)
        await self._transactions.write(lambda tx: sql_gc.mark_deleted(tx, run, pack_ids))

    async def deleted_before(self, run: Maintenance, seconds: float, limit: int = 1000) -> list[str]:
        """Packs deleted `seconds` ago or earlier."""
        age = checks.microseconds(seconds)
        return await self._transactions.write(lambda tx: sql_gc.deleted_before(tx, run, age, limit))

    async def forget_packs(self, run: Maintenance, pack_ids: Sequence[str]) -> None:
        """Remove the rows of packs in state `deleted`."""
        _check_ids(pack_ids)
        await self._transactions.write(lambda tx: sql_gc.forget_packs(tx, run, pack_ids))

    async def expire_caches(self, run: Maintenance, *, unused: float) -> int:
        """Drop stat caches not used for `unused` seconds, and pins that have run out."""
        age = checks.microseconds(unused)
        return await self._transactions.write(lambda tx: sql_gc.expire_caches(tx, run, age))

    # ---- repair

    async def adopt_pack(self, run: Maintenance, pack: PackWrite, *, instead_of: str | None = None) -> int:
        """Enter a pack that is in the blob store as live; see `MaintenanceStore`."""
        checks.check_pack(pack)
        _check_ids([] if instead_of is None else [instead_of])
        return await self._transactions.write(lambda tx: sql_repair.adopt_pack(tx, run, pack, instead_of))

    async def lose_packs(self, run: Maintenance, pack_ids: Sequence[str]) -> int:
        """Set packs to `lost` and drop the rows of their records."""
        _check_ids(pack_ids)
        return await self._transactions.write(lambda tx: sql_repair.lose_packs(tx, run, pack_ids))

    async def drop_records(self, run: Maintenance, pack_id: str, ids: Sequence[bytes]) -> int:
        """Drop those of the records' rows that lead to this pack."""
        _check_ids([pack_id])
        checks.check_record_ids(ids)
        return await self._transactions.write(lambda tx: sql_repair.drop_records(tx, run, pack_id, ids))

    async def note_damage(self, run: Maintenance) -> None:
        """From now on no checkpoint written before counts as whole."""
        await self._transactions.write(lambda tx: sql_repair.note_damage(tx, run))

    async def damaged_threads(self) -> frozenset[str]:
        """Threads whose head was written before records were lost."""
        return await self._transactions.read(sql_repair.damaged_threads)

    async def astray_heads(self) -> list[str]:
        """Threads whose head is not their newest checkpoint."""
        return await self._transactions.read(sql_repair.astray_heads)

    async def replace_record(self, run: Maintenance, thread_id: str, checkpoint_id: str, was: bytes, record_id: bytes) -> bool:
        """Make another record the checkpoint's own; see `MaintenanceStore`."""
        checks.check_record_ids([was, record_id])
        return await self._transactions.write(
            lambda tx: sql_repair.replace_record(tx, run, thread_id, checkpoint_id, was, record_id)
        )

    async def adopt_checkpoints(self, run: Maintenance, checkpoints: Sequence[Checkpoint]) -> list[str]:
        """Enter checkpoints whose ids are not taken; see `MaintenanceStore`."""
        for checkpoint in checkpoints:
            checks.check_checkpoint(checkpoint, checkpoint.thread_id)
        return await self._transactions.write(lambda tx: sql_repair.adopt_checkpoints(tx, run, checkpoints))

    async def mend_heads(self, run: Maintenance) -> list[str]:
        """Make the newest checkpoint of each thread its head where that is not so."""
        return await self._transactions.write(lambda tx: sql_repair.mend_heads(tx, run))

    async def rename_database(self, run: Maintenance, database_id: str) -> None:
        """Give the database another id."""
        await self._transactions.write(lambda tx: sql_repair.rename_database(tx, run, database_id))


def _check_ids(pack_ids: Sequence[str]) -> None:
    for pack_id in pack_ids:
        checks.check_pack_id(pack_id)
