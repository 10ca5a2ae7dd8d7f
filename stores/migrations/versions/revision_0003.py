"""Runs of scheduled jobs."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_text = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    """Create the table of runs."""
    op.create_table(
        "job_runs",
        sa.Column("id", _text, nullable=False),
        sa.Column("job", _text, nullable=False),
        sa.Column("thread_id", _text, nullable=False),
        sa.Column("started_at", sa.BigInteger(), nullable=False),
        sa.Column("outcome", _text, nullable=False),
        sa.Column("record", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("job_runs_in_order", "job_runs", ["job", "thread_id", "started_at", "id", "outcome"], unique=False)
