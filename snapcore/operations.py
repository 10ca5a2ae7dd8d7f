"""What tells one operation of a session from another: its words without secrets, and digests of what goes in."""

import posixpath
from collections.abc import Mapping, Sequence

from blake3 import blake3

from .ledger import Operation
from .redaction import Redactor
from .sandboxes import argument_list

__all__ = ["checkpoint_operation", "exec_operation", "inner_path", "write_operation"]


def exec_operation(
    redactor: Redactor,
    command: Sequence[str] | str,
    *,
    root: str,
    stdin: bytes = b"",
    cwd: str | None = None,
    environment: Mapping[str, str] | None = None,
    user: str | None = None,
) -> Operation:
    """The identity of a command in a sandbox whose workspace is `root`. Raises `SnapshotError` `INVALID_REQUEST`."""
    return Operation(
        kind="exec",
        command=tuple(_text(redactor, word) for word in argument_list(command)),
        cwd=None if cwd is None else inner_path(_text(redactor, cwd), root),
        user=None if user is None else _text(redactor, user),
        environment=tuple(sorted(_text(redactor, name) for name in environment or ())),
        input=_digest(redactor, stdin),
    )


def write_operation(redactor: Redactor, path: str, data: bytes, *, root: str) -> Operation:
    """The identity of a file that is written. Two contents are the same when they differ in secrets only."""
    return Operation(kind="write", command=(inner_path(_text(redactor, path), root),), input=_digest(redactor, data))


def checkpoint_operation(redactor: Redactor, label: str | None) -> Operation:
    """The identity of a checkpoint that is asked for."""
    return Operation(kind="checkpoint", command=() if label is None else (_text(redactor, label),))


def inner_path(path: str, root: str) -> str:
    """A path as seen from the workspace root, which a resumed sandbox may have elsewhere; absolute when it lies outside."""
    full = posixpath.normpath(posixpath.join(root, path))
    base = posixpath.normpath(root)
    if full == base:
        return "."
    return full[len(base.rstrip("/")) + 1 :] if full.startswith(base.rstrip("/") + "/") else full


def _text(redactor: Redactor, text: str) -> str:
    # an argument may hold bytes that are no text, and what is stored must not
    return redactor.scrub_text(text).encode("utf-8", "backslashreplace").decode()


def _digest(redactor: Redactor, data: bytes) -> bytes:
    return blake3(redactor.scrub_bytes(data)).digest() if data else b""
