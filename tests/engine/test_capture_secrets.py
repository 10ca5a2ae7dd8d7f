"""Secrets on the way into a checkpoint by other ways than a file's content: nothing that is stored may hold one."""

import dataclasses
import datetime
import json
import os
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from snapcore.errors import Code, SnapshotError
from snapcore.model import FileStat
from snapcore.packs import read_pack, record_content
from snapcore.protocols import ReadBlock
from snapcore.providers.direct import DirectWorkspace
from snapcore.repository import Repository
from snapcore.selection import FilePolicy

Make = Callable[..., Path]
TOKEN = "ghp_0123456789abcdef"
SECRETS = {"TOKEN": TOKEN}


def assert_nowhere(folder: Path) -> None:
    """No file, record or SQL value of the repository holds the token, plainly or in base64."""
    connection = sqlite3.connect(folder / "snapcore.db")
    try:
        texts = ["\n".join(connection.iterdump()).encode("utf-8", "surrogateescape")]
    finally:
        connection.close()
    for pack in folder.glob("packs/*/*"):
        data = pack.read_bytes()
        texts += [record_content(data[r.offset : r.offset + r.stored_size], r) for r in read_pack(data)]
    for text in texts:
        assert TOKEN.encode() not in text
        assert TOKEN.encode().hex() not in text.decode("latin-1").lower()


@dataclasses.dataclass
class Message:
    role: str
    content: Any


class Call(msgspec.Struct):
    command: str
    environment: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Key:
    value: str


CONVERSATIONS: dict[str, Any] = {
    "dataclass": [Message("user", f"use {TOKEN}")],
    "struct": {"calls": [Call(f"curl -H {TOKEN}", {TOKEN: TOKEN})]},
    "set": {"seen": {TOKEN}, "frozen": frozenset({TOKEN})},
    "nested": Message("tool", [Call("", {"a": TOKEN}), {"deep": (Message("x", {TOKEN}),)}]),
    "bytes": [TOKEN.encode(), bytearray(TOKEN.encode()), memoryview(TOKEN.encode())],
}


@pytest.mark.parametrize("kind", CONVERSATIONS)
async def test_a_conversation_of_any_objects_is_redacted(repo: Repository, work: Path, tmp_path: Path, kind: str) -> None:
    """Case 28: whatever is written as JSON is scrubbed as what it becomes."""
    checkpoint = await repo.capture(work, thread_id="t", conversation=CONVERSATIONS[kind], secrets=SECRETS)
    told = await repo.read_conversation(checkpoint)
    if kind != "bytes":
        assert "{secret:TOKEN}" in json.dumps(told)
    assert_nowhere(tmp_path / "repo")


async def test_a_conversation_is_the_same_with_and_without_secrets(memory_repo: Repository, work: Path) -> None:
    """Redaction changes nothing of what holds no secret."""
    value = {
        "when": datetime.datetime(2024, 1, 2, tzinfo=datetime.UTC),
        "who": Message("user", {"a"}),
        "raw": b"\x00\xff",
        "n": [1, None],
    }
    plain = await memory_repo.capture(work, thread_id="plain", conversation=value)
    redacted = await memory_repo.capture(work, thread_id="redacted", conversation=value, secrets=SECRETS)
    assert plain.conversation == redacted.conversation


@pytest.mark.parametrize("secrets", [None, SECRETS])
@pytest.mark.parametrize("kind", ["object", "cycle", "key", "surrogate"])
async def test_what_cannot_be_json_is_a_typed_error(memory_repo: Repository, work: Path, kind: str, secrets: Any) -> None:
    """And the error shows no value."""
    cycle: list[Any] = [TOKEN]
    cycle.append(cycle)
    value = {"object": [TOKEN, object()], "cycle": cycle, "key": {Key(TOKEN): 1}, "surrogate": "\ud800" + TOKEN}[kind]
    with pytest.raises(SnapshotError) as caught:
        await memory_repo.capture(work, thread_id="t", conversation=value, secrets=secrets)
    assert caught.value.code == Code.INVALID_REQUEST
    assert TOKEN not in str(caught.value)
    assert await memory_repo.get("t") is None


class TellingWorkspace(DirectWorkspace):
    """Says why it cannot read a file, with a secret in what it says."""

    async def read(self, files: Sequence[FileStat]) -> AsyncIterator[Sequence[ReadBlock]]:
        yield [
            ReadBlock(i, 0, b"", last=True, problem=f"GET https://host/{os.fsdecode(f.path)}?t={TOKEN} failed")
            for i, f in enumerate(files)
        ]


async def test_the_reason_of_a_skipped_path_is_scrubbed(repo: Repository, make: Make, tmp_path: Path) -> None:
    """A reason comes from the sandbox's own handle, and is stored in the record."""
    work = make({"file": "content"})
    policy = FilePolicy(on_unreadable="skip")
    report = await repo.capture_with_report(TellingWorkspace(work), thread_id="t", policy=policy, secrets=SECRETS)
    assert [s.reason for s in report.skipped] == ["GET https://host/file?t={secret:TOKEN} failed"]
    assert_nowhere(tmp_path / "repo")


class NamedWorkspace(DirectWorkspace):
    """A sandbox whose own id holds a credential."""

    @property
    def sandbox_id(self) -> str:
        return f"https://user:{TOKEN}@host/box"


async def test_a_secret_in_a_sandbox_id_is_refused(repo: Repository, make: Make, tmp_path: Path) -> None:
    """It is stored with the stat cache, as it is."""
    work = make({"file": "content"})
    with pytest.raises(SnapshotError) as caught:
        await repo.capture(NamedWorkspace(work), thread_id="t", secrets=SECRETS)
    assert caught.value.code == Code.SECRET_IN_NAME
    assert TOKEN not in str(caught.value)
    assert_nowhere(tmp_path / "repo")


@pytest.mark.parametrize("way", ["given", "resolved"])
async def test_a_secret_in_a_root_path_is_refused(repo: Repository, make: Make, tmp_path: Path, way: str) -> None:
    """Both in the path that was given and in the one that a link leads to."""
    folder = make({"file": "content"}, tmp_path / (TOKEN if way == "resolved" else "plain"))
    link = tmp_path / ("link" if way == "resolved" else TOKEN)
    link.symlink_to(folder)
    with pytest.raises(SnapshotError) as caught:
        await repo.capture(link, thread_id="t", secrets=SECRETS)
    assert caught.value.code == Code.SECRET_IN_NAME
    assert_nowhere(tmp_path / "repo")
