"""Files that go back with the graph: workspace checkpoints tied to the checkpoints of a LangGraph graph.

    files = GraphFiles(repo, sandbox, checkpointer)
    agent = create_agent(model, tools, checkpointer=checkpointer, middleware=[files.middleware()])
    ...
    restored = await files.arestore_for(earlier.config)          # an entry of agent.get_state_history(...)
    await agent.ainvoke(None, restored.config)

The graph's `thread_id` is the workspace's too. A graph checkpoint stands for the moment between two steps: what is captured in a
node, before anything else in its step has changed files, is the files as they were at the checkpoint from which the step began.
"""

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import msgspec

from snapcore.autocheckpoint import FailureCallback, Failures, attempted
from snapcore.errors import Code, SnapcoreError, SnapshotError
from snapcore.model import Checkpoint
from snapcore.restoring import Receipt

from .langgraph_home import home_of
from .langgraph_points import Found, Point, search, thread_of

if TYPE_CHECKING:
    from langchain.agents.middleware import AgentMiddleware

try:
    from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda
    from langgraph.checkpoint.base import BaseCheckpointSaver
    from langgraph.config import get_config
except ImportError as error:
    raise SnapcoreError(
        "LangGraph is not installed.", code=Code.MISSING_EXTRA, hint="Install it: pip install 'snapcore[langgraph]'."
    ) from error

__all__ = ["Found", "GraphFiles", "Restored"]


class Restored(msgspec.Struct, frozen=True):
    """What a restore for a graph checkpoint did. Unless `exact`, the files are those of the newest workspace checkpoint before it
    in the same branch of the graph's history: what steps in between did to them is missing.

    Go on from `config`, also after a restore for a thread's newest checkpoint: from there the graph runs the next step again.
    With the thread alone it takes over the results of tasks that a crash came after, whose files may be gone.
    """

    checkpoint: Checkpoint
    exact: bool
    config: dict[str, Any]
    receipt: Receipt


class GraphFiles:
    """The files of a sandbox along the history of a graph.

    `repository` was opened by `snapcore.open_repository`, for agents called asynchronously, or by that of `snapcore.blocking`;
    `sandbox` is an address or a handle opened on the same side. `checkpointer` is the graph's, whatever its kind; only going back
    needs it. Automatic captures that failed are logged, told to `on_failure` and kept in `failures`. Further options are those of
    `Repository.capture`, such as `policy` and `secrets`.

    Methods that begin with `a` are for coroutines, their namesakes for other code.
    """

    def __init__(
        self,
        repository: Any,
        sandbox: Any,
        checkpointer: "BaseCheckpointSaver[Any] | None" = None,
        *,
        on_failure: FailureCallback | None = None,
        wait: float | None = 30.0,
        **capture_options: Any,
    ) -> None:
        self._repository, self._home = home_of(repository)
        self._sandbox = sandbox
        self._saver = checkpointer
        self._failures = Failures(on_failure)
        self._options = {"wait": wait, **capture_options}

    @property
    def failures(self) -> list[SnapcoreError]:
        """Automatic captures that failed, the newest 100, oldest first. None of them failed a step."""
        return self._failures.kept

    # ---- capturing, inside of a node

    async def acapture(self, config: Mapping[str, Any] | None = None, *, label: str | None = None) -> Checkpoint:
        """Capture the files as those of the graph checkpoint from which the present step began; `config` is the node's.

        Safe to repeat: a step that is run again finds the checkpoint of its first run. Raises what `Repository.capture` does, and
        `SnapshotError` `INVALID_REQUEST` outside of a step or without a thread.
        """
        return await self._home.arun(self._capture(config or _config(), label))

    def capture(self, config: Mapping[str, Any] | None = None, *, label: str | None = None) -> Checkpoint:
        """See `acapture`."""
        return self._home.run(self._capture(config or _config(), label))

    async def _capture(self, config: Mapping[str, Any], label: str | None) -> Checkpoint:
        point = Point.of_step(config)
        return await self._repository.capture(
            self._sandbox, thread_id=point.thread_id, idempotency_key=point.key, label=label, **self._options
        )

    # ---- capturing automatically

    @property
    def node(self) -> "Runnable[Any, Any]":
        """A node that captures and leaves the state alone: put it behind nodes that change files. A failure is only reported."""
        return RunnableLambda(self._node, afunc=self._anode, name="snapcore")

    def middleware(self) -> "AgentMiddleware[Any, Any]":
        """For `create_agent` and `create_deep_agent`: captures before each call of the model, when the tools called before are
        done, and at the end. A failure is only reported. Raises `SnapcoreError` `MISSING_EXTRA` without `langchain`."""
        from .langgraph_middleware import WorkspaceMiddleware

        return WorkspaceMiddleware(self)

    def attempt(self) -> str | None:
        """`capture`, and the id of what was captured; None when it failed, which is reported."""
        config = _config()
        return self._home.attempt(self._attempted(config), self._failures, _thread(config))

    async def aattempt(self) -> str | None:
        """See `attempt`."""
        config = _config()
        return await self._home.aattempt(self._attempted(config), self._failures, _thread(config))

    async def _attempted(self, config: Mapping[str, Any]) -> str | None:
        found = await attempted(self._capture(config, None))
        if isinstance(found, Checkpoint):
            return found.id
        await self._failures.report(found, _thread(config))
        return None

    def _node(self, _: Any) -> None:
        self.attempt()

    async def _anode(self, _: Any) -> None:
        await self.aattempt()

    # ---- going back

    async def afind(self, config: Mapping[str, Any]) -> Found:
        """The workspace checkpoint of a graph checkpoint: the one taken at it, or else the newest that was taken before it in the
        same branch. `config` names the graph checkpoint as the graph does (`StateSnapshot.config`); its thread's newest, when it
        names none. Raises `SnapshotError` `MISSING_CHECKPOINT` when there is neither."""
        saver = self._checked_saver()
        steps = search(config, await self._home.arun(self._repository.list(thread_of(config))))
        try:
            asked = next(steps)
            while True:
                asked = steps.send(await _aget(saver, asked))
        except StopIteration as end:
            return _found(end)

    def find(self, config: Mapping[str, Any]) -> Found:
        """See `afind`."""
        saver = self._checked_saver()
        steps = search(config, self._home.run(self._repository.list(thread_of(config))))
        try:
            asked = next(steps)
            while True:
                asked = steps.send(saver.get_tuple(cast("RunnableConfig", asked)))
        except StopIteration as end:
            return _found(end)

    async def arestore_for(self, config: Mapping[str, Any], *, sandbox: Any = None, **options: Any) -> Restored:
        """Bring the files into the state they had at a graph checkpoint; see `afind`, and `Repository.restore` for `options`. The
        files go into `sandbox`, this object's own by default. Raises what both do."""
        return await self._home.arun(self._restore(await self.afind(config), sandbox, options))

    def restore_for(self, config: Mapping[str, Any], *, sandbox: Any = None, **options: Any) -> Restored:
        """See `arestore_for`."""
        return self._home.run(self._restore(self.find(config), sandbox, options))

    async def _restore(self, found: Found, sandbox: Any, options: Mapping[str, Any]) -> Restored:
        target = self._sandbox if sandbox is None else sandbox
        checkpoint = found.checkpoint
        receipt = await self._repository.restore(target, thread_id=checkpoint.thread_id, checkpoint_id=checkpoint.id, **options)
        assert receipt is not None  # only a thread without checkpoints has none
        return Restored(checkpoint, found.exact, found.config, receipt)

    def _checked_saver(self) -> "BaseCheckpointSaver[Any]":
        if self._saver is None:
            raise SnapshotError(
                "Going back needs the graph's checkpointer.",
                code=Code.INVALID_REQUEST,
                hint="Pass it: GraphFiles(repo, sandbox, checkpointer).",
            )
        return self._saver


def _config() -> Mapping[str, Any]:
    try:
        return get_config()
    except RuntimeError:
        return {}


def _thread(config: Mapping[str, Any]) -> str | None:
    """For words: captures have it from their step."""
    thread_id = config.get("configurable", {}).get("thread_id")
    return None if thread_id is None else str(thread_id)


async def _aget(saver: "BaseCheckpointSaver[Any]", config: Any) -> Any:
    """What a saver has, also one that has no asynchronous side."""
    try:
        return await saver.aget_tuple(config)
    except NotImplementedError:
        return await asyncio.to_thread(saver.get_tuple, config)


def _found(end: StopIteration) -> Found:
    found: Found = end.value
    return found
