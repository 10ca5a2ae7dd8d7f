"""The swap of a restore in a sandbox: the journal's steps as calls of shell functions, each safe to repeat.

What a step leaves tells that it was done: a staged name that is gone was placed, a path that is gone was taken out. Removals
unlink (`rm` takes no folder, whatever is planted in its way) instead of renaming into a trash folder, which costs a process a
name; that all of them were done is noted, so that a swap that is run again removes nothing that came later.

A file's mode and time are set through another name of it in the stage, where nobody else can put a link in its place; a
folder's from within.
"""

from collections.abc import Iterable, Iterator
from typing import Final

from snapcore.errors import SnapshotError
from snapcore.model import path_key, validate_path
from snapcore.protocols import PlaceStep, SetMetaStep

from .folders import split
from .journal import Journal
from .shell_lock import ShellLock
from .shell_prelude import MAX_RUNNING, failure
from .shell_tools import broken, quoted
from .threads import in_thread

__all__ = ["SwapPlan", "run_swap"]

MAX_BATCH: Final = 1 << 20  # characters of a script that go in one pipe
NAMES_AT_ONCE: Final = 64  # of one call: far below the system's limit on arguments

_SECOND: Final = 1_000_000_000

REASONS: Final = {
    "1": "its parent folder is not there",
    "2": "a parent is a link or no folder now",
    "3": "a parent folder may not be entered",
    "folder": "it is a folder now",
    "over": "a folder is there now",
    "there": "something else is there now",
    "full": "the folder is not empty",
    "denied": "Permission denied",
    "kind": "it is no file or folder now",
    "missing": "No such file or directory",
    "failed": "the sandbox's tools cannot do it",
}

STEPS: Final = r"""
enter
root_ && command exec 4<. || say lost
[ -d "$k/meta" ] || mkdir "$k/meta"
T=-T
case $(mv -T ./no ./no 2>&1) in *ption* | *sage*) T= ;; esac
printf 'swap\n'

U() { # a step that cannot be done: its number and why
    printf '%s %s\n' "$1" "$2"
}

at() { # make the folder at this path the current one; 1: it is not there, 2: something else is, 3: it may not be entered
    [ "$at" != "x$1" ] || return 0
    at=
    if [ -n "$1" ] && [ -z "$slow" ] && cd -P "$root/$1" 2>/dev/null && is_at "$root/$1"; then
        at=x$1
        return 0
    fi
    walk "$1"
}

walk() { # the same, one folder after the other: for paths that are too long, or lead through a folder that is closed
    if [ -d /proc/self/fd/4/. ]; then
        cd -P /proc/self/fd/4 2>/dev/null || return 3
    else
        root_ || return 2
    fi
    at= rest=$1 gone=
    while [ -n "$rest" ]; do
        c=${rest%%/*}
        case $rest in */*) rest=${rest#*/} ;; *) rest= ;; esac
        { [ -r . ] && [ -x . ]; } || open_here "$gone"
        if [ -L "./$c" ]; then return 2; fi
        if [ ! -e "./$c" ]; then return 1; fi
        [ -d "./$c" ] || return 2
        command exec 5<. 2>/dev/null || return 3
        if ! cd -P "./$c" 2>/dev/null; then
            [ "$uid" != 0 ] && [ -O "./$c" ] && note "$gone${gone:+/}$c" "./$c" && chmod u+rwx "./$c" || return 3
            cd -P "./$c" 2>/dev/null || return 3
        fi
        if [ -d /proc/self/fd/5/. ]; then
            [ .. -ef /proc/self/fd/5 ] || return 2
        else
            [ ! -L "../$c" ] && [ . -ef "../$c" ] || return 2
        fi
        gone=$gone${gone:+/}$c
    done
    at=x$1
}

R() { # first number, folder, names: take out what is no folder
    n=$1
    f=$2
    at "$f"
    e=$?
    shift 2
    [ $e != 1 ] || return 0
    if [ $e = 0 ]; then
        rm -f "$@" 2>/dev/null && return
        open_here "$f" && rm -f "$@" 2>/dev/null && return
    fi
    for x in "$@"; do
        if [ $e != 0 ]; then
            U $n $e
        elif [ -d "$x" ] && [ ! -L "$x" ]; then
            U $n folder
        elif [ -e "$x" ] || [ -L "$x" ]; then
            U $n denied
        fi
        n=$((n + 1))
    done
}

F() { # first number, folder, names: take out folders
    n=$1
    f=$2
    at "$f"
    e=$?
    shift 2
    case $e in 1 | 2) return 0 ;; esac
    if [ $e = 0 ]; then
        rmdir "$@" 2>/dev/null && return
        open_here "$f" && rmdir "$@" 2>/dev/null && return
    fi
    for x in "$@"; do
        if [ $e != 0 ]; then
            U $n $e
        elif [ -d "$x" ] && [ ! -L "$x" ]; then
            case $(rmdir "$x" 2>&1) in
            *mpty* | *xist*) U $n full ;;
            *) [ ! -d "$x" ] || U $n denied ;;
            esac
        fi
        n=$((n + 1))
    done
}

mv_() { # over whatever is there but a folder, and never into one
    if [ -L "$2" ] && [ -d "$2" ] && [ -z "$T" ]; then rm -f "$2"; fi
    mv -f $T "$1" "$2" 2>/dev/null && return
    [ -L "$2" ] && rm -f "$2" && mv -f $T "$1" "$2" 2>/dev/null # busybox takes a link to a folder for one
}

P() { # number, folder, staged name, name: place it
    s=$k/new/$3
    [ -e "$s" ] || [ -L "$s" ] || return 0
    at "$2"
    e=$?
    if [ $e != 0 ]; then
        U $1 $e
        return
    fi
    if [ -d "$s" ] && [ ! -L "$s" ]; then
        if [ -e "$4" ] || [ -L "$4" ]; then
            U $1 there
            return
        fi
    elif [ -d "$4" ] && [ ! -L "$4" ]; then
        U $1 over
        return
    fi
    mv_ "$s" "$4" || { open_here "$2" && mv_ "$s" "$4"; } || {
        case $(mv -f $T "$s" "$4" 2>&1) in
        *directory*) U $1 over ;;
        *denied* | *permitted*) U $1 denied ;;
        *) { [ ! -e "$s" ] && [ ! -L "$s" ]; } || U $1 failed ;;
        esac
    }
}

M() { # number, folder, name, mode, time, owner, each - to leave it: what a file or folder is to have
    if [ "$3" = . ]; then
        at ''
        e=$?
        x=.
    elif at "$2${2:+/}${3#./}"; then
        e=0
        x=.
    else
        at "$2"
        e=$?
        x=
        [ $e != 0 ] || file "$1" "$3" || return 0
    fi
    if [ $e != 0 ]; then
        U $1 $e
        return
    fi
    ok=1
    [ "$6" = - ] || chown "$6" "$x" 2>/dev/null || ok=
    [ "$5" = - ] || touch -c -d "@$5" "$x" 2>/dev/null || ok=
    [ "$4" = - ] || chmod "$4" "$x" 2>/dev/null || ok=
    [ -n "$ok" ] || U $1 failed
}

file() { # number, name: another name, in x, of the file in the current folder; else says why there is none
    if [ -L "$2" ]; then
        U $1 kind
    elif [ -f "$2" ]; then
        x=$k/meta/$1
        ln "$2" "$x" 2>/dev/null || { rm -f "$x"; ln "$2" "$x" 2>/dev/null; } || {
            U $1 denied
            return 1
        }
        [ ! -f "$x" ] || [ -L "$x" ] || return 0
        U $1 kind
    elif [ -d "$2" ]; then
        U $1 3
    elif [ -e "$2" ]; then
        U $1 kind
    else
        U $1 missing
    fi
    return 1
}

K() { # folder, its mode before it was opened, that mode's last digits since then
    at "$1" || return 0
    case $(stat -c %a .) in *$3) chmod "00$2" . ;; esac
}

steps=$(cat) # all of it, before the first is done
case $steps in
*"#$token") ;;
*)
    printf '%s\n' cut "$end"
    rm -f "$k/run"
    exit 0
    ;;
esac
eval "$steps"
if [ -n "$last" ]; then
    if [ -s "$k/opened" ]; then
        printf 'opened\n'
        cat "$k/opened"
        printf '\n%s\n' "$end"
        rm -f "$k/run"
        exit 0
    fi
    said=$(dismantle "$last" 2>&1) && held= || { printf 'left %s\n' "$said"; }
fi
[ -z "$held" ] || rm -f "$k/run"
printf '\n%s\n' "$end"
exit 0
"""

_ALL_REMOVED: Final = ": >$k/removed"


class SwapPlan:
    """The calls for a journal, numbered in the order in which they are done; `paths` gives the path of each number.

    `seconds`: the tools set whole seconds only. `removed`: an earlier run has taken out all that goes. `settled` are folders
    whose metadata was staged.
    """

    def __init__(
        self, journal: Journal, *, seconds: bool, removed: bool = False, settled: frozenset[bytes] = frozenset()
    ) -> None:
        self._journal = journal
        self._seconds = seconds
        self._removed = removed
        self._settled = settled
        self.paths: list[bytes] = []
        self.kept_modes: set[bytes] = set()  # folders and files that get a mode of their own
        self.root_time: str = "-"

    def batches(self) -> Iterator[str]:
        """Scripts for one pipe each, at most some MiB long."""
        lines: list[str] = []
        size = 0
        for line in self._lines():
            lines.append(line)
            size += len(line)
            if size >= MAX_BATCH:
                yield "\n".join(lines)
                lines, size = [], 0
        yield "\n".join(lines)

    def _lines(self) -> Iterator[str]:
        if not self._removed:
            yield from self._grouped("R", (path for _, path in self._journal.removals()))
            yield from self._grouped("F", self._journal.folder_removals())
            if self.paths:
                yield _ALL_REMOVED
        for place in self._journal.placements():
            yield self._place(place)
        for meta in self._journal.metadata():
            if meta.path not in self._settled:
                yield self._meta(meta)

    def _grouped(self, function: str, paths: Iterable[bytes]) -> Iterator[str]:
        """Calls for what follows one another in one folder."""
        folder: bytes | None = None
        names: list[str] = []
        for path in paths:
            parent, name = split(path)
            if names and (parent != folder or len(names) >= NAMES_AT_ONCE):
                yield f"{function} {len(self.paths) - len(names)} {quoted(folder or b'')} {' '.join(names)}"
                names = []
            folder = parent
            names.append(_name(name))
            self.paths.append(path)
        if names:
            yield f"{function} {len(self.paths) - len(names)} {quoted(folder or b'')} {' '.join(names)}"

    def _place(self, step: PlaceStep) -> str:
        parent, name = split(step.path)
        self.paths.append(step.path)
        return f"P {len(self.paths) - 1} {quoted(parent)} {quoted(step.staged)} {_name(name)}"

    def _meta(self, step: SetMetaStep) -> str:
        parent, name = split(step.path)
        self.paths.append(step.path)
        mode = when = owner = "-"
        if step.owner is not None:
            owner = f"{step.owner[0]}:{step.owner[1]}"
        if step.mode is not None:
            self.kept_modes.add(step.path)
            mode = f"{step.mode:05o}"  # of fewer digits, GNU's chmod leaves special bits of folders
        if step.mtime_ns is not None:
            when = _moment(step.mtime_ns, seconds=self._seconds)
            if not step.path:
                self.root_time = when
        return f"M {len(self.paths) - 1} {quoted(parent)} {_name(name) if name else '.'} {mode} {when} {owner}"


def _moment(ns: int, *, seconds: bool) -> str:
    """A time for `touch -d @...`."""
    if seconds:
        return str(ns // _SECOND)
    whole, fraction = divmod(abs(ns), _SECOND)
    return f"{'-' if ns < 0 else ''}{whole}.{fraction:09d}"


def _name(name: bytes) -> str:
    return quoted(b"./" + name)


async def run_swap(lock: ShellLock, plan: "SwapPlan | None", first: str = "") -> list[tuple[bytes, str]]:
    """Do the steps of a plan, if there is one, after the line `first`; then remove the stage. Returns what was left undone.

    `ProviderError` when it was cut short: the stage stays, and all of it may be done again.
    """
    undone: list[tuple[bytes, str]] = []
    batches = plan.batches() if plan is not None else iter(())
    text: str | None = first + "\n" + await in_thread(next, batches, "")
    while text is not None:
        following = await in_thread(next, batches, None)
        last = "" if following is not None else plan.root_time if plan is not None else "-"
        opened = await _run(lock, text, last, plan, undone)
        text = following
        if opened:
            kept = plan.kept_modes.difference(path for path, _ in undone) if plan is not None else frozenset[bytes]()
            lines = [_put_back(path, opened[path]) for path in sorted(opened, key=path_key, reverse=True) if path not in kept]
            await _run(lock, "\n".join((*lines, ": >$k/opened")), last, None, [])
    return undone


async def _run(
    lock: ShellLock, text: str, last: str, plan: "SwapPlan | None", undone: list[tuple[bytes, str]]
) -> dict[bytes, int]:
    """One script. Modes of folders that have to be put back before the stage may go."""
    steps = f"{text}\n#{lock.token}".encode("utf-8", "surrogateescape")
    word, data = await lock.ask(STEPS, lambda: steps, names={"last": last}, patience=MAX_RUNNING)
    if word != "swap":
        raise failure("The restore was cut short; the next one finishes it", data)
    while data:
        line, _, data = data.partition(b"\n")
        if line == b"opened":
            return _opened(data)
        if line.startswith((b"left", b"cut")):
            raise failure("The restore was cut short; the next one finishes it", line + b"\n" + data)
        number, _, why = line.decode("ascii", "replace").partition(" ")
        if line:
            if plan is None or why not in REASONS or not number.isdecimal() or int(number) >= len(plan.paths):
                raise broken("it says of a restore what makes no sense")
            undone.append((plan.paths[int(number)], REASONS[why]))
    return {}


def _opened(notes: bytes) -> dict[bytes, int]:
    """Folders that were made writable, and the mode of each before: what a note says first counts."""
    modes: dict[bytes, int] = {}
    for note in notes.split(b"\0"):
        mode, space, path = note.partition(b" ")
        if space and mode.isdigit() and len(mode) <= 4 and not mode.strip(b"01234567"):
            try:
                validate_path(path)
            except SnapshotError:
                continue
            modes.setdefault(path, int(mode, 8))
    return modes


def _put_back(path: bytes, mode: int) -> str:
    return f"K {quoted(path)} {mode:o} {mode & 0o777 | 0o700:o}"
