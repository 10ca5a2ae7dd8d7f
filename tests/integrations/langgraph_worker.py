"""A graph that other processes run and that dies where it is told to, and a checkpointer that is as durable as a file.

    python langgraph_worker.py FOLDER begin DIE | go-on

The graph adds a line to `workspace/lines` in each of three steps. With DIE `work` it dies in the second one, when it has written
to the file; with `capture` before its files are captured; with `saver` when they are, and the graph's checkpoint is not saved.
"""

import os
import pickle
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict, cast

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import ChannelVersions, Checkpoint, CheckpointMetadata
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph

from snapcore import blocking
from snapcore.integrations.langgraph import GraphFiles

CONFIG: RunnableConfig = {"configurable": {"thread_id": "thread"}}


class FileSaver(InMemorySaver):
    """Keeps all it has in a file as well."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._lock = threading.Lock()
        if path.exists():
            stored, writes, blobs = pickle.loads(path.read_bytes())
            self.storage.update(stored)
            self.writes.update(writes)
            self.blobs.update(blobs)

    def put(
        self, config: RunnableConfig, checkpoint: Checkpoint, metadata: CheckpointMetadata, new_versions: ChannelVersions
    ) -> RunnableConfig:
        saved = super().put(config, checkpoint, metadata, new_versions)
        self._save()
        return saved

    def put_writes(self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = "") -> None:
        super().put_writes(config, writes, task_id, task_path)
        self._save()

    def _save(self) -> None:
        draft = self._path.with_suffix(".new")
        with self._lock:  # checkpoints and writes are saved side by side
            draft.write_bytes(pickle.dumps((dict(self.storage), dict(self.writes), dict(self.blobs))))
            draft.replace(self._path)


class DyingSaver(FileSaver):
    """Dies instead of saving the checkpoint after the second line, once files were captured for it."""

    lines: Path
    captured: Path

    def put(
        self, config: RunnableConfig, checkpoint: Checkpoint, metadata: CheckpointMetadata, new_versions: ChannelVersions
    ) -> RunnableConfig:
        if checkpoint["channel_values"].get("count") == 2 and metadata.get("source") == "loop":
            while not self.captured.exists():
                pass
            os._exit(9)
        return super().put(config, checkpoint, metadata, new_versions)


class State(TypedDict):
    count: int


def main(folder: Path, what: str, die: str = "") -> None:
    workspace = folder / "workspace"
    workspace.mkdir(exist_ok=True)
    lines = workspace / "lines"
    captured = folder / "captured"
    saver = DyingSaver(folder / "saver") if die == "saver" else FileSaver(folder / "saver")
    if isinstance(saver, DyingSaver):
        saver.captured = captured

    def work(state: State) -> State:
        with lines.open("a") as file:
            file.write(f"line {state['count']}\n")
        if die == "work" and state["count"] == 1:
            os._exit(9)
        return {"count": state["count"] + 1}

    def capture(state: State) -> None:
        if die == "capture" and state["count"] == 2:
            os._exit(9)
        files.capture()
        if state["count"] == 2:
            captured.touch()
            while die == "saver":
                time.sleep(1)  # the saver ends the process

    builder = StateGraph(State)
    builder.add_node("work", work)
    builder.add_node("capture", capture)
    builder.add_edge(START, "work")
    builder.add_edge("work", "capture")
    builder.add_conditional_edges("capture", lambda state: "work" if state["count"] < 3 else END)
    graph = builder.compile(checkpointer=saver)
    with blocking.open_repository(folder / "repository") as repo:
        files = GraphFiles(repo, str(workspace), saver)
        if what == "begin":
            graph.invoke({"count": 0}, CONFIG, durability="async" if die == "saver" else "sync")
        else:
            restored = files.restore_for(CONFIG)
            print(
                graph.invoke(None, cast("RunnableConfig", restored.config))["count"],
                files.find(CONFIG).exact,
                len(repo.list("thread")),
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
