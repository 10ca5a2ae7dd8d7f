"""Tools for models: definitions in the shapes that model APIs take, checked arguments, bounded results.

A `Toolset` answers what a model sends with a `ToolResult`, whatever it sends: arguments of a wrong type, unknown tools and
failures of the sandbox or the store come back as results that say so, for the model to read. Nothing here needs a package
besides snapcore's own.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from snapcore.errors import (
    CheckpointConflictError,
    CheckpointWriterConflictError,
    CheckpointWriterLostError,
    Code,
    SnapcoreError,
    printable,
)
from snapcore.redaction import NO_REDACTION, Redactor

__all__ = [
    "Tool",
    "ToolError",
    "ToolResult",
    "Toolset",
    "anthropic_tools",
    "bounded",
    "chat_tools",
    "responses_tools",
    "shown_path",
    "told",
]

MAX_ARGUMENTS: Final = 16 << 20  # bytes of JSON
MAX_SHOWN_PATH: Final = 1_024
MAX_LIST: Final = 32 << 10
MAX_MESSAGE: Final = 2_000
MAX_NUMBER: Final = 1 << 53  # that JSON carries exactly everywhere

Handler = Callable[[Any], Awaitable[dict[str, Any]]]

_OF_THREADS: Final = (
    (CheckpointWriterConflictError, "Another writer holds the thread."),
    (CheckpointWriterLostError, "Another writer has taken the thread over; nothing was saved."),
    (CheckpointConflictError, "The thread has moved on meanwhile; nothing was saved."),
)


class ToolError(SnapcoreError):
    """A tool call that cannot be done as it was asked for. `word` is the kind of failure, `fields` more for the result."""

    def __init__(self, word: str, message: str, hint: str = "", *, fields: Mapping[str, Any] | None = None) -> None:
        super().__init__(message, code=Code.INVALID_REQUEST, hint=hint)
        self.word = word
        self.fields = dict(fields or {})


class ToolResult(msgspec.Struct, frozen=True):
    """What a tool call came to. `value` is plain JSON; with `is_error` it has `error` (a stable word), `message` and `hint`."""

    name: str
    value: dict[str, Any]
    is_error: bool = False

    @property
    def content(self) -> str:
        """`value` as JSON text: what a tool message or a `tool_result` block holds."""
        return msgspec.json.encode(self.value).decode()


class Tool(msgspec.Struct, frozen=True):
    """A tool as a model is told of it. `arguments` is a struct type whose fields are the parameters; those that may be left
    out may be None too, which is their default. `read_only`: it changes neither the sandbox nor the history."""

    name: str
    description: str
    arguments: type[msgspec.Struct]
    read_only: bool = False

    def schema(self, *, strict: bool = False) -> dict[str, Any]:
        """The parameters as JSON schema, without references. With `strict` every parameter is required and those that may be
        left out may be null, as the strict mode of model APIs demands."""
        (reference,), components = msgspec.json.schema_components([self.arguments], ref_template="{name}")
        inlined: dict[str, Any] = _plain(reference, components, strict=strict)
        return {key: value for key, value in inlined.items() if key != "description"}

    def parse(self, arguments: object) -> msgspec.Struct:
        """Checked arguments of what a model sent: JSON text, or an object already read. Raises `ToolError`."""
        given = _read(arguments)
        try:
            parsed = msgspec.convert(given, self.arguments)
            if any(isinstance(value, int) and abs(value) > MAX_NUMBER for value in msgspec.structs.astuple(parsed)):
                raise self._refused("a number is too large")
            msgspec.json.encode(parsed)  # no lone surrogate, which is no text
        except (msgspec.ValidationError, UnicodeEncodeError, RecursionError) as error:
            raise self._refused("a text holds a lone surrogate" if isinstance(error, UnicodeError) else str(error)) from None
        return parsed

    def _refused(self, why: str) -> ToolError:
        names = ", ".join(f.name if f.required else f"{f.name} (optional)" for f in msgspec.structs.fields(self.arguments))
        return ToolError(
            "INVALID_ARGUMENTS",
            f"The arguments of {self.name} are not as they should be: {printable(why)[:300]}.",
            f"It takes an object of: {names}." if names else "It takes an empty object.",
        )


def _read(arguments: object) -> object:
    if arguments is None or arguments in ("", b""):
        return {}
    if isinstance(arguments, Mapping):
        return dict(arguments)
    if not isinstance(arguments, str | bytes | bytearray):
        return arguments
    if len(arguments) > MAX_ARGUMENTS:
        raise ToolError("INVALID_ARGUMENTS", f"The arguments have more than {MAX_ARGUMENTS:,} bytes.")
    try:
        found: object = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else printable(str(error))
        raise ToolError("INVALID_ARGUMENTS", f"The arguments are no JSON: {why}.") from None
    return found


def _plain(schema: Any, components: Mapping[str, Any], *, strict: bool) -> Any:
    """A schema without references, titles and defaults; see `Tool.schema`."""
    if isinstance(schema, list):
        return [_plain(item, components, strict=strict) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _plain(components[schema["$ref"]], components, strict=strict)
    if not strict and "anyOf" in schema:
        kept = [each for each in schema["anyOf"] if each != {"type": "null"}]
        if len(kept) == 1:
            schema = {**{k: v for k, v in schema.items() if k != "anyOf"}, **kept[0]}
    out = {key: value for key, value in schema.items() if key not in ("title", "default", "properties")}
    out = {key: _plain(value, components, strict=strict) for key, value in out.items()}
    if schema.get("type") == "object":
        out["properties"] = {key: _plain(value, components, strict=strict) for key, value in schema["properties"].items()}
        out["required"] = list(schema["properties"]) if strict else schema.get("required", [])
        out["additionalProperties"] = False
    return out


def chat_tools(tools: Iterable[Tool], *, strict: bool = True) -> list[dict[str, Any]]:
    """Definitions for `tools` of OpenAI-style chat completions."""
    return [
        {"type": "function", "function": {**_described(tool), "parameters": tool.schema(strict=strict), "strict": strict}}
        for tool in tools
    ]


def responses_tools(tools: Iterable[Tool], *, strict: bool = True) -> list[dict[str, Any]]:
    """Definitions for `tools` of OpenAI-style responses."""
    return [
        {"type": "function", **_described(tool), "parameters": tool.schema(strict=strict), "strict": strict} for tool in tools
    ]


def anthropic_tools(tools: Iterable[Tool]) -> list[dict[str, Any]]:
    """Definitions for `tools` of Anthropic-style messages."""
    return [{**_described(tool), "input_schema": tool.schema()} for tool in tools]


def _described(tool: Tool) -> dict[str, str]:
    return {"name": tool.name, "description": tool.description}


class Toolset:
    """Tools and what does their work. `redactor` takes secrets out of every result."""

    def __init__(self, tools: Iterable[tuple[Tool, Handler]], redactor: Redactor = NO_REDACTION) -> None:
        self._handlers = {tool.name: (tool, handler) for tool, handler in tools}
        self._redactor = redactor

    @property
    def tools(self) -> Sequence[Tool]:
        """The tools, in order."""
        return [tool for tool, _ in self._handlers.values()]

    def chat_tools(self, *, strict: bool = True) -> list[dict[str, Any]]:
        """Definitions for OpenAI-style chat completions."""
        return chat_tools(self.tools, strict=strict)

    def responses_tools(self, *, strict: bool = True) -> list[dict[str, Any]]:
        """Definitions for OpenAI-style responses."""
        return responses_tools(self.tools, strict=strict)

    def anthropic_tools(self) -> list[dict[str, Any]]:
        """Definitions for Anthropic-style messages."""
        return anthropic_tools(self.tools)

    async def dispatch(self, name: str, arguments: object) -> ToolResult:
        """Do what a model asked for: `arguments` is the JSON text or the object that it sent.

        Whatever a model can send, and whatever fails in the sandbox or the store, is answered by a result; a cancelled call is
        cancelled, and what it had begun in the sandbox ended."""
        try:
            if not isinstance(name, str) or name not in self._handlers:
                known = ", ".join(self._handlers)
                raise ToolError("UNKNOWN_TOOL", f"There is no tool {printable(str(name))[:100]!r}.", f"There are: {known}.")
            tool, handler = self._handlers[name]
            return self._result(name, await handler(tool.parse(arguments)))
        except SnapcoreError as error:
            word, message, hint = told(error)
            hint = f"{hint} Trying again can help.".strip() if error.retryable else hint
            return self._failed(name, word, message, hint, error.fields if isinstance(error, ToolError) else {})
        except OSError as error:
            return self._failed(name, "SYSTEM", error.strerror or str(error), "", {})

    def _failed(self, name: str, word: str, message: str, hint: str, fields: Mapping[str, Any]) -> ToolResult:
        # secrets first: a cut must not leave a part of one
        shown = [printable(self._redactor.scrub_text(text))[:MAX_MESSAGE] for text in (message, hint)]
        value = {"error": word, "message": shown[0], "hint": shown[1]}
        return self._result(name, {**value, **fields}, is_error=True)

    def _result(self, name: str, value: dict[str, Any], *, is_error: bool = False) -> ToolResult:
        return ToolResult(printable(str(name)), self._redactor.redact_json(value), is_error)


def told(error: SnapcoreError) -> tuple[str, str, str]:
    """What a model is told of an error: word, message, hint. Not which thread it is, and not who else is at work, and where."""
    if isinstance(error, ToolError):
        return error.word, error.message, error.hint
    for kind, message in _OF_THREADS:
        if isinstance(error, kind):
            return str(error.code), message, ""
    if error.code == Code.MISSING_CHECKPOINT:
        return str(error.code), "The checkpoint is not there any more.", ""
    return str(error.code), error.message, error.hint


def shown_path(path: bytes) -> str:
    """A path for a model: text, odd bytes escaped (`caf\\xe9`), a very long one shortened in front; the root is `.`.

    It is shortened by whole names (255 bytes at the most), so that no part of a secret stays that was whole before."""
    text = printable(path) or "."
    if len(text) <= MAX_SHOWN_PATH:
        return text
    _, slash, whole = text[-MAX_SHOWN_PATH:].partition("/")
    return f"...{slash}{whole}"


def bounded(items: Sequence[str], most: int = 200) -> dict[str, Any]:
    """The first `most` texts, at most 32 KiB of them, and how many were left out."""
    kept: list[str] = []
    room = MAX_LIST
    for item in items[:most]:
        room -= len(item)
        if room < 0:
            break
        kept.append(item)
    return {"count": len(items), "shown": kept} | ({"left_out": len(items) - len(kept)} if len(kept) < len(items) else {})
