"""How `snapcore diff` shows differences: names, a table, patches, JSON."""

import base64
import re
import shutil
import sys
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from snapcore.errors import printable

from .output import columns, count, entry_fields, padded, path_text, print_line, shortened, size, takes_colours

if TYPE_CHECKING:
    from snapcore.browse import Diff, DiffEntry, NotCompared
    from snapcore.model import Entry
    from snapcore.patchtext import FilePatch

__all__ = ["change_fields", "print_names", "print_patch", "print_skipped", "print_stat"]

LEAST_NAME: Final = 16  # columns of a name in a narrow terminal
ZEROS: Final = re.compile("\0{4,}")
BOLD, RED, GREEN, CYAN, PLAIN = "\x1b[1m", "\x1b[31m", "\x1b[32m", "\x1b[36m", "\x1b[m"


def _sign(d: "DiffEntry") -> str:
    return "+" if d.before is None else "-" if d.after is None else "~"


def _name(d: "DiffEntry | NotCompared", several: bool) -> str:
    return f"{d.root}:{path_text(d.path)}" if several else path_text(d.path)


def print_names(found: "Diff", *, several: bool, long: bool) -> None:
    """A line for each path: what was removed, added and changed; when `long`, in what each differs."""
    for d in (*found.removed, *found.added, *found.changed):
        words = f" ({', '.join(_words(d))})" if long and d.what else ""
        print_line(f"{_sign(d)} {_name(d, several)}{words}")


def print_skipped(skipped: "Sequence[NotCompared]", *, several: bool, aside: bool) -> None:
    """What could not be compared; on stderr when stdout has a patch."""
    for each in skipped:
        line = f"? {_name(each, several)}: {each.reason}"
        if aside:
            sys.stderr.write(f"{printable(line)}\n")
        else:
            print_line(line)


def _words(d: "DiffEntry") -> list[str]:
    """In what a path differs, for a reader."""
    from snapcore.model import Kind

    a, b = d.before, d.after
    if a is None or b is None:
        return []
    shown = {"kind": f"{Kind.NAMES[a.kind]} -> {Kind.NAMES[b.kind]}", "mode": f"mode {a.mode:04o} -> {b.mode:04o}"}
    return [shown.get(name, name) for name in d.what]


# ---- the table


async def print_stat(patches: "AsyncIterator[FilePatch]", *, several: bool) -> None:
    """A table: what became of each path, its bytes before and after, its lines; and the sums."""
    rows: list[tuple[str, str, str, str]] = []
    signs: list[str] = []
    totals = [0, 0, 0, 0]  # lines added, lines removed, bytes before, bytes after
    async for p in patches:
        d = p.entry
        signs.append(_sign(d))
        rows.append((f"{_sign(d)} {printable(_name(d, several))}", _bytes(d.before), _bytes(d.after), _lines(p)))
        totals[0] += p.added or 0
        totals[1] += p.removed or 0
        totals[2] += d.before.size if d.before is not None else 0
        totals[3] += d.after.size if d.after is not None else 0
    if rows:
        _print_table([("  path", "before", "after", ""), *rows])
    numbers = ", ".join(f"{signs.count(sign):,} {word}" for sign, word in (("+", "added"), ("-", "removed"), ("~", "changed")))
    print_line(f"{count(len(rows), 'path')}: {numbers}")
    print_line(f"lines: +{totals[0]:,} -{totals[1]:,}; bytes: {size(totals[2])} before, {size(totals[3])} after")


def _print_table(rows: Sequence[tuple[str, str, str, str]]) -> None:
    widths = [max(columns(row[number]) for row in rows) for number in range(4)]
    if sys.stdout.isatty():
        room = shutil.get_terminal_size().columns - sum(widths[1:]) - 6
        widths[0] = min(widths[0], max(room, LEAST_NAME))
    for name, before, after, last in rows:
        cells = (padded(shortened(name, widths[0]), widths[0]), before.rjust(widths[1]), after.rjust(widths[2]), last)
        sys.stdout.write("  ".join(cells).rstrip() + "\n")


def _bytes(entry: "Entry | None") -> str:
    from snapcore.model import Kind

    return size(entry.size) if entry is not None and entry.kind == Kind.FILE else "-"


def _lines(p: "FilePatch") -> str:
    if p.why:
        return p.why
    words = _words(p.entry)[:1] if "kind" in p.entry.what else []
    words += [f"{sign}{number:,}" for sign, number in (("+", p.added), ("-", p.removed)) if number]
    return " ".join(words) or ", ".join(_words(p.entry))


# ---- patches


def print_patch(data: bytes) -> None:
    """A patch on stdout: exact bytes; on a terminal, what could steer it is escaped, and lines are coloured unless NO_COLOR is
    set."""
    if not sys.stdout.isatty():
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        return
    coloured = takes_colours()
    in_hunk = False
    for raw in data.split(b"\n")[:-1]:
        in_hunk = raw.startswith(b"@@") or (in_hunk and not raw.startswith(b"diff "))
        text = "\t".join(_visible(part) for part in raw.decode("utf-8", "surrogateescape").split("\t"))
        colour = _colour(raw, in_hunk=in_hunk) if coloured else ""
        sys.stdout.write(f"{colour}{text}{PLAIN}\n" if colour else f"{text}\n")


def _visible(text: str) -> str:
    parts = []
    at = 0
    for zeros in ZEROS.finditer(text):
        parts += [printable(text[at : zeros.start()]), f"<{zeros.end() - zeros.start()} zeros>"]
        at = zeros.end()
    return "".join([*parts, printable(text[at:])])


def _colour(line: bytes, *, in_hunk: bool) -> str:
    if not in_hunk:
        return BOLD
    return {b"@": CYAN, b"+": GREEN, b"-": RED}.get(line[:1], "")


# ---- JSON


def change_fields(d: "DiffEntry", p: "FilePatch | None" = None, *, with_text: bool = False) -> dict[str, Any]:
    """A difference as JSON has it; `p` is what was read for it."""
    change = {"+": "added", "-": "removed", "~": "changed"}[_sign(d)]
    some = d.after if d.after is not None else d.before
    assert some is not None
    fields: dict[str, Any] = {"root": d.root, **{k: v for k, v in entry_fields(some).items() if k.startswith("path")}}
    fields.update(change=change, what=list(d.what), before=_entry(d.before), after=_entry(d.after))
    if p is not None:
        fields.update(lines_added=p.added, lines_removed=p.removed, not_shown=p.why or None)
    if p is not None and with_text:
        fields["patch"] = p.data.decode("utf-8", "backslashreplace")
        if not p.data.isascii() and fields["patch"].encode() != p.data:
            fields["patch_b64"] = base64.b64encode(p.data).decode("ascii")
    return fields


def _entry(entry: "Entry | None") -> dict[str, Any] | None:
    return None if entry is None else {k: v for k, v in entry_fields(entry).items() if not k.startswith("path")}
