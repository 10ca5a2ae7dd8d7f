"""Stores under test, and a watch on what they leave open."""

import os
import threading
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def nothing_is_left_open() -> Iterator[None]:
    """Every test closes what it opened: database files, connections, threads of the store."""
    yield
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("snapcore-sql")]
    assert not [path for path in _open_files() if path.endswith((".db", ".db-wal", ".db-shm"))]


def _open_files() -> list[str]:
    paths = []
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []:
        try:
            paths.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue
    return paths
