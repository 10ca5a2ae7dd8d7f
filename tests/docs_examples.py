"""The blocks of the documentation's pages, and what a reader would do with them, one block after another.

Pages are plain Markdown, as code hosts show it. Every block is fenced and has a language:

    console, sh, bash   commands, without a prompt; bash runs them with -euo pipefail
    python, py          run in one namespace for each page, `await` allowed outside of functions; a block that calls
                        `asyncio.run` itself is a program of its own
    output              what the block before it printed: decimals, times and ids may differ, `...` stands for anything
    text                synopses and pictures

A block with `title="NAME"` is a file of that name. `<!-- exit 3 -->` before commands says how the last of them ends.
"""

import ast
import asyncio
import contextlib
import inspect
import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from markdown_it import MarkdownIt

ROOT: Final = Path(__file__).parents[1]
COMMANDS: Final = ("console", "sh", "bash")
PYTHON: Final = ("python", "py")
LONGEST: Final = 300.0  # seconds that a block may take before it is said to hang
_TITLE: Final = re.compile(r'\btitle="([^"]+)"')
_EXIT: Final = re.compile(r"<!-- exit (\d+) -->")
_PROGRAM: Final = re.compile(r"^(?:asyncio|anyio)\.run\(", re.MULTILINE)
_VARIES: Final = (
    (re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d)?(?:\.\d+)?(?:\+00:00|Z)?"), "<time>"),
    (re.compile(r"\b[0-9a-f]{8,}\b"), "<id>"),
    (re.compile(r"\b\d+\.\d+(?=s?\b)"), "<number>"),
)


@dataclass(frozen=True, slots=True)
class Block:
    """One block of a page. `language` is empty where none is given, and `indented` for one without a fence; `line` is the number
    of its first line; `title` the file that it is; `exit` the code with which its commands are said to end."""

    page: str
    line: int
    language: str
    code: str
    title: str = ""
    exit: int = 0

    def __str__(self) -> str:
        return f"{self.page}:{self.line} ({self.language or 'no language'})"


def pages() -> list[str]:
    """All pages, by their paths in the project."""
    return ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]


def blocks(page: str) -> list[Block]:
    """Every block of a page, in order."""
    found: list[Block] = []
    ends = 0
    for token in MarkdownIt("commonmark").enable("table").parse((ROOT / page).read_text("utf-8")):
        if token.type == "html_block" and (said := _EXIT.fullmatch(token.content.strip())):
            ends = int(said[1])
        elif token.type in ("fence", "code_block"):
            assert token.map is not None
            language, _, more = token.info.strip().partition(" ")
            title = _TITLE.search(more)
            found.append(
                Block(
                    page,
                    token.map[0] + (2 if token.type == "fence" else 1),
                    language if token.type == "fence" else "indented",
                    token.content,
                    title[1] if title else "",
                    ends,
                )
            )
            ends = 0
    return found


def python_blocks(page: str) -> list[tuple[int, str]]:
    """(line of its first line, code) of each Python block of a page, by its path in the project."""
    return [(block.line, block.code) for block in blocks(page) if block.language in PYTHON and not block.title]


def run_page(page: str, **given: Any) -> dict[str, Any]:
    """Run every Python block of a page, with `await` allowed outside of functions; `given` are names that are there at the start.
    Returns all names at the end. What a block raises is raised, with the page's own lines in its trace."""
    found = [block for block in blocks(page) if block.language in PYTHON and not block.title]
    assert found, f"{page} has no Python block"
    return Reader(given).read(found)


class Reader:
    """Does what the blocks say, in the present folder and with the environment of this process, as one who reads a page from top
    to bottom. `names` is the namespace of its Python blocks; each `change` is made to what a block says before it is done."""

    def __init__(self, given: Mapping[str, Any] | None = None, changes: Sequence[tuple[str, str]] = ()) -> None:
        self.names: dict[str, Any] = {"__name__": "example", **(given or {})}
        self.printed = ""  # by all blocks so far
        self._changes = changes
        self._last = ""  # by the last block that did something

    def read(
        self,
        found: Sequence[Block],
        start: Callable[[dict[str, Any]], contextlib.AbstractAsyncContextManager[None]] | None = None,
    ) -> dict[str, Any]:
        """Do what blocks say; `start` may add names that need the event loop. Returns all names."""

        async def read() -> None:
            async with start(self.names) if start else contextlib.nullcontext():
                for block in found:
                    await self._one(block)

        asyncio.run(read())
        return self.names

    async def _one(self, block: Block) -> None:
        code = changed(block.code, self._changes)
        if block.title:
            path = Path(os.path.expanduser(block.title))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(code)
        elif block.language == "output":
            self._compare(block)
        elif block.language in COMMANDS:
            await self._said(block, *await asyncio.to_thread(_shell, code))
        elif block.language in PYTHON and _PROGRAM.search(code):
            await self._said(block, *await asyncio.to_thread(_program, [sys.executable, "-c", code]))
        elif block.language in PYTHON:
            await self._python(block, code)

    async def _said(self, block: Block, code: int, printed: str) -> None:
        self._print(printed)
        assert code == block.exit, f"{block} ended with {code}:\n{block.code}\n{printed}"

    async def _python(self, block: Block, code: str) -> None:
        tree = ast.parse(code, block.page)
        ast.increment_lineno(tree, block.line - 1)
        compiled = compile(tree, block.page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            done = eval(compiled, self.names)
            if inspect.iscoroutine(done):
                await done
        sys.stdout.write(out.getvalue())
        self._print(out.getvalue())

    def _print(self, text: str) -> None:
        self._last = text
        self.printed += text

    def _compare(self, block: Block) -> None:
        last = self._last
        for old, new in self._changes:
            last = last.replace(new, old)
        shown, came = (_lines(text) for text in (block.code, last))
        parts = [r"(?:.*\n)*?" if line == "..." else _pattern(line) for line in shown]
        assert re.fullmatch("".join(parts), "".join(f"{line}\n" for line in came)), f"{block}, but it was:\n{last}"


def changed(text: str, changes: Sequence[tuple[str, str]]) -> str:
    """A text in which each placeholder that stands as a word of its own is replaced."""
    for old, new in changes:
        before, after = (r"(?<![\w-])" if old[0].isalnum() else ""), (r"(?![\w-])" if old[-1].isalnum() else "")
        text = re.sub(f"{before}{re.escape(old)}{after}", new.replace("\\", r"\\"), text)
    return text


def _lines(text: str) -> list[str]:
    """The lines of a text without what differs each time, and without the widths of columns."""
    for what, name in _VARIES:
        text = what.sub(name, text)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    return [line for line in lines if line]


def _pattern(line: str) -> str:
    return ".*".join(re.escape(part) for part in re.split(r"\.\.\.|…", line)) + "\n"


def _shell(code: str) -> tuple[int, str]:
    """Run commands. The variables that they export, and the folder that they go to, hold for what comes after."""
    with tempfile.TemporaryDirectory(prefix="snapcore-docs-") as work:
        left = Path(work, "left")
        done = _program(["bash", "-euo", "pipefail", "-c", f"trap 'pwd >{left}; env -0 >>{left}' EXIT\n{code}"])
        place, _, variables = left.read_bytes().partition(b"\n")
    for name, _, value in (line.partition(b"=") for line in variables.split(b"\0") if line):
        os.environb[name] = value
    os.chdir(place)
    return done


def _program(command: Sequence[str]) -> tuple[int, str]:
    """(exit code, what was printed to either stream) of a command; what it leaves running in the background is not waited for."""
    with tempfile.TemporaryFile() as out:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, timeout=LONGEST, check=False)
        out.seek(0)
        return done.returncode, out.read().decode("utf-8", "backslashreplace")
