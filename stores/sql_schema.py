"""The tables of the SQL store, as SQLAlchemy Core metadata; docs/format.md says what they mean.

There are no foreign keys: every change is made under the lock of the repository row, and a commit re-reads what it rests
on. Times are microseconds since the epoch by the database's clock. Text sorts by its UTF-8 bytes.
"""

from typing import Final

from sqlalchemy import (
    DDL,
    BigInteger,
    Column,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    SmallInteger,
    String,
    Table,
    Text,
    event,
)

__all__ = [
    "HEAD_REVISION",
    "checkpoints",
    "chunks",
    "deletions",
    "events",
    "job_runs",
    "ledger_claims",
    "metadata",
    "packs",
    "pins",
    "repository",
    "sandboxes",
    "spares",
    "stat_rows",
    "threads",
    "versions",
    "writer_leases",
]

HEAD_REVISION: Final = "0003"
"""The newest Alembic revision in `migrations/versions`: what `metadata` describes."""

metadata = MetaData()

_text = Text().with_variant(Text(collation="C"), "postgresql")
_number = BigInteger().with_variant(Integer(), "sqlite")  # SQLite numbers rows by itself only in an INTEGER key

versions = Table(
    "alembic_version",
    metadata,
    Column("version_num", String(32), nullable=False),
    PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)

# One row. Updating `commit_seq` first is the ordering lock of every transaction that changes anything.
repository = Table(
    "repository",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("repository_id", _text, nullable=False),
    Column("database_id", _text, nullable=False),
    Column("commit_seq", BigInteger, nullable=False),
    Column("gc_fence", BigInteger, nullable=False),
    Column("damage_epoch", BigInteger, nullable=False),
)

threads = Table(
    "threads",
    metadata,
    Column("thread_id", _text, primary_key=True),
    Column("head_id", _text),  # None when every checkpoint was deleted
    sqlite_with_rowid=False,
)

# The columns are what queries need; `record` is the whole Checkpoint in msgpack and the only thing that is read back.
checkpoints = Table(
    "checkpoints",
    metadata,
    Column("id", _text, primary_key=True),
    Column("thread_id", _text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("label", _text),
    Column("idempotency_key", _text),
    Column("commit_seq", BigInteger, nullable=False),  # when its writer took its lease; 0 of one found by repair
    Column("record_id", LargeBinary, nullable=False),
    Column("record", LargeBinary, nullable=False),
    Index("checkpoints_in_order", "thread_id", "created_at", "id"),
    Index("checkpoints_by_label", "thread_id", "label"),
    Index("checkpoints_by_idempotency_key", "thread_id", "idempotency_key", unique=True),
)

# Checkpoints deleted since the head was written; the next checkpoint of the thread notes them.
deletions = Table(
    "deletions",
    metadata,
    Column("thread_id", _text, primary_key=True),
    Column("checkpoint_id", _text, primary_key=True),
    sqlite_with_rowid=False,
)

# A lease in force or run out; released ones have no row. `fence` is the `commit_seq` of the acquisition.
writer_leases = Table(
    "writer_leases",
    metadata,
    Column("thread_id", _text, primary_key=True),
    Column("token", _text, nullable=False, unique=True),
    Column("fence", BigInteger, nullable=False),
    Column("expires_at", BigInteger, nullable=False),
    Column("host", _text, nullable=False),
    Column("pid", BigInteger, nullable=False),
    Column("boot_id", _text, nullable=False),
    Column("started", BigInteger, nullable=False),
    sqlite_with_rowid=False,
)

pins = Table(
    "pins",
    metadata,
    Column("id", _text, primary_key=True),
    Column("roots", LargeBinary, nullable=False),  # record ids, one after the other
    Column("expires_at", BigInteger, nullable=False),
)

packs = Table(
    "packs",
    metadata,
    Column("number", _number, primary_key=True, autoincrement=True),
    Column("pack_id", _text, nullable=False, unique=True),
    Column("state", _text, nullable=False),
    Column("lease_token", _text, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("size", BigInteger, nullable=False),  # bytes; 0 until its records are entered
    Column("commit_seq", BigInteger),  # None until it is first stamped live
    Column("condemned_at", BigInteger),  # and once it is deleting or deleted, since when it is
    sqlite_autoincrement=True,
)

# Where each record is. `pack_number` is `packs.number`: 25,000 rows are a third smaller than with the pack's id.
chunks = Table(
    "chunks",
    metadata,
    Column("id", LargeBinary, primary_key=True),
    Column("pack_number", BigInteger, nullable=False),
    Column("offset", BigInteger, nullable=False),
    Column("stored_size", BigInteger, nullable=False),
    Column("raw_size", BigInteger, nullable=False),
    Column("codec", SmallInteger, nullable=False),
    Index("chunks_by_pack", "pack_number"),
    sqlite_with_rowid=False,
)

# Records that a pack in state `writing` holds though their row in `chunks` leads to another pack; see sql_packs.
spares = Table(
    "spares",
    metadata,
    Column("pack_number", BigInteger, primary_key=True, autoincrement=False),
    Column("id", LargeBinary, primary_key=True),
    Column("offset", BigInteger, nullable=False),
    Column("stored_size", BigInteger, nullable=False),
    Column("raw_size", BigInteger, nullable=False),
    Column("codec", SmallInteger, nullable=False),
    sqlite_with_rowid=False,
)

# One row for each root of each sandbox that has a stat cache: the manifest it aligns with.
sandboxes = Table(
    "sandboxes",
    metadata,
    Column("number", _number, primary_key=True, autoincrement=True),
    Column("sandbox_id", _text, nullable=False),
    Column("root", _text, nullable=False),
    Column("manifest", LargeBinary, nullable=False),
    Column("redaction", LargeBinary, nullable=False),
    Column("used_at", BigInteger, nullable=False),
    Index("sandboxes_by_root", "sandbox_id", "root", unique=True),
    sqlite_autoincrement=True,
)

stat_rows = Table(
    "stat_rows",
    metadata,
    Column("sandbox_number", BigInteger, primary_key=True, autoincrement=False),
    Column("page_id", LargeBinary, primary_key=True),
    Column("digest", LargeBinary, nullable=False),
    Column("data", LargeBinary, nullable=False),
)

# What happened in the sandboxes of a thread. The columns are what queries need; `record` is the whole Event in msgpack.
# `outputs` comes before it: gc reads nothing else.
events = Table(
    "events",
    metadata,
    Column("thread_id", _text, primary_key=True),
    Column("sequence", BigInteger, primary_key=True, autoincrement=False),
    Column("id", _text, nullable=False, unique=True),
    Column("kind", _text, nullable=False),
    Column("at", BigInteger, nullable=False),
    Column("fence", BigInteger, nullable=False),  # of the claim it was written under
    Column("sandbox_id", _text, nullable=False),
    Column("outputs", LargeBinary),  # msgpack (ids of chunks, ids of chunk lists) of stored outputs; None when there are none
    Column("record", LargeBinary, nullable=False),
    Index("events_by_sandbox", "sandbox_id", "kind"),
)
# as text, since an Index with `postgresql_where` imports SQLAlchemy's whole dialect
event.listen(events, "after_create", DDL("CREATE INDEX events_with_outputs ON events (thread_id) WHERE outputs IS NOT NULL"))  # type: ignore[no-untyped-call]

# The newest claim on each thread's ledger. `fence` is the `commit_seq` of the claim.
ledger_claims = Table(
    "ledger_claims",
    metadata,
    Column("thread_id", _text, primary_key=True),
    Column("token", _text, nullable=False),
    Column("fence", BigInteger, nullable=False),
    sqlite_with_rowid=False,
)

# What scheduled jobs did. The columns are what queries need; `record` is the whole JobRun in msgpack.
job_runs = Table(
    "job_runs",
    metadata,
    Column("id", _text, primary_key=True),
    Column("job", _text, nullable=False),
    Column("thread_id", _text, nullable=False),  # empty for a gc
    Column("started_at", BigInteger, nullable=False),  # by the clock of the machine that ran it
    Column("outcome", _text, nullable=False),
    Column("record", LargeBinary, nullable=False),
    Index("job_runs_in_order", "job", "thread_id", "started_at", "id", "outcome"),
)
