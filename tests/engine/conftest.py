"""Repositories, workspaces and a user without rights, for tests of the engine on local folders."""

import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

import snapcore
from snapcore.providers.direct import GRANULARITY_NS
from snapcore.repository import Repository


@pytest.fixture(autouse=True)
def no_background_loop() -> Iterator[None]:
    """The loop of `snapcore.blocking` lasts as long as its process; other tests want to see no thread of snapcore's."""
    yield
    if "snapcore.blocking" in sys.modules:
        snapcore.blocking._loop.stop()


@pytest.fixture
async def repo(tmp_path: Path) -> AsyncIterator[Repository]:
    """A repository in a folder with a SQLite database, as users have it."""
    async with snapcore.open_repository(tmp_path / "repo") as opened:
        yield opened


@pytest.fixture
async def memory_repo() -> AsyncIterator[Repository]:
    """A repository whose two stores are in memory."""
    async with snapcore.open_repository("memory://") as opened:
        yield opened


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """An empty workspace."""
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


@pytest.fixture
def make(work: Path) -> Callable[..., Path]:
    """Makes files in the workspace from `name=content`-like arguments: `make({"a/b": "text", "empty/": ""})`."""

    def make_files(spec: dict[str, str | bytes], base: Path = work) -> Path:
        for name, content in spec.items():
            path = base / name
            if name.endswith("/"):
                path.mkdir(parents=True, exist_ok=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        return base

    return make_files


@pytest.fixture
def settle() -> Callable[[Path], None]:
    """Waits until every file below a folder is old enough that its times are trusted by the next capture."""

    def newest(folder: Path) -> int:
        found = [os.lstat(folder)]
        for base, folders, files in os.walk(folder):
            found += [os.lstat(os.path.join(base, name)) for name in folders + files]
        return max(max(st.st_ctime_ns, st.st_mtime_ns) for st in found)

    def wait(folder: Path) -> None:
        until = newest(folder) + GRANULARITY_NS + 2_000_000
        while time.time_ns() < until:
            time.sleep(0.002)

    return wait


@pytest.fixture
def as_user() -> Iterator[Callable[[Callable[[Path], None]], Path]]:
    """Runs a function as a user without rights, on a folder of that user, which is returned; what it raises fails the
    test."""
    base = Path(tempfile.mkdtemp())
    root = base / "user"
    root.mkdir()
    base.chmod(0o755)
    user = 65534 if os.geteuid() == 0 else os.geteuid()
    if os.geteuid() == 0:
        os.chown(root, user, user)

    for module in ("browse", "restoring", "verification"):  # such a user may be unable to read what is not loaded yet
        importlib.import_module(f"snapcore.{module}")

    def run(job: Callable[[Path], None]) -> Path:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                if os.geteuid() == 0:
                    os.setgroups([])
                    os.setgid(user)
                    os.setuid(user)
                job(root)
                code = 0
            finally:
                if code:
                    traceback.print_exc()
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        return root

    try:
        yield run
    finally:
        subprocess.run(["chmod", "-R", "u+rwx", base], check=True)
        shutil.rmtree(base)
