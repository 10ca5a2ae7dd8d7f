"""The entry point of the `snapcore` command."""

import gc
import os
import sys

__all__ = ["run"]


def run() -> None:
    """Run the command named in `sys.argv`, and end the process with its exit code."""
    # Loading modules makes much that stays and nothing that goes: the collector would look through it again and again.
    # A command turns it on again once its modules are loaded.
    gc.disable()
    from .app import app

    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
    try:
        app()
    except SystemExit as done:
        _leave(done.code)


def _leave(code: str | int | None) -> None:
    """End the process without taking the interpreter apart, which takes 25 ms: stores and threads are closed by now."""
    if isinstance(code, str):
        sys.exit(code)
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        code = code or 1
    os._exit(code or 0)
