"""What callers add to the secrets they name: functions and regular expressions that find what to take out."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from .errors import Code, SnapshotError
from .redaction_match import Span

__all__ = ["MAX_MATCH", "HookFunction", "RedactionHook", "RedactionPattern", "checked_name", "invalid"]

MAX_MATCH: Final = 64 * 1024
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")

HookFunction = Callable[[str, bytes], Iterable[tuple[int, int]] | bytes]


def invalid(message: str, hint: str = "") -> SnapshotError:
    """The error for a request that makes no sense; its texts never hold a value."""
    return SnapshotError(message, code=Code.INVALID_REQUEST, hint=hint)


def checked_name(name: object, what: str) -> str:
    """`name`, when it may be stored and shown. The error does not show it: it could be a value in the wrong place."""
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise invalid(
            f"The name of {what} is not valid.", "Names have at most 128 letters, digits, '_', '.' and '-', and are not values."
        )
    return name


def _check_max_match(max_match: object, name: str) -> None:
    if not isinstance(max_match, int) or isinstance(max_match, bool) or not 1 <= max_match <= MAX_MATCH:
        raise invalid(f"max_match of '{name}' must be a whole number from 1 to {MAX_MATCH}.")


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class RedactionHook:
    """A function of the caller that finds what to take out.

    `fn(path, block)` gets the file's path and a window of its bytes, and returns the (start, end) ranges to zero, or a block
    of the same length that differs where bytes shall be zeroed. A match of at most `max_match` bytes is always seen whole.
    `version` changes when the function's results do: files are then read again. In text, `path` is empty.
    """

    name: str
    version: str
    fn: HookFunction
    max_match: int = MAX_MATCH

    def __post_init__(self) -> None:
        checked_name(self.name, "a redaction hook")
        if not isinstance(self.version, str) or not self.version:
            raise invalid(f"The redaction hook '{self.name}' needs a version.", "Change it whenever its results change.")
        if not callable(self.fn):
            raise invalid(f"The redaction hook '{self.name}' is not callable.")
        _check_max_match(self.max_match, self.name)

    def __repr__(self) -> str:
        return f"<RedactionHook {self.name} version {self.version}>"

    def spans(self, path: str, block: bytes) -> Iterator[Span]:
        """The ranges that the function names in a window. `SnapshotError` `INVALID_REQUEST` for a result of another kind."""
        result = self.fn(path, block)
        if isinstance(result, bytes | bytearray | memoryview):
            if len(result) != len(block):
                raise invalid(
                    f"The redaction hook '{self.name}' changed the length of a block from {len(block)} to {len(result)} bytes.",
                    "Return ranges, or a block of the same length.",
                )
            ranges: Iterable[tuple[int, int]] = _differences(block, bytes(result))
        else:
            ranges = result
            if not isinstance(ranges, Iterable):
                raise invalid(f"The redaction hook '{self.name}' returned neither ranges nor a block.", "Return [] for none.")
        for start, end in ranges:
            if not 0 <= start <= end <= len(block):
                raise invalid(f"The redaction hook '{self.name}' returned a range outside its block of {len(block)} bytes.")
            if start < end:
                yield start, end, self.name, "hook"


class RedactionPattern:
    """A regular expression on bytes; whatever it matches is taken out.

    A match of at most `max_match` bytes is found wherever it lies. The expression sees a window of the file, so `^`, `$` and
    lookarounds see no further than the window.
    """

    __slots__ = ("_expression", "max_match", "name")

    def __init__(self, name: str, regex: str | bytes | re.Pattern[bytes], max_match: int = 4096) -> None:
        self.name = checked_name(name, "a redaction pattern")
        _check_max_match(max_match, name)
        self.max_match = max_match
        try:
            self._expression: re.Pattern[bytes] = re.compile(regex.encode() if isinstance(regex, str) else regex)
        except (re.error, UnicodeEncodeError, TypeError):
            raise invalid(f"The redaction pattern '{name}' is not a valid regular expression.") from None
        if not isinstance(self._expression.pattern, bytes):
            raise invalid(f"The redaction pattern '{name}' is compiled for text.", "Compile it from bytes.")

    def __repr__(self) -> str:
        return f"<RedactionPattern {self.name}>"

    def identity(self) -> tuple[str, bytes, int, int]:
        """What its results depend on."""
        return self.name, self._expression.pattern, self._expression.flags, self.max_match

    def spans(self, path: str, block: bytes) -> Iterator[Span]:
        """The ranges that match in a window."""
        for match in self._expression.finditer(block):
            if match.end() > match.start():
                yield match.start(), match.end(), self.name, "pattern"


def _differences(before: bytes, after: bytes) -> Iterator[tuple[int, int]]:
    """The ranges in which two blocks of equal length differ."""
    step = 4096
    for base in range(0, len(before), step):
        if before[base : base + step] == after[base : base + step]:
            continue
        start = -1
        stop = min(base + step, len(before))
        for i in range(base, stop):
            if (before[i] != after[i]) == (start < 0):
                if start < 0:
                    start = i
                else:
                    yield start, i
                    start = -1
        if start >= 0:
            yield start, stop
