"""Agent tools: what a model can do with the checkpoints of its own thread, and that it reaches no other.

Cases 5 and 28 for agents: a save says what was saved, and no secret is saved or shown. An artifact that was damaged is never
handed out.
"""

import asyncio
import base64
import json
import os
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import snapcore
from snapcore.errors import CheckpointConflictError, CheckpointWriterLostError, SnapshotError
from snapcore.history import missing
from snapcore.integrations.agent_tools import MAX_READ, AgentTools
from snapcore.integrations.tool_schemas import ToolResult
from snapcore.model import Checkpoint, Holder
from snapcore.providers.local import LocalSandbox
from snapcore.repository import Repository

TOKEN = "token-0123456789abcdef"  # of no service


@pytest.fixture
async def repo(tmp_path: Path) -> AsyncIterator[Repository]:
    async with snapcore.open_repository(tmp_path / "repo") as opened:
        yield opened


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "a").write_text("a1")
    return folder


@pytest.fixture
def tools(repo: Repository, root: Path) -> AgentTools:
    return AgentTools(repo, "mine", LocalSandbox(root), fork_to=lambda source: f"fork-{source.id[:8]}", allow_restore=True)


def value(result: ToolResult) -> dict[str, Any]:
    assert not result.is_error, result
    found: dict[str, Any] = json.loads(result.content)
    return found


def error(result: ToolResult) -> str:
    assert result.is_error, result
    assert "Traceback" not in result.content
    return str(json.loads(result.content)["error"])


async def saved(tools: AgentTools, label: str | None = None) -> str:
    """The id of a new checkpoint."""
    return str(value(await tools.save(label))["checkpoint"]["id"])


# ------------------------------------------------------------------------------------------------ what it can do


async def test_a_save_says_what_was_saved(tools: AgentTools, repo: Repository, root: Path) -> None:
    """Case 5: what is told is what is there."""
    (root / ".env").write_text("not kept")
    told = value(await tools.save("first", artifacts={"plan": "1. go"}))
    checkpoint = await repo.get("mine", label="first")
    assert checkpoint is not None
    assert told["created"] is True
    assert told["checkpoint"] == {
        "id": checkpoint.id,
        "label": "first",
        "reason": "named",
        "created_at": told["checkpoint"]["created_at"],
        "files": 1,
        "bytes": 2,
        "artifacts": ["plan"],
    }
    assert await repo.read_artifact(checkpoint, "plan") == b"1. go"
    assert await repo.read_file(checkpoint, b"a") == b"a1"


async def test_checkpoints_are_listed_from_the_newest(tools: AgentTools) -> None:
    made = [await saved(tools, f"label {number}") for number in range(5)]
    listed = value(await tools.list())
    assert [each["id"] for each in listed["checkpoints"]] == made[::-1]
    assert listed["count"] == 5
    few = value(await tools.list(2))
    assert ([each["id"] for each in few["checkpoints"]], few["count"]) == (made[:2:-1], 5)
    for limit in (0, -1, 101):
        assert error(await tools.list(limit)) == "INVALID_ARGUMENTS"


async def test_a_checkpoint_is_named_by_id_label_or_latest(tools: AgentTools, root: Path) -> None:
    first = await saved(tools, "start")
    (root / "a").write_text("a2")
    (root / "b").write_text("b")
    second = await saved(tools, "start")
    (root / "a").unlink()
    third = await saved(tools)
    assert value(await tools.diff(first)) == {
        "before": first,
        "after": third,
        "added": {"count": 1, "shown": ["b"]},
        "changed": {"count": 0, "shown": []},
        "removed": {"count": 1, "shown": ["a"]},
    }
    assert value(await tools.diff(first, "start"))["after"] == second  # the newest of two that have the label
    assert value(await tools.diff("start", "latest"))["removed"] == {"count": 1, "shown": ["a"]}
    assert value(await tools.diff(second, third))["before"] == second


async def test_a_preview_changes_nothing_and_a_restore_does_what_it_said(tools: AgentTools, repo: Repository, root: Path) -> None:
    first = await saved(tools)
    (root / "a").write_text("changed")
    (root / "new").write_text("new")
    preview = value(await tools.restore_preview(first))
    assert preview == {
        "checkpoint": first,
        "removes": {"count": 1, "shown": ["new"]},
        "adds": {"count": 0, "shown": []},
        "changes": {"count": 1, "shown": ["a"]},
        "bytes": 2,
    }
    assert sorted(os.listdir(root)) == ["a", "new"]
    assert (root / "a").read_text() == "changed"
    assert len(await repo.list("mine")) == 1
    done = value(await tools.restore(first))
    assert (done["removed"], done["changed"]) == (1, 1)
    assert os.listdir(root) == ["a"]
    assert (root / "a").read_text() == "a1"
    before = await repo.get("mine", label="before-restore")
    assert before is not None
    assert await repo.read_file(before, b"new") == b"new"


async def test_a_preview_of_emptiness_is_no_error(tools: AgentTools, root: Path) -> None:
    (root / "a").unlink()
    empty = await saved(tools)
    (root / "a").write_text("precious")
    assert value(await tools.restore_preview(empty))["removes"] == {"count": 1, "shown": ["a"]}
    assert error(await tools.restore(empty)) == "EMPTY_RESTORE"
    assert (root / "a").read_text() == "precious"


async def test_restore_fork_and_save_are_there_only_where_they_were_given(repo: Repository, root: Path) -> None:
    def names(tools: AgentTools) -> set[str]:
        return {tool.name.removeprefix("checkpoint_") for tool in tools.tools}

    assert names(AgentTools(repo, "t")) == {"list", "diff", "read_artifact"}
    assert names(AgentTools(repo, "t", root)) == {"save", "list", "diff", "read_artifact", "restore_preview"}
    assert names(AgentTools(repo, "t", fork_to=lambda _: "f")) == {"list", "diff", "read_artifact", "fork"}
    plain = AgentTools(repo, "t", str(root))
    made = await saved(plain)
    for result in (await plain.restore(made), await plain.fork(made)):
        assert error(result) == "UNKNOWN_TOOL"
    assert [each.thread_id for each in await repo.threads()] == ["t"]


async def test_a_fork_goes_where_the_developer_says(repo: Repository, root: Path) -> None:
    asked: list[Checkpoint] = []

    async def destination(source: Checkpoint) -> str:
        asked.append(source)
        return "tenant-7/forked"

    tools = AgentTools(repo, "mine", LocalSandbox(root), fork_to=destination)
    first = await saved(tools, "start")
    forked = value(await tools.fork("start"))
    (copy,) = await repo.list("tenant-7/forked")
    assert (forked["forked_from"], forked["checkpoint"]["id"]) == (first, copy.id)
    assert "tenant-7" not in json.dumps(forked)
    assert [each.id for each in tools.forks] == [copy.id]
    assert [each.id for each in asked] == [first]
    taken = await tools.fork("start")
    assert error(taken) == "DESTINATION_NOT_EMPTY"
    assert "tenant-7" not in taken.content
    shown = AgentTools(repo, "mine", fork_to=lambda _: "another", show_forks=True)
    assert value(await shown.fork())["thread"] == "another"


# ----------------------------------------------------------------------------------------------- one thread only


async def test_another_threads_checkpoints_are_as_those_that_do_not_exist(
    tools: AgentTools, repo: Repository, root: Path
) -> None:
    mine = await saved(tools)
    theirs = (await repo.capture(str(root), thread_id="theirs", label="secret plan", artifacts={"n": b"x"})).id
    absent = secrets.token_hex(16)

    async def answers(which: str) -> list[str]:
        calls = [
            tools.diff(which),
            tools.diff(mine, which),
            tools.fork(which),
            tools.restore_preview(which),
            tools.restore(which),
            tools.read_artifact(which, "n"),
        ]
        results = [await call for call in calls]
        assert [error(result) for result in results] == ["NOT_FOUND"] * len(calls)
        return [result.content.replace(which, "ID") for result in results]

    expected = await answers(absent)
    for which in (theirs, "secret plan", "theirs"):
        assert await answers(which) == expected
    for which in (
        f"theirs:{theirs}",
        f"theirs/{theirs}",
        "label:secret plan",
        "",
        "latest ",
        theirs[:8],
        "%",
        "*",
        "a\0b",
        "é" * 600,
    ):
        assert error(await tools.diff(which)) == "NOT_FOUND"
    assert theirs not in (await tools.list()).content
    named = await saved(tools, "step 1: a/b")  # no id could be this
    assert value(await tools.diff("step 1: a/b", mine))["before"] == named


@pytest.mark.parametrize("name", ["thread_id", "thread", "to_thread_id", "repo", "sandbox", "workspace_root"])
async def test_no_tool_takes_a_thread_or_a_place(tools: AgentTools, repo: Repository, name: str) -> None:
    await saved(tools, "x")
    before = await repo.threads()
    for tool in tools.tools:
        assert name not in tool.schema()["properties"]
        arguments = {"checkpoint": "latest", "before": "latest", "name": "n"}
        known = tool.schema()["properties"]
        given = {key: text for key, text in arguments.items() if key in known} | {name: "theirs"}
        assert error(await tools.dispatch(tool.name, given)) == "INVALID_ARGUMENTS"
    assert await repo.threads() == before


async def test_an_empty_thread_has_no_latest(tools: AgentTools) -> None:
    assert value(await tools.list()) == {"count": 0, "checkpoints": []}
    for result in (await tools.diff("latest"), await tools.fork(), await tools.restore_preview()):
        assert error(result) == "NOT_FOUND"


# -------------------------------------------------------------------------------------------- what is refused, and how


BAD_NAMES = ["", " ", " x", "x ", "a\nb", "a\0b", "\x7f", "\u202etxt", "final\u200b", "x" * 101]


@pytest.mark.parametrize("name", BAD_NAMES)
async def test_labels_and_names_of_artifacts_are_plain_and_short(tools: AgentTools, repo: Repository, name: str) -> None:
    assert error(await tools.save(name)) == "INVALID_ARGUMENTS"
    assert error(await tools.save("x", artifacts={name: "text"})) == "INVALID_ARGUMENTS"
    assert await repo.list("mine") == []


async def test_artifacts_are_few_and_small(tools: AgentTools, repo: Repository) -> None:
    assert error(await tools.save(artifacts={f"n{number}": "" for number in range(17)})) == "INVALID_ARGUMENTS"
    assert error(await tools.save(artifacts={"n": "é" * (1 << 19), "m": "x"})) == "TOO_LARGE"
    twice = {"artifacts": [{"name": "n", "text": "1"}, {"name": "n", "text": "2"}]}
    assert error(await tools.dispatch("checkpoint_save", twice)) == "INVALID_ARGUMENTS"
    assert error(await tools.save("latest")) == "INVALID_ARGUMENTS"
    assert await repo.list("mine") == []
    assert len(value(await tools.save(artifacts={f"n{number}": "" for number in range(16)}))["checkpoint"]["artifacts"]) == 16


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("checkpoint_save", '{"label": 5}'),
        ("checkpoint_save", {"artifacts": {"n": "x"}}),
        ("checkpoint_save", {"artifacts": ["x"]}),
        ("checkpoint_save", {"artifacts": [{"name": "n"}]}),
        ("checkpoint_save", {"artifacts": [{"name": "n", "text": None}]}),
        ("checkpoint_save", {"artifacts": [{"name": "n", "text": "\ud800"}]}),
        ("checkpoint_save", {"artifacts": [{"name": "n", "text": "x", "mode": 1}]}),
        ("checkpoint_save", "{'label': 'x'}"),
        ("checkpoint_list", {"limit": "all"}),
        ("checkpoint_list", []),
        ("checkpoint_list", {"limit": 10**5_000}),
        ("checkpoint_diff", {}),
        ("checkpoint_diff", {"before": ["latest"]}),
        ("checkpoint_fork", {"checkpoint": "latest", "to": "theirs"}),
        ("checkpoint_read_artifact", {"checkpoint": "latest"}),
        ("checkpoint_drop", {}),
    ],
)
async def test_whatever_a_model_sends_is_answered(tools: AgentTools, repo: Repository, name: str, arguments: object) -> None:
    assert error(await tools.dispatch(name, arguments)) in ("INVALID_ARGUMENTS", "UNKNOWN_TOOL")
    assert await repo.threads() == []


async def test_failures_of_the_sandbox_and_the_store_are_answers(tools: AgentTools, repo: Repository, root: Path) -> None:
    os.mkfifo(root / "pipe")
    refused = await tools.save()
    assert error(refused) == "UNSUPPORTED_ENTRY"
    (root / "pipe").unlink()
    holder = Holder(host="a-host-of-others", pid=4242, boot_id="boot", started=1)
    grant = await repo.checkpoints.acquire_writer("mine", ttl=600, holder=holder)
    held = await tools.save()
    assert error(held) == "WRITER_HELD"
    assert "a-host-of-others" not in held.content
    assert "mine" not in held.content
    await repo.checkpoints.release_writer(grant.lease)
    await saved(tools)


async def test_saves_at_once_wait_for_each_other(tools: AgentTools, repo: Repository) -> None:
    results = await asyncio.gather(*(tools.save(f"l{number}") for number in range(5)))
    assert [result.is_error for result in results] == [False] * 5
    assert len(await repo.list("mine")) == 5


def test_a_thread_id_has_to_make_sense(repo: Repository) -> None:
    with pytest.raises(SnapshotError):
        AgentTools(repo, "")


# ------------------------------------------------------------------------------------------------- artifacts, paths


async def test_a_long_artifact_is_read_in_parts(tools: AgentTools, repo: Repository, root: Path) -> None:
    text = "".join(chr(ord("à") + number % 20) for number in range(2 * MAX_READ + 5))
    data = bytes(range(256)) * (MAX_READ // 256 + 1)
    await repo.capture(str(root), thread_id="mine", artifacts={"text": text.encode(), "data": data})
    parts: list[str] = []
    offset: int | None = 0
    while offset is not None:
        part = value(await tools.read_artifact("latest", "text", offset=offset))
        parts.append(part["text"])
        offset = part.get("next_offset")
    assert [len(part) for part in parts] == [MAX_READ, MAX_READ, 5]
    assert "".join(parts) == text
    assert value(await tools.read_artifact("latest", "data"))["next_offset"] == MAX_READ
    assert value(await tools.read_artifact("latest", "data", offset=MAX_READ))["bytes"] == len(data)
    for bad in (-1, len(text) + 1):
        assert error(await tools.read_artifact("latest", "text", offset=bad)) == "INVALID_ARGUMENTS"
    missing = await tools.read_artifact("latest", "no")
    assert error(missing) == "NOT_FOUND"
    assert "data, text" in missing.value["hint"]


async def test_a_flipped_bit_in_an_artifact_is_found(tools: AgentTools, tmp_path: Path) -> None:
    await tools.save(artifacts={"report": secrets.token_hex(40_000)})
    assert "text" in value(await tools.read_artifact("latest", "report"))
    packs = [path for path in (tmp_path / "repo/packs").rglob("*") if path.is_file() and path.stat().st_size > 30_000]
    for pack in packs:
        data = bytearray(pack.read_bytes())
        data[len(data) // 2] ^= 1
        pack.chmod(0o600)
        pack.write_bytes(data)
    assert packs
    damaged = await tools.read_artifact("latest", "report")
    assert error(damaged) == "INVALID_BLOB"
    assert "text" not in damaged.value


async def test_odd_names_are_escaped_and_long_lists_cut(tools: AgentTools, repo: Repository, root: Path) -> None:
    empty = await saved(tools)
    for name in (b"caf\xe9", b"two\nlines", b"\x1b[31mred"):
        Path(os.fsdecode(os.fsencode(root) + b"/" + name)).touch()
    some = await saved(tools)
    shown = value(await tools.diff(empty, some))["added"]["shown"]
    assert shown == ["\\x1b[31mred", "caf\\xe9", "two\\nlines"]
    for number in range(300):
        (root / ("n" * 200 + f"{number:04}")).touch()
    await saved(tools)
    many = value(await tools.diff(some))["added"]
    assert (many["count"], len(many["shown"]), many["left_out"]) == (300, 100, 200)
    assert len((await tools.restore_preview(some)).content) < 50_000


async def test_secrets_are_neither_saved_nor_shown(repo: Repository, root: Path) -> None:
    """Case 28."""
    hidden = AgentTools(repo, "mine", LocalSandbox(root), secrets={"TOKEN": TOKEN})
    (root / "a").write_text(TOKEN)
    results = [
        await hidden.save(f"with {TOKEN}", artifacts={"note": f"use {TOKEN} now"}),
        await hidden.list(),
        await hidden.read_artifact("latest", "note"),
        await hidden.diff(TOKEN),
        await hidden.save("x", artifacts={TOKEN: "y"}),
    ]
    assert all(TOKEN not in result.content for result in results)
    assert value(results[0])["checkpoint"]["label"] == "with {secret:TOKEN}"
    assert value(results[2])["text"] == "use {secret:TOKEN} now"
    assert error(results[4]) == "SECRET_IN_NAME"
    (made,) = await repo.list("mine")
    assert TOKEN.encode() not in await repo.read_artifact(made, "note")
    open_artifact = await repo.capture(str(root), thread_id="mine", artifacts={"old": f"was {TOKEN}".encode()})
    shown = await hidden.read_artifact(open_artifact.id, "old")  # saved before anybody knew
    assert value(shown)["text"] == "was {secret:TOKEN}"
    cut = {"cut": b"x" * (MAX_READ - 8) + TOKEN.encode(), "data": b"\xff" + TOKEN.encode()}
    await repo.capture(str(root), thread_id="mine", artifacts=cut)
    part = value(await hidden.read_artifact("latest", "cut"))
    assert part["text"] == "x" * (MAX_READ - 8) + "{secret:"
    data = value(await hidden.read_artifact("latest", "data"))
    assert base64.b64decode(data["base64"]) == b"\xff" + b"\0" * len(TOKEN)


async def test_where_a_long_path_is_cut_no_part_of_a_secret_stays(repo: Repository, root: Path) -> None:
    """Case 28."""
    hidden = AgentTools(repo, "mine", LocalSandbox(root), secrets={"TOKEN": TOKEN})
    await saved(hidden)
    for shown in (6, 12, 18):  # characters of the token that a cut at 1,024 would leave
        below = "/".join(letter * 200 for letter in "bcdef")
        (root / f"{shown} of {TOKEN}" / below[: 1_023 - shown]).mkdir(parents=True)
    preview = await hidden.restore_preview()
    assert value(preview)["removes"]["count"] > 10
    assert "/" + "b" * 200 in preview.content
    assert not any(TOKEN[-length:] in preview.content for length in (6, 12, 18))


async def test_whoever_loses_the_thread_in_a_call_is_not_told_its_name(repo: Repository, root: Path) -> None:
    for failure, word in (
        (CheckpointWriterLostError("The lease on thread 'mine' was taken over."), "WRITER_LOST"),
        (CheckpointConflictError("Thread 'mine' has moved on.", hint="See mine."), "STALE_HEAD"),
        (missing("mine", "0123"), "MISSING_CHECKPOINT"),
    ):

        def fails(path: str, kind: str, failure: Exception = failure) -> bool:
            raise failure

        tools = AgentTools(repo, "mine", LocalSandbox(root), capture={"policy": snapcore.FilePolicy(exclude=fails)})
        told = await tools.save()
        assert error(told) == word
        assert "mine" not in told.content


async def test_the_developers_options_go_with_each_call(repo: Repository, root: Path) -> None:
    messages: list[dict[str, str]] = []
    tools = AgentTools(
        repo,
        "mine",
        LocalSandbox(root),
        capture=lambda: {"conversation": list(messages), "artifacts": {"trace": b"t"}, "thread_id": "theirs"},
    )
    messages.append({"role": "user", "content": "hello"})
    value(await tools.save(artifacts={"note": "n"}))
    (made,) = await repo.list("mine")
    assert await repo.read_conversation(made) == messages
    assert sorted(made.artifacts) == ["note", "trace"]
