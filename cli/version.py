"""The line that `snapcore --version` prints."""

import snapcore

__all__ = ["version_line"]


def version_line() -> str:
    """The command's name and its version."""
    return f"snapcore {snapcore.__version__}"
