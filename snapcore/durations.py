"""Durations as people write them: `90s`, `24h`, `30d12h`."""

import math
import re
from typing import Final

from .errors import Code, SnapshotError

__all__ = ["parse_duration"]

UNITS: Final = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400, "y": 366 * 86_400}
LONGEST: Final = 10_000 * UNITS["y"]
_PART: Final = re.compile(r"([0-9]{1,9})([a-z]+)")
_WHOLE: Final = re.compile(r"(?:[0-9]{1,9}[a-z]+)+")


def parse_duration(value: object, what: str, *, zero: bool = False, months: bool = False) -> float:
    """Seconds, from a number of seconds or a text: whole numbers with the units `s`, `min` or `m`, `h`, `d`, `w`, `y` (366 days,
    so that no year is longer), largest first, each once; `0` needs no unit. `what` begins the message of an error.

    `zero` allows nothing at all. `months` says that other tools take `m` for months where this is asked for: it is refused
    then. Raises `SnapshotError` `INVALID_REQUEST`.
    """
    seconds = _parsed(value, what, months) if isinstance(value, str) else value
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not math.isfinite(seconds):
        raise _refused(what, value)
    if seconds < 0 or (not seconds and not zero) or seconds > LONGEST:
        raise _refused(what, value)
    return float(seconds)


def _parsed(text: str, what: str, months: bool) -> int:
    if text == "0":
        return 0
    if not _WHOLE.fullmatch(text):
        raise _refused(what, text)
    parts = [(int(number), unit) for number, unit in _PART.findall(text)]
    if months and any(unit == "m" for _, unit in parts):
        raise SnapshotError(
            f"{what} is {text!r}: does 'm' stand for months or for minutes?",
            code=Code.INVALID_REQUEST,
            hint="Write days (90d) or minutes (90min).",
        )
    sizes = [UNITS.get(unit, 0) for _, unit in parts]
    if not all(sizes) or sizes != sorted(set(sizes), reverse=True):
        raise _refused(what, text)
    return sum(number * size for (number, _), size in zip(parts, sizes, strict=True))


def _refused(what: str, value: object) -> SnapshotError:
    return SnapshotError(
        f"{what} is {value!r}, which is no length of time that makes sense.",
        code=Code.INVALID_REQUEST,
        hint="Write it as 90s, 15min, 24h, 7d or 30d12h.",
    )
