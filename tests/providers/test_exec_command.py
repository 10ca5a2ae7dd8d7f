"""`snapcore exec`, and restores of some paths, in sandboxes of each kind there is."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from snapcore.sandboxes import SandboxSpec

from .. import ssh_server as servers  # noqa: TID252  # the tests are no package that could be named
from ..cli.conftest import Run, repo, run  # noqa: TID252
from .e2b_service import need_server

__all__ = ["repo", "run"]

Given = pytest.FixtureRequest


@contextmanager
def docker(given: Given) -> Iterator[str]:
    given.getfixturevalue("docker_host")
    name = given.getfixturevalue("make_container")(command=["sh", "-c", "mkdir -p /workspace; sleep 3600"])
    yield f"docker://{name}/workspace"


@contextmanager
def ssh(given: Given) -> Iterator[str]:
    server: servers.SshServer = given.getfixturevalue("shared_ssh_on_path")
    folder = given.getfixturevalue("tmp_path") / "by-ssh"
    folder.mkdir()
    yield f"ssh://{server.user}@127.0.0.1:{server.port}{folder}"


@contextmanager
def e2b(given: Given) -> Iterator[str]:
    from snapcore.providers.e2b import E2BProvider
    from snapcore.testing.e2b_server import E2BServer

    need_server()
    patch: pytest.MonkeyPatch = given.getfixturevalue("monkeypatch")
    with E2BServer() as server:
        for name, value in server.environment.items():
            patch.setenv(name, value)

        async def made() -> str:
            options: dict[str, Any] = {**server.options}
            handle = await E2BProvider(timeout=600, **options).create(SandboxSpec())
            await handle.close()
            return handle.binding.sandbox_id

        yield f"e2b://{asyncio.run(made())}/workspace"


KINDS: list[Callable[[Given], AbstractContextManager[str]]] = [docker, ssh, e2b]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def address(request: Given, run: Run) -> Iterator[str]:
    """A sandbox with an empty workspace, and a repository."""
    with request.param(request) as address:
        run("init")
        yield address


def test_a_command_and_checkpoints_around_it(run: Run, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = run("exec", address, "--", "sh", "-c", "printf 'out\\n'; printf 'err\\n' >&2; exit 9", code=9)
    assert (outcome.stdout, outcome.stderr) == (b"out\n", "err\n")
    monkeypatch.setenv("GIVEN_TOKEN", "hunter2-hunter2")
    run("exec", address, "-t", "t", "--secret-env", "GIVEN_TOKEN", "--label", "made", "--", "sh", "-c", "env > known")
    assert b"GIVEN_TOKEN=hunter2" in run("exec", "-t", "t", "--", "cat", "known").stdout
    kept = run("cat", "label:made:known", "-t", "t").stdout
    assert b"GIVEN_TOKEN=" in kept
    assert b"hunter2" not in kept
    run("exec", address, "-t", "t", "--", "rm", "known")
    assert "known" in run("exec", "-t", "t", "--restore", "label:made", "--", "ls").text
    lines = [json.loads(line) for line in run("log", "t", "--json").text.splitlines()]
    assert [line["exit_code"] for line in lines if line["kind"] == "exec.completed"] == [0, 0, 0, 0]
    assert {line["sandbox_id"] for line in lines} == {lines[0]["sandbox_id"]}


def test_a_command_that_takes_too_long_is_ended_there(run: Run, address: str) -> None:
    forever = "while :; do sleep 0.1; echo >> ran; done"
    outcome = run("exec", address, "--timeout", "2s", "--json", "--", "sh", "-c", forever, code=124)
    assert outcome.error["code"] == "EXEC_TIMEOUT"
    run("exec", address, "--", "sh", "-c", "a=$(wc -c < ran); sleep 1; [ $a = $(wc -c < ran) ]")


def test_some_paths_are_restored(run: Run, address: str) -> None:
    run("exec", address, "-t", "t", "--label", "base", "--", "sh", "-c", "mkdir src; echo 1 > src/a; echo 1 > b")
    run("exec", "-t", "t", "--", "sh", "-c", "echo 2 > src/a; echo 2 > src/new; echo 2 > b")
    words = ("restore", address, "-t", "t", "-c", "label:base", "--paths", "src")
    plan = run(*words, "--dry-run", "--json").json["plan"]
    assert [(each["action"], each["path"]) for each in plan["paths"] if each["kind"] == "file"] == [
        ("change", "src/a"),
        ("remove", "src/new"),
    ]
    done = run(*words, "--json", code=3 if address.startswith("docker") else 0).json  # busybox sets no parts of a second
    assert {reason for each in done["differences"] for reason in [each["reason"]]} <= {"another modification time"}
    assert run("exec", "-t", "t", "--", "sh", "-c", "cat src/a b; ls src").text == "1\n2\na\n"
