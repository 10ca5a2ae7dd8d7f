"""Which checkpoints the records in packs tell of: pure, for a repair that has nothing else to go by.

A record is put before its checkpoint is committed, so that a record alone does not prove that there was such a checkpoint.
What proves it is a later record: of a checkpoint that continued it, was forked or rewound from it, or that gave it another
label. Where nothing does, of several that continue the same one, the newest whose content is all there is taken.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable

import msgspec

from .model import Checkpoint

__all__ = ["Lineage", "Verdict"]

Place = tuple[str, str | None]  # thread, and the checkpoint that is continued there


class Verdict(msgspec.Struct, frozen=True):
    """What becomes of the records that were found: checkpoints to enter, those that were never committed as far as one can
    tell, and those that are not whole and that nothing continues. Each in order of thread, time and id."""

    entered: tuple[Checkpoint, ...]
    uncommitted: tuple[Checkpoint, ...]
    incomplete: tuple[Checkpoint, ...]


class Lineage:
    """Gathers records, of checkpoints in the database too, then judges those that are not in it."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], Checkpoint] = {}
        self._known: set[tuple[str, str]] = set()
        self._settled: set[Place] = set()
        self._proven: set[tuple[str, str]] = set()
        self._deleted: set[tuple[str, str]] = set()

    def add(self, record: Checkpoint) -> None:
        """A record from a pack. Of several of one checkpoint the one with the highest revision counts."""
        self._learn(record)
        key = (record.thread_id, record.id)
        before = self._found.get(key)
        if before is None or (before.revision, before.record_id) < (record.revision, record.record_id):
            self._found[key] = record

    def add_known(self, checkpoint: Checkpoint) -> None:
        """A checkpoint that is in the database."""
        self._learn(checkpoint)
        self._known.add(_key(checkpoint))
        self._settled.add((checkpoint.thread_id, checkpoint.parent_id))

    def _learn(self, record: Checkpoint) -> None:
        thread_id = record.thread_id
        if record.parent_id is not None:
            self._proven.add((thread_id, record.parent_id))
        if record.source_id is not None:
            self._proven.add((record.source_thread_id or thread_id, record.source_id))
        if record.revision:
            self._proven.add((thread_id, record.id))
        self._deleted.update((thread_id, gone) for gone in record.deleted)

    def candidates(self) -> list[Checkpoint]:
        """Checkpoints that were found, are not in the database, and were not deleted as far as the records say."""
        gone = self._known | self._deleted
        return sorted((c for key, c in self._found.items() if key not in gone), key=_order)

    def judge(self, whole: Collection[tuple[str, str]]) -> Verdict:
        """Choose among the candidates, of which `whole` (thread, id) have all of their content."""
        places: dict[Place, list[Checkpoint]] = defaultdict(list)
        for c in self.candidates():
            places[c.thread_id, c.parent_id].append(c)
        entered: list[Checkpoint] = []
        uncommitted: list[Checkpoint] = []
        incomplete: list[Checkpoint] = []
        for place, siblings in places.items():
            chosen = [c for c in siblings if _key(c) in self._proven]
            settled = bool(chosen) or place in self._settled
            if not settled:
                chosen = [c for c in siblings if _key(c) in whole][-1:]
            entered += chosen
            chosen_ids = {c.id for c in chosen}
            for c in siblings:
                if c.id not in chosen_ids:
                    (uncommitted if settled or chosen else incomplete).append(c)
        return Verdict(_sorted(entered), _sorted(uncommitted), _sorted(incomplete))


def _key(c: Checkpoint) -> tuple[str, str]:
    return (c.thread_id, c.id)


def _order(c: Checkpoint) -> tuple[str, int, str]:
    return (c.thread_id, c.created_at, c.id)


def _sorted(found: Iterable[Checkpoint]) -> tuple[Checkpoint, ...]:
    return tuple(sorted(found, key=_order))
