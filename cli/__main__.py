"""`python -m snapcore.cli` is the `snapcore` command."""

from .main import run

run()
