"""Help pages: each command has one, with examples that are run here; docs/commands.md is made of the same."""

import io
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import typer

from snapcore.cli.app import ALIASES, app
from snapcore.cli.reference import reference
from snapcore.testing import StrictS3Server

from .. import docker_engine as engines  # noqa: TID252 (tests are no package that could be named)
from .. import services  # noqa: TID252
from .conftest import Run

PAGE: Final = Path(__file__).parents[2] / "docs" / "commands.md"
COLUMNS: Final = 80
TOKEN: Final = "token-" + "0123456789"
SERVICES: Final = {"docker": re.compile(r"\bdocker\b"), "cloud": re.compile(r"s3://|postgresql://")}
PLAIN: Final = re.compile(r"snapcore [^|&;<>()$]+")
LIVE: Final = re.compile(r"--follow|cron run(?!.*--once)")  # until they are ended


def commands(group: Any = None, ctx: Any = None) -> Iterator[tuple[str, Any]]:
    """Every command by its words."""
    group = group or typer.main.get_command(app)
    ctx = ctx or typer.Context(group, info_name="snapcore")
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        own = typer.Context(command, info_name=name, parent=ctx)
        if hasattr(command, "list_commands"):
            yield from commands(command, own)
        else:
            yield own.command_path.removeprefix("snapcore "), command


COMMANDS: Final = dict(commands())


def needs(example: str) -> str:
    """The service that an example needs; none for most."""
    return next((name for name, words in SERVICES.items() if words.search(example)), "")


def lines(name: str, service: str = "") -> list[str]:
    return [line for line in COMMANDS[name].examples if not line.startswith("#") and needs(line) == service]


# ---- the pages


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_page_that_fits(run: Run, name: str) -> None:
    page = run(*name.split(), "--help").text
    assert page.startswith(f"Usage: snapcore {name} ")
    assert max(map(len, page.splitlines())) <= COLUMNS
    assert COMMANDS[name].examples, "the module's EXAMPLES lacks it"
    assert "\nExamples:\n" in page
    whole = re.sub(r"(?m)^(  # .*)\n  # ", r"\1 ", page.replace(" \\\n      ", " "))
    told = re.sub(r"(?m)^(# .*)\n# ", r"\1 ", "\n".join(COMMANDS[name].examples))
    assert all(f"\n  {line}\n" in whole for line in told.splitlines())
    assert "snapcore --help" in page.splitlines()[-1]
    assert run("help", *name.split()).text == page


@pytest.mark.parametrize("name", COMMANDS)
def test_whatever_can_be_given_is_explained(name: str) -> None:
    parameters = [p for p in COMMANDS[name].params if not p.hidden]
    assert [p.name for p in parameters if not p.help] == []


def test_the_common_options_come_last(run: Run) -> None:
    headings = re.findall(r"^(\S[^\n]*):$", run("capture", "-h").text, re.MULTILINE)
    assert headings[:2] == ["Arguments", "Options"]
    assert headings[-2:] == ["Common options", "Examples"]
    assert {"What is saved", "Secrets", "Other writers"} <= set(headings)


def test_the_first_page_names_all_commands_variables_and_exit_codes(run: Run) -> None:
    page = run("--help").text
    assert page == run("help").text
    assert max(map(len, page.splitlines())) <= COLUMNS
    for word in (*(name.split()[0] for name in COMMANDS), "SNAPCORE_REPO", "SNAPCORE_DATABASE", "NO_COLOR"):
        assert re.search(rf"^  {word} ", page, re.MULTILINE), word
    for word in ("143", "docker://CONTAINER/FOLDER", "label:L"):
        assert re.search(rf"^  {word} ", page, re.MULTILINE), word


def test_a_narrow_terminal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    page = run("verify", "-h").text.partition("\nExamples:")[0]
    assert max(map(len, page.splitlines())) <= 60


def test_a_mistyped_word_is_answered_with_what_was_meant(run: Run) -> None:
    for typed, meant in (
        (["captur"], "capture"),
        (["snap"], "snapshots"),
        (["store", "tset"], "test"),
        (["list", "--thred", "x"], "--thread"),
        (["capture", "--secret", "X"], "--secret-env"),
        (["--vrsion"], "--version"),
        (["help", "captur"], "capture"),
        (["help", "store", "tset"], "test"),
    ):
        error = run(*typed, code=2).stderr.splitlines()[-1]
        assert f"Did you mean {meant}" in error
    for unknown in ("entirely-different", ""):
        assert "Did you mean" not in run(unknown, code=2).stderr
    assert "No such command" in run("help", "entirely-different", code=2).stderr


def test_what_was_mistyped_cannot_steer_the_terminal(run: Run) -> None:
    for typed in (["li\x1b[31mst"], ["list", "--thr\x1b[31mead"], ["help", "\x1b[31m"], ["show", "-t", "t", "a", "\x1b[31m"]):
        assert "\x1b" not in run(*typed, code=2).stderr


# ---- docs/commands.md


def test_the_page_of_all_commands_is_what_the_definitions_give() -> None:
    assert PAGE.read_text() == reference(), f"run: python -m snapcore.cli.reference >{PAGE.relative_to(PAGE.parents[1])}"


def test_it_has_every_command_option_and_alias() -> None:
    page = reference()
    for name, command in COMMANDS.items():
        section = page.partition(f"## snapcore {name}\n")[2].partition("\n## ")[0]
        assert section, name
        for param in command.params:
            if param.param_type_name == "option" and param.rich_help_panel is None and not param.hidden:
                assert max(param.opts, key=len).lstrip("-") in section, (name, param.name)
    assert all(f"`snapcore {alias}`" in page for alias in ALIASES)


# ---- the examples

FILES: Final = {
    "workspace/src/main.py": f"print('hello')\n# {TOKEN}\n",
    "workspace/notes.txt": "first\n",
    "workspace/build.log": "built\n",
    "jobs.toml": '[jobs.thread-1]\nsandbox = "./workspace"\nevery = "1h"\n',
    "snapcore.toml": '[jobs.thread-1]\nsandbox = "./workspace"\nevery = "1h"\n',
    "deploy/snapcore.toml": 'thread = "thread-1"\n',
}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory, quick_snapcore: Path) -> Path:
    """A folder with ./workspace, ./elsewhere, and a home that has a repository: `thread-1` with three checkpoints, of which the
    second is labelled, and something in its ledger."""
    world = tmp_path_factory.mktemp("examples") / "world"
    for name, text in FILES.items():
        (world / name).parent.mkdir(parents=True, exist_ok=True)
        (world / name).write_text(text)
    (world / "elsewhere").mkdir()
    for folder in (".local/share/bash-completion/completions", ".zfunc", ".config/fish/completions"):
        (world / "home" / folder).mkdir(parents=True)
    programs = world / "bin"
    programs.mkdir()
    for name, script in {"snapcore": f'exec {quick_snapcore}/snapcore "$@"', "make": ":", "git": ":"}.items():
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    (world / "begin").write_text(
        "set -e\nsnapcore init\n"
        "snapcore capture ./workspace --thread thread-1 --id 3f2a9c41 --step 3\n"
        "echo second >>workspace/notes.txt\n"
        "snapcore capture ./workspace --thread thread-1 --label after-install --step 5 --secret-env GITHUB_TOKEN\n"
        "echo third >>workspace/notes.txt\n"
        "snapcore capture ./workspace --thread thread-1 --step 8\n"
        "snapcore exec ./workspace --thread thread-1 -- ls\n"
        "snapcore export --thread thread-1 -o backup.tar.zst\n"
    )
    done = subprocess.run(["sh", "begin"], cwd=world, env=environment(world), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done
    return shutil.copytree(world, world.parent / "template", symlinks=True)


def environment(world: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SNAPCORE_", "AWS_", "XDG_", "DOCKER_"))}
    path = f"{world / 'bin'}:{os.environ['PATH']}"
    return {**kept, "HOME": str(world / "home"), "PATH": path, "GITHUB_TOKEN": TOKEN}


@pytest.fixture
def world(template: Path) -> Path:
    """Such a folder for one test, always at the same path: a sandbox is known by it."""
    world = template.parent / "world"
    shutil.rmtree(world)
    return shutil.copytree(template, world, symlinks=True)


def run_example(example: str, world: Path, **more: str) -> None:
    live = LIVE.search(example) is not None
    process = subprocess.Popen(
        ["bash", "-c", f"exec {example}" if live else example],
        cwd=world,
        env={**environment(world), **more},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    if live:
        begun = process.stdout.readline()
        process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode in ((0, 143) if live else (0, 3)), (example, output.decode())
    assert b"Traceback" not in output, output.decode()
    assert not live or begun


def run_here(run: Run, example: str) -> None:
    """Run a line without a shell and without a process, which takes much less time."""
    words = shlex.split(example)[1:]
    try:
        run(*words)
    except AssertionError:
        run(*words, code=3)


@pytest.mark.parametrize("name", [name for name in COMMANDS if lines(name)])
def test_the_examples_work(name: str, world: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "init":
        shutil.rmtree(world / "home" / ".snapcore")
    monkeypatch.chdir(world)
    monkeypatch.delenv("SNAPCORE_REPO")
    for variable, value in environment(world).items():
        monkeypatch.setenv(variable, value)
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        for example in lines(name):
            if PLAIN.fullmatch(example) and not LIVE.search(example):
                run_here(run, example)
            else:
                run_example(example, world)


def test_the_examples_with_a_bucket_and_postgres_work(world: Path, postgres_url: str) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
    with StrictS3Server() as server:
        server.buckets["my-bucket"] = {}
        for name in COMMANDS:
            for example in lines(name, "cloud"):
                placed = re.sub(r"postgresql://\S+", shlex.quote(postgres_url), example)
                run_example(placed, world, AWS_ENDPOINT_URL_S3=server.url, **keys)


def test_the_examples_with_a_container_work(world: Path) -> None:
    try:
        engine = engines.docker_engine()
    except engines.NoEngineError as error:
        if os.environ.get(services.REQUIRED):
            pytest.fail(str(error))
        pytest.skip(str(error))
    name = f"snapcore-test-{secrets.token_hex(6)}"
    api = engine.client()
    host = api.create_host_config(network_mode="none", init=False)
    api.create_container(engines.image(engine, "busybox"), name=name, host_config=host)
    try:
        api.start(name)
        api.put_archive(name, "/", _files_of_the_container(world))
        docker = world / "bin" / "docker"  # of the package's own client: the real one need not be installed
        docker.write_text(f"#!{sys.executable}\n{EXPORT.format(host=engine.host)}")
        docker.chmod(0o755)
        for command in COMMANDS:
            for example in lines(command, "docker"):
                run_example(example.replace("my-container", name), world, DOCKER_HOST=engine.host)
    finally:
        api.remove_container(name, force=True, v=True)
        api.close()


EXPORT: Final = """
import sys
import docker
assert sys.argv[1] == "export"
for piece in docker.APIClient(base_url={host!r}).export(sys.argv[2]):
    sys.stdout.buffer.write(piece)
"""


def _files_of_the_container(world: Path) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        tar.add(world / "workspace", "workspace")
        tar.add(world / "bin" / "git", "bin/git")
    return data.getvalue()
