"""The ledger: events and the claims under which they are written."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_text = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    """Create the tables of the ledger."""
    op.create_table(
        "events",
        sa.Column("thread_id", _text, nullable=False),
        sa.Column("sequence", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("id", _text, nullable=False),
        sa.Column("kind", _text, nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("sandbox_id", _text, nullable=False),
        sa.Column("outputs", sa.LargeBinary(), nullable=True),
        sa.Column("record", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("thread_id", "sequence"),
        sa.UniqueConstraint("id"),
    )
    op.create_index("events_by_sandbox", "events", ["sandbox_id", "kind"], unique=False)
    op.execute("CREATE INDEX events_with_outputs ON events (thread_id) WHERE outputs IS NOT NULL")
    op.create_table(
        "ledger_claims",
        sa.Column("thread_id", _text, nullable=False),
        sa.Column("token", _text, nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("thread_id"),
        sqlite_with_rowid=False,
    )
