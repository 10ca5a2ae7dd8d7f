"""Which names blobs may have; shared by all blob stores."""

import re
from typing import Final

from snapcore.errors import Code, SnapshotError

__all__ = ["MAX_KEY_LENGTH", "validate_key", "validate_prefix", "validate_range"]

MAX_KEY_LENGTH: Final = 200
_FOREIGN: Final = re.compile(r"[^a-z0-9._/-]")


def validate_key(key: str) -> None:
    """Refuse (`INVALID_REQUEST`) a key that some store could not hold, with the rule that it breaks."""
    _check_characters(key, "A blob key")
    if not key:
        raise _refusal("A blob key must not be empty.")
    if any(not part for part in key.split("/")):
        raise _refusal(f"The blob key {key!r} has an empty part: '/' only joins parts.")
    _check_parts(key, "The blob key")


def validate_prefix(prefix: str) -> None:
    """Refuse a prefix that no key can start with."""
    _check_characters(prefix, "A prefix of blob keys")
    if prefix.startswith("/") or "//" in prefix:
        raise _refusal(f"The prefix {prefix!r} has an empty part: '/' only joins parts.")
    _check_parts(prefix, "The prefix")


def validate_range(offset: int, length: int | None) -> None:
    """Refuse a range that starts before the blob or has a negative length."""
    if offset < 0 or (length is not None and length < 0):
        raise _refusal("A range of a blob must not be negative.")


def _check_characters(text: str, what: str) -> None:
    if len(text) > MAX_KEY_LENGTH:
        raise _refusal(f"{what} has at most {MAX_KEY_LENGTH} characters.")
    if _FOREIGN.search(text):
        # Lower case only: some file systems do not tell it from upper case. ASCII only: some change other letters.
        raise _refusal(f"{what} consists of a-z, 0-9, '.', '_', '-' and '/'; {text!r} does not.")


def _check_parts(text: str, what: str) -> None:
    if any(part.startswith(".") for part in text.split("/")):
        # '.' and '..' would lead elsewhere; other dot names are the store's own.
        raise _refusal(f"{what} {text!r} has a part that starts with a dot.")


def _refusal(message: str) -> SnapshotError:
    return SnapshotError(message, code=Code.INVALID_REQUEST)
