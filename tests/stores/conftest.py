"""Stores under test, and a watch on what they leave open."""

import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from snapcore.stores.s3 import RetryPolicy, S3BlobStore, S3Credentials, S3Settings
from snapcore.testing import StrictS3Server

from .postgres_helpers import Wire

AWS_VARIABLES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_PROFILE",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
)


@pytest.fixture(autouse=True)
def nothing_is_left_open() -> Iterator[None]:
    """Every test closes what it opened: database files, connections, threads of the store."""
    threads, files = set(_store_threads()), _database_files()
    yield
    assert [thread.name for thread in _store_threads() if thread not in threads] == []
    assert [path for path in _database_files() if path not in files] == []


@pytest.fixture
def no_aws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """None of this machine's AWS configuration."""
    for name in AWS_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-aws-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-aws-credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def strict_server(no_aws: None) -> Iterator[StrictS3Server]:
    """A strict S3 server with an empty bucket."""
    with StrictS3Server() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of a new SQLite file, and that of a new schema on Postgres."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/snapcore.db"
    address: str = request.getfixturevalue("postgres_url")
    return address


@pytest.fixture
def wire(postgres_url: str) -> Iterator[Wire]:
    """A wire to a new schema on Postgres, which can be cut."""
    wire = Wire(postgres_url)
    yield wire
    wire.close()


class Pauses:
    """Time that passes only while a store waits before it tries again: `waits` are the pauses it made, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waits: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds

    def policy(self, **options: Any) -> RetryPolicy:
        """A policy by this time. Each wait is the longest that it may be."""
        return RetryPolicy(sleep=self.sleep, clock=lambda: self.now, part=lambda: 1.0, **options)


@pytest.fixture
def pauses() -> Pauses:
    return Pauses()


@pytest.fixture
async def open_store(strict_server: StrictS3Server, pauses: Pauses) -> AsyncIterator[Callable[..., S3BlobStore]]:
    """Opens stores on the strict server, and closes them after the test."""
    opened = []

    def open_one(place: str = "bucket/prefix", *, retry: RetryPolicy | None = None, **settings: Any) -> S3BlobStore:
        store = S3BlobStore(
            strict_server.address(place),
            credentials=S3Credentials("key", "secret"),
            settings=S3Settings(**settings),
            retry=retry or pauses.policy(),
        )
        opened.append(store)
        return store

    yield open_one
    for store in opened:
        await store.close()


@pytest.fixture
def s3(open_store: Callable[..., S3BlobStore]) -> S3BlobStore:
    """A store on the strict server."""
    return open_store()


def _store_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(("snapcore-sql", "snapcore-s3"))]


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
