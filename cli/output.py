"""What the command prints: results on stdout, errors on stderr, nothing that could steer a terminal."""

import base64
import itertools
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from snapcore.errors import SnapcoreError, SnapshotError, printable

if TYPE_CHECKING:
    from snapcore.model import Checkpoint, Entry

__all__ = [
    "checkpoint_fields",
    "columns",
    "count",
    "entry_fields",
    "error_fields",
    "mode_text",
    "moment",
    "padded",
    "path_fields",
    "path_list",
    "path_text",
    "print_error",
    "print_json",
    "print_json_array",
    "print_line",
    "print_system_error",
    "print_table",
    "print_unforeseen",
    "short_ids",
    "shortened",
    "size",
    "system_error_line",
    "takes_colours",
    "width",
]

SHORT_ID: Final = 8
NARROW: Final = 80
LEAST_NAME: Final = 6  # as "THREAD", the longest head of a column of names
_MADE: Final = re.compile(r"[0-9a-f]{32}")  # an id that snapcore made
SYSTEM: Final = "SYSTEM"  # the code of errors that are none of the engine's
INTERNAL: Final = "INTERNAL"  # the code of mistakes of snapcore itself
SYSTEM_HINT: Final = "The operating system refused it: see to what it names (space, permissions, limits), then try again."


def print_line(text: str = "") -> None:
    """One line on stdout; whatever could steer a terminal is escaped."""
    sys.stdout.write(printable(text) + "\n")


def print_json(value: object) -> None:
    """One JSON value on stdout, in ASCII."""
    sys.stdout.write(json.dumps(value) + "\n")


async def print_json_array(values: AsyncIterator[object]) -> None:
    """A JSON array on stdout, one element a line, written as the elements come."""
    separator = "["
    async for value in values:
        sys.stdout.write(f"{separator}\n{json.dumps(value)}")
        separator = ","
    sys.stdout.write("[]\n" if separator == "[" else "\n]\n")


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int] = (), names: Sequence[int] = ()) -> None:
    """Columns on stdout under a head; those in `right` are aligned to the right. Those in `names` lose their middles as far as
    it takes to fit a terminal's width; what a program reads is whole."""
    table = [[printable(cell) for cell in row] for row in (head, *rows)]
    widths = [max(columns(row[number]) for row in table) for number in range(len(head))]
    _fit(widths, names)
    to_right = frozenset(right)
    for row in table:
        line = "  ".join(
            padded(shortened(cell, width), width, right=number in to_right)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        sys.stdout.write(line.rstrip() + "\n")


def _fit(widths: list[int], names: Sequence[int]) -> None:
    """Make the columns `names` narrower, the widest first, until all of them fit the terminal or nothing is left to take."""
    surplus = sum(widths) + 2 * (len(widths) - 1) - width() if names and sys.stdout.isatty() else 0
    while surplus > 0:
        widest = max(names, key=lambda column: widths[column])
        if widths[widest] <= LEAST_NAME:
            break
        widths[widest] -= 1
        surplus -= 1


def width() -> int:
    """How many columns there are to write in: the terminal's, but at least 80."""
    import shutil

    return max(NARROW, shutil.get_terminal_size((NARROW, 24)).columns) if sys.stdout.isatty() else NARROW


def shortened(text: str, width: int) -> str:
    """A text with its middle left out where it takes more than that many columns. Both ends of a name or a path tell it apart."""
    if columns(text) <= width:
        return text
    end = len(text)
    while columns(text[end - 1 :]) <= (width - 1) // 2:
        end -= 1
    start = 0
    while columns(text[: start + 1]) + 1 + columns(text[end:]) <= width:
        start += 1
    return f"{text[:start]}…{text[end:]}"


def takes_colours() -> bool:
    """Whether terminals may be sent colours: see https://no-color.org and https://bixense.com/clicolors."""
    return not os.environ.get("NO_COLOR") and os.environ.get("CLICOLOR") != "0" and os.environ.get("TERM") != "dumb"


def padded(text: str, width: int, *, right: bool = False) -> str:
    """A text with spaces after it, or before it, so that it takes this many columns."""
    spaces = " " * (width - columns(text))
    return f"{spaces}{text}" if right else f"{text}{spaces}"


def columns(text: str) -> int:
    """How many columns of a terminal a text takes: none for what combines with what is before it, two for wide letters."""
    if text.isascii():
        return len(text)
    import unicodedata

    return sum(0 if unicodedata.combining(ch) else 2 if unicodedata.east_asian_width(ch) in "WF" else 1 for ch in text)


def print_error(error: SnapcoreError, *, as_json: bool) -> None:
    """The error on stderr: message, code and hint, or a JSON object."""
    if as_json:
        _tell(json.dumps(error_fields(error)))
    else:
        _tell(f"snapcore: {printable(error.message)} [{error.code}]\n  {printable(_hint(error))}")


def _tell(what: str) -> None:
    """Say on stderr what went wrong. On a full disk, say, the exit code tells alone: it must not become another one."""
    try:
        sys.stderr.write(f"{what}\n")
    except BrokenPipeError:
        raise
    except OSError:
        return


def _hint(error: SnapcoreError) -> str:
    if error.hint:
        return error.hint
    from .hints import HINTS

    return HINTS[error.code]


def print_system_error(error: OSError, *, as_json: bool) -> None:
    """What the operating system refused, on stderr: message, code and hint, or a JSON object, as for any error."""
    _print_foreign(str(error), SYSTEM, SYSTEM_HINT, as_json=as_json)


def print_unforeseen(error: Exception, *, as_json: bool) -> None:
    """An error that nobody foresaw, on stderr: of what kind it is, and where it arose. Its message may hold a secret."""
    import traceback

    from .hints import UNFORESEEN

    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {frames[-1].filename}, line {frames[-1].lineno}" if frames else ""
    _print_foreign(f"An unforeseen {type(error).__name__}{where}.", INTERNAL, UNFORESEEN, as_json=as_json)


def _print_foreign(message: str, code: str, hint: str, *, as_json: bool) -> None:
    if as_json:
        _tell(json.dumps({"message_type": "error", "code": code, "message": message, "hint": hint, "retryable": False}))
    else:
        _tell(f"snapcore: {printable(message)} [{code}]\n  {hint}")


def system_error_line(error: OSError) -> str:
    """What the operating system refused, in one line with its end."""
    return f"snapcore: {printable(str(error))} [{SYSTEM}]\n"


def error_fields(error: SnapcoreError) -> dict[str, Any]:
    """An error as JSON has it."""
    fields: dict[str, Any] = {
        "message_type": "error",
        "code": str(error.code),
        "message": error.message,
        "hint": _hint(error),
        "retryable": error.retryable,
    }
    if isinstance(error, SnapshotError):
        fields["paths"] = [path_fields(path) for path in error.paths]
    return fields


def path_fields(path: bytes) -> dict[str, str]:
    """`path` as text. Bytes that are not UTF-8 are escaped there, and `path_b64` holds the path exactly."""
    try:
        return {"path": path.decode("utf-8")}
    except UnicodeDecodeError:
        return {"path": printable(path), "path_b64": base64.b64encode(path).decode("ascii")}


def path_list(paths: Iterable[bytes]) -> list[str]:
    """Paths as texts; see `path_fields`."""
    return [path_fields(path)["path"] for path in paths]


def path_text(path: bytes) -> str:
    """A path for a reader, the root folder as `.`."""
    return path_fields(path)["path"] or "."


def count(number: int, noun: str) -> str:
    """`1 file`, `2,000 files`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def size(number: int) -> str:
    """Bytes for a reader, in decimal units: `1.2 MB`."""
    value = float(number)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{number} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def mode_text(kind: int, mode: int) -> str:
    """A mode as `ls -l` shows it."""
    import stat

    from snapcore.model import Kind

    types = {Kind.DIR: stat.S_IFDIR, Kind.LINK: stat.S_IFLNK}
    return stat.filemode(types.get(kind, stat.S_IFREG) | mode)


def moment(microseconds: int, *, exact: bool = False) -> str:
    """A time since the epoch, ISO 8601 in UTC, in whole seconds or to the microsecond."""
    import datetime

    at = datetime.datetime.fromtimestamp(0, datetime.UTC) + datetime.timedelta(microseconds=microseconds)
    return at.isoformat(timespec="microseconds" if exact else "seconds").replace("+00:00", "Z")


def short_ids(ids: Sequence[str]) -> list[str]:
    """Each id as far as it tells it from the others: at least 8 characters, so many that none looks like a number or a word.
    Those that somebody chose stay as they are."""
    made = sorted({each for each in ids if _MADE.fullmatch(each)})
    needed = {each: _telling(each) for each in made}
    for one, two in itertools.pairwise(made):
        differs = 1 + next(at for at in range(len(one)) if one[at] != two[at])
        needed[one], needed[two] = max(needed[one], differs), max(needed[two], differs)
    return [each[: needed.get(each)] for each in ids]


def _telling(made: str) -> int:
    ends = range(SHORT_ID, len(made))
    return next((end for end in ends if not made[:end].isdecimal() and not made[:end].isalpha()), len(made))


def checkpoint_fields(checkpoint: "Checkpoint") -> dict[str, Any]:
    """A checkpoint as JSON has it."""
    totals = checkpoint.totals
    return {
        "id": checkpoint.id,
        "thread_id": checkpoint.thread_id,
        "parent_id": checkpoint.parent_id,
        "reason": checkpoint.reason,
        "label": checkpoint.label,
        "created_at": moment(checkpoint.created_at, exact=True),
        "content_id": checkpoint.content_id.hex(),
        "files": totals.files,
        "folders": totals.folders,
        "links": totals.links,
        "bytes": totals.bytes,
        "run_id": checkpoint.run_id,
        "step": checkpoint.step,
        "recovered": checkpoint.recovered,
    }


def entry_fields(entry: "Entry") -> dict[str, Any]:
    """A manifest's entry as JSON has it."""
    from snapcore.model import Kind

    fields: dict[str, Any] = {
        **path_fields(entry.path),
        "kind": Kind.NAMES[entry.kind],
        "mode": f"{entry.mode:04o}",
        "size": entry.size,
        "mtime_ns": entry.mtime_ns,
    }
    if entry.kind == Kind.LINK:
        fields.update({f"target{key[4:]}": value for key, value in path_fields(entry.target).items()})
    if entry.hardlink:
        fields.update({f"hardlink{key[4:]}": value for key, value in path_fields(entry.hardlink).items()})
    if entry.redaction_chunks or entry.redaction_list:
        fields["redacted_bytes"] = None  # kept apart from the entry; not worth a read of the store for each
    elif entry.redactions:
        fields["redacted_bytes"] = sum(redaction.length for redaction in entry.redactions)
    return fields
