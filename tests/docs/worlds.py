"""What there is where a page of the documentation is read: services, sandboxes, variables, and what its placeholders stand for.

A page without an entry has a folder with `./workspace` in it, `snapcore` on the path, and a home of its own.
"""

import asyncio
import contextlib
import io
import os
import secrets
import shutil
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from snapcore.testing import StrictS3Server

from .. import services  # noqa: TID252  # the tests are no package that could be named
from ..providers.e2b_service import need_server  # noqa: TID252

STUBS: Final = Path(__file__).parent / "stubs"
_OURS: Final = (
    "SNAPCORE_",
    "AWS_",
    "E2B_",
    "DOCKER_",
    "PG",
    "XDG_",
    "OPENAI_",
    "ANTHROPIC_",
)  # variables that a reader has not set
_WORKSPACE: Final = {
    "README.md": "# An agent's work\n",
    "notes.txt": "first\nsecond\nthird\n",
    "run.sh": "#!/bin/sh\nexec python3 -m src.app\n",
    "src/__init__.py": "",
    "src/app.py": "from .parser import parse\n\nprint(parse('1,2,3'))\n",
    "src/parser.py": "def parse(line):\n    return line.split(',')\n",
    "data/table.csv": "name,value\none,1\ntwo,2\n",
    "logs/run.log": "started\n",
    ".env": "API_TOKEN=token-0123456789\n",
    "node_modules/left-pad/index.js": "module.exports = 1\n",
}


@dataclass(frozen=True, slots=True)
class Page:
    """A page's world. Values of `replace`, `prepare` and `variables` may hold

    {folder}                the page's folder
    {s3}                    the endpoint of an S3 service with the bucket `bucket`
    {postgres} {database}   the address and the name of an empty database
    {ssh}                   an address of ssh, without a folder
    {e2b} {e2b_key}         the id of a sandbox that has /workspace, and a key
    {gnu} {busybox}         images; {python}: one whose `pip` installs nothing, and whose `python` runs nothing
    """

    needs: tuple[str, ...] = ()  # of "bsdtar", "docker", "e2b", "postgres", "s3", "ssh"
    replace: Mapping[str, str] = field(default_factory=dict)  # what a reader has to replace: by what
    containers: Mapping[str, str] = field(default_factory=dict)  # that are there and have /workspace: their images
    names: tuple[str, ...] = ()  # of containers that the page makes itself
    variables: Mapping[str, str] = field(default_factory=dict)
    prepare: str = ""  # commands that are run before
    after: str = ""  # commands that are run after, and have to succeed
    installed: bool = False  # `snapcore` is the installed script, not one that starts more quickly
    opens: str = ""  # a repository that is there as `repo`, in Python
    elsewhere: str = ""  # the test that runs all of the page
    python: str = ""  # the test that runs the Python blocks, which need more than a world
    prints: tuple[str, ...] = ()  # what has to be printed, in this order


_MADE: Final = {"SNAPCORE_REPO": "{folder}/repo"}
_PROJECT: Final = "mkdir project"
_LEDGER: Final = """
python - <<'PROGRAM'
import asyncio, snapcore
from snapcore.providers.local import LocalProvider

async def main():
    async with snapcore.open_repository("repo") as repo:
        async with await repo.session(LocalProvider(), thread_id="thread-1") as session:
            for number in range(1, 8):
                await session.exec(f"mkdir -p src; echo 'print({number})' | tee -a src/main.py")
                await session.checkpoint("after-install" if number == 1 else None)
            await session.destroy()

asyncio.run(main())
PROGRAM
"""

PAGES: Final[Mapping[str, Page]] = {
    "README.md": Page(
        installed=True,
        needs=("docker", "e2b", "postgres", "s3", "ssh"),
        containers={"my-container": "gnu"},
        replace={
            "i1a2b3c4d5e6f7": "{e2b}",
            "ssh://dev@build-host/srv/project": "{ssh}{folder}/workspace",
            "-- /workspace": "-- {folder}/pod",
            "postgresql+psycopg://user@host/snapcore": "{postgres}",
            "python:3.12": "{python}",
        },
        prepare="mkdir pod",
        after="""
            diff -r --no-dereference --exclude=.env --exclude=node_modules workspace elsewhere
            snapcore threads | grep '^thread-2 '
        """,
        prints=("['after-install', None]",),
    ),
    "docs/cli.md": Page(
        needs=("docker", "ssh"),
        variables={**_MADE, "API_TOKEN": "token-0123456789"},
        containers={"my-container": "gnu", "box": "busybox"},
        replace={
            "ssh://dev@build-host/srv/project": "{ssh}{folder}/workspace",
            "-- /workspace": "-- {folder}/workspace",
            "podman exec -i box /workspace": "podman exec -i box {folder}/box",
            "/home/agent/work": "{folder}/box",
            "--command {} /workspace": "--command {} {folder}/workspace",
            "/srv/project": "{folder}/project",
        },
        prepare=f"""
            mkdir project box; snapcore init
            {_LEDGER}
            snapcore capture workspace --thread T --label release --id 3f2a0000000000000000000000000000
        """,
    ),
    "docs/commands.md": Page(elsewhere="tests/cli/test_help.py"),
    "docs/index.md": Page(needs=("docker",), containers={"my-container": "gnu"}),
    "docs/docker.md": Page(
        needs=("docker",),
        variables=_MADE,
        containers={"my-container": "gnu"},
        replace={"python:3.12": "{gnu}"},
        prepare="snapcore init",
        opens="repo",
    ),
    "docs/e2b.md": Page(
        needs=("e2b",),
        variables=_MADE,
        replace={"e2b_...": "{e2b_key}", "i1a2b3c4d5e6f7": "{e2b}", "my-template": "base"},
        prepare="snapcore init",
        opens="repo",
    ),
    "docs/postgres.md": Page(
        needs=("postgres", "s3"),
        replace={"postgresql://user:password@host:5432/snapcore": "{postgres}"},
    ),
    "docs/export.md": Page(needs=("bsdtar", "docker"), names=("box",), replace={"debian:stable-slim": "{gnu}"}),
    "docs/tutorials/docker.md": Page(
        needs=("docker",), names=("agent-1", "agent-2", "agent-3"), replace={"debian:stable-slim": "{gnu}"}
    ),
    "docs/sandboxes.md": Page(
        needs=("docker", "e2b", "ssh"),
        containers={"my-container": "gnu"},
        replace={
            "i1a2b3c4d5e6f7": "{e2b}",
            "dev@build-host true": "sandbox true",
            "ssh://dev@build-host/srv/project": "{ssh}{folder}/workspace",
            "-- /workspace": "-- {folder}/workspace",
            "box /workspace": "box {folder}/workspace",
        },
    ),
    "docs/s3.md": Page(
        needs=("s3",),
        replace={
            "/srv/snapcore.db": "{folder}/snapcore.db",
            "https://ACCOUNT.r2.cloudflarestorage.com": "{s3}",
        },
        prepare="echo secret > r2-secret",
    ),
    "docs/sessions.md": Page(prints=("1 files are back\n", "stdout b'1\\n2\\n3\\n'", "exec.completed")),
    "docs/workflows.md": Page(prints=("2 of 4 steps are done and unchanged",)),
    "docs/integrations/agent-tools.md": Page(
        prepare=_PROJECT, prints=("NOT_FOUND NOT_FOUND", "'customer-7/", "Rewrite the parser.")
    ),
    "docs/integrations/coding-tools.md": Page(
        prepare=_PROJECT,
        prints=(
            "{'path': 'src/app.py', 'replaced': 1, 'first_line': 1}",
            "3 DEBUG = False\n",
            "[0, 3]",
            "key={secret:API_TOKEN}",
            "[('baseline', 'saved'), ('end', 'saved')]",
        ),
    ),
    "docs/integrations/deepagents.md": Page(python="tests/integrations/test_langgraph_docs.py"),
    "docs/integrations/langgraph.md": Page(python="tests/integrations/test_langgraph_docs.py"),
    "docs/integrations/mcp.md": Page(prepare=_PROJECT),
    "docs/integrations/rebuno.md": Page(python="tests/integrations/test_rebuno_docs.py"),
}


@dataclass(slots=True)
class World:
    """Where a page is read."""

    folder: Path
    facts: dict[str, str]
    changes: list[tuple[str, str]]


def fill(text: str, facts: Mapping[str, str]) -> str:
    """A text with the facts of a world in it; other braces stay."""
    for name, value in facts.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def make_workspace(folder: Path) -> None:
    """The files of an agent, as they are in a folder called `workspace`."""
    for name, text in _WORKSPACE.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "run.sh").chmod(0o755)
    (folder / "current").symlink_to("src/app.py")
    (folder / "empty").mkdir()


class Maker:
    """Makes the world of a page, and clears it away."""

    def __init__(self, page: Page, folder: Path, request: pytest.FixtureRequest) -> None:
        self._page = page
        self._folder = folder
        self._request = request
        self._stack = contextlib.ExitStack()
        self._facts = {"folder": str(folder)}
        self._changes: list[tuple[str, str]] = []

    def __enter__(self) -> World:
        with contextlib.ExitStack() as undo:
            undo.push(self._stack)
            self._environment()
            make_workspace(self._folder / "workspace")
            for name in self._page.needs:
                getattr(self, f"_{name}")()
            for name, value in self._page.variables.items():
                os.environ[name] = fill(value, self._facts)
            self._changes += [(old, fill(new, self._facts)) for old, new in self._page.replace.items()]
            undo.pop_all()
        return World(self._folder, self._facts, self._changes)

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _environment(self) -> None:
        kept = dict(os.environ)
        place = os.getcwd()

        def back() -> None:
            os.chdir(place)
            os.environ.clear()
            os.environ.update(kept)

        self._stack.callback(back)
        for name in [name for name in os.environ if name.startswith(_OURS) and "_TEST_" not in name]:
            del os.environ[name]
        places = [STUBS, Path(sys.executable).parent, os.environ["PATH"]]
        if not self._page.installed:
            places.insert(1, self._request.getfixturevalue("quick_snapcore"))
        os.environ |= {
            "PATH": os.pathsep.join(map(str, places)),
            "HOME": str(self._folder / "home"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "COLUMNS": "100",
        }
        (self._folder / "home").mkdir(parents=True)
        os.chdir(self._folder)

    def _bsdtar(self) -> None:
        if shutil.which("bsdtar") is None:
            reason = "bsdtar is not installed (Debian: apt-get install libarchive-tools)"
            if os.environ.get(services.REQUIRED):
                pytest.fail(reason)
            pytest.skip(reason)

    def _docker(self) -> None:
        from .. import docker_engine  # noqa: TID252

        engine = self._request.getfixturevalue("docker_engine")
        make = self._request.getfixturevalue("make_container")
        api = self._request.getfixturevalue("docker_api")
        os.environ["DOCKER_HOST"] = engine.host
        self._facts |= {name: docker_engine.image(engine, name) for name in ("gnu", "busybox")}
        self._facts["python"] = _python_image(api, self._facts["gnu"])
        for name, image in self._page.containers.items():
            there = make(image)
            api.put_archive(there, "/", _tar_of_workspace(self._folder / "workspace"))
            self._changes.append((name, there))
        for name in self._page.names:
            there = f"snapcore-docs-{secrets.token_hex(6)}"
            self._changes.append((name, there))
            self._stack.callback(_remove, api, there)

    def _e2b(self) -> None:
        from snapcore.providers.e2b import E2BProvider
        from snapcore.sandboxes import SandboxSpec
        from snapcore.testing.e2b_server import E2BServer

        need_server()
        server = self._stack.enter_context(E2BServer())
        os.environ |= server.environment

        async def make() -> str:
            handle = await E2BProvider(timeout=3600, **_any(server.options)).create(SandboxSpec())
            await handle.close()
            return handle.sandbox_id

        sandbox_id = asyncio.run(make())
        self._facts |= {"e2b": sandbox_id.removeprefix("e2b://"), "e2b_key": server.environment["E2B_API_KEY"]}
        place = server.folder(self._facts["e2b"]) / "workspace"
        owner = place.stat()
        make_workspace(place)
        for path in place.rglob("*"):
            os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)

    def _postgres(self) -> None:
        import psycopg
        from sqlalchemy import make_url

        url = make_url(self._request.getfixturevalue("postgres_server"))
        name = f"docs_{secrets.token_hex(6)}"

        def drop() -> None:
            with psycopg.connect(_plain(url), autocommit=True) as connection:
                connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)".encode())

        with psycopg.connect(_plain(url), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name} ENCODING 'UTF8' TEMPLATE template0".encode())
        self._stack.callback(drop)
        self._facts |= {"database": name, "postgres": _plain(url.set(database=name))}
        os.environ |= {"PGHOST": str(url.host), "PGPORT": str(url.port), "PGUSER": str(url.username)}

    def _s3(self) -> None:
        server = self._stack.enter_context(StrictS3Server())
        self._facts["s3"] = server.url
        os.environ |= {
            "AWS_ENDPOINT_URL": server.url,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def _ssh(self) -> None:
        server = self._request.getfixturevalue("ssh_server")
        os.environ["PATH"] = f"{server.shared_program}{os.pathsep}{os.environ['PATH']}"
        self._facts["ssh"] = "ssh://sandbox"


def _plain(url: Any) -> str:
    return str(url.set(drivername="postgresql").render_as_string(hide_password=False))


def _any(options: Mapping[str, str]) -> dict[str, Any]:
    return dict(options)


def _tar_of_workspace(folder: Path) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        tar.add(folder, "workspace")
    return data.getvalue()


def _python_image(api: Any, base: str) -> str:
    """An image with a `pip install -q --target FOLDER PACKAGE` that makes an empty package, and a `python -m MODULE`."""
    tag = "snapcore-tests/python:1"
    if not api.images(name=tag):
        scripts = {
            "pip": 'set -eu; [ "$1 $2 $3" = "install -q --target" ]; mkdir -p "$4/$5"; : > "$4/$5/__init__.py"',
            "python": 'set -eu; [ "$1" = -m ]; echo "$2 runs"',
        }
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w") as tar:
            for name, script in scripts.items():
                member = tarfile.TarInfo(f"usr/local/bin/{name}")
                content = f"#!/bin/sh\n{script}\n".encode()
                member.mode, member.size = 0o755, len(content)
                tar.addfile(member, io.BytesIO(content))
        container = api.create_container(base)["Id"]
        api.put_archive(container, "/", data.getvalue())
        api.commit(container, *tag.split(":"))
        api.remove_container(container)
    return tag


def _remove(api: Any, name: str) -> None:
    from docker.errors import NotFound

    with contextlib.suppress(NotFound):
        api.remove_container(name, force=True, v=True)
