"""Where a path that a model gave really leads, found out inside the sandbox, and what is in a folder there.

One `sh` script walks a path component by component as the kernel would, and looks after each step whether it is still below
the root: so neither a link nor `..` leads out, whoever planted it. What comes back is in hexadecimal digits, so that any name
survives a sandbox whose output is text.
"""

import contextlib
import re
import secrets
import stat
from collections.abc import Iterator
from typing import Final, Literal

import msgspec

from snapcore.errors import Code, ProviderError, printable
from snapcore.providers.folders import is_stage_name
from snapcore.sandboxes import ExecResult, SandboxHandle

from .tool_schemas import ToolError, shown_path

__all__ = ["Listed", "Place", "assign", "last_words", "list_folder", "resolve", "set_mode"]

MAX_PATH: Final = 4_000
MAX_LISTING: Final = 192 << 10  # bytes of names and stats, before they are in hexadecimal digits
SCRIPT_OUTPUT: Final = 1 << 20
SCRIPT_SECONDS: Final = 60.0

_ESCAPED: Final = re.compile(rb"\\x([0-9a-f]{2})|\\([nrt])")
_CONTROLS: Final = {b"n": b"\n", b"r": b"\r", b"t": b"\t"}

_BEGIN: Final = r"""LC_ALL=C
export LC_ALL
end() { printf '%s %s\n' "$token" "$*"; exit 0; }
hex() { printf '%s' "$1" | od -An -v -tx1 | tr -d ' \n'; }
inside() {
    here=$(pwd -P; echo .)
    here=${here%??}
    case $here/ in "$top"/*) return 0;; esac
    return 1
}
found() { end "$1" "${2:--}" "${3:--}" "$(hex "${top:-/}")" "$(hex "$4")"; }
cd -P -- "$root" 2>/dev/null || end noroot
top=$(pwd -P; echo .)
top=${top%??}
[ "$top" != / ] || top=
given=$root
while [ "${given%/}" != "$given" ]; do given=${given%/}; done
"""

_WALK: Final = r"""
hops=0
rest=$path
base=
while :; do
    while [ "${rest#/}" != "$rest" ]; do rest=${rest#/}; done
    [ -n "$rest" ] || break
    part=${rest%%/*}
    more=
    case $rest in */*) more=${rest#*/};; esac
    if [ "$part" = . ]; then
        rest=$more
    elif [ "$part" = .. ]; then
        cd -P .. 2>/dev/null || end closed
        inside || end outside
        rest=$more
    elif [ -L "./$part" ]; then
        hops=$((hops + 1))
        [ "$hops" -le 40 ] || end loop
        to=$(readlink "./$part"; echo .)
        to=${to%??}
        case $rest in */*) slash=/;; *) slash=;; esac
        case $to in
        /*)
            case $to/ in
            "$top"/*) to=${to#"$top"};;
            "$given"/*) to=${to#"$given"};;
            *) end outside;;
            esac
            cd -P -- "${top:-/}" 2>/dev/null || end closed;;
        esac
        rest=$to$slash$more
    elif [ -d "./$part" ]; then
        cd -P "./$part" 2>/dev/null || end closed
        inside || end outside
        rest=$more
    else
        while [ "${more#/}" != "$more" ]; do more=${more#/}; done
        if [ -z "$more" ]; then
            case $rest in */*) end nofolder;; esac
            base=$part
            break
        fi
        [ ! -e "./$part" ] || end nofolder
        [ "$make" = 1 ] || end missing
        mkdir "./$part" 2>/dev/null && [ -d "./$part" ] || end closed
    fi
done
inside || end outside
"""

_TELL: Final = r"""
[ -n "$base" ] || found folder - - "$here"
whole=${here%/}/$base
if [ -f "./$base" ]; then
    facts=$(stat -c '%a %s' "./$base" 2>/dev/null || stat -f '%Lp %z' "./$base" 2>/dev/null) || facts='- -'
    found file "${facts% *}" "${facts#* }" "$whole"
fi
[ ! -e "./$base" ] || found other - - "$whole"
found missing - - "$whole"
"""

_LIST: Final = r"""
[ -z "$base" ] || { [ -e "./$base" ] && end nofolder; end missing; }
[ -r . ] || end closed
find . -prune >/dev/null 2>&1 && stat . >/dev/null 2>&1 || end notools
printf '%s folder - - %s %s\n' "$token" "$(hex "${top:-/}")" "$(hex "$here")"
if stat -c %f . >/dev/null 2>&1; then
    set -- -c "$token %f %s %n"
else
    set -- -f "$token %Xp %z %N"
fi
find . ! -name . -prune -exec stat "$@" {} + 2>/dev/null | head -c "$limit" | od -An -v -tx1
"""

_MODE: Final = r"""
[ -f "$path" ] && [ ! -L "$path" ] || exit 1
chmod "$mode" "$path"
"""

_REFUSALS: Final = {
    "noroot": ("NO_WORKSPACE", "The workspace is not there, or may not be entered."),
    "outside": ("OUTSIDE", "{path} leads out of the workspace."),
    "loop": ("LINK_LOOP", "{path} goes in circles through links."),
    "nofolder": ("NOT_A_FOLDER", "{path} is no folder, or goes through something that is none."),
    "closed": ("ACCESS_DENIED", "A folder on the way to {path} may not be entered or made."),
    "notools": ("MISSING_TOOL", "The sandbox has no find or no stat."),
    "missing": ("NOT_FOUND", "There is no {path}."),
}


PlaceKind = Literal["file", "folder", "other", "missing"]
_KINDS: Final[dict[str, PlaceKind]] = {"file": "file", "folder": "folder", "other": "other", "missing": "missing"}


class Place(msgspec.Struct, frozen=True):
    """What a path leads to: `path` is absolute and free of links, `relative` the same below the root. `mode` and `size` (bytes)
    are known of files, where the sandbox has `stat`."""

    kind: PlaceKind
    path: bytes
    relative: bytes
    mode: int | None = None
    size: int | None = None

    @property
    def text(self) -> str:
        """`path` for calls of a handle."""
        return self.path.decode("utf-8", "surrogateescape")


class Listed(msgspec.Struct, frozen=True):
    """An entry of a folder. `kind` is `file`, `folder`, `link` or `other`."""

    name: bytes
    kind: str
    mode: int
    size: int


async def resolve(handle: SandboxHandle, path: str, *, make: bool = False) -> Place:
    """Where a path below the workspace root leads. With `make`, folders on the way that are not there are made.

    `\\xe9` and the like stand for a byte, as listings show it, unless there is something with just that name. Raises `ToolError`
    for what leads out, loops or cannot be entered, `ProviderError`."""
    exact = _checked(handle, path)
    unescaped = _ESCAPED.sub(lambda m: bytes([int(m[1], 16)]) if m[1] else _CONTROLS[m[2]], exact)
    if unescaped != exact and b"\0" not in unescaped:
        for candidate in (exact, unescaped):
            place = await _look(handle, candidate, make=False, missing_is_error=False)
            if place.kind != "missing":
                return place
    return await _look(handle, exact, make=make, missing_is_error=True)


async def list_folder(handle: SandboxHandle, path: str) -> tuple[Place, list[Listed], bool]:
    """The folder that a path leads to, what is in it by name, and whether that is only a part."""
    place = await resolve(handle, path)
    if place.kind == "missing":
        raise _refusal("missing", path.encode())
    if place.kind != "folder":
        raise _refusal("nofolder", path.encode())
    token = _token()
    head, _, rest = (await _run(handle, _LIST, token, place.relative, limit=str(MAX_LISTING))).partition("\n")
    folder = _place(head.split(), place.relative, missing_is_error=True)
    with _sensible():
        raw = bytes.fromhex(rest)
        parts = raw.split(b"\n" + token.encode() + b" ") if raw else []
        cut = len(raw) >= MAX_LISTING
        if cut:
            parts.pop()
        found = [_listed(part.removeprefix(token.encode() + b" ").removesuffix(b"\n")) for part in parts]
    entries = sorted((each for each in found if folder.relative or not is_stage_name(each.name)), key=lambda each: each.name)
    return folder, entries, cut


async def set_mode(handle: SandboxHandle, place: Place, mode: int) -> bool:
    """Give a file permission bits; false when it does not take them."""
    script = assign("path", place.path) + f"mode={mode:04o}\n" + _MODE
    done = await handle.exec(["sh", "-c", script], timeout=SCRIPT_SECONDS, max_output=SCRIPT_OUTPUT)
    return done.exit_code == 0


def _checked(handle: SandboxHandle, path: str) -> bytes:
    """The path as bytes below the root. An absolute one has to name the root or something below it, as it is written."""
    raw = path.encode()
    if not raw or b"\0" in raw or len(raw) > MAX_PATH:
        raise ToolError("INVALID_PATH", f"A path is a text of 1 to {MAX_PATH:,} bytes without NUL.")
    if not raw.startswith(b"/"):
        return raw
    root = handle.workspace_root.rstrip("/").encode("utf-8", "surrogateescape")
    if raw == root or raw.startswith(root + b"/"):
        return raw[len(root) :] or b"."
    raise ToolError("OUTSIDE", f"{shown_path(raw)} is not in the workspace.", "Give a path relative to the workspace.")


async def _look(handle: SandboxHandle, path: bytes, *, make: bool, missing_is_error: bool) -> Place:
    answer = await _run(handle, _TELL, _token(), path, make="1" if make else "0")
    return _place(answer.split(), path, missing_is_error=missing_is_error)


async def _run(handle: SandboxHandle, last: str, token: str, path: bytes, *, make: str = "0", limit: str = "0") -> str:
    """What a script says after its token."""
    root = handle.workspace_root.encode("utf-8", "surrogateescape")
    names = f"token={token}\nmake={make}\nlimit={limit}\n" + assign("root", root) + assign("path", path)
    script = names + _BEGIN + _WALK + last
    done = await handle.exec(["sh", "-c", script], timeout=SCRIPT_SECONDS, max_output=SCRIPT_OUTPUT)
    _, found, answer = done.stdout.decode("ascii", "replace").partition(f"{token} ")
    if not found or done.truncated:
        said = last_words(done) or "nothing"
        raise ProviderError(f"The sandbox's shell could not look up a path; it said {said}.", code=Code.NOT_CAPABLE)
    return answer


def _place(words: list[str], path: bytes, *, missing_is_error: bool) -> Place:
    if words == ["missing"] and not missing_is_error:
        return Place("missing", b"", b"")
    if len(words) == 1 and words[0] in _REFUSALS:
        raise _refusal(words[0], path)
    with _sensible():
        kind, mode, size, top, whole = words
        real, found = bytes.fromhex(top).rstrip(b"/"), bytes.fromhex(whole)
        place = Place(
            kind=_KINDS[kind],
            path=found,
            relative=found[len(real) :].lstrip(b"/"),
            mode=int(mode, 8) & 0o7777 if mode != "-" else None,
            size=int(size) if size != "-" else None,
        )
        if not (found + b"/").startswith(real + b"/") or b".." in place.relative.split(b"/"):
            raise ValueError(found)
    if is_stage_name(place.relative.split(b"/")[0]):
        raise _refusal("missing", path)  # a restore at work keeps its files there
    return place


def _refusal(word: str, path: bytes) -> ToolError:
    name, message = _REFUSALS[word]
    return ToolError(
        name, message.format(path=shown_path(path)), "Paths are relative to the workspace." if word == "outside" else ""
    )


def _listed(record: bytes) -> Listed:
    mode, size, name = record.split(b" ", 2)
    bits = int(mode, 16)
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}
    return Listed(name.removeprefix(b"./"), kinds.get(stat.S_IFMT(bits), "other"), stat.S_IMODE(bits), int(size))


def _token() -> str:
    return f"snapcore-{secrets.token_hex(12)}"


def assign(name: str, value: bytes) -> str:
    """A line of `sh` that sets a variable to any bytes, itself in ASCII: the way to the sandbox may be text."""
    octal = "".join(f"\\0{byte:03o}" for byte in value)
    return f"{name}=$(printf '%b.' '{octal}')\n{name}=${{{name}%.}}\n"


def last_words(done: ExecResult) -> str:
    """The last line that a script wrote to stderr, whole: whoever shortens it takes out secrets first."""
    return printable(done.stderr.strip().rpartition(b"\n")[2])


@contextlib.contextmanager
def _sensible() -> Iterator[None]:
    """The programs of a sandbox may say anything: what cannot be read is its failure."""
    try:
        yield
    except (ValueError, LookupError):
        raise ProviderError("The sandbox's shell gave an answer that makes no sense.", code=Code.NOT_CAPABLE) from None
