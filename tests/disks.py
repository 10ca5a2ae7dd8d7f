"""File systems of their own, for tests of mount points and of full disks."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["disk_at"]


@contextmanager
def disk_at(folder: Path, *options: str) -> Iterator[Path]:
    """A file system at `folder`, which is made; `options` are of mount(8), such as `size=4m`. Skips the test of those who may not
    mount one."""
    if os.geteuid() != 0:
        pytest.skip("only the superuser may mount a file system")
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", ",".join(["rw", *options]), "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
