"""Selectors: which folders and containers they stand for, and that two sandboxes never share a thread."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from snapcore.cron.jobs import Job, make_plan
from snapcore.cron.selectors import list_sandboxes, parse_selector
from snapcore.cron.targets import Threads
from snapcore.errors import Code, ProviderError, SnapshotError
from snapcore.settings_files import load_settings

from ..providers.docker_fixtures import MakeContainer  # noqa: TID252 (tests are no package that could be named)


async def names(pattern: str, folder: Path) -> list[str]:
    return [found.name for found in await list_sandboxes(parse_selector(pattern, str(folder), "select"))]


def jobs(folder: Path, text: str) -> dict[str, Job]:
    (folder / "jobs.toml").write_text(text)
    return make_plan(load_settings(str(folder / "jobs.toml"))).jobs


# ------------------------------------------------------------------------------------------------------------ folders


async def test_folders_that_match_and_nothing_else(tmp_path: Path) -> None:
    for name in ("agent-1", "agent-2", "other", ".agent-hidden"):
        (tmp_path / "all" / name).mkdir(parents=True)
    (tmp_path / "all" / "agent-file").write_text("no folder")
    found = await list_sandboxes(parse_selector("folders:all/agent-*", str(tmp_path), "select"))
    assert [(each.name, each.address) for each in found] == [
        ("agent-1", str(tmp_path / "all/agent-1")),
        ("agent-2", str(tmp_path / "all/agent-2")),
    ]
    assert await names("folders:all/*", tmp_path) == ["agent-1", "agent-2", "other"]
    assert await names("folders:all/.*", tmp_path) == [".agent-hidden"]
    assert await names("folders:all/agent-[!2]", tmp_path) == ["agent-1"]
    assert await names(f"folders:{tmp_path}/all/other", Path("/")) == ["other"]


async def test_names_tell_folders_apart_by_all_that_the_wildcards_match(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "work").mkdir(parents=True)
    assert await names("folders:*/work", tmp_path) == ["a/work", "b/work"]


async def test_no_link_is_followed_behind_the_first_wildcard(tmp_path: Path) -> None:
    """Whoever owns the folder a could lead the capture to b, or out of both, otherwise."""
    (tmp_path / "real" / "b" / "work").mkdir(parents=True)
    (tmp_path / "real" / "a").mkdir()
    (tmp_path / "real" / "a" / "work").symlink_to(tmp_path / "real" / "b" / "work")
    (tmp_path / "real" / "c").symlink_to(tmp_path / "real" / "b")
    (tmp_path / "agents").symlink_to("real")  # of whoever wrote the pattern
    assert await names("folders:agents/*/work", tmp_path) == ["b/work"]
    assert await names("folders:agents/*", tmp_path) == ["a", "b"]


async def test_a_disk_that_is_not_mounted_is_an_error_and_not_nothing(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError) as caught:
        await names("folders:missing/*", tmp_path)
    assert caught.value.code == Code.MISSING_WORKSPACE
    assert await names("folders:*", tmp_path) == []


WITHOUT_RIGHTS = ("setpriv", "--inh-caps=-all", "--bounding-set=-all")  # the superuser may list every folder otherwise
LIST = """
import asyncio, sys
from snapcore.cron.selectors import list_sandboxes, parse_selector
print([found.name for found in asyncio.run(list_sandboxes(parse_selector(sys.argv[1], sys.argv[2], "select")))])
"""


def test_a_folder_that_cannot_be_listed_hides_no_other(tmp_path: Path) -> None:
    (tmp_path / "closed" / "work").mkdir(parents=True)
    (tmp_path / "open" / "work").mkdir(parents=True)
    (tmp_path / "closed").chmod(0)
    try:
        limits = WITHOUT_RIGHTS if os.geteuid() == 0 else ()
        command = [*limits, sys.executable, "-c", LIST, "folders:*/work", str(tmp_path)]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "['open/work']\n"
    finally:
        (tmp_path / "closed").chmod(0o700)


# ------------------------------------------------------------------------------------------------------------ threads


async def test_two_sandboxes_of_one_thread_are_refused_whatever_their_order(tmp_path: Path) -> None:
    for name in ("x/one", "y/one", "x/two"):
        (tmp_path / "all" / name).mkdir(parents=True)
    made = jobs(
        tmp_path,
        '[jobs.many]\nselect = "folders:all/*/*"\nthread = "{name}"\nevery = "1h"\n'
        '[jobs.single]\nsandbox = "elsewhere"\nthread = "x/one"\nevery = "1h"\n',
    )
    for order in (["many", "single"], ["single", "many"]):
        threads = Threads()
        captured, refused = [], []
        for name in order:
            targets, not_these = await threads.targets(made[name])
            captured += [target.thread_id for target in targets]
            refused += [(each.thread_id, each.error.code) for each in not_these]
        assert sorted(captured) == ["x/one", "x/two", "y/one"]
        assert refused == [("x/one", Code.INVALID_REQUEST)]


async def test_a_thread_is_free_again_when_its_owner_is_gone(tmp_path: Path) -> None:
    (tmp_path / "all" / "one").mkdir(parents=True)
    made = jobs(
        tmp_path,
        '[jobs.many]\nselect = "folders:all/*"\nthread = "{name}"\nevery = "1h"\n'
        '[jobs.single]\nsandbox = "elsewhere"\nthread = "one"\nevery = "1h"\n',
    )
    threads = Threads()
    await threads.targets(made["many"])
    (tmp_path / "all" / "one").rmdir()
    await threads.targets(made["many"])
    targets, refused = await threads.targets(made["single"])
    assert [target.thread_id for target in targets] == ["one"]
    assert refused == []
    threads.release("single")
    (tmp_path / "all" / "one").mkdir()
    assert len((await threads.targets(made["many"]))[0]) == 1


@pytest.mark.parametrize("name", [b"bell\x07", b"latin-\xe9", b"line\nbreak", b"n" * 255])
async def test_a_name_that_is_no_thread_id_is_refused(tmp_path: Path, name: bytes) -> None:
    os.makedirs(os.path.join(os.fsencode(tmp_path), b"all", name))
    (tmp_path / "all" / "good").mkdir()
    made = jobs(tmp_path, f'[jobs.many]\nselect = "folders:all/*"\nthread = "{"x" * 300}{{name}}"\nevery = "1h"\n')
    targets, refused = await Threads().targets(made["many"])
    assert [target.sandbox for target in targets] == [str(tmp_path / "all" / "good")]
    assert [(each.thread_id, each.error.code) for each in refused] == [("", Code.INVALID_ID)]
    assert refused[0].error.message.isprintable()


# ------------------------------------------------------------------------------------------------------------- docker


async def test_running_containers_with_a_label(make_container: MakeContainer, docker_api: Any, docker_host: str) -> None:
    mine = make_container(labels={"agent": "yes", "team": "a"})
    other = make_container(labels={"agent": "yes", "team": "b"})
    make_container(labels={"agent": "yes", "team": "a"}, start=False)
    make_container(labels={"agents": "yes"})
    paused = make_container(labels={"agent": "yes"})
    docker_api.pause(paused)
    assert set(await names("docker:label=agent", Path("/"))) >= {mine, other}
    assert await names("docker:label=team=a", Path("/")) == [mine]
    assert await names("docker:label=team=nobody", Path("/")) == []
    assert paused not in await names("docker:label=agent", Path("/"))
    docker_api.unpause(paused)


async def test_an_engine_that_is_not_there_is_an_error_and_not_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
    with pytest.raises(ProviderError) as caught:
        await names("docker:label=agent", Path("/"))
    assert caught.value.code == Code.SANDBOX_UNAVAILABLE
    assert caught.value.retryable
