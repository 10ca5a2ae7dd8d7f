"""Which workspace checkpoint belongs to which checkpoint of a graph.

A workspace checkpoint that was taken in a graph has an idempotency key: `langgraph:` and the ids of the graph checkpoints that
were current then, from the outermost graph to the one it was taken in. So it is found by them from any process, whether or not
the graph's own checkpoint was saved by then, and is made once however often the step is run again.
"""

from collections.abc import Generator, Mapping, Sequence
from typing import Any, Final

import msgspec

from snapcore.errors import Code, SnapshotError, printable
from snapcore.model import Checkpoint

__all__ = ["STATE_KEY", "Found", "Point", "search", "thread_of"]

KEY_PREFIX: Final = "langgraph:"
STATE_KEY: Final = "snapcore_checkpoint"
"""The channel in which `GraphFiles.middleware` keeps the newest workspace checkpoint's id."""

_SEPARATOR: Final = "|"  # between the levels of a graph's namespace


class Point(msgspec.Struct, frozen=True):
    """A place in the history of a graph: its thread, and the graph checkpoints current there, outermost first."""

    thread_id: str
    ids: tuple[str, ...]

    @classmethod
    def of_step(cls, config: Mapping[str, Any]) -> "Point":
        """Where the node is that was given `config`: its graph's newest checkpoint, from which this step began.

        Raises `SnapshotError` `INVALID_REQUEST` when `config` is not that of a step, or has no thread.
        """
        settings = config.get("configurable", {})
        current = settings.get("checkpoint_map")
        own = str(settings.get("checkpoint_ns", "")).rpartition(_SEPARATOR)[0]
        if not current or own not in current:
            raise SnapshotError(
                "This is not the configuration of a step of a graph.",
                code=Code.INVALID_REQUEST,
                hint="Call it inside of a node, with the config that the node was given.",
            )
        # what a caller who addressed a subgraph has put there goes deeper
        outer = sorted((_depth(ns), ids) for ns, ids in current.items() if _depth(ns) < _depth(own))
        return cls(thread_of(config), (*(each for _, each in outer), current[own]))

    @property
    def key(self) -> str:
        """The idempotency key of the workspace checkpoint that is taken here."""
        return KEY_PREFIX + "/".join(self.ids)


class Found(msgspec.Struct, frozen=True):
    """The workspace checkpoint of a graph checkpoint. `exact`: it was taken at that very one; otherwise it is the newest that was
    taken before it in the same branch, and what steps in between did to the files is not in it. `config` addresses the graph
    checkpoint."""

    checkpoint: Checkpoint
    exact: bool
    config: dict[str, Any]


class _Index:
    """The workspace checkpoints of a thread, oldest first, by the graph checkpoints in their keys."""

    def __init__(self, checkpoints: Sequence[Checkpoint]) -> None:
        self.place = {c.id: i for i, c in enumerate(checkpoints)}
        self.at: dict[str, int] = {}
        """Taken when this graph checkpoint was current."""
        self.within: dict[str, int] = {}
        """The newest taken by a graph inside of the step that began at this graph checkpoint."""
        for i, c in enumerate(checkpoints):
            if c.idempotency_key is not None and c.idempotency_key.startswith(KEY_PREFIX):
                *outer, own = c.idempotency_key.removeprefix(KEY_PREFIX).split("/")
                self.at[own] = i
                self.within.update(dict.fromkeys(outer, i))

    def during(self, graph_id: str) -> int:
        """The newest that was taken at a graph checkpoint or in the step after it; -1 for none."""
        return max(self.at.get(graph_id, -1), self.within.get(graph_id, -1))


def search(config: Mapping[str, Any], checkpoints: Sequence[Checkpoint]) -> Generator[dict[str, Any], Any, Found]:
    """Find the workspace checkpoint at, or newest before, the graph checkpoint that `config` names, by default the newest.

    Yields configurations, wants what a saver's `get_tuple` has for each, and returns what was found. `checkpoints` are those of
    the workspace's thread, oldest first. Raises `SnapshotError` `MISSING_CHECKPOINT`.
    """
    thread_id = thread_of(config)
    settings = config.get("configurable", {})
    target = yield _address(thread_id, str(settings.get("checkpoint_ns", "")), settings.get("checkpoint_id"))
    if target is None:
        raise _missing(f"The graph has no checkpoint {settings.get('checkpoint_id') or ''}".rstrip(), thread_id)
    target_id = str(target.checkpoint["id"])
    address = {"configurable": {"checkpoint_ns": "", **settings, "thread_id": thread_id, "checkpoint_id": target_id}}
    index = _Index(checkpoints)
    if target_id in index.at:
        return Found(checkpoints[index.at[target_id]], True, address)
    before = yield from _before(target, thread_id, index)
    carried = index.place.get(str(target.checkpoint["channel_values"].get(STATE_KEY)), -1)
    if max(before, carried) < 0:
        raise _missing("No workspace checkpoint was taken at or before this checkpoint of the graph", thread_id)
    return Found(checkpoints[max(before, carried)], False, address)


def _before(graph: Any, thread_id: str, index: _Index) -> Generator[dict[str, Any], Any, int]:
    """The newest workspace checkpoint on the way from a graph checkpoint back to the beginning; -1 for none."""
    while True:
        parents = graph.metadata.get("parents") or {}
        earlier = None
        if graph.parent_config is not None:
            found = index.during(graph.parent_config["configurable"]["checkpoint_id"])
            earlier = yield graph.parent_config
            if earlier is not None and (earlier.metadata.get("parents") or {}) != parents:
                earlier = None  # an earlier run of this subgraph: what lies between them is further out
            elif found >= 0:
                return found
        if earlier is None:
            own = str(graph.config["configurable"].get("checkpoint_ns", ""))
            outer = [ns for ns in parents if _depth(ns) < _depth(own)]
            if not outer:
                return -1
            ns = max(outer, key=_depth)
            if parents[ns] in index.at:
                return index.at[parents[ns]]
            earlier = yield _address(thread_id, ns, parents[ns])
            if earlier is None:
                return -1
        graph = earlier


def thread_of(config: Mapping[str, Any]) -> str:
    """The thread of a configuration. Raises `SnapshotError` `INVALID_REQUEST` when it names none."""
    thread_id = config.get("configurable", {}).get("thread_id")
    if thread_id is None:
        raise SnapshotError(
            "The configuration names no thread.",
            code=Code.INVALID_REQUEST,
            hint='Pass {"configurable": {"thread_id": ...}} to the graph.',
        )
    return str(thread_id)


def _address(thread_id: str, ns: str, checkpoint_id: str | None) -> dict[str, Any]:
    named = {} if checkpoint_id is None else {"checkpoint_id": checkpoint_id}
    return {"configurable": {"thread_id": thread_id, "checkpoint_ns": ns, **named}}


def _depth(ns: str) -> int:
    return ns.count(_SEPARATOR) + 1 if ns else 0


def _missing(what: str, thread_id: str) -> SnapshotError:
    return SnapshotError(f"{printable(what)} (thread {printable(thread_id)}).", code=Code.MISSING_CHECKPOINT)
