"""No secret of a session is stored or shown, in any form. Case 28."""

import base64
import json
import logging
import traceback
import urllib.parse
from pathlib import Path
from typing import Any

import pytest

import snapcore
from snapcore import Repository
from snapcore.errors import Code, ProviderError, ReplayDivergedError, SnapcoreError, SnapshotError
from snapcore.packs import read_pack, record_content
from snapcore.providers.local import LocalProvider
from snapcore.redaction_hooks import RedactionPattern
from snapcore.sandboxes import SandboxHandle, SandboxSpec

from .session_helpers import Counter, contents, local, whole_ledger

SECRET = 'tok//en+"5ecret"-42=\u00e9'  # with what paths would be made shorter by
SECRETS = {"TOKEN": SECRET}


def forms(secret: str) -> list[bytes]:
    """The ways in which a secret may be written."""
    raw = secret.encode()
    return [
        raw,
        raw.hex().encode(),
        raw.hex().upper().encode(),
        urllib.parse.quote(secret, safe="").encode(),
        urllib.parse.quote_plus(secret).encode(),
        json.dumps(secret)[1:-1].encode(),
        json.dumps(secret, ensure_ascii=False)[1:-1].encode(),
        *(base64.b64encode(b"x" * shift + raw) for shift in range(3)),
    ]


def shown(text: bytes) -> list[bytes]:
    """The forms of the secret, and parts of it, that a text holds."""
    parts = [SECRET.encode()[:10], SECRET.encode()[-10:], *(form[4:-4] for form in forms(SECRET)[-3:])]
    return [form for form in [*forms(SECRET), *parts] if form in text]


def assert_nowhere(folder: Path) -> None:
    """No byte of the database, and no record of any pack, holds the secret."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert any(path.name == "snapcore.db" for path in files)
    for path in files:
        data = path.read_bytes()
        assert shown(data) == [], path
        if "packs" in path.parts:
            for record in read_pack(data):
                assert shown(record_content(data[record.offset : record.offset + record.stored_size], record)) == []


def assert_told_without(error: BaseException) -> None:
    """Nor its message, nor its trace's last lines, nor what it carries."""
    text = "".join((*traceback.format_exception_only(error), repr(error), repr(vars(error))))
    assert shown(text.encode()) == []


@pytest.fixture
def provider(tmp_path: Path) -> LocalProvider:
    return local(tmp_path)


@pytest.fixture
def counter(tmp_path: Path) -> Counter:
    return Counter(tmp_path / "runs")


async def test_no_secret_reaches_a_database_a_blob_or_a_record(
    repo: Repository, provider: LocalProvider, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Case 28: by commands, input, environment, outputs, files, labels and all that is kept beside them."""
    caplog.set_level(logging.DEBUG)
    every = "\n".join(form.decode("utf-8", "replace") for form in forms(SECRET))
    spec = SandboxSpec(environment={"TOKEN": SECRET, "SHORT": "1"})
    async with await repo.session(provider, thread_id="t", spec=spec, secrets=SECRETS) as session:
        for word in forms(SECRET):
            await session.exec(["echo", f"with {word.decode()}"])
        done = await session.exec(
            'cat; echo "$TOKEN"; echo "$OTHER" >&2', stdin=every.encode(), environment={"OTHER": f"x{SECRET}x"}, user=None
        )
        assert shown(done.stdout + done.stderr) == []
        assert b"{secret:TOKEN}" in done.stdout
        large = await session.exec(["sh", "-c", 'for n in $(seq 3000); do echo "$n $TOKEN"; done'])
        assert large.stdout.count(b"{secret:TOKEN}") == 3000
        await session.write_file("file", every)
        await session.write_file("large", every * 5000)
        await session.exec("ls", cwd=f"inner/../{SECRET}")
        await session.checkpoint(f"label {SECRET}", conversation=[{"text": every}], artifacts={"report": every.encode()})
        assert contents(session)["file"] == every.encode()  # the sandbox itself has it
        assert shown(repr(session).encode() + repr(session.warnings).encode()) == []
    async with await repo.resume("t", secrets=SECRETS, spec=spec, label=f"label {SECRET}") as resumed:
        assert (await resumed.exec(["echo", f"with {SECRET}"])).replayed
        assert resumed.restored is not None
        assert set(resumed.restored.redacted) == {b"file", b"large"}
    async with await repo.resume("t", secrets=SECRETS, spec=spec, reinject=True) as resumed:
        assert contents(resumed)["file"] == every.encode()
    assert_nowhere(tmp_path / "repo")
    assert shown(repr(await whole_ledger(repo, "t")).encode()) == []
    assert shown(caplog.text.encode()) == []


async def test_a_secret_that_is_cut_where_the_output_is_cut_leaves_no_part(
    repo: Repository, provider: LocalProvider, tmp_path: Path
) -> None:
    """Case 28: wherever the limit falls."""
    async with await repo.session(
        provider, thread_id="t", spec=SandboxSpec(environment={"T": SECRET}), secrets=SECRETS
    ) as session:
        for limit in (*range(1, 60), 400, 4096, 5000):
            done = await session.exec('for n in $(seq 400); do printf "%s.." "$T"; done', max_output=limit)
            assert len(done.stdout) <= limit
            assert done.truncated
            rest = done.stdout.replace(b"{secret:TOKEN}..", b"")
            assert b"{secret:TOKEN}..".startswith(rest), limit
    assert_nowhere(tmp_path / "repo")


async def test_a_secret_in_the_name_of_a_written_file_is_not_recorded(
    repo: Repository, provider: LocalProvider, tmp_path: Path
) -> None:
    name = "sEcret-name.42"
    async with await repo.session(provider, thread_id="t", secrets={**SECRETS, "NAME": name}) as session:
        await session.write_file(f"a/../{SECRET}.txt", "x")
        await session.write_file(f"{name}.txt", "x")
        with pytest.raises(SnapshotError) as caught:
            await session.checkpoint()
    assert caught.value.code == Code.SECRET_IN_NAME
    assert name not in str(caught.value)
    assert name not in repr(await whole_ledger(repo, "t"))
    assert_nowhere(tmp_path / "repo")


async def test_no_error_shows_a_secret(repo: Repository, provider: LocalProvider, counter: Counter, tmp_path: Path) -> None:
    """Case 28: of operations that diverge, are uncertain, or fail."""
    errors: list[SnapcoreError] = []

    async def failing(work: Any) -> None:
        with pytest.raises(SnapcoreError) as caught:
            await work
        errors.append(caught.value)

    async with await repo.session(provider, thread_id="t", secrets=SECRETS) as session:
        await session.exec(["echo", SECRET])
        await session.checkpoint()
        await failing(session.exec(f"sleep 600; {SECRET}", timeout=0.1))
        await failing(session.exec(["/bin/echo", f"{SECRET}\0"]))
        await failing(session.exec("true", environment={SECRET: "1"}))
        await failing(session.fork(f"x {SECRET}\n"))
        await failing(session.checkpoint(SECRET * 40))

        async def lost(*args: Any, **kwargs: Any) -> None:
            raise ProviderError(f"Lost while running {args}", code=Code.SANDBOX_UNAVAILABLE)

        session.handle.exec = lost  # type: ignore[method-assign,assignment]
        await failing(session.exec(f"curl {SECRET}", at_most_once=True))
        await failing(session.exec(f"curl {SECRET}", at_most_once=True))
        assert errors[-1].code == Code.OPERATION_UNCERTAIN
    async with await repo.resume("t", secrets=SECRETS, replay="strict") as session:
        await failing(session.exec(["echo", "other", SECRET]))
        assert isinstance(errors[-1], ReplayDivergedError)
        assert "{secret:TOKEN}" in str(errors[-1])
    await failing(repo.resume("t", label=f"no {SECRET}", secrets=SECRETS))
    for error in errors:
        assert_told_without(error)
    assert_nowhere(tmp_path / "repo")


async def test_what_is_stored_as_it_is_must_hold_no_secret(repo: Repository, provider: LocalProvider, tmp_path: Path) -> None:
    name = "sEcret-name.42"
    refused: list[dict[str, Any]] = [
        {"thread_id": f"t-{name}"},
        {"thread_id": "t", "roots": {"a": f"x/{name}"}},
        {"thread_id": "t", "roots": {name: "x"}},
        {"thread_id": "t", "spec": SandboxSpec(name=name)},
        {"thread_id": "t", "spec": SandboxSpec(workspace_root=f"/{name}")},
    ]
    for options in refused:
        with pytest.raises(SnapshotError) as caught:
            await repo.session(provider, secrets=[name], **options)
        assert caught.value.code == Code.SECRET_IN_NAME
        assert name not in str(caught.value)
    assert not (tmp_path / "sandboxes").exists()
    # where the provider puts a secret into its binding, the sandbox does not stay
    inside = LocalProvider(tmp_path / name)
    with pytest.raises(SnapshotError) as caught:
        await repo.session(inside, thread_id="t", secrets=[name])
    assert caught.value.code == Code.SECRET_IN_NAME
    assert not list((tmp_path / name).iterdir())
    async with await repo.session(provider, thread_id="t", secrets=[name]) as session:
        with pytest.raises(SnapshotError) as caught:
            await session.fork(f"to-{name}")
        assert caught.value.code == Code.SECRET_IN_NAME


async def test_labels_of_a_spec_are_redacted(repo: Repository, provider: LocalProvider, tmp_path: Path) -> None:
    class Taking(LocalProvider):
        async def create(self, spec: SandboxSpec) -> SandboxHandle:
            return await super().create(SandboxSpec())

    spec = SandboxSpec(image=f"registry/{SECRET}", labels={"owner": SECRET}, options={"auth": SECRET})
    async with await repo.session(Taking(tmp_path / "taking"), thread_id="t", spec=spec, secrets=SECRETS):
        pass
    (record,) = [event.spec for event in await whole_ledger(repo, "t") if event.spec is not None]
    assert record.labels == {"owner": "{secret:TOKEN}"}
    assert record.options == ("auth",)
    assert_nowhere(tmp_path / "repo")


async def test_a_rotated_secret_is_the_same_operation(repo: Repository, provider: LocalProvider, counter: Counter) -> None:
    async def program(secret: str, session: snapcore.Session) -> list[bool]:
        first = await session.exec(["sh", "-c", counter("a", "true"), secret], stdin=f"in {secret}".encode())
        await session.write_file("f", f"key={secret}")
        second = await session.exec(counter("b", f"echo {secret}"), environment={"KEY": secret})
        await session.checkpoint(f"by {secret}")
        return [first.replayed, second.replayed]

    async with await repo.session(provider, thread_id="t", secrets={"KEY": "old-secret-1"}) as session:
        assert await program("old-secret-1", session) == [False, False]
    async with await repo.resume("t", secrets={"KEY": "a-new-one-of-another-length"}) as session:
        assert await program("a-new-one-of-another-length", session) == [True, True]
        assert session.replaying == 0
    assert counter.runs == ["a", "b"]


async def test_what_a_pattern_finds_is_redacted_too(repo: Repository, provider: LocalProvider, tmp_path: Path) -> None:
    pattern = RedactionPattern("key", rb"AKIA[0-9A-Z]{16}", max_match=20)
    key = "AKIA0123456789ABCDEF"
    async with await repo.session(provider, thread_id="t", patterns=[pattern]) as session:
        done = await session.exec(f"echo {key}; for n in $(seq 2000); do echo {key}; done >&2")
        assert done.stdout == b"{secret:key}\n"
        await session.checkpoint(key)
    for path in (tmp_path / "repo").rglob("*"):
        assert not path.is_file() or key.encode() not in path.read_bytes()


async def test_an_output_that_came_whole_is_kept_up_to_its_limit_however_long_a_secret_may_be(
    repo: Repository, provider: LocalProvider
) -> None:
    wide = RedactionPattern("KEY", rb"key-[0-9]{1,60000}", max_match=60_000)
    async with await repo.session(provider, thread_id="t", patterns=[wide]) as session:
        done = await session.exec("echo key-123; seq 1000; echo key-456 >&2", max_output=2000)
        assert (len(done.stdout), done.truncated) == (2000, True)
        assert done.stdout.startswith(b"{secret:KEY}\n1\n2\n")
        assert done.stderr == b"{secret:KEY}\n"
        done = await session.exec("printf key-; head -c 100000 /dev/zero | tr '\\0' 7", max_output=2000)
        assert b"777" not in done.stdout


async def test_a_secret_is_in_no_thread_that_a_fork_would_make(repo: Repository, provider: LocalProvider, tmp_path: Path) -> None:
    async with await repo.session(provider, thread_id="t", secrets=SECRETS) as session:
        with pytest.raises(SnapshotError) as caught:
            await session.fork(f"fork-{SECRET}")
        assert caught.value.code == Code.SECRET_IN_NAME
    assert await repo.list("t") == []
    assert_nowhere(tmp_path / "repo")


async def test_a_secret_with_odd_characters_is_in_no_message(repo: Repository, provider: LocalProvider, tmp_path: Path) -> None:
    """Case 28: messages show names as they are, in no notation that would hide a secret from those who look for it."""
    odd = "S3cret\\with'all\"of-it"
    async with await repo.session(provider, thread_id="t", secrets={"ODD": odd}) as session:
        for done in (await session.exec([odd]), await session.exec("true", cwd=odd)):
            assert done.exit_code == 127
            assert b"{secret:ODD}" in done.stderr
            assert b"S3cret" not in done.stderr
        with pytest.raises(SnapshotError) as caught:
            await session.exec("true", environment={odd: "x"})
        assert "S3cret" not in str(caught.value)
        with pytest.raises(SnapshotError) as caught:
            await session.write_file(odd + "\0", b"")
        assert "S3cret" not in str(caught.value)
