"""What gc and repair ask of a checkpoint store, beside what captures and restores ask of it.

The rules that make gc safe are in docs/format.md; each method says which transaction it is. `CheckpointStore` includes
all of this.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from .model import Checkpoint, PackWrite

__all__ = ["Maintenance", "MaintenanceStore", "PackContents", "Roots"]


class Maintenance(msgspec.Struct, frozen=True):
    """A running gc or repair. One that starts later supersedes it: `fence` is then no longer the store's."""

    fence: int


class Roots(msgspec.Struct, frozen=True):
    """All that must be kept, as one state of the store has it; ids are 32 bytes each, once each.

    `mark` is that state's sequence number. `records` are leaves (checkpoint records), `manifests` lead to trees (pins of readers
    among them), `chunks` and `chunk_lists` are contents outside trees (conversations, artifacts).
    """

    mark: int
    now: int
    records: frozenset[bytes] = frozenset()
    manifests: frozenset[bytes] = frozenset()
    chunks: frozenset[bytes] = frozenset()
    chunk_lists: frozenset[bytes] = frozenset()


class PackContents(msgspec.Struct, frozen=True):
    """A pack's row and the records whose rows lead to it: (id, offset, stored size), by offset.

    `owned` says of a pack that is `writing` whether its writer may still commit it. `condemned_at` is the database's time,
    None unless it is condemned, deleting or deleted.
    """

    number: int
    pack_id: str
    state: str
    size: int
    commit_seq: int | None
    condemned_at: int | None
    owned: bool
    records: tuple[tuple[bytes, int, int], ...] = ()


class MaintenanceStore(Protocol):
    """Every method that takes a `Maintenance` raises `RepositoryError` `MAINTENANCE_LOST` once a later one has started, and
    changes nothing then. Each is one transaction that first locks the repository row."""

    async def start_maintenance(self) -> Maintenance:
        """Begin a gc or a repair; whichever ran before is superseded."""
        ...

    async def roots(self) -> Roots:
        """The mark and all roots, of one state of the store. Changes nothing."""
        ...

    async def pack_contents(self, after: int = 0, limit: int = 64) -> list[PackContents]:
        """Rows of up to `limit` packs with a number above `after`, in order of their numbers. Changes nothing."""
        ...

    async def reserve_maintenance_packs(self, run: Maintenance, pack_ids: Sequence[str]) -> None:
        """Enter packs in state `writing`, owned by this run, before they are put."""
        ...

    # ---- gc

    async def condemn(self, run: Maintenance, mark: int, pack_ids: Sequence[str]) -> list[str]:
        """Condemn those of the packs that are still live with a sequence number up to `mark`; returns them."""
        ...

    async def condemn_abandoned(self, run: Maintenance) -> list[str]:
        """Condemn every pack in state `writing` whose writer cannot commit any more: its lease has run out or is gone, or its
        maintenance was superseded. Returns them."""
        ...

    async def move_records(self, run: Maintenance, mark: int, pack: PackWrite, sources: Sequence[str]) -> list[str]:
        """Make the rows of `pack`'s records that lead to `sources` lead to `pack`, which was reserved and put; it becomes live
        with a new sequence number, and the sources are condemned.

        A source that is not live any more, or has a number above `mark`, is left as it is. Returns the sources condemned; when
        there is none, `pack` stays `writing`.
        """
        ...

    async def sweep(self, run: Maintenance, *, grace: float, limit: int = 100) -> list[str]:
        """Set up to `limit` packs, condemned for `grace` seconds or more, to `deleting` and drop the rows of their records.
        Returns the packs whose blobs are to be deleted: these, and those an interrupted gc left in that state."""
        ...

    async def mark_deleted(self, run: Maintenance, pack_ids: Sequence[str]) -> None:
        """Their blobs are gone: from `deleting` to `deleted`."""
        ...

    async def deleted_before(self, run: Maintenance, seconds: float, limit: int = 1000) -> list[str]:
        """Packs deleted `seconds` ago or earlier, to be deleted once more: a writer that was given up may have put one late."""
        ...

    async def forget_packs(self, run: Maintenance, pack_ids: Sequence[str]) -> None:
        """Remove the rows of packs in state `deleted`."""
        ...

    async def expire_caches(self, run: Maintenance, *, unused: float) -> int:
        """Drop stat caches not used for `unused` seconds, pins that have run out, and runs of jobs of more than 400 days ago.
        Returns the number of caches dropped."""
        ...

    # ---- repair

    async def adopt_pack(self, run: Maintenance, pack: PackWrite, *, instead_of: str | None = None) -> int:
        """Enter a pack that is in the blob store, live with a new sequence number, also when it was condemned or lost. Its
        records get rows where they have none, or where their row leads to the pack `instead_of`, or to the pack itself at
        another place. Returns how many rows it gave.

        Raises `CheckpointConflictError` `DUPLICATE_ID`, with nothing changed, for a pack that is `deleting` or `deleted` (a gc
        that was superseded may yet delete its blob) and for one that is `writing` whose writer may still commit it, unless
        this run reserved it.
        """
        ...

    async def lose_packs(self, run: Maintenance, pack_ids: Sequence[str]) -> int:
        """Set packs to `lost` (one without a row gets one) and drop the rows of their records, from which on no checkpoint
        written before counts as whole (`Grant.damaged`). Returns how many rows were dropped.

        One that is `deleting` or `deleted` stays so, or it might be adopted while a gc that was superseded deletes it. One that
        is `writing` whose writer may still commit it is left as it is, with its rows.
        """
        ...

    async def drop_records(self, run: Maintenance, pack_id: str, ids: Sequence[bytes]) -> int:
        """Drop those of the records' rows that lead to this pack, which does not have them there; else as `lose_packs`."""
        ...

    async def note_damage(self, run: Maintenance) -> None:
        """From now on no checkpoint written before counts as whole (`Grant.damaged`)."""
        ...

    async def damaged_threads(self) -> frozenset[str]:
        """The threads of whose head that is said (`Grant.damaged`). Changes nothing."""
        ...

    async def astray_heads(self) -> list[str]:
        """Threads whose head is not their newest checkpoint, or is one that is not there. Changes nothing."""
        ...

    async def replace_record(self, run: Maintenance, thread_id: str, checkpoint_id: str, was: bytes, record_id: bytes) -> bool:
        """Make `record_id` the id of a checkpoint's own record, which was `was`. False, and nothing changed, when it is another
        by now, or the checkpoint is gone."""
        ...

    async def adopt_checkpoints(self, run: Maintenance, checkpoints: Sequence[Checkpoint]) -> list[str]:
        """Enter checkpoints whose ids are not taken, and make each thread's newest its head. Returns the ids entered."""
        ...

    async def mend_heads(self, run: Maintenance) -> list[str]:
        """Make the newest checkpoint of each thread its head where that is not so. Returns the threads changed."""
        ...

    async def rename_database(self, run: Maintenance, database_id: str) -> None:
        """Give the database another id: one rebuilt from the blob store must not be taken for the one that was lost."""
        ...
