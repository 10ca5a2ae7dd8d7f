"""File systems and users of their own for tests."""

import asyncio
import os
import shutil
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from snapcore.providers.direct import DirectWorkspace
from snapcore.testing.workspace_suite import restore

from ..disks import disk_at  # noqa: TID252 (tests are no package that could be named)
from .docker_fixtures import docker_api, docker_engine, docker_host, docker_proxy, make_container

__all__ = ["docker_api", "docker_engine", "docker_host", "docker_proxy", "make_container"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    with disk_at(tmp_path / "small-disk", "size=4m") as folder:
        yield folder


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A workspace with another file system mounted at `mount` in it."""
    with disk_at(tmp_path / "workspace" / "mount") as folder:
        yield folder.parent


@pytest.fixture
def bound(tmp_path: Path) -> Iterator[Path]:
    """A workspace with a folder and a file of the same file system mounted in it, at names that the mount table escapes."""
    if os.geteuid() != 0:
        pytest.skip("only the superuser may mount a file system")
    source, root = tmp_path / "source", tmp_path / "work space"
    (source / "folder").mkdir(parents=True)
    (source / "folder" / "inner").write_text("inner")
    (source / "file").write_text("bound")
    targets = [root / "a \\ b\n\t", root / "bound file"]
    targets[0].mkdir(parents=True)
    targets[1].touch()
    mounted: list[Path] = []
    try:
        for name, target in zip(("folder", "file"), targets, strict=True):
            subprocess.run(["mount", "--bind", source / name, target], check=True)
            mounted.append(target)
        yield root
    finally:
        for target in mounted:
            subprocess.run(["umount", "-l", target], check=True)


@pytest.fixture
def as_user() -> Iterator[Callable[[Callable[[Path], None]], Path]]:
    """Runs a function as a user without rights, on a folder of that user, which is returned; what it raises fails the
    test."""
    base = Path(tempfile.mkdtemp())
    root = base / "home"
    root.mkdir()
    base.chmod(0o755)
    user = 65534 if os.geteuid() == 0 else os.geteuid()
    if os.geteuid() == 0:
        os.chown(root, user, user)

    def run(work: Callable[[Path], None]) -> Path:
        asyncio.run(restore(DirectWorkspace(base / "first"), [], []))  # loads modules that the user may be unable to read
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                if os.geteuid() == 0:
                    os.setgroups([])
                    os.setgid(user)
                    os.setuid(user)
                work(root)
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
