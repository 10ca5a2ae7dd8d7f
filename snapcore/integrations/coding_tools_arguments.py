"""What a model is told of the coding tools, and what it may send to each."""

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from .tool_schemas import Tool

__all__ = ["CODING_TOOLS", "MAX_LINES", "Edit", "Exec", "ListFolder", "ReadFile", "WriteFile"]

MAX_LINES: Final = 2_000  # that one call shows of a file


def _text(description: str) -> Any:
    return Meta(description=description)


class ReadFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Arguments of `read_file`."""

    path: Annotated[str, _text("The file, relative to the workspace.")]
    start_line: Annotated[int | None, _text("The first line to show, from 1. Null: from the beginning.")] = None
    max_lines: Annotated[int | None, _text(f"How many lines to show, at most {MAX_LINES}. Null: {MAX_LINES}.")] = None


class WriteFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Arguments of `write_file`."""

    path: Annotated[str, _text("The file, relative to the workspace. Folders on the way are made.")]
    content: Annotated[str, _text("The whole new content.")]
    executable: Annotated[bool | None, _text("Whether it may be executed. Null: as it is now, or not.")] = None


class Edit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Arguments of `edit`."""

    path: Annotated[str, _text("The file, relative to the workspace.")]
    old_text: Annotated[str, _text("The text to replace, exactly as it is in the file, with its indentation.")]
    new_text: Annotated[str, _text("What comes in its place.")]
    replace_all: Annotated[bool | None, _text("Replace every occurrence. Null: there has to be exactly one.")] = None


class Exec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Arguments of `exec`."""

    command: Annotated[str, _text("The command line, run by sh.")]
    cwd: Annotated[str | None, _text("The folder to run it in, relative to the workspace. Null: the workspace.")] = None
    timeout_seconds: Annotated[int | None, _text("After how many seconds it is stopped. Null: the default.")] = None


class ListFolder(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Arguments of `list`."""

    path: Annotated[str | None, _text("The folder, relative to the workspace. Null: the workspace itself.")] = None


EXEC_TEXT: Final = (
    "Run a shell command in the workspace and get its exit code and output. Each call is a shell of its own, without input:"
    " what cd and export did is gone afterwards."
)
CODING_TOOLS: Final = (
    Tool("read_file", "Read a text file, or some of its lines.", ReadFile, read_only=True),
    Tool("write_file", "Create a file, or replace its whole content.", WriteFile),
    Tool("edit", "Replace a piece of text in a file. The text has to be there exactly once, unless replace_all is true.", Edit),
    Tool("exec", EXEC_TEXT, Exec),
    Tool("list", "List what is in a folder.", ListFolder, read_only=True),
)
