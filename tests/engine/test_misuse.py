"""What users do by mistake: refused by a typed error before anything is changed."""

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import snapcore
from snapcore.errors import Code, SnapshotError
from snapcore.repository import Repository

Make = Callable[..., Path]
SECRET = "a-very-secret-value"


@pytest.mark.parametrize("inside", ["packs", ".", "packs/new"])
async def test_a_workspace_inside_the_repository_is_refused(repo: Repository, make: Make, tmp_path: Path, inside: str) -> None:
    await repo.capture(make({"a": "x"}), thread_id="t")
    before = sorted(os.walk(tmp_path / "repo"))
    for call in (repo.restore, repo.capture):
        with pytest.raises(SnapshotError) as caught:
            await call(tmp_path / "repo" / inside, thread_id="t")
        assert caught.value.code == Code.INVALID_WORKSPACE
    assert sorted(os.walk(tmp_path / "repo")) == before


async def lose(packs: Path) -> None:
    shutil.rmtree(packs)


async def cut(packs: Path) -> None:
    for path in packs.rglob("*"):
        if path.is_file():
            os.truncate(path, 100)


@pytest.mark.parametrize("harm", [lose, cut])
@pytest.mark.parametrize("thread", ["t", "another"])
async def test_no_checkpoint_shares_content_that_is_gone(
    repo: Repository, make: Make, tmp_path: Path, harm: Callable[[Path], Any], thread: str
) -> None:
    """Case 6: no record without durable bytes."""
    work = make({"a": "x" * 1000, "b": os.urandom(500_000)})
    await repo.capture(work, thread_id="t")
    await harm(tmp_path / "repo" / "packs")
    with pytest.raises(SnapshotError) as caught:
        await repo.capture(work, thread_id=thread, reread=True)
    assert caught.value.code in (Code.MISSING_BLOB, Code.INVALID_BLOB)
    assert "snapcore verify" in caught.value.hint
    assert len(await repo.list("t")) == 1
    assert await repo.list("another") == []


async def test_secrets_are_put_back_over_an_earlier_restore(memory_repo: Repository, make: Make, tmp_path: Path) -> None:
    work = make({"s": f"key {SECRET}\n", "plain": "x"})
    await memory_repo.capture(work, thread_id="t", secrets={"TOKEN": SECRET})
    out = tmp_path / "out"
    first = await memory_repo.restore(out, thread_id="t")
    assert first is not None
    assert first.redacted == (b"s",)
    assert SECRET not in (out / "s").read_text()
    await memory_repo.restore(out, thread_id="t", reinject=True, secrets={"TOKEN": SECRET}, verify="content")
    assert (out / "s").read_text() == f"key {SECRET}\n"


async def test_options_that_make_no_sense_are_refused(memory_repo: Repository, make: Make) -> None:
    work = make({"a": "x", "folder/b": "y"})
    await memory_repo.capture(work, thread_id="t")
    (work / "a").write_text("changed")
    wrong: list[dict[str, Any]] = [
        {"verify": "contents"},
        {"reinject": True},
        {"paths": "a"},
        {"paths": ["nope"]},
        {"paths": ["folder/nope"]},
        {"paths": [".."]},
        {"paths": ["folder/../a"]},
        {"paths": ["/a"]},
    ]
    for options in wrong:
        with pytest.raises(SnapshotError) as caught:
            await memory_repo.restore(work, thread_id="t", **options)
        assert caught.value.code in (Code.INVALID_REQUEST, Code.INVALID_PATH), options
    assert (work / "a").read_text() == "changed"
    await memory_repo.restore(work, thread_id="t", paths=["folder/", "a"])
    assert (work / "a").read_text() == "x"


@pytest.mark.parametrize("address", ["", "a\0b"])
async def test_an_empty_address_is_not_the_present_folder(memory_repo: Repository, make: Make, address: str) -> None:
    await memory_repo.capture(make({"a": "x"}), thread_id="t")
    for call in (memory_repo.capture, memory_repo.restore):
        with pytest.raises(SnapshotError) as caught:
            await call(address, thread_id="t")
        assert caught.value.code == Code.INVALID_REQUEST
    with pytest.raises(SnapshotError):
        await snapcore.open_repository(address)


async def test_a_current_folder_that_is_gone_is_told(
    memory_repo: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(SnapshotError) as caught:
        await memory_repo.capture(".", thread_id="t")
    monkeypatch.chdir(tmp_path)
    assert caught.value.code == Code.MISSING_WORKSPACE


@pytest.mark.parametrize("wait", [float("nan"), -1.0])
async def test_a_wait_that_makes_no_sense_does_not_begin(memory_repo: Repository, make: Make, wait: float) -> None:
    await memory_repo.capture(make({"a": "x"}), thread_id="t")
    async with asyncio.timeout(60):  # one that is not a number would never end
        with pytest.raises(SnapshotError) as caught:
            await memory_repo.forget("t", keep_last=1, wait=wait)
    assert caught.value.code == Code.INVALID_REQUEST
