"""Repositories that earlier releases made stay readable, restorable and usable. See make_fixture.py."""

import hashlib
import importlib.util
import json
import os
import sqlite3
import stat
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import snapcore
from snapcore import Checkpoint, Code, FilePolicy, Repository, RepositoryError, SnapcoreError
from snapcore.config import FORMAT_VERSION
from snapcore.packs import read_pack

HERE = Path(__file__).parent
VERSIONS = sorted(path.name for path in HERE.glob("v[0-9]*"))
CHECKPOINTS = ["first", "second", "third", "forked-third"]

Listing = dict[str, Any]


def load_maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_fixture", HERE / "make_fixture.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


maker = load_maker()


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(version: str, tmp_path: Path) -> Path:
    """A copy of the old repository."""
    target = tmp_path / "repository"
    with tarfile.open(HERE / version / "repository.tar.gz") as archive:
        archive.extractall(target, filter="data")
    return target


@pytest.fixture
def listing(version: str) -> Listing:
    """What the old repository must hold."""
    found: Listing = json.loads((HERE / version / "contents.json").read_text())
    return found


@pytest.fixture
async def repository(folder: Path) -> AsyncIterator[Repository]:
    async with snapcore.open_repository(folder, create=False) as opened:
        yield opened


async def find(repository: Repository, checkpoint_id: str) -> Checkpoint:
    return await repository.resolve(checkpoint_id)


def on_disk(root: Path) -> list[Listing]:
    """The tree as the operating system tells it, in the listing's words."""
    base = os.fsencode(root)
    groups: dict[int, str] = {}
    found: list[Listing] = []

    def visit(path: bytes) -> None:
        full = os.path.join(base, path) if path else base
        st = os.lstat(full)
        entry: Listing = {"path": path.decode("latin-1"), "mode": f"{stat.S_IMODE(st.st_mode):o}"}
        found.append(entry)
        if stat.S_ISDIR(st.st_mode):
            entry["kind"] = "folder"
            for name in sorted(os.listdir(full)):
                visit(os.path.join(path, name))
            return
        entry["mtime_ns"] = st.st_mtime_ns
        if stat.S_ISLNK(st.st_mode):
            entry |= {"kind": "link", "target": os.readlink(full).decode("latin-1")}
            return
        with open(full, "rb") as file:
            content = file.read()
        entry |= {"kind": "file", "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        if st.st_nlink > 1 and (first := groups.setdefault(st.st_ino, entry["path"])) != entry["path"]:
            entry["hardlink"] = first

    visit(b"")
    return found


def expected_on_disk(tree: list[Listing], root: Path) -> list[Listing]:
    beside = ("chunks", "chunk_list", "redactions", "in_root")
    entries = [{key: value for key, value in e.items() if key not in beside} for e in tree]
    for entry, listed in zip(entries, tree, strict=True):
        if listed.get("in_root"):
            entry["target"] = f"{root}/{listed['target']}"
    return entries


def differences(found: list[Listing], expected: list[Listing]) -> list[object]:
    pairs = [({e["path"]: e for e in found}, {e["path"]: e for e in expected})]
    return [(a.get(p), b.get(p)) for a, b in pairs for p in sorted(a.keys() | b.keys()) if a.get(p) != b.get(p)]


def test_a_repository_of_every_format_version_is_kept() -> None:
    assert [f"v{number}" for number in range(1, FORMAT_VERSION + 1)] == VERSIONS


async def test_it_holds_what_it_held(repository: Repository, listing: Listing) -> None:
    assert json.loads(json.dumps(await maker.describe(repository))) == listing


async def test_every_byte_of_it_is_whole(repository: Repository, listing: Listing) -> None:
    report = await repository.verify(read_data=True)
    assert report.problems == []
    assert report.checkpoints == sum(len(t["checkpoints"]) for t in listing["threads"].values())


@pytest.mark.parametrize("checkpoint_id", CHECKPOINTS)
async def test_its_checkpoints_restore_exactly(
    repository: Repository, listing: Listing, tmp_path: Path, checkpoint_id: str
) -> None:
    checkpoint = await find(repository, checkpoint_id)
    root = tmp_path / "restored"
    receipt = await repository.restore(
        root, thread_id=checkpoint.thread_id, checkpoint_id=checkpoint_id, verify="content", workspace_root=str(root)
    )
    assert receipt is not None
    assert receipt.differences == ()
    assert receipt.content_id == checkpoint.content_id
    tree = listing["trees"][checkpoint.content_id.hex()]
    assert differences(on_disk(root), expected_on_disk(tree, root)) == []


async def test_secrets_that_were_taken_out_are_put_back(repository: Repository, tmp_path: Path) -> None:
    root = tmp_path / "restored"
    await repository.restore(root, thread_id="main", checkpoint_id="first", reinject=True, secrets=maker.SECRETS)
    assert (root / "config" / "settings.ini").read_text() == f"[auth]\ntoken = {maker.SECRET}\nend\n"
    blobs = [await repository.blobs.get(info.key) async for info in repository.blobs.list("")]
    assert not any(maker.SECRET.encode() in blob for blob in blobs)


async def test_a_checkpoint_is_found_by_label_step_and_idempotency_key(repository: Repository, tmp_path: Path) -> None:
    labelled = await repository.get("main", label="named later")
    assert labelled is not None
    assert labelled.id == "third"
    assert (await repository.fork("main", to_thread_id="of step 1", at_step=1)).source_id == "first"
    (tmp_path / "other").mkdir()
    report = await repository.capture_with_report(tmp_path / "other", thread_id="main", idempotency_key="step-2")
    assert (report.created, report.checkpoint.id) == (False, "second")


async def test_work_goes_on_in_it(repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snapcore.ingest.CONTENT_IDS_IN_ENTRY", maker.IDS_IN_ENTRY)
    root = tmp_path / "restored"
    await repository.restore(root, thread_id="main", checkpoint_id="third")
    again = await repository.capture_with_report(root, thread_id="main", checkpoint_id="again")
    old = await find(repository, "third")
    assert again.checkpoint.content_id == old.content_id
    assert again.bytes_stored < 20_000  # every chunk is known
    (root / "new.txt").write_text("new\n")
    newer = await repository.capture(root, thread_id="main")
    assert [d.path for d in (await repository.diff(old, newer)).added] == [b"new.txt"]
    await repository.rewind("main", "first")
    await repository.label("main", "second", "kept")
    await repository.delete_head("main")
    assert (await repository.list("main"))[-1].id == newer.id
    assert (await repository.verify(read_data=True)).ok


async def test_its_saved_policy_still_protects_what_capture_left_out(repository: Repository, tmp_path: Path) -> None:
    root = tmp_path / "restored"
    await repository.restore(root, thread_id="main", checkpoint_id="first")
    (root / "live.log").write_text("kept by the pattern\n")
    (root / "stray.txt").write_text("no part of the checkpoint\n")
    os.mkfifo(root / "pipe")
    await repository.restore(root, thread_id="main", checkpoint_id="second")
    assert (root / "live.log").exists()
    assert (root / "pipe").is_fifo()
    assert not (root / "stray.txt").exists()


async def test_today_s_release_writes_the_same_ids(listing: Listing, tmp_path: Path) -> None:
    """Chunks, manifests and content ids made today deduplicate against those of the newest format kept here."""
    (tmp_path / "workspace").mkdir()
    await maker.make_repository(tmp_path / "made", tmp_path / "workspace")
    async with snapcore.open_repository(tmp_path / "made", create=False) as made:
        found = json.loads(json.dumps(await maker.describe(made)))
    for side in (found, listing):
        for thread in side["threads"].values():
            for checkpoint in thread["checkpoints"]:
                del checkpoint["created_at"], checkpoint["root_path"]  # no part of the format
    assert found == listing


# ---- damage


async def test_a_damaged_pack_is_found_and_says_whom_it_hurts(repository: Repository, folder: Path) -> None:
    pack = max((path for path in folder.glob("packs/*/*")), key=lambda path: path.stat().st_size)
    data = pack.read_bytes()
    record = next(r for r in read_pack(data) if r.stored_size > 10)
    pack.write_bytes(data[: record.offset + 5] + bytes([data[record.offset + 5] ^ 0xFF]) + data[record.offset + 6 :])
    report = await repository.verify(read_data=True)
    assert [(p.kind, p.subject) for p in report.problems] == [("pack-damaged", pack.name)]
    assert ("main", "first") in report.problems[0].checkpoints


def records(database: Path) -> list[tuple[str, bytes]]:
    with sqlite3.connect(database) as connection:
        found: list[tuple[str, bytes]] = connection.execute("SELECT id, record FROM checkpoints ORDER BY id").fetchall()
    connection.close()
    return found


async def test_a_damaged_checkpoint_row_is_a_typed_error(folder: Path) -> None:
    database = folder / "snapcore.db"
    checkpoint_id, record = next(row for row in records(database) if row[0] == "first")
    for damaged in (
        *(record[:length] for length in range(0, len(record), 41)),
        record[:-1],
        b"\xc1" + record[1:],
        b"\x91" * 9999,
    ):
        with sqlite3.connect(database) as connection:
            connection.execute("UPDATE checkpoints SET record = ? WHERE id = ?", (damaged, checkpoint_id))
        connection.close()
        async with snapcore.open_repository(folder, create=False) as repository:
            for call in (repository.list("main"), repository.get("main", checkpoint_id), repository.resolve(checkpoint_id)):
                with pytest.raises(RepositoryError) as error:
                    await call
                assert error.value.code == Code.DAMAGED


async def test_a_lost_snapcore_json_or_database_is_a_typed_error(folder: Path) -> None:
    for name, code in (("snapcore.json", Code.DAMAGED), ("snapcore.db", Code.WRONG_DATABASE)):
        (folder / name).rename(folder / "aside")
        with pytest.raises(SnapcoreError) as error:
            async with snapcore.open_repository(folder, create=False):
                pass
        assert error.value.code == code
        for left in folder.glob(f"{name}*"):
            left.unlink()
        (folder / "aside").rename(folder / name)
    async with snapcore.open_repository(folder, create=False) as repository:
        assert len(await repository.threads()) == 2


def test_the_default_policy_of_old_checkpoints_is_today_s(listing: Listing) -> None:
    assert FilePolicy.default().exclude == ()
    excludes = {c["id"]: c["exclude"] for c in listing["threads"]["main"]["checkpoints"]}
    assert excludes["first"] == []
    assert excludes["second"] == ["*.log"]
