"""Git checkouts as resources of Rebuno executions, cloned from and pushed to a server that asks for a token. Cases 24 and 28."""

import base64
import os
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import rebuno

from snapcore.errors import SnapshotError
from snapcore.integrations.rebuno import thread_of
from snapcore.integrations.rebuno_git import GitDriver
from snapcore.providers.local import LocalProvider
from snapcore.repository import Repository

from .rebuno_kernel import RebunoKernel
from .rebuno_worker import run, run_fork

FIRST, SECOND = "ghp_first_token_of_the_worker", "ghp_second_token_of_the_worker"
OTHER = "a secret of another kind"
AUTHOR = ("agent", "agent@example.com")


class GitServer:
    """Repositories over HTTP, by git's own `http-backend`, for whoever has the token."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.token = FIRST
        self.refused = 0
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.answer(self)

            do_POST = do_GET  # noqa: N815

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the base class calls it so
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        login = base64.b64encode(f"x-access-token:{self.token}".encode()).decode()
        if handler.headers.get("Authorization") != f"Basic {login}":
            self.refused += 1
            handler.send_response(403)
            handler.end_headers()
            return
        path, _, query = handler.path.partition("?")
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        environment = {
            **os.environ, "GIT_PROJECT_ROOT": str(self.folder), "GIT_HTTP_EXPORT_ALL": "1", "PATH_INFO": path,
            "QUERY_STRING": query, "REQUEST_METHOD": handler.command, "REMOTE_USER": "worker",
            "CONTENT_TYPE": handler.headers.get("Content-Type", ""), "CONTENT_LENGTH": str(len(body)),
            "HTTP_CONTENT_ENCODING": handler.headers.get("Content-Encoding", ""),
            "GIT_PROTOCOL": handler.headers.get("Git-Protocol", ""),
        }  # fmt: skip
        done = subprocess.run(["git", "http-backend"], input=body, env=environment, capture_output=True, check=True)
        head, _, answer = done.stdout.partition(b"\r\n\r\n")
        lines = [line.partition(": ") for line in head.decode().split("\r\n")]
        handler.send_response(next((int(value.split()[0]) for name, _, value in lines if name == "Status"), 200))
        for name, _, value in lines:
            if name != "Status":
                handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(answer)


def git(*arguments: str, cwd: Path) -> str:
    names = [f"GIT_{who}_{what}" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")]
    environment = {**os.environ, **dict.fromkeys(names, "agent")}
    done = subprocess.run(["git", *arguments], cwd=cwd, check=True, capture_output=True, text=True, env=environment)
    return done.stdout.strip()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[GitServer]:
    """A server with `project`, whose branch main tracks a file that a default policy leaves out."""
    work = tmp_path / "work"
    work.mkdir()
    git("init", "-q", "-b", "main", cwd=work)
    (work / "code.py").write_text("print(1)\n")
    (work / ".env.example").write_text("TOKEN=\n")
    git("add", ".", cwd=work)
    git("commit", "-q", "-m", "first", cwd=work)
    git("clone", "-q", "--bare", str(work), str(tmp_path / "hosted" / "project"), cwd=tmp_path)
    server = GitServer(tmp_path / "hosted")
    yield server
    server.stop()


@pytest.fixture
def driver(repo: Repository, server: GitServer, tmp_path: Path) -> GitDriver:
    provider = LocalProvider(tmp_path / "sandboxes")
    return GitDriver(repo, provider, f"{server.url}/project", token=lambda: server.token, author=AUTHOR)


async def committing(driver: GitDriver, name: str) -> list[str]:
    """Commit a file in a step, leave another uncommitted, push; the branch and what git says of the files then."""
    checkout = await rebuno.resource("workspace", driver=driver, checkpoints=rebuno.CheckpointPolicy())

    async def commit() -> int:
        await checkout.upload(f"{checkout.workspace_root}/{name}", b"x")
        done = await checkout.exec(f"git add {name} && git commit -q -m {name} && echo draft >{name}.draft")
        return int(done.exit_code)

    async def push() -> str:
        done = await checkout.git("push", "-q", "-u", "origin", "HEAD")
        return f"{done.exit_code} {done.stderr.decode()}"

    assert await rebuno.step(f"commit {name}", commit, resources=["workspace"]) == 0
    assert await rebuno.step(f"push {name}", push) == "0 "
    found = [await checkout.exec(["git", *words]) for words in (["branch", "--show-current"], ["status", "--porcelain"])]
    return [result.stdout.decode().strip() for result in found]


async def test_each_execution_has_its_branch_and_a_fork_goes_on_from_the_commits_of_its_source(
    kernel: RebunoKernel, driver: GitDriver, server: GitServer, tmp_path: Path
) -> None:
    source = await run(kernel, lambda: committing(driver, "one"))
    assert kernel.executions[source]["output"] == [f"rebuno/{source}", "?? one.draft"]
    first = kernel.events(source, "step.succeeded")[0]["event_seq"]
    server.token = SECOND  # what the worker holds has changed
    fork = await run_fork(kernel, lambda: committing(driver, "two"), source, first)
    assert fork["output"] == [f"rebuno/{fork['id']}", "?? one.draft\n?? two.draft"]  # and .env.example is there
    hosted = tmp_path / "hosted" / "project"
    assert git("log", "--format=%s", f"rebuno/{source}", cwd=hosted).split() == ["one", "first"]
    assert git("log", "--format=%s", f"rebuno/{fork['id']}", cwd=hosted).split() == ["two", "one", "first"]
    assert server.refused == 0


async def test_a_later_turn_stays_on_its_branch(kernel: RebunoKernel, driver: GitDriver) -> None:
    first = await run(kernel, lambda: committing(driver, "one"), session="session")
    second = await run(kernel, lambda: committing(driver, "two"), session="session")
    assert kernel.executions[second]["output"] == [f"rebuno/{first}", "?? one.draft\n?? two.draft"]


@pytest.mark.parametrize("secrets", [None, {"other": OTHER}, [OTHER]])
async def test_the_token_is_in_no_file_no_binding_and_no_checkpoint(
    kernel: RebunoKernel, repo: Repository, server: GitServer, tmp_path: Path, secrets: Any
) -> None:
    provider = LocalProvider(tmp_path / "sandboxes")
    url = f"{server.url}/project"
    driver = GitDriver(repo, provider, url, token=lambda: server.token, author=AUTHOR, secrets=secrets)

    async def process() -> str:
        await committing(driver, "one")
        checkout = await rebuno.resource("workspace", driver=driver)

        async def careless() -> str:
            """Writes the token down, as only an agent that was given it could."""
            await checkout.upload(f"{checkout.workspace_root}/notes", f"{server.token}{OTHER}".encode())
            return str((await checkout.git("config", "alias.x", f"!echo {server.token}")).stdout.decode())

        await rebuno.step("careless", careless, resources=["workspace"])
        await checkout.exec("rm notes && git config --unset alias.x")
        return str((await checkout.git("-c", f"alias.x=!echo {server.token}", "x")).stdout.decode())

    source = await run(kernel, process)
    assert kernel.executions[source]["output"] == "{secret:git-token}\n"
    assert not kernel.events(source, "resource.checkpoint_failed")
    forms = [FIRST.encode(), base64.b64encode(f"x-access-token:{FIRST}".encode())]
    for folder in ("sandboxes", "repo", "kernel.json"):
        top = tmp_path / folder
        for path in [top, *top.rglob("*")]:
            if path.is_file():
                data = path.read_bytes()
                assert not any(form in data for form in forms), path
    before = (await repo.list(thread_of(source)))[-1]
    assert await repo.read_file(before, b"notes") == bytes(len(FIRST)) + (bytes(len(OTHER)) if secrets else OTHER.encode())
    assert FIRST.encode() not in await repo.read_file(before, b".git/config")


async def test_hooks_of_the_checkout_do_not_get_the_token(kernel: RebunoKernel, driver: GitDriver, tmp_path: Path) -> None:
    async def process() -> None:
        checkout = await rebuno.resource("workspace", driver=driver)
        hook = f"{checkout.workspace_root}/.git/hooks/pre-push"
        await checkout.exec(f"mkdir -p .git/hooks && printf '#!/bin/sh\\nenv >{tmp_path}/stolen\\n' >{hook} && chmod +x {hook}")
        assert (await checkout.git("push", "-q", "origin", "HEAD")).exit_code == 0

    await run(kernel, process)
    assert not (tmp_path / "stolen").exists()


async def test_a_clone_that_fails_leaves_no_sandbox_and_says_why_without_the_token(
    kernel: RebunoKernel, repo: Repository, driver: GitDriver, server: GitServer, tmp_path: Path
) -> None:
    wrong = GitDriver(repo, LocalProvider(tmp_path / "sandboxes"), f"{server.url}/project", token=lambda: SECOND)
    with pytest.raises(AssertionError, match="git clone ended with 128") as caught:
        await run(kernel, lambda: committing(wrong, "one"))
    assert SECOND not in str(caught.value)
    assert os.listdir(tmp_path / "sandboxes") == []


async def test_a_repository_without_a_commit_is_begun_on_the_branch(
    kernel: RebunoKernel, driver: GitDriver, server: GitServer
) -> None:
    empty = server.folder / "project"
    git("update-ref", "-d", "refs/heads/main", cwd=empty)
    source = await run(kernel, lambda: committing(driver, "one"))
    assert kernel.executions[source]["output"][0] == f"rebuno/{source}"
    assert git("log", "--format=%s", f"rebuno/{source}", cwd=empty) == "one"


async def test_what_the_policy_leaves_out_stays_deleted_only_when_it_was_deleted_in_git(
    kernel: RebunoKernel, driver: GitDriver
) -> None:
    async def process() -> None:
        checkout = await rebuno.resource("workspace", driver=driver, checkpoints=rebuno.CheckpointPolicy())

        async def remove() -> int:
            return int((await checkout.exec("rm code.py && git rm -q .env.example")).exit_code)

        await rebuno.step("remove", remove, resources=["workspace"])

    async def look() -> str:
        checkout = await rebuno.resource("workspace", driver=driver, checkpoints=rebuno.CheckpointPolicy())
        return str((await checkout.exec("git status --porcelain")).stdout.decode())

    source = await run(kernel, process)
    fork = await run_fork(kernel, look, source)
    assert fork["output"] == "D  .env.example\n D code.py\n"


@pytest.mark.parametrize("url", ["https://x:y@example.com/a", "https://token@example.com/a", "ssh://git:y@example.com/a"])
async def test_an_address_with_a_login_is_refused_without_showing_it(repo: Repository, tmp_path: Path, url: str) -> None:
    with pytest.raises(SnapshotError, match="holds a login") as caught:
        GitDriver(repo, LocalProvider(tmp_path), url)
    assert "example" not in str(caught.value)
    with pytest.raises(SnapshotError, match="https:// address"):
        GitDriver(repo, LocalProvider(tmp_path), "git@example.com:a", token=lambda: FIRST)
