"""Reading many files of a sandbox through one pipe.

The files go to the sandbox in groups; for each it answers with a tar archive of their contents, and then with a stat of every
file. The answer counts only with that stat: whatever went wrong before it, a file is taken for whole only when its size and
times are those that were scanned. The parts end with tokens that are random for each call, so that an archive that was cut
short (by a file that shrank, a tool that was killed) is noticed, and the next part found. Such a group is read again, file by
file. Before and after it, the parent folders are looked at: none may have become a link.
"""

import contextlib
import os
import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Final

import msgspec

from snapcore.errors import printable
from snapcore.model import FileStat, Kind, path_key
from snapcore.protocols import Buffer, ReadBlock
from snapcore.sandboxes import Shell

from .shell_records import Records, decode, make_records
from .shell_scripts import filled
from .shell_tools import ENVIRONMENT, Tools, broken, finished, quoted, unstalled
from .shell_untar import BLOCK, RECORD, Member, next_member, tar_room
from .stats import NOT_REGULAR, VANISHED

__all__ = ["read_files"]

GROUP_FILES: Final = 1_000
GROUP_BYTES: Final = 4 << 20
GROUP_NAMES: Final = 60 << 10  # bytes: all of them become one argument of a command in the sandbox
COMMAND_LINE: Final = 100_000
READ_BLOCK: Final = 4 << 20
LONGEST_PATH: Final = 4096 - 4  # with the root's before it, and some signs
MAX_WORD: Final = 256 << 10

TOO_LONG: Final = "the path is too long for the sandbox's tools"
UNREADABLE: Final = "unreadable"
GOOD: Final = ord("1")
CLOSED: Final = ord("2")
_SEPARATORS: Final = [bytes([code]) for code in (*range(2, 9), *range(14, 32))]  # neither blanks nor what bash uses itself
_CONTROLS: Final = re.compile(rb"[\1-\37]")

_SCRIPT: Final = r"""
cd @ROOT@ || exit 1
root=$(pwd -P; echo x); root=${root%?x}; prefix=${root%/}; export root prefix
xargs -0 -n 4 -s @LINE@ sh -c @GROUP@ sh
status=$?
printf '%s' '@TOKEN@'
exit "$status"
"""
_GROUP: Final = r"""
IFS=$1; set -f; folders=$2; files=$3; limit=$4
look() {
    seen=
    for folder in $folders; do
        if cd -P "$prefix/$folder" 2>/dev/null && [ "$PWD" = "$prefix/$folder" ]; then seen=${seen}1
        else
            while [ ! -e "$prefix/$folder" ] && [ "$folder" != "${folder%/*}" ]; do folder=${folder%/*}; done
            if [ ! -e "$prefix/$folder" ] || [ -x "$prefix/$folder" ]; then seen=${seen}0; else seen=${seen}2; fi
        fi
        cd "$root" || exit 255
    done
}
look
printf '%s\0' "$seen"
set -- $files
case $seen in *[!1]*) ;; *) tar -c -f - @OPTIONS@ -- "$@" 2>/dev/null | head -c "$limit" ;; esac
printf '%s' '@TOKEN@'
look
printf '%s\0' "$seen"
@STAT@ 2>/dev/null
@END@
exit 0
"""
_OPTIONS: Final = {"gnu": "--no-recursion --no-unquote --hard-dereference --format=gnu", "busybox": "--no-recursion"}


class _Group(msgspec.Struct, frozen=True):
    """Files that are read together. `start` is the first one's index among all; `alone`: one, of which whatever is got counts."""

    start: int
    files: tuple[FileStat, ...]
    alone: bool
    separator: bytes = b""

    def folders(self) -> list[bytes]:
        """Their parent folders but the root."""
        return sorted({file.path.rpartition(b"/")[0] for file in self.files} - {b""}, key=path_key)

    def arguments(self) -> bytes:
        """What the script of a group is given."""
        limit = RECORD + sum(tar_room(len(file.path), file.size) for file in self.files)
        parts = (
            self.separator,
            self.separator.join(self.folders()),
            self.separator.join(b"./" + file.path for file in self.files),
            b"%d" % limit,
        )
        return b"".join(part + b"\0" for part in parts)


def read_files(shell: Shell, root: str, tools: Tools, files: Sequence[FileStat]) -> AsyncGenerator[Sequence[ReadBlock], None]:
    """See `Workspace.read`. One call; another for what has to be read again file by file."""
    tools.require("xargs", "archives", "head", *(() if tools.find == "printf" else ("stat",)))
    return _Reader(shell, os.fsencode(root), tools).read(_groups(files))


def _groups(files: Sequence[FileStat]) -> list[_Group]:
    """The files in order, cut into groups. No group has two names of one inode: busybox's tar writes the second as a link."""
    groups: list[_Group] = []
    group: list[FileStat] = []
    folders: set[bytes] = set()
    inodes: set[tuple[int, int]] = set()
    free = set(_SEPARATORS)
    size = names = 0

    def close(end: int) -> None:
        nonlocal free, size, names
        if group:
            groups.append(_Group(end - len(group), tuple(group), alone=len(group) == 1, separator=min(free, default=b"")))
        group.clear()
        folders.clear()
        inodes.clear()
        free = set(_SEPARATORS)
        size = names = 0

    for index, file in enumerate(files):
        folder = file.path.rpartition(b"/")[0]
        length = len(file.path) + 3 + (0 if folder in folders else len(folder) + 1)
        left = _unused(free, file.path)
        twice = file.nlink > 1 and (file.device, file.inode) in inodes
        full = len(group) >= GROUP_FILES or size + file.size > GROUP_BYTES or names + length > GROUP_NAMES
        if full or twice or not left:
            close(index)
            left = _unused(free, file.path)
        group.append(file)
        free = left
        folders.add(folder)
        inodes.add((file.device, file.inode))
        size += file.size
        names += length
    close(len(files))
    return groups


def _unused(separators: set[bytes], path: bytes) -> set[bytes]:
    return {separator for separator in separators if separator not in path} if _CONTROLS.search(path) else separators


class _Reader:
    """Reads for one workspace."""

    def __init__(self, shell: Shell, root: bytes, tools: Tools) -> None:
        self._shell = shell
        self._root = root
        self._tools = tools

    async def read(self, groups: Sequence[_Group]) -> AsyncGenerator[Sequence[ReadBlock], None]:
        token, records_token = (secrets.token_hex(16) for _ in range(2))
        asked = b"".join(group.arguments() for group in groups)
        async with (
            self._shell.pipe(self._script(token, records_token), asked) as pipe,
            contextlib.aclosing(unstalled(pipe.stdout())) as pieces,
        ):
            stream = _Stream(pieces, token.encode())
            for group in groups:
                part = _Part(stream, group, make_records(self._tools, records_token), LONGEST_PATH - len(self._root))
                async with contextlib.aclosing(self._blocks(part)) as batches:
                    async for batch in batches:
                        yield batch
            await stream.end()
            await finished(pipe)

    async def _blocks(self, part: "_Part") -> AsyncGenerator[Sequence[ReadBlock], None]:
        group = part.group
        if group.alone:
            async for block in part.alone():
                yield [block]
            return
        blocks = await part.together()
        if blocks is not None:
            yield blocks
            return
        singly = [
            msgspec.structs.replace(group, start=group.start + at, files=(file,), alone=True)
            for at, file in enumerate(group.files)
        ]
        async with contextlib.aclosing(self.read(singly)) as batches:
            async for batch in batches:
                yield batch

    def _script(self, token: str, records_token: str) -> str:
        records = make_records(self._tools, records_token)
        group = filled(
            _GROUP,
            OPTIONS=_OPTIONS.get(self._tools.tar, ""),
            TOKEN=token,
            STAT=records.stat_command(),
            END=records.end_command("end"),
        )
        script = filled(_SCRIPT, ROOT=quoted(self._root), LINE=str(COMMAND_LINE), GROUP=quoted(group.encode()), TOKEN=token)
        return ENVIRONMENT + script


class _Stream:
    """What a sandbox prints, taken apart at tokens. Bounded: nothing is kept but what is asked for."""

    def __init__(self, pieces: AsyncIterator[bytes], token: bytes) -> None:
        self._pieces = pieces
        self._token = token
        self._ahead = b""

    async def word(self) -> bytes:
        """What comes before the next NUL."""
        data = self._ahead
        while b"\0" not in data:
            if len(data) > MAX_WORD:
                raise broken("it answers with more than there can be")
            data += await self._more()
        word, _, self._ahead = data.partition(b"\0")
        return word

    async def until_token(self, limit: int) -> AsyncIterator[bytes]:
        """The pieces of what comes before the next token: not more than `limit` bytes."""
        data, keep = self._ahead, len(self._token) - 1
        while (at := data.find(self._token)) < 0:
            if len(data) > keep:
                limit -= len(data) - keep
                if limit < 0:
                    raise broken("it answers with more than there can be")
                yield data[:-keep]
                data = data[-keep:]
            data += await self._more()
        self._ahead = data[at + len(self._token) :]
        if at > limit:
            raise broken("it answers with more than there can be")
        yield data[:at]

    async def stats(self, records: Records, most: int) -> dict[bytes, FileStat]:
        """What the records tell, by path: of at most so many."""
        found: dict[bytes, FileStat] = {}
        data, self._ahead = self._ahead, b""
        while True:
            for numbers, target, name in records.feed(data):
                path = name.removeprefix(b"./")
                found[path] = decode(numbers, target, path)
            if len(found) > most:
                raise broken("it answers with more than there can be")
            if records.end is not None:
                self._ahead = records.rest
                return found
            data = await self._more()

    async def end(self) -> None:
        """Check that the output ends here, with the token."""
        data = self._ahead
        async for piece in self._pieces:
            data += piece
            if len(data) > len(self._token):
                break
        if data != self._token:
            raise broken("its answer was cut short, or goes on after its end")

    async def _more(self) -> bytes:
        piece = await anext(self._pieces, b"")
        if not piece:
            raise broken("its answer was cut short")
        return piece


class _Part:
    """What the sandbox answers for one group."""

    def __init__(self, stream: _Stream, group: _Group, records: Records, longest: int) -> None:
        self.group = group
        self._longest = longest
        self._stream = stream
        self._records = records
        self._limit = RECORD + sum(tar_room(len(file.path), file.size) for file in group.files)
        self._folders = group.folders()

    async def together(self) -> list[ReadBlock] | None:
        """The blocks of a whole group. None when its archive is not as it should be, so that nothing in it can be relied on."""
        before = await self._stream.word()
        data = b"".join([piece async for piece in self._stream.until_token(self._limit)])
        seen, after = await self._after()
        if before != b"1" * len(self._folders) or seen != before:
            return None
        members: dict[bytes, Member] = {}
        at = 0
        while (member := next_member(data, at)) is not None:
            members[member.name] = member
            at = member.end
        if data[at : at + 2 * BLOCK] != bytes(2 * BLOCK):
            return None
        blocks = []
        for index, file in enumerate(self.group.files, self.group.start):
            now, member = after.get(file.path), members.get(b"./" + file.path)
            if member is not None and not member.regular and now is not None and now.kind == Kind.FILE:
                return None
            content = data[member.start : member.start + member.size] if member is not None and member.regular else None
            blocks.append(_whole_block(index, file, content, now))
        return blocks

    async def alone(self) -> AsyncIterator[ReadBlock]:
        """The blocks of a single file, as they come."""
        (file,) = self.group.files
        before = await self._stream.word()
        content = _Content(file)
        offset = 0
        async for piece in self._stream.until_token(self._limit):
            content.feed(piece)
            while len(content.data) > READ_BLOCK:
                yield ReadBlock(self.group.start, offset, content.take(READ_BLOCK))
                offset += READ_BLOCK
        seen, stats = await self._after()
        now = stats.get(file.path)
        if offset:
            data = bytes(content.data)
            if now is not None and _same(file, now) and offset + len(data) != file.size:
                raise broken(f"{printable(file.path)} could be read in part only")
            yield ReadBlock(self.group.start, offset, data, True, now)
        else:
            yield self._only_block(file, content, set(before + seen) - {GOOD}, now)

    def _only_block(self, file: FileStat, content: "_Content", bad: set[int], now: FileStat | None) -> ReadBlock:
        block = _whole_block(self.group.start, file, content.data if content.regular and not bad else None, now)
        problem = block.problem
        if CLOSED in bad:
            problem = UNREADABLE
        elif bad and now is not None:
            problem = NOT_REGULAR
        if problem and len(file.path) > self._longest:
            problem = TOO_LONG
        return ReadBlock(self.group.start, 0, b"", True, problem=problem) if problem else block

    async def _after(self) -> tuple[bytes, dict[bytes, FileStat]]:
        seen = await self._stream.word()
        return seen, await self._stream.stats(self._records, len(self.group.files))


class _Content:
    """A single file's content, taken out of an archive piece by piece: at most the scanned size."""

    def __init__(self, file: FileStat) -> None:
        self.data = bytearray()
        self.regular = False
        self._left = file.size
        self._head = b""
        self._begun = False

    def feed(self, piece: bytes) -> None:
        """Take the next piece of the archive."""
        if not self._begun:
            self._head += piece
            member = next_member(self._head, 0)
            if member is None:
                self._head = self._head[:MAX_WORD]
                return
            self._begun, self.regular = True, member.regular
            self._left = min(self._left, member.size)
            piece, self._head = self._head[member.start :], b""
        self.data += piece[: self._left]
        self._left -= min(len(piece), self._left)

    def take(self, size: int) -> bytes:
        """The next bytes, which are then let go."""
        taken = bytes(self.data[:size])
        del self.data[:size]
        return taken


def _whole_block(index: int, file: FileStat, content: Buffer | None, now: FileStat | None) -> ReadBlock:
    """The only block of a file: its content (None: it was not in the archive) and its stat afterwards (None: it is gone)."""
    if now is None or now.kind != Kind.FILE:
        return ReadBlock(index, 0, b"", True, problem=VANISHED if now is None else NOT_REGULAR)
    data = content[: min(file.size, now.size)] if content is not None else b""
    if _same(file, now) and (content is None or len(data) != file.size):
        return ReadBlock(index, 0, b"", True, problem=UNREADABLE)
    return ReadBlock(index, 0, data, True, file if now == file else now)


def _same(file: FileStat, now: FileStat) -> bool:
    return (now.size, now.mtime_ns, now.ctime_ns, now.inode) == (file.size, file.mtime_ns, file.ctime_ns, file.inode)
