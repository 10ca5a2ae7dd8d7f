"""Files that go back with the history of real LangGraph graphs. Covers case 5 where a graph has nothing to restore (an error,
never a restore of nothing), and case 7: another process finds the files by the thread's id."""

import asyncio
import logging
import operator
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
import pytest_asyncio
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, interrupt

import snapcore
from snapcore import blocking
from snapcore.errors import Code, SnapcoreError, SnapshotError
from snapcore.integrations.langgraph import GraphFiles

WORKER = Path(__file__).with_name("langgraph_worker.py")
CONFIG: RunnableConfig = {"configurable": {"thread_id": "thread"}}


class State(TypedDict):
    done: Annotated[list[str], operator.add]


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    path = tmp_path / "workspace"
    path.mkdir()
    return path


@pytest_asyncio.fixture
async def repo() -> AsyncIterator[snapcore.Repository]:
    async with snapcore.open_repository("memory://") as opened:
        yield opened


def contents(workspace: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in workspace.iterdir()}


def two_steps(workspace: Path, files: GraphFiles, saver: BaseCheckpointSaver[Any] | None) -> Any:
    """first, captured, second, captured; both write."""

    def writing(name: str) -> Any:
        async def write(state: State) -> State:
            number = len(state["done"])
            (workspace / "file").write_text(f"{name} {number}")
            (workspace / f"{name}-{number}").touch()
            return {"done": [name]}

        return write

    builder = StateGraph(State)
    builder.add_node("first", writing("first"))
    builder.add_node("after-first", files.node)
    builder.add_node("second", writing("second"))
    builder.add_node("after-second", files.node)
    builder.add_edge(START, "first")
    builder.add_edge("first", "after-first")
    builder.add_edge("after-first", "second")
    builder.add_edge("second", "after-second")
    builder.add_edge("after-second", END)
    return builder.compile(checkpointer=saver)


def before(graph: Any, node: str, config: RunnableConfig = CONFIG) -> RunnableConfig:
    """The newest checkpoint of the graph from which `node` runs next."""
    found: RunnableConfig = next(s.config for s in graph.get_state_history(config) if s.next == (node,))
    return found


async def test_going_back_in_the_graph_goes_back_in_the_files(repo: snapcore.Repository, workspace: Path) -> None:
    saver = InMemorySaver()
    files = GraphFiles(repo, str(workspace), saver)
    graph = two_steps(workspace, files, saver)
    await graph.ainvoke({"done": []}, CONFIG)
    assert contents(workspace) == {"file": "second 1", "first-0": "", "second-1": ""}

    restored = await files.arestore_for(before(graph, "after-first"))
    assert restored.exact
    assert contents(workspace) == {"file": "first 0", "first-0": ""}
    restored = await files.arestore_for(CONFIG)
    assert not restored.exact  # the last step only captured
    assert contents(workspace) == {"file": "second 1", "first-0": "", "second-1": ""}


async def test_a_run_from_an_older_checkpoint_is_a_branch_with_files_of_its_own(
    repo: snapcore.Repository, workspace: Path
) -> None:
    saver = InMemorySaver()
    files = GraphFiles(repo, str(workspace), saver)
    graph = two_steps(workspace, files, saver)
    await graph.ainvoke({"done": []}, CONFIG)
    left = (await graph.aget_state(CONFIG)).config
    fork = await graph.aupdate_state(before(graph, "second"), {"done": ["a word of the user"]})
    await files.arestore_for(fork)
    assert contents(workspace) == {"file": "first 0", "first-0": ""}
    await graph.ainvoke(None, fork)
    assert contents(workspace) == {"file": "second 2", "first-0": "", "second-2": ""}

    await files.arestore_for(left)
    assert contents(workspace) == {"file": "second 1", "first-0": "", "second-1": ""}
    await files.arestore_for(CONFIG)
    assert contents(workspace) == {"file": "second 2", "first-0": "", "second-2": ""}


async def test_between_captures_the_newest_before_in_the_branch_counts(repo: snapcore.Repository, workspace: Path) -> None:
    saver = InMemorySaver()
    files = GraphFiles(repo, str(workspace), saver)
    graph = two_steps(workspace, files, saver)
    await graph.ainvoke({"done": []}, CONFIG)
    back = before(graph, "second")
    found = await files.afind(back)
    assert not found.exact
    assert found.config == {"configurable": back.get("configurable")}
    assert found.checkpoint == (await files.afind(before(graph, "after-first"))).checkpoint
    assert (await files.afind(before(graph, "after-second"))).checkpoint != found.checkpoint


async def test_where_nothing_was_captured_before_there_is_an_error_and_no_change(
    repo: snapcore.Repository, workspace: Path
) -> None:
    saver = InMemorySaver()
    files = GraphFiles(repo, str(workspace), saver)
    graph = two_steps(workspace, files, saver)
    await graph.ainvoke({"done": []}, CONFIG)
    there = contents(workspace)
    unknown = {"configurable": {"thread_id": "thread", "checkpoint_id": "1ef00000-0000-6000-8000-000000000000"}}
    for config in (before(graph, "first"), unknown, {"configurable": {"thread_id": "another"}}):
        with pytest.raises(SnapshotError) as caught:
            await files.arestore_for(config)
        assert caught.value.code == Code.MISSING_CHECKPOINT
    assert contents(workspace) == there


async def test_a_checkpoint_that_was_deleted_is_passed_over(repo: snapcore.Repository, workspace: Path) -> None:
    saver = InMemorySaver()
    files = GraphFiles(repo, str(workspace), saver)
    graph = two_steps(workspace, files, saver)
    await graph.ainvoke({"done": []}, CONFIG)
    newest = await files.afind(before(graph, "after-second"))
    await repo.delete("thread", newest.checkpoint.id)
    await files.arestore_for(before(graph, "after-second"))
    assert contents(workspace) == {"file": "first 0", "first-0": ""}


async def test_a_step_that_is_run_again_finds_its_capture(repo: snapcore.Repository, workspace: Path) -> None:
    saver = InMemorySaver()
    files = GraphFiles(repo, str(workspace), saver)

    async def ask(state: State) -> State:
        await files.acapture()
        (workspace / "file").write_text("changed")
        return {"done": [interrupt("go on?")]}

    graph = StateGraph(State).add_node("ask", ask).add_edge(START, "ask").compile(checkpointer=saver)
    await graph.ainvoke({"done": []}, CONFIG)
    await graph.ainvoke(Command(resume="yes"), CONFIG)
    assert len(await repo.list("thread")) == 1
    await files.arestore_for(before(graph, "ask"), allow_empty=True)
    assert contents(workspace) == {}


# ---- graphs in graphs


async def test_what_a_graph_inside_captured_belongs_to_the_step_around_it(repo: snapcore.Repository, workspace: Path) -> None:
    saver = InMemorySaver()
    files = GraphFiles(repo, str(workspace), saver)
    inner = two_steps(workspace, files, None)

    async def more(state: State) -> State:
        (workspace / "file").write_text("more")
        return {"done": ["more"]}

    builder = StateGraph(State)
    builder.add_node("inner", inner)
    builder.add_node("more", more)
    builder.add_node("again", inner)
    builder.add_edge(START, "inner")
    builder.add_edge("inner", "more")
    builder.add_edge("more", "again")
    graph = builder.compile(checkpointer=saver)
    await graph.ainvoke({"done": []}, CONFIG)

    async def file_at(config: Any) -> str:
        await files.arestore_for(config)
        return (workspace / "file").read_text()

    assert await file_at(before(graph, "more")) == "second 1"
    assert await file_at(before(graph, "again")) == "second 1"  # the step `more` was not captured
    assert await file_at(CONFIG) == "second 4"
    inside = [each async for each in saver.alist({"configurable": {"thread_id": "thread"}})]
    namespaces = sorted({each.config.get("configurable", {})["checkpoint_ns"] for each in inside} - {""})
    assert len(namespaces) == 2
    for ns in namespaces:
        # oldest first: the input, the start, then after each node
        run = [each for each in reversed(inside) if each.config.get("configurable", {})["checkpoint_ns"] == ns]
        first = ns.startswith("inner")
        assert await file_at(run[2].config) == ("first 0" if first else "first 3")
        assert await file_at(run[4].config) == ("second 1" if first else "second 4")
        if first:
            with pytest.raises(SnapshotError):
                await files.afind(run[1].config)
        else:
            assert await file_at(run[1].config) == "second 1"  # before this run: what the graph around it has


async def test_a_graph_inside_that_remembers_its_runs_is_not_mistaken_for_one_run(
    repo: snapcore.Repository, workspace: Path
) -> None:
    saver = InMemorySaver()
    files = GraphFiles(repo, str(workspace), saver)

    async def look(state: State) -> State:
        return {"done": ["looked"]}

    inner = StateGraph(State).add_node("look", look).add_node("capture", files.node).add_edge(START, "look")
    remembering = inner.add_edge("look", "capture").compile(checkpointer=True)

    async def change(state: State) -> State:
        (workspace / "file").write_text(str(len(state["done"])))
        return {"done": ["changed"]}

    builder = StateGraph(State).add_node("change", change).add_node("capture", files.node).add_node("inner", remembering)
    graph = (
        builder.add_edge(START, "change").add_edge("change", "capture").add_edge("capture", "inner").compile(checkpointer=saver)
    )
    await graph.ainvoke({"done": []}, CONFIG)
    await graph.ainvoke({"done": []}, CONFIG)
    newest = (workspace / "file").read_text()
    runs = [each async for each in saver.alist({"configurable": {"thread_id": "thread", "checkpoint_ns": "inner"}})]
    start = next(each.config for each in runs if each.metadata.get("source") == "input")  # of the second run
    (workspace / "file").write_text("something else")
    found = await files.arestore_for(start)
    assert not found.exact
    assert (workspace / "file").read_text() == newest


async def test_before_a_graph_inside_captures_there_is_what_the_step_around_it_captured(
    repo: snapcore.Repository, workspace: Path
) -> None:
    saver = InMemorySaver()
    files = GraphFiles(repo, str(workspace), saver)
    inner = two_steps(workspace, files, None)

    async def outer(state: State) -> State:
        (workspace / "file").write_text("of before")
        await files.acapture()
        (workspace / "file").write_text("of the step around")
        done: State = await inner.ainvoke(state)
        return done

    builder = StateGraph(State).add_node("write", outer).add_edge(START, "write")
    await builder.compile(checkpointer=saver).ainvoke({"done": []}, CONFIG)
    inside = [each async for each in saver.alist({"configurable": {"thread_id": "thread"}})]
    start = [each.config for each in inside if each.config.get("configurable", {})["checkpoint_ns"]][-1]
    assert not (await files.arestore_for(start)).exact
    assert (workspace / "file").read_text() == "of before"


# ---- when processes die


@pytest.mark.parametrize(
    ("die", "captures"),
    [("work", 3), ("capture", 3), pytest.param("saver", 4, id="saver: a capture of no checkpoint is left over")],
)
def test_another_process_goes_on_where_the_graph_was(tmp_path: Path, die: str, captures: int) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(WORKER), str(tmp_path), *arguments], capture_output=True, text=True, timeout=300, check=False
        )

    died = run("begin", die)
    assert died.returncode == 9, died.stderr
    assert (tmp_path / "workspace" / "lines").read_text() == "line 0\nline 1\n"
    if die != "capture":
        (tmp_path / "workspace" / "lines").write_text("another sandbox\n")
    went_on = run("go-on")
    assert went_on.returncode == 0, went_on.stderr
    assert went_on.stdout.split() == ["3", "False", str(captures)]
    if die == "capture":
        # the graph was past the second line, and the newest capture before: that line is not in it, as `exact` says
        assert (tmp_path / "workspace" / "lines").read_text() == "line 0\nline 2\n"
    else:
        assert (tmp_path / "workspace" / "lines").read_text() == "line 0\nline 1\nline 2\n"


# ---- the two sides


def test_a_graph_without_async_works_with_a_blocking_repository(workspace: Path) -> None:
    saver = InMemorySaver()
    with blocking.open_repository("memory://") as repo:
        files = GraphFiles(repo, str(workspace), saver)

        def write(state: State) -> State:
            (workspace / "file").write_text(str(len(state["done"])))
            return {"done": ["write"]}

        builder = StateGraph(State).add_node("write", write).add_node("capture", files.node)
        graph = builder.add_edge(START, "write").add_edge("write", "capture").compile(checkpointer=saver)
        graph.invoke({"done": []}, CONFIG)
        graph.invoke({"done": []}, CONFIG)
        assert contents(workspace) == {"file": "1"}
        first = [s.config for s in graph.get_state_history(CONFIG) if s.next == ("capture",)][-1]
        assert files.restore_for(first).exact
        assert contents(workspace) == {"file": "0"}


async def test_a_saver_without_an_async_side_will_do(repo: snapcore.Repository, workspace: Path) -> None:
    class Sync(InMemorySaver):
        async def aget_tuple(self, config: RunnableConfig) -> Any:
            raise NotImplementedError

    saver = InMemorySaver()
    files = GraphFiles(repo, str(workspace), saver)
    await two_steps(workspace, files, saver).ainvoke({"done": []}, CONFIG)
    sync = Sync()
    sync.storage, sync.writes, sync.blobs = saver.storage, saver.writes, saver.blobs
    assert (await GraphFiles(repo, str(workspace), sync).afind(CONFIG)).checkpoint == (await files.afind(CONFIG)).checkpoint


async def test_blocking_calls_on_the_loop_that_they_would_wait_for_are_refused(
    repo: snapcore.Repository, workspace: Path
) -> None:
    files = GraphFiles(repo, str(workspace), InMemorySaver())
    with pytest.raises(SnapshotError, match="ainvoke") as caught:
        files.find(CONFIG)
    assert caught.value.code == Code.INVALID_REQUEST


def test_an_async_repository_outside_of_its_loop_is_refused(workspace: Path) -> None:
    with blocking.open_repository("memory://") as repo, pytest.raises(SnapcoreError, match=r"snapcore\.blocking"):
        GraphFiles(repo._inner, str(workspace))


# ---- failures


async def test_a_failed_capture_is_reported_and_fails_no_step(repo: snapcore.Repository, workspace: Path) -> None:
    saver = InMemorySaver()
    failures: list[SnapcoreError] = []
    files = GraphFiles(repo, str(workspace / "not there"), saver, on_failure=failures.append)
    graph = two_steps(workspace, files, saver)
    assert (await graph.ainvoke({"done": []}, CONFIG))["done"] == ["first", "second"]
    assert [each.code for each in failures] == [Code.MISSING_WORKSPACE] * 2


async def test_who_is_told_and_fails_fails_no_step(
    repo: snapcore.Repository, workspace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def told(error: SnapcoreError) -> None:
        raise BrokenPipeError

    seen: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: seen.append(context["exception"]))
    saver = InMemorySaver()
    files = GraphFiles(repo, str(workspace / "not there"), saver, on_failure=told)
    with caplog.at_level(logging.WARNING, "snapcore"):
        assert (await two_steps(workspace, files, saver).ainvoke({"done": []}, CONFIG))["done"] == ["first", "second"]
    assert [type(each) for each in seen] == [BrokenPipeError] * 2
    assert [each.code for each in files.failures] == [Code.MISSING_WORKSPACE] * 2
    assert caplog.text.count("MISSING_WORKSPACE") == 2


async def test_a_capture_that_was_asked_for_raises(repo: snapcore.Repository, workspace: Path) -> None:
    files = GraphFiles(repo, str(workspace))
    with pytest.raises(SnapshotError, match="step of a graph") as caught:
        await files.acapture()
    assert caught.value.code == Code.INVALID_REQUEST
    with pytest.raises(SnapshotError, match="checkpointer"):
        await files.arestore_for(CONFIG)


async def test_a_graph_without_a_thread_is_reported(repo: snapcore.Repository, workspace: Path) -> None:
    failures: list[SnapcoreError] = []
    files = GraphFiles(repo, str(workspace), on_failure=failures.append)
    await two_steps(workspace, files, None).ainvoke({"done": []})
    assert [each.code for each in failures] == [Code.INVALID_REQUEST] * 2


@pytest.mark.parametrize("module", ["langgraph", "langgraph_middleware"])
def test_without_the_package_the_error_says_what_to_install(module: str) -> None:
    package = {"langgraph": "langgraph.config", "langgraph_middleware": "langchain.agents.middleware"}[module]
    code = f"import sys; sys.modules[{package!r}] = None; import snapcore.integrations.{module}"
    failed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert "pip install" in failed.stderr.splitlines()[-1]
