"""A chat model that says what a script holds, for agents whose model is not what is tested."""

import itertools
from collections.abc import Sequence
from typing import Any

from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage

Call = tuple[str, dict[str, Any]]


class Scripted(GenericFakeChatModel):
    """Takes tools, and pays no heed to them."""

    def bind_tools(self, tools: Any, **options: Any) -> "Scripted":
        return self


def scripted(*turns: Sequence[Call] | str) -> Scripted:
    """A turn is a list of tool calls, or the text that ends the agent's work."""
    numbers = itertools.count()

    def message(turn: Sequence[Call] | str) -> AIMessage:
        if isinstance(turn, str):
            return AIMessage(turn)
        return AIMessage("", tool_calls=[{"name": name, "args": args, "id": f"call-{next(numbers)}"} for name, args in turn])

    return Scripted(messages=iter([message(turn) for turn in turns]))


def write(path: str, content: str) -> Call:
    return "write_file", {"file_path": path, "content": content}


def execute(command: str) -> Call:
    return "execute", {"command": command}
