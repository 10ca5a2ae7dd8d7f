"""Pages are written as code hosts show them; here is what the site needs otherwise.

What pages link to outside of docs/ is led to where the site has it: the changelog is a page, other files of the project are
copies to read.
"""

import html
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).parents[1]
PAGES: Final = {"CHANGELOG.md": "CHANGELOG.md", "README.md": "index.md"}
_LINK: Final = re.compile(r"(\]\(|^\[[^\]\n]+\]: )(\.\./[^\s)#]+)", re.MULTILINE)

_MARK: Final = re.compile(r"\[\[([A-Z]\d+)\]\]")  # a reference in brackets, which the site would take for two

_COMMANDS: Final = re.compile(r"^( *```)console$", re.MULTILINE)  # without prompts they are coloured as a script is
_BARS: Final = re.compile(r"`([^`\n]*\\\|[^`\n]*)`")  # in a table's code, where the site would show the backslash


def _outside(page: str, target: str) -> str | None:
    """Where in the project a link of a page leads, None when it stays in docs/."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
    return None if path.startswith("docs/") or not (ROOT / path).is_file() else path


def _place(path: str) -> str:
    """Where the site has a file of the project."""
    return PAGES.get(path, f"source/{path}.txt")


def _with_bars(found: re.Match[str]) -> str:
    """Code in a table with its bars."""
    code = html.escape(found[1].replace("\\|", "|")).replace("|", "&#124;")
    return f"<code>{code}</code>"


def on_files(files: Files, config: "MkDocsConfig") -> Files:
    """Add the files that pages link to."""
    wanted = {"CHANGELOG.md"}
    for file in files.documentation_pages():
        for found in _LINK.finditer(file.content_string):
            if (path := _outside(file.src_uri, found[2])) and path != "README.md":
                wanted.add(path)
    for path in sorted(wanted):
        files.append(File.generated(config, _place(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: "Page", config: "MkDocsConfig", files: Files) -> str:
    """Lead links out of docs/ to where the site has what they name."""

    def led(found: re.Match[str]) -> str:
        path = _outside(page.file.src_uri, found[2])
        if path is None:
            return found[0]
        return found[1] + posixpath.relpath(_place(path), posixpath.dirname(page.file.src_uri) or ".")

    for what, by in ((_LINK, led), (_MARK, r"[\\[\1\\]][\1]"), (_COMMANDS, r"\1sh"), (_BARS, _with_bars)):
        markdown = what.sub(by, markdown)
    return markdown
