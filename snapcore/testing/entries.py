"""Small valid checkpoints, packs and records for the suites of checkpoint stores."""

import hashlib
import secrets
from typing import Any

from snapcore.model import Checkpoint, PackRecord, PackWrite, RecordType, RootState, ThreadInfo, WriterLease
from snapcore.protocols import CheckpointStore, Commit, Grant, PackInfo, StoreIdentity

__all__ = [
    "IDENTITY",
    "State",
    "acquire",
    "append",
    "checkpoint_for",
    "digest",
    "new_pack_id",
    "pack_of",
    "start",
    "state_of",
]

IDENTITY = StoreIdentity(repository_id="repository", database_id="database")

State = tuple[list[ThreadInfo], list[list[Checkpoint]], list[PackInfo]]


def digest(name: object) -> bytes:
    """A record id by name."""
    return hashlib.blake2b(str(name).encode(), digest_size=32).digest()


def new_pack_id() -> str:
    """A random pack id."""
    return secrets.token_hex(16)


def pack_of(pack_id: str, *names: object) -> PackWrite:
    """A pack that holds a record of 10 bytes for each name, in order."""
    records = tuple(
        PackRecord(id=digest(name), type=RecordType.CHUNK, offset=10 * place, stored_size=10, raw_size=20, codec=1)
        for place, name in enumerate(names)
    )
    return PackWrite(pack_id=pack_id, size=10 * len(names) + 100, records=records)


def checkpoint_for(thread_id: str, name: str, parent: str | None = None, **fields: Any) -> Checkpoint:
    """A checkpoint of one root whose record is called `record-<name>` and whose manifest is `manifest-<name>`."""
    root = RootState(
        name="workspace", path="/workspace", manifest=digest(f"manifest-{name}"), content_id=digest(f"content-{name}")
    )
    given: dict[str, Any] = {
        "id": name,
        "thread_id": thread_id,
        "parent_id": parent,
        "created_at": 1,
        "roots": (root,),
        "content_id": root.content_id,
        "record_id": digest(f"record-{name}"),
    }
    return Checkpoint(**(given | fields))


async def acquire(store: CheckpointStore, thread_id: str, **options: Any) -> tuple[WriterLease, str]:
    """A lease with a pack to write."""
    pack_id = new_pack_id()
    grant = await store.acquire_writer(thread_id, pack_id=pack_id, **options)
    return grant.lease, pack_id


async def start(store: CheckpointStore, thread_id: str, name: str, **fields: Any) -> tuple[Grant, Checkpoint, Commit]:
    """A writer that is about to append: its grant, a checkpoint after the head, and a commit with all its records."""
    pack_id = new_pack_id()
    grant = await store.acquire_writer(thread_id, pack_id=pack_id)
    parent = None if grant.head is None else grant.head.id
    checkpoint = checkpoint_for(thread_id, name, parent, **fields)
    return grant, checkpoint, Commit(packs=(pack_of(pack_id, f"manifest-{name}", f"record-{name}"),))


async def append(store: CheckpointStore, thread_id: str, name: str, **fields: Any) -> Checkpoint:
    """Append a checkpoint after the head with a lease of its own."""
    grant, checkpoint, commit = await start(store, thread_id, name, **fields)
    return await store.append(grant.lease, checkpoint, commit)


async def state_of(store: CheckpointStore) -> State:
    """All that a failed call must leave as it was."""
    threads = await store.threads()
    return threads, [await store.checkpoints(thread.thread_id) for thread in threads], await store.packs()
