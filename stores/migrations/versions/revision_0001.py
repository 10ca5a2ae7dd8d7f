"""The first schema."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_text = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
_number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Create every table."""
    op.create_table(
        "checkpoints",
        sa.Column("id", _text, nullable=False),
        sa.Column("thread_id", _text, nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("label", _text, nullable=True),
        sa.Column("idempotency_key", _text, nullable=True),
        sa.Column("commit_seq", sa.BigInteger(), nullable=False),
        sa.Column("record_id", sa.LargeBinary(), nullable=False),
        sa.Column("record", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("checkpoints_by_idempotency_key", "checkpoints", ["thread_id", "idempotency_key"], unique=True)
    op.create_index("checkpoints_by_label", "checkpoints", ["thread_id", "label"], unique=False)
    op.create_index("checkpoints_in_order", "checkpoints", ["thread_id", "created_at", "id"], unique=False)
    op.create_table(
        "chunks",
        sa.Column("id", sa.LargeBinary(), nullable=False),
        sa.Column("pack_number", sa.BigInteger(), nullable=False),
        sa.Column("offset", sa.BigInteger(), nullable=False),
        sa.Column("stored_size", sa.BigInteger(), nullable=False),
        sa.Column("raw_size", sa.BigInteger(), nullable=False),
        sa.Column("codec", sa.SmallInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sqlite_with_rowid=False,
    )
    op.create_index("chunks_by_pack", "chunks", ["pack_number"], unique=False)
    op.create_table(
        "deletions",
        sa.Column("thread_id", _text, nullable=False),
        sa.Column("checkpoint_id", _text, nullable=False),
        sa.PrimaryKeyConstraint("thread_id", "checkpoint_id"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "packs",
        sa.Column("number", _number, autoincrement=True, nullable=False),
        sa.Column("pack_id", _text, nullable=False),
        sa.Column("state", _text, nullable=False),
        sa.Column("lease_token", _text, nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("commit_seq", sa.BigInteger(), nullable=True),
        sa.Column("condemned_at", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("number"),
        sa.UniqueConstraint("pack_id"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "pins",
        sa.Column("id", _text, nullable=False),
        sa.Column("roots", sa.LargeBinary(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "repository",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("repository_id", _text, nullable=False),
        sa.Column("database_id", _text, nullable=False),
        sa.Column("commit_seq", sa.BigInteger(), nullable=False),
        sa.Column("gc_fence", sa.BigInteger(), nullable=False),
        sa.Column("damage_epoch", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "sandboxes",
        sa.Column("number", _number, autoincrement=True, nullable=False),
        sa.Column("sandbox_id", _text, nullable=False),
        sa.Column("root", _text, nullable=False),
        sa.Column("manifest", sa.LargeBinary(), nullable=False),
        sa.Column("redaction", sa.LargeBinary(), nullable=False),
        sa.Column("used_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("number"),
        sqlite_autoincrement=True,
    )
    op.create_index("sandboxes_by_root", "sandboxes", ["sandbox_id", "root"], unique=True)
    op.create_table(
        "spares",
        sa.Column("pack_number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("id", sa.LargeBinary(), nullable=False),
        sa.Column("offset", sa.BigInteger(), nullable=False),
        sa.Column("stored_size", sa.BigInteger(), nullable=False),
        sa.Column("raw_size", sa.BigInteger(), nullable=False),
        sa.Column("codec", sa.SmallInteger(), nullable=False),
        sa.PrimaryKeyConstraint("pack_number", "id"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "stat_rows",
        sa.Column("sandbox_number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("page_id", sa.LargeBinary(), nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("sandbox_number", "page_id"),
    )
    op.create_table(
        "threads",
        sa.Column("thread_id", _text, nullable=False),
        sa.Column("head_id", _text, nullable=True),
        sa.PrimaryKeyConstraint("thread_id"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "writer_leases",
        sa.Column("thread_id", _text, nullable=False),
        sa.Column("token", _text, nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.Column("host", _text, nullable=False),
        sa.Column("pid", sa.BigInteger(), nullable=False),
        sa.Column("boot_id", _text, nullable=False),
        sa.Column("started", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("thread_id"),
        sa.UniqueConstraint("token"),
        sqlite_with_rowid=False,
    )
