"""The scripts of a scan: what `sh` in the sandbox is given, as text to be read."""

import re
from typing import Final, Self

import msgspec

from snapcore.protocols import ScanSelection

from .folders import STAGE_NAME
from .shell_records import MARKED, PLAIN, UNREADABLE, PrintfRecords, Records, StatRecords
from .shell_tools import ENVIRONMENT, PROBE, Tools, quoted

__all__ = ["Pruning", "clock_script", "filled", "header_script", "look_script", "tree_script"]

STAT_BATCH: Final = 500  # names that one run of `stat` is given

_STAGE_TEST: Final = " -o ".join(
    f"-path ./{name}" for name in (STAGE_NAME.decode(), f"'{STAGE_NAME.decode()}.{'[0-9a-f]' * 16}'")
)
_CLOCK: Final = r"""
case $date in
ns) date +%s%N ;;
proc) stat -c '%Y %y' /proc/self/ ;;
*) date +%s ;;
esac
"""
_HEADER: Final = r"""
printf '\0'
root=@ROOT@
leave() { printf '%s\0%s\0' "$1" @TOKEN@; exit 0; }
if [ ! -d "$root" ]; then
    if [ -e "$root" ] || [ -h "$root" ]; then leave other; else leave missing; fi
fi
cd "$root" 2>/dev/null || leave closed
real=$(pwd -P; echo x); real=${real%?x}
now=$(@CLOCK@)
staged=
for name in ./@STAGE@ ./@STAGE@.????????????????; do
    if [ -e "$name" ] || [ -h "$name" ]; then staged=1; fi
done
printf 'open\0%s\0%s\0%s\0' "$real" "$now" "$staged"
"""
_MOUNTS: Final = r"""
set --
prefix=${real%/}
listed=
if [ -r /proc/self/mountinfo ]; then
    listed=1
    while read -r _ _ _ _ point _; do
        case $point in
        *\\*) printf '%s\0' "$point" ;;
        "$prefix"/?*)
            printf '%s\0' "$point"
            case $point in
            *[*?[]*) ;;
            *) set -- "$@" -o -path "./${point#"$prefix"/}" ;;
            esac ;;
        esac
    done </proc/self/mountinfo
fi
printf '@TOKEN@\0'
"""
_BY_PRINTF: Final = r"""
find . -ignore_readdir_race @XDEV@ \( @STAGE@ \) -prune \
    -o \( @NAMES@ "$@" \) -prune @PLAIN@ \
    -o -type d \( @MARKED@ \) -prune @MARKED_ACTION@ \
    -o -type d ! \( -readable -executable \) -prune @UNREADABLE@ \
    -o @PLAIN@
@END@
"""
_BY_STAT: Final = r"""
exec 4>&1
status=$({ { find . @XDEV@ \( @STAGE@ \) -prune \
        -o \( @NAMES@ "$@" \) -prune -print0 \
        -o -type d \( @MARKED@ \) -prune -print0 -print0 \
        -o -print0
    echo "$?" >&3
} | xargs -0 -n @BATCH@ sh -c @INNER@ sh >&4 3>&-; echo "$?" >&3; } 3>&1)
set -- $status
@END@
"""
_INNER: Final = r"""
@STAT@
status=$?
[ "$status" -lt 2 ] || exit 255
for name do
    [ ! -d "$name" ] || [ -h "$name" ] || { [ -r "$name" ] && [ -x "$name" ]; } || @UNREADABLE@
done
exit "$status"
"""


class Pruning(msgspec.Struct, frozen=True):
    """What of a selection is pruned where the files are."""

    names: frozenset[bytes] = frozenset()
    prefixes: tuple[bytes, ...] = ()
    marked: tuple[tuple[bytes, bytes], ...] = ()
    cross_mounts: bool = False

    @classmethod
    def of(cls, selection: ScanSelection, *, cross_mounts: bool) -> Self:
        """Of a selection that need not tell names and prefixes."""
        return cls(
            frozenset(getattr(selection, "pruned_names", ())),
            tuple(getattr(selection, "pruned_prefixes", ())),
            tuple(sorted(selection.marked_folders.items())),
            cross_mounts,
        )

    def names_test(self) -> str:
        """The test of `find` for what is never listed, whatever it is."""
        patterns = [_pattern(name) for name in sorted(self.names)] + [_pattern(prefix, "*") for prefix in self.prefixes]
        return " -o ".join(["! -name '*'", *(f"-name {pattern}" for pattern in patterns)])

    def marked_test(self) -> str:
        """The test of `find` for folders that hold what marks them."""
        tests = [
            f'-name {_pattern(name)} -exec sh -c \'test -e "$1" || test -h "$1"\' sh {{}}/{quoted(marker)} \\;'
            for name, marker in self.marked
        ]
        return " -o ".join(["! -name '*'", *tests])


def _pattern(name: bytes, rest: str = "") -> str:
    """A quoted pattern of `find` that matches just this name, with `rest` after it."""
    escaped = b"".join(b"\\" + name[at : at + 1] if name[at] in b"*?[\\" else name[at : at + 1] for at in range(len(name)))
    return quoted(escaped + rest.encode())


def header_script(root: bytes, token: str, tools: Tools | None) -> str:
    """Prints what the tools are (nothing, when they are known), the state of the root, where it really is, the time, and whether
    a stage is there, each ended by a NUL; goes into the root, or ends with the token when that cannot be."""
    begin = PROBE if tools is None else _known(tools)
    return begin + filled(_HEADER, ROOT=quoted(root), TOKEN=token, STAGE=STAGE_NAME.decode(), CLOCK=_CLOCK)


def clock_script(tools: Tools) -> str:
    """Prints the time, as `header_script` does."""
    return _known(tools) + _CLOCK


def look_script(root: bytes, records: Records) -> str:
    """Prints a record of each name on stdin that is there."""
    stat = quoted(records.stat_command().encode() + b" 2>/dev/null")
    return f"{ENVIRONMENT}cd {quoted(root)} || exit 1\nxargs -0 -n {STAT_BATCH} sh -c {stat} sh\n{records.end_command('')}\n"


def _known(tools: Tools) -> str:
    return f"{ENVIRONMENT}find={tools.find} date={tools.date}\n"


def tree_script(pruning: Pruning, token: str) -> str:
    """After `header_script`: prints the mount points below the root and the token, each ended by a NUL, then the records."""
    by_printf, by_stat = PrintfRecords(token), StatRecords(token)
    cross = pruning.cross_mounts
    common = {"STAGE": _STAGE_TEST, "NAMES": pruning.names_test(), "MARKED": pruning.marked_test()}
    first = filled(
        _BY_PRINTF,
        XDEV="" if cross else "-xdev",
        PLAIN=by_printf.action(PLAIN),
        MARKED_ACTION=by_printf.action(MARKED),
        UNREADABLE=by_printf.action(UNREADABLE),
        END=by_printf.end_command("$? 0"),
        **common,
    )
    inner = filled(_INNER, STAT=by_stat.stat_command(), UNREADABLE=by_stat.unreadable_command("$name"))
    second = filled(
        _BY_STAT,
        XDEV="" if cross else "${xdev}",
        BATCH=str(STAT_BATCH),
        INNER=quoted(inner.encode()),
        END=by_stat.end_command("$1 $2"),
        **common,
    )
    mounts = filled(_MOUNTS, TOKEN=token) + ("set --\n" if cross else "") + 'if [ "$listed" ]; then xdev=; else xdev=-xdev; fi\n'
    return f"{mounts}case $find in\nprintf)\n{first};;\nprint0)\n{second};;\nesac\n"


def filled(script: str, **values: str) -> str:
    """The script with each `@NAME@` replaced, and none in what replaces it."""
    return re.sub(r"@([A-Z_]+)@", lambda name: values[name[1]], script)
