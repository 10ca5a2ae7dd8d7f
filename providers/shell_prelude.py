"""Scripts for the `sh` of a sandbox that work in a restore's stage, and how their answers are read.

Everything is done on plain names in a current folder that was entered by `cd -P` and then proved to be where it should be: by
`$PWD`, which dash and busybox take from the kernel, else by `..` being the folder that was left. What is in the stage, which
only this user may enter, is reached through descriptor 3 of its folder: a stage moved away and replaced by a link leads nowhere.

An answer is one word on a line, then data, then a line that this host chose: an answer without it was cut short.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from typing import Final

from snapcore.errors import Code, ProviderError, printable
from snapcore.sandboxes import Shell

from .shell_tools import STALL_SECONDS, broken, finished, quoted

__all__ = ["MAX_RUNNING", "ask", "failure"]

MAX_ANSWER: Final = 16 << 20
MAX_RUNNING: Final = 1800.0  # seconds that a step without any output may take: a sync, the removal of a large tree

_PRELUDE: Final = r"""
LC_ALL=C TZ=UTC0 QUOTING_STYLE=literal EXTRACT_UNSAFE_SYMLINKS=1
export LC_ALL TZ QUOTING_STYLE EXTRACT_UNSAFE_SYMLINKS
unset IFS CDPATH TAR_OPTIONS TAPE ENV BASH_ENV
nl='
'
umask 077
set -f
held= at= k=
slow=${BASH_VERSION-}${KSH_VERSION-}${ZSH_VERSION-} # shells that make up $PWD from names
uid=$(id -u)

say() { # the word of the answer, and what is said about it
    [ -z "$held" ] || rm -f -- "$k/run"
    printf '%s\n%s\n%s\n' "$1" "${2-}" "$end"
    exit 0
}

is_at() { # whether the current folder is really the one at this absolute path
    if [ -z "$slow" ]; then
        [ "$PWD" = "$1" ]
    else
        [ "$(env pwd -P; echo .)" = "$1$nl." ]
    fi
}

root_() { # make the root the current folder
    at=
    cd -P "${root:-/}" 2>/dev/null && is_at "${root:-/}" && at=x
}

alive() { # whether the script that left this mark still runs
    if [ "$3 $4" = "$boot $host" ] && [ -d "/proc/$$" ]; then
        st=
        { read -r st <"/proc/$1/stat"; } 2>/dev/null || return 1
        began "$st"
        [ "$began" = "$2" ]
    elif [ "$3 $4" = "$boot $host" ]; then
        kill -0 "$1" 2>/dev/null
    else
        m=$(stat -c %Y ./run) || return 1
        [ $(($(date +%s) - m)) -lt 600 ]
    fi
}

began() { # when a process started, from its line in /proc; nothing for one that has ended
    set -- ${1##*) }
    began=${20-}
    case ${1-} in Z | X) began= ;; esac
}

me() { # what tells this script from every other
    boot=- host=- st=
    { read -r boot </proc/sys/kernel/random/boot_id; read -r host </proc/sys/kernel/hostname; } 2>/dev/null
    { read -r st <"/proc/$$/stat"; } 2>/dev/null
    began "$st"
    mine="$$ ${began:--} $boot $host"
}

worked_in() { # whether a script works in the stage, which is the current folder
    [ -f ./run ] && [ ! -L ./run ] || return 1
    left=
    { read -r left <./run; } 2>/dev/null
    set -- $left
    if [ $# -lt 4 ]; then # it is just being written, or was when its script died, or could not be
        m=$(stat -c %Y ./run) && [ $(($(date +%s) - m)) -lt 10 ]
    else
        alive "$@"
    fi
}

mark() { # one script at a time works in the stage
    me
    if ! (set -C && : >./run) 2>/dev/null; then
        ! worked_in || say busy
        rm -f ./run
        (set -C && : >./run) 2>/dev/null || say fail "$( (set -C && : >./run) 2>&1)"
    fi
    printf '%s\n' "$mine" 2>/dev/null >./run # on a full disk it stays empty
    held=1
}

in_stage() { # make the stage, which must be this user's own, the current folder and descriptor 3
    at=
    cd -P "$root/.snapcore-stage" 2>/dev/null || say lost
    is_at "$root/.snapcore-stage" && [ -O . ] || say lost
    command exec 3<. || say fail 'the stage cannot be read'
    k=/proc/self/fd/3
    [ -d $k/. ] || k=$root/.snapcore-stage
}

owned() { # whether the owner file holds this text
    o=
    [ -f ./owner ] && [ ! -L ./owner ] && { IFS= read -r o <./owner || :; }
    case $o in *"$1"*) ;; *) return 1 ;; esac
}

enter() { # work in the stage that the owner of this token holds
    in_stage
    owned "$token" || say lost
    mark
}

note() { # a folder's mode, before it is made writable
    m=$(stat -c %a "$2") && printf '%s %s\0' "$m" "$1" >>"$k/opened"
}

open_here() { # make the current folder, at this path, writable, if it is this user's and is not yet
    [ "$uid" != 0 ] && [ -O . ] || return 1
    [ ! -r . ] || [ ! -w . ] || [ ! -x . ] || return 1
    note "$1" . && chmod u+rwx .
}

time_of() { # into t, the mtime of the current folder as finely as can be told, or -
    t=$(stat -c %.9Y . 2>/dev/null) || t=
    case $t in *[!0-9.-]* | '') t=$(stat -c %Y .) || t=- ;; esac
}

set_time() { # of the current folder
    [ "$1" = - ] || touch -c -d "@$1" . 2>/dev/null || touch -c -d "@${1%.*}" . 2>/dev/null || :
}

dismantle() { # remove the stage, the journal first and the owner last; the root keeps its time, or gets the one given
    cd -P "$root/.snapcore-stage" 2>/dev/null && is_at "$root/.snapcore-stage" && [ -O . ] || return 1
    new=$1
    set -- ./journal ./journal.part ./removed ./new ./trash ./meta ./opened
    rm -rf "$@" 2>/dev/null || { chmod -R u+rwx ./new 2>/dev/null; rm -rf "$@"; } || return 1
    set +f
    for x in ./* ./.[!.]*; do
        case $x in ./owner | ./run | './*' | './.[!.]*') ;; *) rm -rf "$x" || { chmod -R u+rwx "$x"; rm -rf "$x"; } ;; esac
    done
    set -f
    root_ || return 1
    if [ "$new" = - ]; then time_of; else t=$new; fi
    rm -f "$k/run" "$k/owner"
    if ! rmdir ./.snapcore-stage 2>/dev/null; then
        if [ "$uid" != 0 ] && [ -O . ] && m=$(stat -c %a .); then
            chmod u+rwx .
            rmdir ./.snapcore-stage
            e=$?
            chmod "00$m" .
        else
            rmdir ./.snapcore-stage
            e=$?
        fi
        [ $e = 0 ] || return 1
    fi
    set_time "$t"
}

synced() { # bring files, or everything where the tool takes no names, to the disk
    sync "$@" 2>/dev/null || sync 2>/dev/null || :
}
"""


async def ask(
    shell: Shell,
    script: str,
    root: bytes,
    stdin: bytes | AsyncIterator[bytes] = b"",
    *,
    names: Mapping[str, str] = {},
    patience: float = STALL_SECONDS,
) -> tuple[str, bytes]:
    """Run a script after the functions above, in the sandbox where the resolved path of the root is `root`. The word of its
    answer, and the data. `names` are shell variables with their values, quoted where that is needed. `patience` seconds may
    pass while neither the input is taken nor output comes."""
    end = "end-" + secrets.token_hex(16)
    moved = time.monotonic()

    async def fed(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        nonlocal moved
        async for piece in pieces:
            moved = time.monotonic()
            yield piece

    variables = {"root": quoted(b"" if root == b"/" else root), "end": end, **names}
    head = "\n".join(f"{name}={word}" for name, word in variables.items())
    given = stdin if isinstance(stdin, bytes) else fed(stdin)
    out = bytearray()
    async with shell.pipe(head + _PRELUDE + script, given) as pipe:
        pieces = aiter(pipe.stdout())
        following = asyncio.ensure_future(anext(pieces, b""))
        try:
            while True:
                done, _ = await asyncio.wait([following], timeout=max(0.0, moved + patience - time.monotonic()))
                if not done:
                    if time.monotonic() - moved < patience:
                        continue
                    raise broken(f"it has been silent for {patience:.0f} seconds")
                piece = following.result()
                if not piece:
                    break
                moved = time.monotonic()
                out += piece
                if len(out) > MAX_ANSWER:
                    raise broken("it answers with more than there can be")
                following = asyncio.ensure_future(anext(pieces, b""))
        finally:
            if not following.done():
                following.cancel()
                await asyncio.wait([following])
        await finished(pipe)
    tail = f"\n{end}\n".encode()
    word, newline, data = bytes(out).partition(b"\n")
    if not newline or not data.endswith(tail):
        if b"\n" + data == tail:
            return word.decode("ascii", "replace"), b""
        raise broken("its answer was cut short")
    return word.decode("ascii", "replace"), data[: -len(tail)]


def failure(what: str, said: bytes) -> ProviderError:
    """A step that a tool of the sandbox could not do, by what it said."""
    lines = said.strip().splitlines()
    full = [line for line in lines if b"No space left" in line or b"quota exceeded" in line]
    reason = printable((full or lines)[-1][-300:]) if lines else "no reason was given"
    if full:
        code, hint = Code.SANDBOX_FULL, "Free some space there. The workspace is as it was."
    elif any(word in said for word in (b"ermission denied", b"not permitted", b"ead-only file system")):
        code, hint = Code.NOT_CAPABLE, "The workspace is as it was."
    elif b"not found" in said:
        code, hint = Code.MISSING_TOOL, "Install it in the sandbox's image. The workspace is as it was."
    else:
        code, hint = Code.SANDBOX_UNAVAILABLE, ""
    return ProviderError(f"{what}: {reason}.", code=code, hint=hint)
