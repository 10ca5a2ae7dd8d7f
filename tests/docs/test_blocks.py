"""Every block of README.md and docs/ does what a reader would do with it."""

import configparser
import contextlib
import importlib
import json
import os
import re
import tomllib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

import snapcore
from snapcore.cli import app
from snapcore.settings import Settings

from ..docs_examples import COMMANDS, PYTHON, ROOT, Block, Reader, blocks, pages  # noqa: TID252
from .worlds import PAGES, Maker, Page, fill

yaml = importlib.import_module("yaml")  # which has no types

RUN: Final = (*COMMANDS, *PYTHON, "output")
HERE: Final = [page for page in pages() if not PAGES.get(page, Page()).elsewhere]  # pages that are read here


# ---- blocks that are run


@pytest.mark.parametrize("page", [page for page in HERE if any(block.language in RUN for block in blocks(page))])
def test_a_page_does_what_it_says(page: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    plan = PAGES.get(page, Page())
    found = [block for block in blocks(page) if not (plan.python and block.language in PYTHON)]
    with Maker(plan, tmp_path / "reader", request) as world:
        if plan.prepare:
            Reader().read([Block(f"the world of {page}", 1, "sh", fill(plan.prepare, world.facts))])
        reader = Reader(changes=world.changes)

        @contextlib.asynccontextmanager
        async def start(names: dict[str, Any]) -> AsyncIterator[None]:
            async with contextlib.AsyncExitStack() as stack:
                if plan.opens:
                    names["repo"] = await stack.enter_async_context(snapcore.open_repository(plan.opens))
                yield

        reader.read(found, start)
        if plan.after:
            Reader().read([Block(f"what is left of {page}", 1, "sh", fill(plan.after, world.facts))])
    place = 0
    for text in plan.prints:
        place = reader.printed.find(text, place)
        assert place >= 0, f"{text!r} was not printed, or not in this order:\n{reader.printed}"


@pytest.mark.parametrize("page", [page for page, plan in PAGES.items() if plan.python])
def test_a_page_whose_python_is_run_elsewhere_is_run_there(page: str) -> None:
    where = (ROOT / PAGES[page].python).read_text("utf-8")
    assert re.search(rf'run_page\(\s*"{re.escape(page)}"', where)


@pytest.mark.parametrize("page", [page for page, plan in PAGES.items() if plan.elsewhere])
def test_a_page_that_is_run_elsewhere_is_run_there(page: str) -> None:
    assert os.path.basename(page) in (ROOT / PAGES[page].elsewhere).read_text("utf-8")


def test_every_world_is_that_of_a_page() -> None:
    assert set(PAGES) <= set(pages())


# ---- blocks that are looked at


def _toml(block: Block) -> None:
    found = tomllib.loads(block.code)
    settings = found.get("tool", {}).get("snapcore") if "tool" in found else found
    if settings is not None and not {"project", "build-system", "dependency-groups"} & set(found):
        msgspec.convert(settings, Settings)


def _ini(block: Block) -> None:
    parser = configparser.RawConfigParser(strict=False, allow_no_value=False)
    parser.read_string(block.code)
    assert parser.sections(), block


def _text(block: Block) -> None:
    """A synopsis names commands that there are."""
    for line in block.code.splitlines():
        if said := re.match(r"snapcore ([a-z]+)\b", line):
            assert said[1] in {*app.COMMANDS, *app.GROUPS}, f"{block}: there is no command {said[1]}"


def _crontab(block: Block) -> None:
    from apscheduler.triggers.cron import CronTrigger

    lines = [line for line in block.code.splitlines() if line and not line.startswith("#") and not re.match(r"\w+ ?=", line)]
    for line in lines:
        if not line.startswith("@"):
            CronTrigger.from_crontab(" ".join(line.split()[:5]))


LOOKED_AT: Final[dict[str, Callable[[Block], object]]] = {
    "crontab": _crontab,
    "ini": _ini,
    "json": lambda block: json.loads(block.code),
    "text": _text,
    "toml": _toml,
    "yaml": lambda block: list(yaml.safe_load_all(block.code)),
}
LOOKED_AT_BLOCKS: Final = [block for page in HERE for block in blocks(page) if block.language in LOOKED_AT]


@pytest.mark.parametrize("block", LOOKED_AT_BLOCKS, ids=str)
def test_what_is_not_run_is_well_formed(block: Block) -> None:
    LOOKED_AT[block.language](block)


@pytest.mark.parametrize("page", HERE)
def test_no_block_is_left_out(page: str) -> None:
    """Every block has a language with a rule; indented ones are fenced, so that they have one."""
    assert [str(block) for block in blocks(page) if block.language not in {*RUN, *LOOKED_AT}] == []


@pytest.mark.parametrize("page", HERE)
def test_a_file_that_holds_a_program_is_used_by_the_page(page: str) -> None:
    found = blocks(page)
    for number, block in enumerate(found):
        if block.title and block.language in (*COMMANDS, *PYTHON):
            name = os.path.basename(block.title)
            assert any(name in later.code for later in found[number + 1 :]), f"{block}: nothing runs {block.title}"


def test_output_follows_what_printed_it() -> None:
    for page in pages():
        found = blocks(page)
        for before, block in zip([None, *found], found, strict=False):
            if block.language == "output":
                assert before is not None, block
                assert before.language in (*COMMANDS, *PYTHON), block
