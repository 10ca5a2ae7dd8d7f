"""The bytes of one file, to and from a sandbox, whatever its name is."""

import posixpath
import secrets
from collections.abc import AsyncGenerator
from typing import Final

from snapcore.sandboxes import ExecResult, SandboxHandle

from .coding_tools_paths import Place, assign, last_words
from .tool_schemas import ToolError, shown_path

__all__ = ["read_pieces", "write_whole"]

MAX_PIPED: Final = 16 << 20
SECONDS: Final = 120.0

_READ: Final = 'exec cat < "$path"'
_WRITE: Final = """cat > "$draft" && mv -f "$draft" "$path" && exit
code=$?
rm -f "$draft"
exit "$code"
"""


async def read_pieces(handle: SandboxHandle, place: Place) -> AsyncGenerator[bytes, None]:
    """The file's bytes, in pieces. Leaving early ends the transfer, when the generator is closed."""
    if _by_pipe(handle, place):
        done = await handle.exec(["sh", "-c", assign("path", place.path) + _READ], timeout=SECONDS, max_output=MAX_PIPED)
        _check(done, place)
        yield done.stdout
        return
    pieces = handle.download(place.text)
    try:
        async for piece in pieces:
            yield piece
    except UnicodeError:
        raise _unnamed(place) from None
    finally:
        if isinstance(pieces, AsyncGenerator):
            await pieces.aclose()


async def write_whole(handle: SandboxHandle, place: Place, data: bytes) -> None:
    """Create or replace the file."""
    if _by_pipe(handle, place):
        draft = posixpath.join(posixpath.dirname(place.path), f".snapcore-upload.{secrets.token_hex(8)}".encode())
        script = assign("path", place.path) + assign("draft", draft) + _WRITE
        _check(await handle.exec(["sh", "-c", script], stdin=data, timeout=SECONDS), place)
        return
    try:
        await handle.upload(place.text, data)
    except UnicodeError:
        raise _unnamed(place) from None


def _by_pipe(handle: SandboxHandle, place: Place) -> bool:
    """Whether the file goes through a command's pipes: a provider's own transfers may not know a name that is no text."""
    try:
        place.path.decode()
    except UnicodeDecodeError:
        return handle.abilities.binary_pipes
    return False


def _check(done: ExecResult, place: Place) -> None:
    if done.exit_code:
        raise ToolError("SYSTEM", f"{shown_path(place.relative)}: {last_words(done)}.")
    if done.truncated:
        raise ToolError("TOO_LARGE", f"{shown_path(place.relative)} has more than {MAX_PIPED:,} bytes.", "Use exec.")


def _unnamed(place: Place) -> ToolError:
    return ToolError("INVALID_PATH", f"This sandbox's provider cannot name {shown_path(place.relative)}.", "Use exec.")
