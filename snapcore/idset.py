"""A set of record ids that stays small in memory: a million ids take some 40 MB instead of 150."""

import threading
from collections.abc import Iterable
from typing import Final

from .model import DIGEST_BYTES

__all__ = ["IdSet"]

SMALL: Final = 50_000
PREFIX: Final = 2


class IdSet:
    """Ids of 32 bytes. Safe to use from several threads.

    Up to `SMALL` ids are a plain set. Beyond, ids are kept by their first two bytes, the rest of each concatenated: since
    ids are hashes, finding 30 given bytes anywhere in such a run means that the id is there.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._few: set[bytes] = set()
        self._runs: dict[bytes, bytes] = {}

    def add_new(self, ids: Iterable[bytes]) -> list[bytes]:
        """Add ids; those that were not there before, once each, in order."""
        fresh = []
        with self._lock:
            few, runs = self._few, self._runs
            for i in ids:
                if i not in few and not (runs and i[PREFIX:] in runs.get(i[:PREFIX], b"")):
                    few.add(i)
                    fresh.append(i)
            if len(few) > SMALL:
                self._pack()
        return fresh

    def __contains__(self, record_id: bytes) -> bool:
        with self._lock:
            return self._has(record_id)

    def __len__(self) -> int:
        with self._lock:
            return len(self._few) + sum(len(run) for run in self._runs.values()) // (DIGEST_BYTES - PREFIX)

    def _has(self, i: bytes) -> bool:
        return i in self._few or i[PREFIX:] in self._runs.get(i[:PREFIX], b"")

    def remove(self, ids: Iterable[bytes]) -> None:
        """Forget ids."""
        with self._lock:
            for i in ids:
                self._few.discard(i)
                run = self._runs.get(i[:PREFIX], b"")
                at = run.find(i[PREFIX:])
                if at >= 0:
                    self._runs[i[:PREFIX]] = run[:at] + run[at + len(i) - PREFIX :]

    def _pack(self) -> None:
        groups: dict[bytes, list[bytes]] = {}
        for i in self._few:
            groups.setdefault(i[:PREFIX], []).append(i[PREFIX:])
        for prefix, rests in groups.items():
            self._runs[prefix] = b"".join((self._runs.get(prefix, b""), *rests))
        self._few.clear()
