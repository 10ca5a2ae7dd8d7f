"""Where settings files may be: cheap to ask, since every command does so and there mostly is none."""

import os
from collections.abc import Iterator
from typing import Final

__all__ = ["FILE_NAME", "PROJECT_FILE_NAME", "settings_candidates"]

FILE_NAME: Final = "snapcore.toml"
PROJECT_FILE_NAME: Final = "pyproject.toml"


def settings_candidates(start: str) -> Iterator[str]:
    """The files of the two names in the folder `start` and above, nearest first, and in one folder `snapcore.toml` first. Costs
    one look at the file system for each name and folder."""
    folder = os.path.abspath(start)
    while True:
        for name in (FILE_NAME, PROJECT_FILE_NAME):
            path = os.path.join(folder, name)
            if os.path.lexists(path):
                yield path
        above = os.path.dirname(folder)
        if above == folder:
            return
        folder = above
