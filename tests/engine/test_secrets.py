"""Secrets: in no stored byte, record, log or error, in whatever form they were written; and back on request."""

import base64
import json
import logging
import os
import sqlite3
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from snapcore.errors import Code, SnapshotError
from snapcore.packs import read_pack, record_content
from snapcore.redaction import RedactionHook, RedactionPattern
from snapcore.repository import Repository
from snapcore.selection import FilePolicy

Make = Callable[..., Path]
Settle = Callable[[Path], None]
TOKEN = 'ghp_Zk3/pq+Y8w"N\\x&=0'
SECRETS: dict[str, str | bytes] = {"TOKEN": TOKEN, "KEY": "AKIAIOSFODNN7EXAMPLE", "BINARY": b"\xff\x00\x01secret\xfe\n"}


def raw(name: str) -> bytes:
    value = SECRETS[name]
    return value.encode() if isinstance(value, str) else value


def forms(value: bytes) -> dict[str, bytes]:
    """What tools make of a secret, without the code under test. Of base64 the characters that the secret alone decides."""
    text = value.decode("latin-1")
    found = {
        "raw": value,
        "hex": value.hex().encode(),
        "upper hex": value.hex().upper().encode(),
        "url": urllib.parse.quote(value, safe="").encode(),
    }
    for shift in range(3):
        encoded = base64.b64encode(bytes(shift) + value)
        found[f"base64, shifted by {shift}"] = encoded[-(-8 * shift // 6) : 8 * (shift + len(value)) // 6]
    if value.isascii():
        found["json"] = json.dumps(text)[1:-1].encode()
        found["json in json"] = json.dumps(json.dumps(text))[3:-3].encode()
    return found


ALL_FORMS = {f"{name} as {form}": data for name in SECRETS for form, data in forms(raw(name)).items()}


async def stored(repo: Repository, folder: Path) -> Iterator[tuple[str, bytes]]:
    """All that the repository holds: every file as it is, every record of every pack decompressed, every SQL value."""
    found: list[tuple[str, bytes]] = []
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            found.append((str(path), path.read_bytes()))
            if "packs" in path.parts:
                data = path.read_bytes()
                for record in read_pack(data):
                    payload = data[record.offset : record.offset + record.stored_size]
                    found.append((f"record of type {record.type}", record_content(payload, record)))
    connection = sqlite3.connect(folder / "snapcore.db")
    try:
        found += [("SQL", line.encode("utf-8", "surrogateescape")) for line in connection.iterdump()]
    finally:
        connection.close()
    return iter(found)


async def assert_no_secret(repo: Repository, folder: Path) -> None:
    for place, data in await stored(repo, folder):
        for name, form in ALL_FORMS.items():
            assert form not in data, f"{name} in {place}"


async def test_no_secret_is_stored_in_any_form(repo: Repository, make: Make, tmp_path: Path, caplog: Any) -> None:
    """Case 28: in files of all sizes, at any place, in conversation, artifacts and label; and in no log line."""
    caplog.set_level(logging.DEBUG)
    spec: dict[str, bytes] = {}
    for number, form in enumerate(ALL_FORMS.values()):
        spec[f"small/{number}"] = b"before" + form + b"after" + form
        spec[f"alone/{number}"] = form
        spec[f"long/{number}"] = bytes(number) + b"." * 300_000 + form + b"." * 1000
    everything = b" ".join(ALL_FORMS.values())
    for border in (1 << 18, 1 << 20, 4 << 20, 8 << 20):
        spec[f"border/{border}"] = b"." * (border - len(everything) // 2) + everything
    work = make(spec)
    texts = [form.decode("latin-1") for form in ALL_FORMS.values() if form.isascii()]
    checkpoint = await repo.capture(
        work,
        thread_id="t",
        secrets=SECRETS,
        label=f"uses {TOKEN}",
        conversation=[{"role": "user", "content": text, text: [text, {"deep": text}]} for text in texts],
        artifacts={"log": everything, "big": b"." * (4 << 20) + everything},
    )
    assert checkpoint.label == "uses {secret:TOKEN}"
    await assert_no_secret(repo, tmp_path / "repo")
    assert await repo.read_file(checkpoint, b"small/0") == b"before" + bytes(len(TOKEN)) + b"after" + bytes(len(TOKEN))
    messages = await repo.read_conversation(checkpoint)
    assert messages[0]["content"] == "{secret:TOKEN}"
    assert len(await repo.read_artifact(checkpoint, "log")) == len(everything)
    for line in caplog.messages:
        assert not any(form.decode("latin-1") in line for form in ALL_FORMS.values())


async def test_the_fingerprint_of_the_secrets_is_no_plain_hash(repo: Repository, make: Make, tmp_path: Path) -> None:
    """No plain or fast hash of a secret is stored, raw or as hex."""
    import hashlib

    from blake3 import blake3

    work = make({"file": f"token={TOKEN}"})
    await repo.capture(work, thread_id="t", secrets={"TOKEN": TOKEN})
    fast = [hashlib.new(name, TOKEN.encode()).digest() for name in ("md5", "sha1", "sha256", "sha512", "blake2b")]
    fast.append(blake3(TOKEN.encode()).digest())
    for _, data in await stored(repo, tmp_path / "repo"):
        assert not any(digest in data or digest.hex().encode() in data.lower() for digest in fast)


async def test_receipts_tell_what_was_taken_out_and_reinject_puts_it_back(memory_repo: Repository, make: Make) -> None:
    """Offset, length, name and form are kept; only equal lengths under the same names come back."""
    content = {f"f{number}": b"a" + form + b"z" for number, form in enumerate(ALL_FORMS.values())}
    content["big"] = b"." * 9_000_000 + TOKEN.encode() + b"." * 100
    work = make({**content, "plain": b"nothing"})
    checkpoint = await memory_repo.capture(work, thread_id="t", secrets=SECRETS)
    taken = {e.path: e.redactions async for e in memory_repo.ls(checkpoint) if e.redactions}
    assert set(taken) == {os.fsencode(name) for name in content}
    assert [(r.offset, r.length, r.name, r.form) for r in taken[b"f0"]] == [(1, len(TOKEN), "TOKEN", "raw")]
    target = work.parent / "target"
    receipt = await memory_repo.restore(target, thread_id="t")
    assert receipt is not None
    assert set(receipt.redacted) == set(taken)
    assert (target / "f0").read_bytes() == b"a" + bytes(len(TOKEN)) + b"z"
    fresh = work.parent / "fresh"
    receipt = await memory_repo.restore(fresh, thread_id="t", reinject=True, secrets=SECRETS, verify="content")
    assert receipt is not None
    assert receipt.redacted == ()
    assert {name: (fresh / name).read_bytes() for name in content} == content


async def test_a_rotated_token_comes_back_as_its_present_value(memory_repo: Repository, make: Make) -> None:
    new = TOKEN[::-1]
    work = make({"file": f"a{TOKEN}z", "hex": b"x" + TOKEN.encode().hex().encode(), "other": b"k=" + raw("KEY")})
    await memory_repo.capture(work, thread_id="t", secrets=SECRETS)
    target = work.parent / "target"
    receipt = await memory_repo.restore(target, thread_id="t", reinject=True, secrets={"TOKEN": new})
    assert receipt is not None
    assert receipt.redacted == (b"other",)
    assert (target / "file").read_text() == f"a{new}z"
    assert (target / "hex").read_bytes() == b"x" + new.encode().hex().encode()
    assert (target / "other").read_bytes() == b"k=" + bytes(20)
    longer = work.parent / "longer"
    receipt = await memory_repo.restore(longer, thread_id="t", reinject=True, secrets={"TOKEN": new + "longer"})
    assert receipt is not None
    assert b"file" in receipt.redacted
    assert (longer / "file").read_bytes() == b"a" + bytes(len(TOKEN)) + b"z"


async def test_the_live_unredacted_file_counts_as_equal(memory_repo: Repository, make: Make) -> None:
    """Restoring over it neither zeroes the secret nor writes anything; a changed byte elsewhere still does."""
    spec = {"file": f"user=me\ntoken={TOKEN}\n", "big": "." * 5_000_000 + TOKEN}
    work = make(spec)
    await memory_repo.capture(work, thread_id="t", secrets=SECRETS)
    for touched in (False, True):
        if touched:  # no stat helps: the contents have to be compared
            for name in spec:
                st = (work / name).stat()
                os.utime(work / name, ns=(1, 1))
                os.utime(work / name, ns=(st.st_atime_ns, st.st_mtime_ns))
        receipt = await memory_repo.restore(work, thread_id="t", verify="content")
        assert receipt is not None
        assert (receipt.changed, receipt.bytes_written) == (0, 0)
        assert (work / "file").read_text() == spec["file"]
    (work / "file").write_text(spec["file"].replace("me", "ME"))
    receipt = await memory_repo.restore(work, thread_id="t")
    assert receipt is not None
    assert receipt.changed == 1
    assert (work / "file").read_bytes() == b"user=me\ntoken=" + bytes(len(TOKEN)) + b"\n"


@pytest.mark.parametrize("form", ["raw", "hex", "url", "base64, shifted by 1"])
@pytest.mark.parametrize("place", ["file", "folder", "link", "link target"])
async def test_a_secret_in_a_name_is_refused_without_its_value(
    memory_repo: Repository, make: Make, form: str, place: str
) -> None:
    """Case 28: the place is named, the value is not; neither in the error nor in what hangs on it."""
    secret = "tok-8f3b2c9d1e"
    written = forms(secret.encode())[form].decode()
    work = make({"plain": "x"})
    name = f"report-{written}.txt"
    if place == "file":
        (work / name).write_text("x")
    elif place == "folder":
        (work / name).mkdir()
    elif place == "link":
        (work / name).symlink_to("plain")
    else:
        (work / "link").symlink_to(name)
    with pytest.raises(SnapshotError) as caught:
        await memory_repo.capture(work, thread_id="t", secrets={"TOKEN": secret})
    assert caught.value.code == Code.SECRET_IN_NAME
    assert "TOKEN" in str(caught.value)
    shown = repr((str(caught.value), caught.value.args, vars(caught.value), caught.value.paths))
    assert written not in shown
    assert secret not in shown
    assert await memory_repo.get("t") is None


async def test_a_secret_in_other_names_is_refused_or_scrubbed(repo: Repository, make: Make, tmp_path: Path) -> None:
    """Names of artifacts and roots, ids and patterns are refused; a label is scrubbed."""
    work = make({"plain": "x"})
    with pytest.raises(SnapshotError) as caught:
        await repo.capture(work, thread_id="t", secrets=SECRETS, artifacts={f"log {TOKEN}": b"x"})
    assert caught.value.code == Code.SECRET_IN_NAME
    assert TOKEN not in str(caught.value)
    named: list[dict[str, Any]] = [
        {"run_id": f"run {TOKEN}"},
        {"idempotency_key": f"key {TOKEN}"},
        {"checkpoint_id": f"id {raw('KEY').decode()}"},
        {"thread_id": f"thread {TOKEN}"},
        {"roots": {f"root {TOKEN}": str(work)}},
        {"policy": FilePolicy.patterns(exclude=[f"*{raw('KEY').decode()}*"])},
    ]
    for options in named:
        with pytest.raises(SnapshotError) as caught:
            await repo.capture(work, **{"thread_id": "t", "secrets": SECRETS, **options})
        assert caught.value.code == Code.SECRET_IN_NAME, options
        assert not any(value in str(caught.value) for value in (TOKEN, raw("KEY").decode()))
    await repo.capture(work, thread_id="t", secrets=SECRETS, label=f"label {TOKEN}")
    await assert_no_secret(repo, tmp_path / "repo")


async def test_errors_of_a_capture_hold_no_secret(memory_repo: Repository, make: Make) -> None:
    """A path in a message is scrubbed like any text."""
    work = make({"a": "x"})
    (work / "link").symlink_to("/etc")
    hook = RedactionHook("broken", "1", lambda path, block: [(0, 10**9)])
    with pytest.raises(SnapshotError) as caught:
        await memory_repo.capture(work, thread_id="t", secrets=SECRETS, hooks=[hook])
    assert not any(value in repr(vars(caught.value)) for value in (TOKEN, "AKIAIOSFODNN7EXAMPLE"))
    with pytest.raises(SnapshotError) as caught:
        await memory_repo.capture(work, thread_id="t", secrets={"TOKEN": TOKEN}, checkpoint_id=f"bad/{TOKEN}")
    assert TOKEN not in repr((str(caught.value), vars(caught.value)))
    with pytest.raises(SnapshotError) as caught:
        await memory_repo.restore(work, thread_id="u", checkpoint_id=TOKEN, secrets={"TOKEN": TOKEN})
    assert TOKEN not in repr((str(caught.value), vars(caught.value)))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {"secrets": SECRETS}),
        ({"secrets": SECRETS}, {}),
        ({"secrets": {"A": "value-one"}}, {"secrets": {"A": "value-two"}}),
        ({"secrets": {"A": "value-one"}}, {"secrets": {"B": "value-one"}}),
        ({"secrets": {"A": "value-one"}}, {"secrets": {"A": "value-one", "B": "value-two"}}),
        ({}, {"patterns": [RedactionPattern("number", rb"\d{16}")]}),
        ({"patterns": [RedactionPattern("number", rb"\d{16}")]}, {"patterns": [RedactionPattern("number", rb"\d{15}")]}),
        (
            {"hooks": [RedactionHook("hook", "1", lambda path, block: [])]},
            {"hooks": [RedactionHook("hook", "2", lambda path, block: [])]},
        ),
    ],
)
async def test_other_secrets_cause_unchanged_files_to_be_read_again(
    memory_repo: Repository, make: Make, settle: Settle, first: dict[str, Any], second: dict[str, Any]
) -> None:
    """Known by fingerprint; with the same set nothing is read again."""
    work = make({"a": "value-one value-two", "b": f"{TOKEN} 1234567890123456"})
    settle(work)
    await memory_repo.capture(work, thread_id="t", **first)
    assert (await memory_repo.capture_with_report(work, thread_id="t", **first)).files_read == 0
    assert (await memory_repo.capture_with_report(work, thread_id="t", **second)).files_read == 2
    assert (await memory_repo.capture_with_report(work, thread_id="t", **second)).files_read == 0


async def test_hooks_and_patterns_take_out_what_they_find(memory_repo: Repository, make: Make) -> None:
    seen: list[str] = []

    def find(path: str, block: bytes) -> list[tuple[int, int]]:
        seen.append(path)
        at = block.find(b"PRIVATE")
        return [(at, at + 7)] if at >= 0 else []

    work = make({"a": "x PRIVATE y", "b": "card 4111111111111111 end", "c": "." * 5_000_000 + "PRIVATE"})
    checkpoint = await memory_repo.capture(
        work,
        thread_id="t",
        hooks=[RedactionHook("private", "1", find)],
        patterns=[RedactionPattern("card", rb"\b\d{16}\b")],
        label="about 4111111111111111",
    )
    assert await memory_repo.read_file(checkpoint, b"a") == b"x " + bytes(7) + b" y"
    assert await memory_repo.read_file(checkpoint, b"b") == b"card " + bytes(16) + b" end"
    assert (await memory_repo.read_file(checkpoint, b"c"))[-8:] == b"." + bytes(7)
    assert checkpoint.label == "about {secret:card}"
    assert {"a", "b", "c"} <= set(seen)


@pytest.mark.parametrize("secrets", [{"A": "short"}, {"A": ""}, ["abc"], {"bad name": "long enough"}])
async def test_unusable_secrets_are_refused_before_anything_happens(memory_repo: Repository, make: Make, secrets: Any) -> None:
    """Values shorter than 6 bytes, unless asked for; names that look like values. The value is not shown."""
    work = make({"a": "short"})
    with pytest.raises(SnapshotError) as caught:
        await memory_repo.capture(work, thread_id="t", secrets=secrets)
    assert caught.value.code == Code.INVALID_REQUEST
    assert "long enough" not in str(caught.value)
    assert await memory_repo.threads() == []


async def test_short_secrets_are_taken_out_when_asked_for(memory_repo: Repository, make: Make) -> None:
    work = make({"a": "pin 1234."})
    checkpoint = await memory_repo.capture(work, thread_id="t", secrets={"PIN": "1234"}, allow_short_secrets=True)
    assert await memory_repo.read_file(checkpoint, b"a") == b"pin \0\0\0\0."


async def test_a_list_of_secrets_gets_names(memory_repo: Repository, make: Make) -> None:
    work = make({"a": "first-secret second-secret"})
    checkpoint = await memory_repo.capture(work, thread_id="t", secrets=["first-secret", b"second-secret"])
    (entry,) = [e async for e in memory_repo.ls(checkpoint, b"a")]
    assert [r.name for r in entry.redactions] == ["secret-1", "secret-2"]


async def test_the_first_capture_after_a_restore_does_not_store_what_was_put_back(
    repo: Repository, make: Make, tmp_path: Path, settle: Settle
) -> None:
    """With the same secrets the reinjected files are known; with none they are redacted no more, as asked."""
    work = make({"file": f"token={TOKEN}"})
    await repo.capture(work, thread_id="t", secrets=SECRETS)
    target = tmp_path / "target"
    await repo.restore(target, thread_id="t", reinject=True, secrets=SECRETS)
    report = await repo.capture_with_report(target, thread_id="t", secrets=SECRETS)
    assert report.files_read == 0
    assert await repo.read_file(report.checkpoint, b"file") == b"token=" + bytes(len(TOKEN))
    await assert_no_secret(repo, tmp_path / "repo")


async def test_a_fork_and_a_rewind_keep_what_was_taken_out(memory_repo: Repository, make: Make) -> None:
    work = make({"file": f"token={TOKEN}"})
    checkpoint = await memory_repo.capture(work, thread_id="t", secrets=SECRETS)
    fork = await memory_repo.fork("t", to_thread_id="u")
    back = await memory_repo.rewind("t", checkpoint.id)
    assert fork.redaction == back.redaction == checkpoint.redaction
    for thread in ("u", "t"):
        target = work.parent / thread
        await memory_repo.restore(target, thread_id=thread, reinject=True, secrets=SECRETS)
        assert (target / "file").read_text() == f"token={TOKEN}"
