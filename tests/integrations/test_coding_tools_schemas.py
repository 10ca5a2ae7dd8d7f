"""Definitions of tools, as the clients of model APIs and JSON schema itself see them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # its types are a package of their own
import pydantic
import pytest
from anthropic.types import ToolParam
from openai.lib._pydantic import _ensure_strict_json_schema
from openai.types.chat import ChatCompletionFunctionToolParam
from openai.types.responses import FunctionToolParam

import snapcore
from snapcore.integrations.agent_tools import AgentTools
from snapcore.integrations.coding_tools import CodingTools
from snapcore.integrations.tool_schemas import Tool, Toolset
from snapcore.providers.local import LocalSandbox

GOOD: dict[str, dict[str, Any]] = {
    "read_file": {"path": "a", "start_line": 1, "max_lines": 5},
    "write_file": {"path": "a", "content": "", "executable": True},
    "edit": {"path": "a", "old_text": "x", "new_text": "", "replace_all": False},
    "exec": {"command": "ls", "cwd": "src", "timeout_seconds": 5},
    "list": {"path": "."},
    "checkpoint_save": {"label": "x", "artifacts": [{"name": "n", "text": "t"}]},
    "checkpoint_list": {"limit": 5},
    "checkpoint_diff": {"before": "a", "after": "b"},
    "checkpoint_read_artifact": {"checkpoint": "a", "name": "n", "offset": 0},
    "checkpoint_restore_preview": {"checkpoint": "a"},
    "checkpoint_fork": {"checkpoint": "a"},
    "checkpoint_restore": {"checkpoint": "a"},
}


@pytest.fixture
async def toolsets(tmp_path: Path) -> list[Toolset]:
    async with snapcore.open_repository("memory://") as repo:
        handle = LocalSandbox(tmp_path)
        return [CodingTools(handle), AgentTools(repo, "t", handle, fork_to=lambda _: "f", allow_restore=True)]


def every_tool(toolsets: list[Toolset]) -> list[Tool]:
    return [tool for tools in toolsets for tool in tools.tools]


def keys_of(schema: Any) -> Iterator[str]:
    """The keywords used anywhere in a schema, without the names of properties."""
    if isinstance(schema, list):
        for item in schema:
            yield from keys_of(item)
    if isinstance(schema, dict):
        for key, item in schema.items():
            yield key
            yield from keys_of(list(item.values()) if key == "properties" else item)


def test_every_tool_has_an_example_here(toolsets: list[Toolset]) -> None:
    assert sorted(tool.name for tool in every_tool(toolsets)) == sorted(GOOD)


def test_the_clients_types_take_the_definitions(toolsets: list[Toolset]) -> None:
    shapes: list[tuple[Any, Any]] = []
    for tools in toolsets:
        shapes += [(ChatCompletionFunctionToolParam, tools.chat_tools()), (FunctionToolParam, tools.responses_tools())]
        shapes += [(ToolParam, tools.anthropic_tools())]
    for shape, definitions in shapes:
        keys = set(shape.__annotations__)
        for definition in definitions:
            pydantic.TypeAdapter(shape).validate_python(definition, strict=True)
            assert set(definition) <= keys
    for tools in toolsets:
        for tool, chat, response, message in zip(
            tools.tools, tools.chat_tools(), tools.responses_tools(), tools.anthropic_tools(), strict=True
        ):
            told = {"name": tool.name, "description": tool.description}
            assert chat == {"type": "function", "function": {**told, "parameters": tool.schema(strict=True), "strict": True}}
            assert response == {"type": "function", **told, "parameters": tool.schema(strict=True), "strict": True}
            assert message == {**told, "input_schema": tool.schema()}
    assert [each["function"]["name"] for each in toolsets[0].chat_tools()] == ["read_file", "write_file", "edit", "exec", "list"]
    assert all(each["function"]["strict"] for each in toolsets[0].chat_tools())
    assert not any(each["strict"] for each in toolsets[0].responses_tools(strict=False))


def test_strict_schemas_are_what_openais_own_client_would_make_of_them(toolsets: list[Toolset]) -> None:
    for tool in every_tool(toolsets):
        schema = tool.schema(strict=True)
        theirs = _ensure_strict_json_schema(tool.schema(strict=True), path=(), root=schema)
        assert schema == theirs
        assert sorted(schema["required"]) == sorted(schema["properties"])
        assert not {"$ref", "$defs", "default", "title"} & set(keys_of(schema))


@pytest.mark.parametrize("strict", [False, True])
def test_schemas_and_checks_agree(toolsets: list[Toolset], strict: bool) -> None:
    for tool in every_tool(toolsets):
        schema = tool.schema(strict=strict)
        jsonschema.Draft202012Validator.check_schema(schema)
        validator = jsonschema.Draft202012Validator(schema)
        good = GOOD[tool.name]
        validator.validate(good)
        tool.parse(good)
        optional = set(good) - set(tool.schema()["required"])
        least = {key: (None if strict else item) for key, item in good.items() if strict or key not in optional}
        least |= {key: item for key, item in good.items() if key not in optional}
        validator.validate(least)
        assert tool.parse(least) == tool.parse({key: item for key, item in good.items() if key not in optional})
        for bad in ({**good, "thread_id": "x"}, {**good, next(iter(good)): 1.5}, [good]):
            assert not validator.is_valid(bad)
            with pytest.raises(snapcore.SnapcoreError):
                tool.parse(bad)
        for name in tool.schema()["required"]:
            without = {key: item for key, item in good.items() if key != name}
            assert not validator.is_valid(without)
            with pytest.raises(snapcore.SnapcoreError):
                tool.parse(without)


def test_every_parameter_says_what_it_is(toolsets: list[Toolset]) -> None:
    for tool in every_tool(toolsets):
        assert tool.description
        for name, parameter in tool.schema()["properties"].items():
            assert parameter["description"], name
