"""Captures as a middleware of LangChain's agents, which LangGraph itself does without."""

from typing import TYPE_CHECKING, Annotated, Any, NotRequired

from snapcore.errors import Code, SnapcoreError

from .langgraph_points import STATE_KEY

if TYPE_CHECKING:
    from .langgraph import GraphFiles

try:
    from langchain.agents.middleware import AgentMiddleware, AgentState
    from langchain.agents.middleware.types import PrivateStateAttr
except ImportError as error:
    raise SnapcoreError(
        "LangChain is not installed.", code=Code.MISSING_EXTRA, hint="Install it: pip install langchain."
    ) from error

__all__ = ["WorkspaceMiddleware"]


class _State(AgentState[Any]):
    snapcore_checkpoint: NotRequired[Annotated[str, PrivateStateAttr]]


class WorkspaceMiddleware(AgentMiddleware[_State, Any]):
    """Captures in steps of its own, in which nothing else runs. The id goes into the state as well: so each later checkpoint of
    the graph names the newest capture, also where the saver keeps only some of them (`durability="exit"`)."""

    state_schema = _State

    def __init__(self, files: "GraphFiles") -> None:
        super().__init__()
        self._files = files

    def before_model(self, state: _State, runtime: Any) -> dict[str, Any] | None:
        """When the tools are done, and at the very start."""
        return _update(self._files.attempt())

    async def abefore_model(self, state: _State, runtime: Any) -> dict[str, Any] | None:
        """See `before_model`."""
        return _update(await self._files.aattempt())

    def after_agent(self, state: _State, runtime: Any) -> dict[str, Any] | None:
        """At the end of a turn."""
        return _update(self._files.attempt())

    async def aafter_agent(self, state: _State, runtime: Any) -> dict[str, Any] | None:
        """See `after_agent`."""
        return _update(await self._files.aattempt())


def _update(checkpoint_id: str | None) -> dict[str, Any] | None:
    return None if checkpoint_id is None else {STATE_KEY: checkpoint_id}
