"""Makes a small repository of today's format, to be kept and reopened by every later release.

    python tests/formats/make_fixture.py tests/formats/v1

writes `repository.tar.gz` (the blob store and its database) and `contents.json` (what it must be found to hold). The ids,
times and contents are fixed, so that running it again gives the same listing for as long as the format is the same. A new
format version gets a folder of its own; an existing one is never made anew.
"""

import asyncio
import gzip
import hashlib
import io
import itertools
import json
import os
import random
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from snapcore import FilePolicy, Repository, open_repository
from snapcore.chunking import DEFAULT_CHUNKER
from snapcore.config import CONFIG_KEY, RepositoryConfig, encode_config
from snapcore.model import Checkpoint, ContentRef, Kind
from snapcore.providers.direct import DirectWorkspace
from snapcore.records import RecordReader
from snapcore.stores.local import LocalBlobStore
from snapcore.stores.sql import SqlCheckpointStore

SECRET = "fixture-token-0123456789"  # a value that exists for this fixture only
SECRETS = {"FIXTURE_TOKEN": SECRET}
CONFIG = RepositoryConfig(1, "5eed" * 8, "da7a" * 8, "5a17" * 8, DEFAULT_CHUNKER, ())
FIRST_TIME_NS = 1_600_000_000_123_456_789
ROOT = Path("/tmp/snapcore-fixture/workspace")
BIG_BYTES = 9_000_000
IDS_IN_ENTRY = 1  # as few as it takes to get a chunk list out of a small file


class FixedWorkspace(DirectWorkspace):
    """A local folder that calls itself the same on every machine."""

    @property
    def sandbox_id(self) -> str:
        return "file://host/workspace"


def write(root: Path, name: bytes, data: bytes, mode: int = 0o644, mtime_ns: int = FIRST_TIME_NS) -> None:
    path = os.path.join(os.fsencode(root), name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)
    os.chmod(path, mode)
    os.utime(path, ns=(mtime_ns, mtime_ns))


def settle_folders(root: Path) -> None:
    """Fixed modes for folders whatever the umask, fixed times for folders and links."""
    for folder, folders, names in os.walk(os.fsencode(root), topdown=False):
        for name in [*folders, *names]:
            path = os.path.join(folder, name)
            if os.path.islink(path):
                os.utime(path, ns=(FIRST_TIME_NS, FIRST_TIME_NS), follow_symlinks=False)
        os.chmod(folder, 0o700 if folder.endswith(b"private") else 0o755)
        os.utime(folder, ns=(FIRST_TIME_NS, FIRST_TIME_NS))


def make_first_tree(root: Path) -> None:
    rng = random.Random(20)
    write(root, b"src/main.py", b"print('hello')\n")
    write(root, b"src/tool.sh", b"#!/bin/sh\nexit 0\n", 0o755)
    for number in range(70):
        write(root, b"src/modules/m%03d.py" % number, b"x = %d\n" % rng.getrandbits(60), mtime_ns=FIRST_TIME_NS + number)
    write(root, b"config/settings.ini", f"[auth]\ntoken = {SECRET}\nend\n".encode())
    write(root, b"empty.txt", b"")
    write(root, b"group.txt", b"for the group\n", 0o660)
    write(root, b"before-1970.txt", b"old\n", mtime_ns=-1_500_000_001)
    write(root, b"private/key", b"key\n", 0o600)
    for name in (b"new\nline", b" spaced ", b"-dash", b"caf\xe9 \xff", "naïve 文".encode(), b"a.b", b"n" * 255):
        write(root, b"odd/" + name, name + b"\n")
    write(root, b"odd/a/inside", b"1\n")
    repeated = rng.randbytes(700) * (BIG_BYTES // 700)
    write(root, b"data/big.bin", rng.randbytes(3_000) + repeated + b"end")
    (root / "folder" / "empty").mkdir(parents=True)
    os.link(root / "src" / "tool.sh", root / "tool-too.sh")
    os.link(root / "src" / "tool.sh", root / "odd" / "tool-three.sh")
    os.symlink("src/main.py", root / "to-file")
    os.symlink("../src", root / "folder" / "to-folder")
    os.symlink("no/such/file", root / "dangling")
    os.symlink(root / "src", root / "absolute")
    os.symlink(b"caf\xe9", os.fsencode(root) + b"/odd/to-odd")
    settle_folders(root)


def make_second_tree(root: Path) -> None:
    write(root, b"src/main.py", b"print('hello again')\n", mtime_ns=FIRST_TIME_NS + 1_000)
    write(root, b"src/added.py", b"added\n")
    (root / "empty.txt").unlink()
    os.chmod(root / "src" / "tool.sh", 0o700)
    write(root, b"skipped.log", b"left out by a pattern\n")
    os.mkfifo(root / "pipe")
    settle_folders(root)


def make_third_tree(root: Path) -> None:
    shutil.rmtree(root / "odd")
    (root / "pipe").unlink()
    write(root, b"odd", b"a file where a folder was\n")
    (root / "folder" / "to-folder").unlink()
    (root / "folder" / "to-folder").mkdir()
    settle_folders(root)


@contextmanager
def fixed_ids() -> Iterator[None]:
    """Pack and checkpoint ids that are the same each time, and chunk lists in entries that need none."""
    numbers = itertools.count(1)

    def next_id() -> str:
        return f"{next(numbers):032x}"

    with (
        patch("snapcore.capturing.new_pack_id", next_id),
        patch("snapcore.history.new_pack_id", next_id),
        patch("snapcore.packwriter.new_pack_id", next_id),
        patch("snapcore.history.new_checkpoint_id", next_id),
        patch("snapcore.ingest.CONTENT_IDS_IN_ENTRY", IDS_IN_ENTRY),
    ):
        yield


async def make_repository(folder: Path, root: Path) -> None:
    """Fill `folder` with a repository, through trees that are made in `root`."""
    clock = itertools.count(1_700_000_000_000_000, 1_000_000)
    blobs = LocalBlobStore(folder)
    store = SqlCheckpointStore(f"sqlite:///{folder / 'snapcore.db'}", clock=lambda: next(clock))
    repository = Repository(blobs, store, CONFIG)
    workspace = FixedWorkspace(root)
    try:
        await blobs.put(CONFIG_KEY, encode_config(CONFIG))
        await store.initialize(CONFIG.identity)
        with fixed_ids():
            make_first_tree(root)
            await repository.capture(
                workspace,
                thread_id="main",
                checkpoint_id="first",
                label="after-install",
                secrets=SECRETS,
                conversation=[{"role": "user", "content": f"use {SECRET} please"}, {"role": "assistant", "content": "done ✓"}],
                artifacts={"report.txt": b"all is well\n", "empty": b""},
                run_id="run-1",
                step=1,
            )
            make_second_tree(root)
            await repository.capture(
                workspace,
                thread_id="main",
                checkpoint_id="second",
                secrets=SECRETS,
                policy=FilePolicy(on_unsupported="skip").with_exclude("*.log"),
                run_id="run-1",
                step=2,
                idempotency_key="step-2",
            )
            await repository.fork("main", "first", to_thread_id="fork of main")
            make_third_tree(root)
            await repository.capture(workspace, thread_id="fork of main", checkpoint_id="forked-third", secrets=SECRETS)
            await repository.capture(workspace, thread_id="main", checkpoint_id="third", secrets=SECRETS, step=3)
            await repository.label("main", "third", "named later")
            await repository.capture(workspace, thread_id="main", checkpoint_id="abandoned", secrets=SECRETS, step=4)
            await repository.delete("main", "abandoned")
            await repository.rewind("main", "second")
    finally:
        await repository.close()


def _short(ids: bytes) -> list[str]:
    return [ids[i : i + 8].hex() for i in range(0, len(ids), 32)]


def _content(ref: ContentRef) -> dict[str, Any]:
    return {
        "size": ref.size,
        "chunks": _short(ref.chunks),
        "chunk_list": _short(ref.chunk_list),
        "redactions": [[r.offset, r.length, r.name, r.form] for r in ref.redactions],
    }


async def _tree(repository: Repository, checkpoint: Checkpoint) -> list[dict[str, Any]]:
    entries = []
    reader = RecordReader(repository._engine)
    async for e in repository.ls(checkpoint):
        found: dict[str, Any] = {"path": e.path.decode("latin-1"), "kind": Kind.NAMES[e.kind], "mode": f"{e.mode:o}"}
        if e.kind != Kind.DIR:
            found["mtime_ns"] = e.mtime_ns
        if e.kind == Kind.FILE:
            content = await repository.read_file(checkpoint, e.path)
            found |= {"size": e.size, "sha256": hashlib.sha256(content).hexdigest()}
            found |= {"chunks": _short(b"".join(await reader.chunk_ids(e))), "chunk_list": _short(e.chunk_list)}
        if e.kind == Kind.LINK:
            found |= {"target": e.target.decode("latin-1"), "in_root": e.in_root}
        if e.hardlink:
            found["hardlink"] = e.hardlink.decode("latin-1")
        if e.redactions:
            found["redactions"] = [[r.offset, r.length, r.name, r.form] for r in e.redactions]
        entries.append(found)
    return entries


async def _describe(repository: Repository, c: Checkpoint) -> dict[str, Any]:
    (root,) = c.roots
    return {
        "id": c.id,
        "parent_id": c.parent_id,
        "created_at": c.created_at,
        "reason": c.reason,
        "label": c.label,
        "run_id": c.run_id,
        "step": c.step,
        "content_id": c.content_id.hex(),
        "conversation": _content(c.conversation) | {"messages": await repository.read_conversation(c)},
        "artifacts": {
            name: _content(ref) | {"text": (await repository.read_artifact(c, name)).decode()}
            for name, ref in c.artifacts.items()
        },
        "idempotency_key": c.idempotency_key,
        "source": [c.source_thread_id, c.source_id],
        "deleted": list(c.deleted),
        "redacted": bool(c.redaction),
        "root": root.name,
        "root_path": root.path,
        "exclude": list(root.policy.exclude),
        "skipped": [[s.path.decode("latin-1"), s.reason] for s in root.skipped],
        "totals": [root.totals.files, root.totals.folders, root.totals.links, root.totals.bytes],
    }


async def describe(repository: Repository) -> dict[str, Any]:
    """Everything that the repository is found to hold, as the listing states it: trees by content id, names as Latin-1."""
    threads = {}
    trees: dict[str, Any] = {}
    for thread in await repository.threads():
        checkpoints = await repository.list(thread.thread_id)
        found = [await _describe(repository, c) for c in checkpoints]
        threads[thread.thread_id] = {"head": thread.head_id, "checkpoints": found}
        for c in checkpoints:
            if c.content_id.hex() not in trees:
                trees[c.content_id.hex()] = await _tree(repository, c)
    return {"repository_id": repository.config.repository_id, "threads": threads, "trees": trees}


def pack_up(folder: Path) -> bytes:
    """The folder as a tar archive that depends on nothing but its files."""
    out = io.BytesIO()
    with gzip.GzipFile(fileobj=out, mode="wb", mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as archive:
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            info = tarfile.TarInfo(str(path.relative_to(folder)))
            info.size, info.mode = path.stat().st_size, 0o600
            with path.open("rb") as file:
                archive.addfile(info, file)
    return out.getvalue()


@contextmanager
def fixed_root() -> Iterator[Path]:
    """An empty workspace whose path, which checkpoints keep, tells nothing of the machine."""
    ROOT.mkdir(parents=True)
    try:
        yield ROOT
    finally:
        shutil.rmtree(ROOT.parent)


async def main(target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, fixed_root() as root:
        folder = Path(scratch, "repository")
        await make_repository(folder, root)
        async with open_repository(folder, create=False) as repository:
            listing = await describe(repository)
        (target / "repository.tar.gz").write_bytes(pack_up(folder))
        text = json.dumps(listing, indent=1, ensure_ascii=True)
        (target / "contents.json").write_text(text + "\n")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
