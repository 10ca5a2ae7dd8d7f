"""The entry point of the `snapcore` command."""

import gc
import sys

__all__ = ["run"]


def run() -> None:
    """Run the command named in `sys.argv`, and exit with its code."""
    # Loading modules makes much that stays and nothing that goes: the collector would look through it again and again.
    # A command turns it on again once its modules are loaded.
    gc.disable()
    from .app import app

    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
    app()
