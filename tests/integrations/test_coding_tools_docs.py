"""The loops of the page about coding tools work with the clients of model APIs; tests/docs runs the rest of the page.

The clients are the real packages; what they would get from the network is made here.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from snapcore.integrations.coding_tools import CodingTools
from snapcore.providers.local import LocalSandbox

from ..docs_examples import run_page  # noqa: TID252  # the tests are no package that could be named


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder `project` in an otherwise empty present folder."""
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path)


class Service:
    """Answers an API's requests in turn, and keeps them."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self.requests: list[dict[str, Any]] = []
        self._answers = list(answers)

    def client(self) -> httpx2.AsyncClient:
        def answer(request: httpx2.Request) -> httpx2.Response:
            self.requests.append(json.loads(request.content))
            return httpx2.Response(200, json=self._answers[len(self.requests) - 1])

        return httpx2.AsyncClient(transport=httpx2.MockTransport(answer))


@pytest.fixture
def loops() -> dict[str, Callable[..., Any]]:
    return run_page("docs/integrations/coding-tools.md")


@pytest.fixture
def tools(tmp_path: Path) -> CodingTools:
    (tmp_path / "project/a").write_text("in a")
    return CodingTools(LocalSandbox(tmp_path / "project"))


async def test_the_loop_of_chat_completions(loops: dict[str, Callable[..., Any]], tools: CodingTools) -> None:
    def completion(message: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": None, **message}}
        return {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}

    def call(number: int, name: str, arguments: str) -> dict[str, Any]:
        return {"id": f"call-{number}", "type": "function", "function": {"name": name, "arguments": arguments}}

    wanted = [call(1, "read_file", '{"path": "a", "start_line": null, "max_lines": null}'), call(2, "exec", "{oops")]
    service = Service(completion({"tool_calls": wanted}), completion({"content": "done"}))
    client = openai.AsyncOpenAI(api_key="none", http_client=service.client())
    assert await loops["chat"](client, "m", tools, [{"role": "user", "content": "go"}]) == "done"
    assert service.requests[0]["tools"] == tools.chat_tools()
    results = [message for message in service.requests[1]["messages"] if message["role"] == "tool"]
    assert [result["tool_call_id"] for result in results] == ["call-1", "call-2"]
    assert json.loads(results[0]["content"])["content"] == "in a"
    assert json.loads(results[1]["content"])["error"] == "INVALID_ARGUMENTS"


async def test_the_loop_of_responses(loops: dict[str, Callable[..., Any]], tools: CodingTools) -> None:
    def response(number: int, *output: dict[str, Any]) -> dict[str, Any]:
        fixed = {"object": "response", "created_at": 0, "model": "m", "tools": [], "tool_choice": "auto"}
        return {"id": f"r{number}", "output": output, "parallel_tool_calls": True, **fixed}

    call = {"type": "function_call", "id": "f", "call_id": "call-1", "name": "read_file", "arguments": '{"path": "a"}'}
    text = {"type": "output_text", "text": "done", "annotations": []}
    message = {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [text]}
    service = Service(response(1, call), response(2, message))
    client = openai.AsyncOpenAI(api_key="none", http_client=service.client())
    assert await loops["respond"](client, "m", tools, "go") == "done"
    assert service.requests[0]["tools"] == tools.responses_tools()
    (result,) = service.requests[1]["input"]
    assert (result["call_id"], service.requests[1]["previous_response_id"]) == ("call-1", "r1")
    assert json.loads(result["output"])["content"] == "in a"


async def test_the_loop_of_messages(loops: dict[str, Callable[..., Any]], tools: CodingTools) -> None:
    def message(*content: dict[str, Any]) -> dict[str, Any]:
        usage = {"input_tokens": 1, "output_tokens": 1}
        return {"id": "m", "type": "message", "role": "assistant", "model": "m", "content": content, "usage": usage}

    def use(number: int, name: str, given: object) -> dict[str, Any]:
        return {"type": "tool_use", "id": f"use-{number}", "name": name, "input": given}

    service = Service(
        message(use(1, "read_file", {"path": "a"}), use(2, "read_file", {"path": "../x"})),
        message({"type": "text", "text": "done"}),
    )
    client = anthropic.AsyncAnthropic(api_key="none", http_client=service.client())
    assert await loops["converse"](client, "m", tools, [{"role": "user", "content": "go"}]) == "done"
    assert service.requests[0]["tools"] == tools.anthropic_tools()
    results = service.requests[1]["messages"][-1]["content"]
    assert [(result["tool_use_id"], result["is_error"]) for result in results] == [("use-1", False), ("use-2", True)]
    assert json.loads(results[0]["content"])["content"] == "in a"
