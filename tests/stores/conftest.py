"""Stores under test, and a watch on what they leave open."""

import os
import threading
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def nothing_is_left_open() -> Iterator[None]:
    """Every test closes what it opened: database files, connections, threads of the store."""
    threads, files = set(_store_threads()), _database_files()
    yield
    assert [thread.name for thread in _store_threads() if thread not in threads] == []
    assert [path for path in _database_files() if path not in files] == []


def _store_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("snapcore-sql")]


def _database_files() -> list[str]:
    return [path for path in _open_files() if path.endswith((".db", ".db-wal", ".db-shm"))]


def _open_files() -> list[str]:
    paths = []
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []:
        try:
            paths.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue
    return paths
