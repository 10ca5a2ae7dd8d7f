"""The Python blocks of a page of the documentation, run one after another in one namespace as a reader would."""

import ast
import asyncio
import inspect
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def python_blocks(page: str) -> list[tuple[int, str]]:
    """(line of its first line, code) of each Python block of a page, by its path in the project."""
    text = (ROOT / page).read_text()
    return [(text.count("\n", 0, found.start(1)) + 1, found[1]) for found in _BLOCK.finditer(text)]


def run_page(page: str, **given: Any) -> dict[str, Any]:
    """Run every Python block of a page, with `await` allowed outside of functions; `given` are names that are there at the start.
    Returns all names at the end. What a block raises is raised, with the page's own lines in its trace."""
    blocks = python_blocks(page)
    assert blocks, f"{page} has no Python block"

    async def run() -> dict[str, Any]:
        names: dict[str, Any] = {"__name__": "example", **given}
        for line, code in blocks:
            tree = ast.parse(code, page)
            ast.increment_lineno(tree, line - 1)
            compiled = compile(tree, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            done = eval(compiled, names)
            if inspect.iscoroutine(done):
                await done
        return names

    return asyncio.run(run())
