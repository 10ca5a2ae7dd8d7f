"""The checkpoint store on a SQL database: SQLite, in a file or in memory, or Postgres.

`SqlCheckpointStore` checks what it is given and runs one transaction a call; the work is in the `sql_*` modules.
"""

from collections.abc import Callable, Collection, Sequence

from sqlalchemy import Connection, select

from snapcore.errors import CheckpointConflictError, Code, SnapshotError
from snapcore.ledger import Claim, Event
from snapcore.model import (
    Checkpoint,
    Holder,
    Location,
    PackWrite,
    StatPage,
    StatUpdate,
    ThreadInfo,
    WriterLease,
    validate_id,
    validate_text,
    validate_thread_id,
)
from snapcore.protocols import Commit, Grant, PackInfo, Pin, StoreIdentity
from snapcore.runs import JobRun, checked_run

from . import checks, sql_checkpoints, sql_leases, sql_ledger, sql_packs, sql_runs, sql_stats
from . import sql_schema as schema
from .sql_dialects import open_database
from .sql_maintenance import SqlMaintenance
from .sql_transactions import Transaction, Transactions

__all__ = ["SqlCheckpointStore"]


class SqlCheckpointStore(SqlMaintenance):
    """A `CheckpointStore` on a SQL database.

    `url` is `sqlite:///path` (relative, or absolute with a fourth slash), `sqlite://` for a database in memory that lives as
    long as this object, or `postgresql://user:password@host/database`, with `?schema=name` for a schema of it. Nothing is
    opened before the first call. `clock` replaces the database's clock (microseconds since the epoch), for tests;
    `busy_timeout` is how many seconds to wait for other processes before `RepositoryError` `STORE_UNAVAILABLE`.

    A call that is cancelled waits for its running transaction, so that its fate is never unknown to this process.
    """

    def __init__(self, url: str, *, clock: Callable[[], int] | None = None, busy_timeout: float = 30.0) -> None:
        database = open_database(url, busy_timeout=busy_timeout)
        super().__init__(Transactions(database, clock))
        self._url = database.url

    @property
    def url(self) -> str:
        """The address of the database, without credentials."""
        return self._url

    async def identity(self) -> StoreIdentity | None:
        """The ids this store was initialised with, or None when it never was."""
        if not await self._transactions.exists():
            return None
        return await self._transactions.read(lambda tx: _identity(tx.connection))

    async def initialize(self, identity: StoreIdentity) -> StoreIdentity:
        """Create the schema and set the ids, unless that was done. Returns the ids in force."""

        def work(connection: Connection) -> StoreIdentity:
            present = _identity(connection)
            if present is not None:
                return present
            connection.execute(
                schema.repository.insert().values(
                    id=1,
                    repository_id=identity.repository_id,
                    database_id=identity.database_id,
                    commit_seq=0,
                    gc_fence=0,
                    damage_epoch=0,
                )
            )
            return identity

        return await self._transactions.initialize(work)

    async def close(self) -> None:
        """Release connections and threads. Idempotent."""
        await self._transactions.close()

    async def now(self) -> int:
        """The database's clock, microseconds since the epoch."""
        return await self._transactions.read(lambda tx: tx.now)

    # ---- writer leases

    async def acquire_writer(
        self,
        thread_id: str,
        *,
        ttl: float = 120.0,
        holder: Holder | None = None,
        pack_id: str | None = None,
        sandbox_id: str | None = None,
        roots: Sequence[str] = (),
        token: str | None = None,
    ) -> Grant:
        """Take the thread's lease and read what a capture starts from; see `CheckpointStore`."""
        validate_thread_id(thread_id)
        if pack_id is not None:
            checks.check_pack_id(pack_id)
        own_token = sql_leases.new_token() if token is None else token
        sql_leases.check_token(own_token)
        microseconds = _ttl(ttl)

        def work(tx: Transaction) -> Grant:
            lease = sql_ledger.not_before(tx, sql_leases.acquire(tx, thread_id, microseconds, holder, own_token))
            sql_packs.reserve(tx, [] if pack_id is None else [pack_id], lease.token, lease.fence)
            bases, redactions = sql_stats.bases(tx, sandbox_id, roots) if sandbox_id is not None else ({}, {})
            return Grant(
                lease=lease,
                head=sql_checkpoints.head(tx, thread_id),
                bases=bases,
                base_redactions=redactions,
                deleted=sql_checkpoints.deleted_since_head(tx, thread_id),
                has_records=sql_packs.has_records(tx),
                damaged=sql_checkpoints.is_damaged(tx, thread_id),
            )

        return await self._transactions.write(work)

    async def renew_writer(self, lease: WriterLease) -> WriterLease:
        """Extend the lease by its ttl from now."""
        return await self._transactions.write(lambda tx: sql_leases.renew(tx, lease))

    async def release_writer(self, lease: WriterLease) -> None:
        """Give the lease up."""
        await self._transactions.write(lambda tx: sql_leases.release(tx, lease))

    # ---- packs and records

    async def reserve_packs(self, lease: WriterLease, pack_ids: Sequence[str]) -> None:
        """Enter packs in state `writing`, owned by the lease."""
        for pack_id in pack_ids:
            checks.check_pack_id(pack_id)

        def work(tx: Transaction) -> None:
            sql_leases.check(tx, lease)
            sql_packs.reserve(tx, pack_ids, lease.token, lease.fence)

        await self._transactions.write(work)

    async def add_pack(self, lease: WriterLease, pack: PackWrite) -> frozenset[bytes]:
        """Enter the records of a pack that was put; see `CheckpointStore`."""
        checks.check_pack(pack)

        def work(tx: Transaction) -> frozenset[bytes]:
            sql_leases.check(tx, lease)
            return sql_packs.enter(tx, lease, pack)

        return await self._transactions.write(work)

    async def known(self, ids: Collection[bytes]) -> frozenset[bytes]:
        """Which records lie in a pack that is live or condemned."""
        checks.check_record_ids(ids)
        return await self._transactions.read(lambda tx: sql_packs.known(tx, ids))

    async def locate(self, ids: Collection[bytes]) -> dict[bytes, Location]:
        """Where records are."""
        checks.check_record_ids(ids)
        return await self._transactions.read(lambda tx: sql_packs.locate(tx, ids))

    async def packs(self) -> list[PackInfo]:
        """Every pack's row, ordered by id."""
        return await self._transactions.read(sql_packs.list_packs)

    async def record_totals(self) -> tuple[int, int]:
        """(number of records, their raw size in bytes) over all packs."""
        return await self._transactions.read(sql_packs.record_totals)

    # ---- checkpoints

    async def append(
        self,
        lease: WriterLease,
        checkpoint: Checkpoint,
        commit: Commit,
        *,
        source: tuple[str, str] | None = None,
        release: bool = True,
    ) -> Checkpoint:
        """Append a checkpoint and move the head to it; see `CheckpointStore`."""
        checks.check_checkpoint(checkpoint, lease.thread_id)
        checks.check_commit(commit, lease.thread_id, checkpoint.id)
        if source is not None:
            _check_source(source)
        return await self._transactions.write(lambda tx: sql_checkpoints.append(tx, lease, checkpoint, commit, source, release))

    async def fork(self, lease: WriterLease, checkpoint: Checkpoint, commit: Commit) -> Checkpoint:
        """Start an empty thread with a copy of a checkpoint; see `CheckpointStore`."""
        checks.check_checkpoint(checkpoint, lease.thread_id)
        checks.check_commit(commit, lease.thread_id, checkpoint.id)
        source_thread, source_id = checkpoint.source_thread_id, checkpoint.source_id
        if source_thread is None or source_id is None or checkpoint.parent_id is not None:
            raise SnapshotError("A fork names its source and has no parent.", code=Code.INVALID_ENTRY)
        if source_thread == lease.thread_id:
            raise CheckpointConflictError(
                "A thread cannot be forked into itself.", code=Code.SAME_THREAD, hint="Fork into a new thread, or rewind."
            )
        source = (source_thread, source_id)
        return await self._transactions.write(lambda tx: sql_checkpoints.fork(tx, lease, checkpoint, commit, source))

    async def set_label(
        self, lease: WriterLease, checkpoint_id: str, label: str | None, record_id: bytes, commit: Commit
    ) -> Checkpoint:
        """Change a checkpoint's label; see `CheckpointStore`."""
        validate_id(checkpoint_id)
        checks.check_label(label)
        checks.check_record_ids([record_id])
        checks.check_commit(commit, lease.thread_id, checkpoint_id)
        return await self._transactions.write(
            lambda tx: sql_checkpoints.set_label(tx, lease, checkpoint_id, label, record_id, commit)
        )

    async def delete(self, lease: WriterLease, checkpoint_ids: Sequence[str]) -> list[Checkpoint]:
        """Remove checkpoints; see `CheckpointStore`."""
        for checkpoint_id in checkpoint_ids:
            validate_id(checkpoint_id)
        return await self._transactions.write(lambda tx: sql_checkpoints.remove(tx, lease, checkpoint_ids))

    async def get(self, thread_id: str, checkpoint_id: str) -> Checkpoint | None:
        """A checkpoint of the thread."""
        validate_thread_id(thread_id)
        validate_id(checkpoint_id)
        return await self._transactions.read(lambda tx: sql_checkpoints.get(tx, thread_id, checkpoint_id))

    async def head(self, thread_id: str) -> Checkpoint | None:
        """The newest checkpoint of the thread."""
        validate_thread_id(thread_id)
        return await self._transactions.read(lambda tx: sql_checkpoints.head(tx, thread_id))

    async def by_label(self, thread_id: str, label: str) -> Checkpoint | None:
        """The newest checkpoint of the thread with that label."""
        validate_thread_id(thread_id)
        checks.check_label(label)
        return await self._transactions.read(lambda tx: sql_checkpoints.by_label(tx, thread_id, label))

    async def by_idempotency_key(self, thread_id: str, key: str) -> Checkpoint | None:
        """The checkpoint that was appended under that key."""
        validate_thread_id(thread_id)
        checks.check_idempotency_key(key)
        return await self._transactions.read(lambda tx: sql_checkpoints.by_idempotency_key(tx, thread_id, key))

    async def checkpoints(self, thread_id: str) -> list[Checkpoint]:
        """All checkpoints of the thread, oldest first."""
        validate_thread_id(thread_id)
        return await self._transactions.read(lambda tx: sql_checkpoints.list_thread(tx, thread_id))

    async def find(self, prefix: str, thread_id: str | None = None) -> list[Checkpoint]:
        """Checkpoints whose id starts with `prefix`, of one thread or all, at most 20."""
        if prefix:
            validate_id(prefix)
        if thread_id is not None:
            validate_thread_id(thread_id)
        return await self._transactions.read(lambda tx: sql_checkpoints.find(tx, prefix, thread_id))

    async def threads(self) -> list[ThreadInfo]:
        """All threads that have a checkpoint, ordered by id as UTF-8 bytes."""
        return await self._transactions.read(sql_checkpoints.list_threads)

    # ---- the ledger

    async def claim_ledger(self, lease: WriterLease, token: str) -> Claim:
        """Take the thread's ledger; see `LedgerStore`."""
        sql_leases.check_token(token)
        return await self._transactions.write(lambda tx: sql_ledger.claim(tx, lease, token))

    async def append_event(
        self, claim: Claim, event: Event, *, lease: WriterLease | None = None, commit: Commit | None = None
    ) -> Event:
        """Append an event and return it as it is stored; see `LedgerStore`."""
        if (lease is None) != (commit is None):
            raise SnapshotError("A commit comes with the lease it was made under.", code=Code.INVALID_REQUEST)
        checks.check_event(claim, event, commit)
        return await self._transactions.write(lambda tx: sql_ledger.append(tx, claim, event, lease, commit))

    async def events(self, thread_id: str, *, after: int = 0, limit: int = 500) -> list[Event]:
        """Up to `limit` events of the thread with a sequence number above `after`, in order."""
        validate_thread_id(thread_id)
        checks.check_page(after, limit)
        return await self._transactions.read(lambda tx: sql_ledger.list_events(tx, thread_id, after, limit))

    async def sandbox_thread(self, sandbox_id: str) -> str | None:
        """The thread that last created, opened or resumed that sandbox."""
        validate_text(sandbox_id, "A sandbox id")
        return await self._transactions.read(lambda tx: sql_ledger.sandbox_thread(tx, sandbox_id))

    # ---- runs of scheduled jobs

    async def record_run(self, run: JobRun) -> None:
        """Keep a run, and the newest ones of its job in its thread; see `RunStore`."""
        checked = checked_run(run)
        await self._transactions.write(lambda tx: sql_runs.record(tx, checked))

    async def runs(self, *, job: str | None = None, thread_id: str | None = None, limit: int = 50) -> list[JobRun]:
        """Up to `limit` runs, of a job and a thread where they are named, newest first."""
        if job is not None:
            validate_text(job, "The name of a job")
        if thread_id:
            validate_thread_id(thread_id)
        checks.check_page(0, limit)
        return await self._transactions.read(lambda tx: sql_runs.list_runs(tx, job, thread_id, limit))

    async def last_runs(self) -> list[JobRun]:
        """The newest run of each job in each thread, and the newest of each that went well."""
        return await self._transactions.read(sql_runs.last_runs)

    # ---- readers

    async def pin(self, roots: Sequence[bytes], source: tuple[str, str], *, ttl: float = 3600.0) -> Pin:
        """Hold records for `ttl` seconds; see `CheckpointStore`."""
        checks.check_record_ids(roots)
        _check_source(source)
        microseconds = _ttl(ttl)

        def work(tx: Transaction) -> Pin:
            sql_checkpoints.require(tx, *source)
            return sql_leases.add_pin(tx, roots, microseconds)

        return await self._transactions.write(work)

    async def renew_pin(self, pin: Pin, *, ttl: float = 3600.0) -> Pin:
        """Hold the records for `ttl` seconds from now."""
        microseconds = _ttl(ttl)
        return await self._transactions.write(lambda tx: sql_leases.renew_pin(tx, pin, microseconds))

    async def unpin(self, pin: Pin) -> None:
        """Let go. Idempotent."""
        await self._transactions.write(lambda tx: sql_leases.remove_pin(tx, pin))

    # ---- the stat cache

    async def stat_digests(self, sandbox_id: str, root: str) -> dict[bytes, bytes]:
        """Digest by page id of every stat page of this sandbox and root."""
        return await self._transactions.read(lambda tx: sql_stats.digests(tx, sandbox_id, root))

    async def stat_pages(self, sandbox_id: str, root: str, page_ids: Collection[bytes]) -> dict[bytes, StatPage]:
        """The stat pages of these manifest pages; those that are not there are absent."""
        return await self._transactions.read(lambda tx: sql_stats.pages(tx, sandbox_id, root, page_ids))

    async def save_stats(self, updates: Sequence[StatUpdate]) -> None:
        """Apply updates outside a commit."""
        await self._transactions.write(lambda tx: sql_stats.save(tx, updates))


def _identity(connection: Connection) -> StoreIdentity | None:
    row = connection.execute(select(schema.repository.c.repository_id, schema.repository.c.database_id)).one_or_none()
    return None if row is None else StoreIdentity(repository_id=row.repository_id, database_id=row.database_id)


def _check_source(source: tuple[str, str]) -> None:
    thread_id, checkpoint_id = source
    validate_thread_id(thread_id)
    validate_id(checkpoint_id)


def _ttl(seconds: float) -> int:
    if not 0 < seconds < 10**9:
        raise SnapshotError("A lease or a pin lasts more than 0 seconds.", code=Code.INVALID_REQUEST)
    return max(1, checks.microseconds(seconds))
