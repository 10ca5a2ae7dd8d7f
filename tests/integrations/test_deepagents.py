"""Real deep agents, with a scripted model, whose files are captured and go back with their graph; and sandboxes of snapcore,
local, in Docker and of E2B, as their backends. Covers case 7: another process finds the files by the thread's id."""

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from deepagents import create_deep_agent
from deepagents.backends import LocalShellBackend
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver

import snapcore
from snapcore import blocking
from snapcore.errors import SnapcoreError
from snapcore.integrations.deepagents import BackendSandbox, HandleBackend, checkpointed, sandbox_of
from snapcore.integrations.langgraph import GraphFiles
from snapcore.model import Kind
from snapcore.providers.e2b import E2BProvider
from snapcore.providers.local import LocalSandbox
from snapcore.sandboxes import SandboxHandle, SandboxSpec
from snapcore.testing.e2b_server import E2BServer

from ..providers.docker_fixtures import MakeContainer  # noqa: TID252 (tests are no package that could be named)
from ..providers.e2b_service import need_server  # noqa: TID252
from .deepagents_scripted import execute, scripted, write
from .langgraph_worker import FileSaver

CONFIG: RunnableConfig = {"configurable": {"thread_id": "thread"}}
QUESTION: dict[str, Any] = {"messages": [("user", "Work.")]}
WORKER = "tests.integrations.deepagents_worker"
ROOT = Path(__file__).parents[2]
TREE = r"""
cd "$0"
mkdir -p a/b
i=0; while [ $i -lt 300 ]; do echo $i >"a/b/name $i"; i=$((i + 1)); done
chmod 700 a
ln -s b a/c
head -c 3000000 /dev/urandom >large
touch empty
printf '\377\000' >"$(printf 'odd \377\n ')"
"""


@pytest_asyncio.fixture
async def repo() -> AsyncIterator[snapcore.Repository]:
    async with snapcore.open_repository("memory://") as opened:
        yield opened


@pytest.fixture
def backend(tmp_path: Path) -> LocalShellBackend:
    (tmp_path / "root").mkdir()
    return LocalShellBackend(tmp_path / "root", env={"PATH": os.environ["PATH"]})


def contents(backend: LocalShellBackend) -> dict[str, str]:
    return {path.name: path.read_text() for path in backend.cwd.iterdir()}


def before_model(agent: Any) -> list[RunnableConfig]:
    """The checkpoints at which files were captured before a call of the model, newest first."""
    return [s.config for s in agent.get_state_history(CONFIG) if s.next and s.next[0].endswith("Middleware.before_model")]


# ---- the middleware


async def test_two_steps_back_in_the_agent_are_two_steps_back_in_the_files(
    repo: snapcore.Repository, backend: LocalShellBackend
) -> None:
    saver = InMemorySaver()
    files = GraphFiles(repo, sandbox_of(backend), saver)
    model = scripted(
        [write("/notes.txt", "one")],
        [execute("echo two >>notes.txt; mkdir made; touch made/file; rmdir none; rm -r made")],
        [write("/more.txt", "three"), execute("rm notes.txt")],
        "done",
        # the second time, from two steps back
        [write("/other.txt", "branch")],
        "done otherwise",
    )
    agent: Any = create_deep_agent(model, backend=backend, checkpointer=saver, middleware=[files.middleware()])
    result = await agent.ainvoke(QUESTION, CONFIG)
    assert result["messages"][-1].content == "done"
    assert "snapcore_checkpoint" not in result
    assert contents(backend) == {"more.txt": "three"}
    left = (await agent.aget_state(CONFIG)).config

    newest, second, first, start = before_model(agent)
    assert (await files.arestore_for(second)).exact
    assert contents(backend) == {"notes.txt": "onetwo\n"}
    restored = await files.arestore_for(first)
    assert contents(backend) == {"notes.txt": "one"}

    result = await agent.ainvoke(None, restored.config)
    assert result["messages"][-1].content == "done otherwise"
    assert contents(backend) == {"notes.txt": "one", "other.txt": "branch"}
    await files.arestore_for(left)
    assert contents(backend) == {"more.txt": "three"}
    await files.arestore_for(CONFIG)
    assert contents(backend) == {"notes.txt": "one", "other.txt": "branch"}
    assert (await files.afind(newest)).exact
    await files.arestore_for(start, allow_empty=True)
    assert contents(backend) == {}


async def test_checkpoints_that_the_graph_did_not_save_are_found_by_its_state(
    repo: snapcore.Repository, backend: LocalShellBackend
) -> None:
    saver = InMemorySaver()
    files = GraphFiles(repo, sandbox_of(backend), saver)
    for content in ("first", "second"):
        model = scripted([write("/notes.txt", content)], "done")
        agent: Any = create_deep_agent(model, backend=backend, checkpointer=saver, middleware=[files.middleware()])
        await agent.ainvoke(QUESTION, CONFIG, durability="exit")
    newest, older = [s.config for s in agent.get_state_history(CONFIG) if s.values.get("messages")]
    await files.arestore_for(older)
    assert contents(backend) == {"notes.txt": "first"}
    await files.arestore_for(newest)
    assert contents(backend) == {"notes.txt": "second"}


def test_an_agent_goes_on_in_another_process_and_another_folder(backend: LocalShellBackend, tmp_path: Path) -> None:
    saver = FileSaver(tmp_path / "saver")
    with blocking.open_repository(tmp_path / "repository") as repo:
        files = GraphFiles(repo, sandbox_of(backend), saver)
        model = scripted([write("/notes.txt", "from the first\n"), execute("touch empty")], "done")
        agent: Any = create_deep_agent(model, backend=backend, checkpointer=saver, middleware=[files.middleware()])
        agent.invoke(QUESTION, CONFIG)
    assert contents(backend) == {"notes.txt": "from the first\n", "empty": ""}
    went_on = subprocess.run(
        [sys.executable, "-m", WORKER, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert went_on.returncode == 0, went_on.stderr
    assert went_on.stdout == "done\n"
    second = tmp_path / "second"
    assert {path.name: path.read_text() for path in second.iterdir()} == {"copy": "from the first\n", "empty": ""}
    assert contents(backend) == {"notes.txt": "from the first\n", "empty": ""}


async def test_what_a_subagent_did_is_in_the_next_checkpoint_of_its_agent(
    repo: snapcore.Repository, backend: LocalShellBackend
) -> None:
    saver = InMemorySaver()
    files = GraphFiles(repo, sandbox_of(backend), saver)
    helper: Any = {
        "name": "helper",
        "description": "helps",
        "system_prompt": "Help.",
        "model": scripted([write("/by-helper.txt", "x")], "helped"),
    }
    model = scripted([("task", {"description": "Help.", "subagent_type": "helper"})], "done")
    agent: Any = create_deep_agent(
        model, backend=backend, subagents=[helper], checkpointer=saver, middleware=[files.middleware()]
    )
    await agent.ainvoke(QUESTION, CONFIG)
    after, start = before_model(agent)
    await files.arestore_for(start, allow_empty=True)
    assert contents(backend) == {}
    await files.arestore_for(after)
    assert contents(backend) == {"by-helper.txt": "x"}


async def test_an_agent_works_on_when_its_files_cannot_be_captured(repo: snapcore.Repository, backend: LocalShellBackend) -> None:
    failures: list[SnapcoreError] = []
    files = GraphFiles(repo, sandbox_of(backend, "/not there"), on_failure=failures.append)
    model = scripted([write("/notes.txt", "x")], "done")
    agent: Any = create_deep_agent(model, backend=backend, middleware=[files.middleware()], checkpointer=InMemorySaver())
    assert (await agent.ainvoke(QUESTION, CONFIG))["messages"][-1].content == "done"
    assert len(failures) == 3


# ---- the backend with checkpoints


async def test_a_backend_with_checkpoints_takes_the_thread_of_the_graph(
    repo: snapcore.Repository, backend: LocalShellBackend
) -> None:
    async with checkpointed(backend, repo) as wrapped:
        model = scripted([write("/a", "1")], [execute("cat a")], [execute("rm a; touch b")], "done")
        agent: Any = create_deep_agent(model, backend=wrapped, checkpointer=InMemorySaver())
        await agent.ainvoke(QUESTION, CONFIG)
        assert wrapped.failures == []
    assert [[e.path async for e in repo.ls(c) if e.path] for c in await repo.list("thread")] == [[], [b"a"], [b"b"]]


def test_a_backend_with_checkpoints_without_async(backend: LocalShellBackend) -> None:
    with blocking.open_repository("memory://") as repo, checkpointed(backend, repo) as wrapped:
        agent: Any = create_deep_agent(scripted([write("/a", "1")], "done"), backend=wrapped, checkpointer=InMemorySaver())
        agent.invoke(QUESTION, CONFIG)
        assert len(repo.list("thread")) == 2


# ---- sandboxes of snapcore


@pytest.fixture(scope="module")
def e2b_server() -> Iterator[E2BServer]:
    need_server()
    with E2BServer() as server:
        yield server


@pytest_asyncio.fixture(params=["local", "docker", "e2b"])
async def handle(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SandboxHandle]:
    if request.param == "local":
        (tmp_path / "workspace").mkdir()
        yield LocalSandbox(tmp_path / "workspace")
        return
    if request.param == "e2b":
        provider = E2BProvider(**request.getfixturevalue("e2b_server").options)
        made = await provider.create(SandboxSpec())
        yield made
        await provider.destroy(made.binding)
        return
    request.getfixturevalue("docker_host")
    make: MakeContainer = request.getfixturevalue("make_container")
    opened = await snapcore.connect(f"docker://{make()}/workspace")
    await opened.exec("mkdir -p /workspace", cwd="/")
    yield opened
    await opened.close()


async def test_an_agent_works_in_a_sandbox_of_snapcore(repo: snapcore.Repository, handle: SandboxHandle) -> None:
    root = handle.workspace_root
    saver = InMemorySaver()
    backend = HandleBackend(handle)
    files = GraphFiles(repo, handle, saver)
    model = scripted(
        [write(f"{root}/src/notes.txt", "one\ntwo\n")],
        [("edit_file", {"file_path": f"{root}/src/notes.txt", "old_string": "two", "new_string": "2"})],
        [("read_file", {"file_path": f"{root}/src/notes.txt"}), execute("pwd; wc -l src/notes.txt; exit 3")],
        [("ls", {"path": root}), ("glob", {"pattern": "**/*.txt", "path": root}), ("grep", {"pattern": "one", "path": root})],
        [execute("rm -r src")],
        "done",
    )
    agent: Any = create_deep_agent(model, backend=backend, checkpointer=saver, middleware=[files.middleware()])
    result = await agent.ainvoke(QUESTION, CONFIG)
    said = [str(message.content) for message in result["messages"] if message.type == "tool"]
    assert "one" in said[2]
    assert "2" in said[2].splitlines()[-1]
    assert root in said[3]
    assert "exit code 3" in said[3]
    assert f"{root}/src" in said[4]
    assert f"{root}/src/notes.txt" in said[5]
    assert f"{root}/src/notes.txt" in said[6]
    after_edit = before_model(agent)[-3]
    await files.arestore_for(after_edit)
    assert (await backend.adownload_files([f"{root}/src/notes.txt"]))[0].content == b"one\n2\n"


async def test_files_of_a_backend_keep_their_bytes_and_modes(handle: SandboxHandle) -> None:
    backend = HandleBackend(handle)
    path = f"{handle.workspace_root}/deep/er/script"
    data = bytes(range(256)) * 100
    assert [each.error for each in await backend.aupload_files([(path, data), ("relative", b"")])] == [None, "invalid_path"]
    found = await backend.adownload_files([path, path + "-not", handle.workspace_root])
    assert [each.error for each in found] == [None, "file_not_found", "is_directory"]
    assert found[0].content == data
    await backend.aexecute(f"chmod 755 {path}")
    assert (await backend.awrite(path, "echo 1\r\necho 1\r\n")).error is None
    assert (await backend.aedit(path, "echo 1\necho 1", "echo 2\necho 3")).occurrences == 1
    assert (await backend.aexecute(f"[ -x {path} ] && cat {path}")).output == "echo 2\r\necho 3\r\n"
    assert (await backend.aedit(path, "not there", "x")).error
    read = await backend.aread(path, 1, 1)
    assert (read.start_line, read.end_line, read.total_lines) == (2, 2, 2)
    assert (await backend.adelete(f"{handle.workspace_root}/deep")).error is None
    assert (await backend.adelete(f"{handle.workspace_root}/deep")).error


async def test_odd_names_and_binary_files_are_told_apart(handle: SandboxHandle) -> None:
    backend = HandleBackend(handle)
    root = handle.workspace_root
    await backend.aupload_files(
        [(f"{root}/a b'\"$x", b"find me\nx\nfind me"), (f"{root}/.hidden", b""), (f"{root}/bin", b"\xff\0")]
    )
    await backend.aexecute("mkdir .git sub; echo find me >.git/x; ln -s nowhere link")
    listed = (await backend.als(root)).entries or []
    assert [(each["path"].removeprefix(root), each.get("is_dir")) for each in listed] == [
        ("/.git", True),
        ("/.hidden", False),
        ("/a b'\"$x", False),
        ("/bin", False),
        ("/link", False),
        ("/sub", True),
    ]
    found = await backend.agrep("find me")
    assert [(each["path"], each["line"], each["text"]) for each in found.matches or []] == [
        (f"{root}/a b'\"$x", 1, "find me"),
        (f"{root}/a b'\"$x", 3, "find me"),
    ]
    assert (await backend.agrep("find me", max_count=1)).truncated
    assert (await backend.agrep("find me", glob="*.py")).matches == []
    assert (await backend.aglob("a*", root)).matches == [{"path": f"{root}/a b'\"$x", "is_dir": False}]
    assert (await backend.aglob("../*")).error
    assert (await backend.als(f"{root}/none")).error
    binary = await backend.aread(f"{root}/bin")
    assert binary.file_data is not None
    assert binary.file_data["encoding"] == "base64"


async def tree(repo: snapcore.Repository, checkpoint: snapcore.Checkpoint) -> list[snapcore.Entry]:
    """Its entries, besides the root; times in seconds, as busybox sets no finer ones, and those of folders left out."""
    entries = [e async for e in repo.ls(checkpoint) if e.path]
    return [msgspec.structs.replace(e, mtime_ns=0 if e.kind == Kind.DIR else e.mtime_ns // 10**9) for e in entries]


async def test_the_same_tree_comes_through_a_backends_own_calls(repo: snapcore.Repository, handle: SandboxHandle) -> None:
    through = BackendSandbox(HandleBackend(handle), handle.workspace_root)
    await handle.exec(["sh", "-c", TREE, handle.workspace_root])
    straight = await repo.capture(handle, thread_id="straight")
    assert straight.totals.files == 303
    assert (await repo.capture(through, thread_id="through")).content_id == straight.content_id
    await handle.exec(["sh", "-c", 'cd "$0"; rm -r a/b; echo >large; touch more', handle.workspace_root])
    await repo.restore(through, thread_id="through", verify="content")
    again = await repo.capture(handle, thread_id="straight")
    assert await tree(repo, again) == await tree(repo, straight)


async def test_long_output_is_cut_and_long_commands_are_ended(handle: SandboxHandle) -> None:
    backend = HandleBackend(handle, max_output=1000)
    cut = await backend.aexecute("head -c 5000 /dev/zero | tr '\\0' x")
    assert (cut.output, cut.truncated, cut.exit_code) == ("x" * 1000, True, 0)
    assert not (await backend.aexecute("echo short")).truncated
    assert (await backend.aexecute("echo begun; sleep 1000", timeout=1)).exit_code == 124


def test_a_sandbox_of_snapcore_without_async(tmp_path: Path) -> None:
    (tmp_path / "workspace").mkdir()
    backend = HandleBackend(blocking.connect(str(tmp_path / "workspace")))
    with blocking.open_repository("memory://") as repo:
        files = GraphFiles(repo, backend.handle, saver := InMemorySaver())
        model = scripted([write(f"{tmp_path}/workspace/a", "1")], [execute("rm a")], "done")
        agent: Any = create_deep_agent(model, backend=backend, checkpointer=saver, middleware=[files.middleware()])
        agent.invoke(QUESTION, CONFIG)
        files.restore_for(before_model(agent)[-2])
    assert backend.read(f"{tmp_path}/workspace/a").file_data
    assert backend.edit(f"{tmp_path}/workspace/a", "1", "2").occurrences == 1
    assert [each["path"] for each in backend.ls(f"{tmp_path}/workspace").entries or []] == [f"{tmp_path}/workspace/a"]
    assert backend.glob("*").matches
    assert backend.grep("2").matches
    assert backend.download_files([f"{tmp_path}/workspace/a"])[0].content == b"2"
    assert backend.upload_files([(f"{tmp_path}/workspace/a", b"3")])[0].error is None
    assert backend.delete(f"{tmp_path}/workspace/a").error is None
