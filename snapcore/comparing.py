"""Comparing a checkpoint with a live tree: what a capture would find changed, without storing or changing anything.

The tree is scanned once, and only what may have changed is read: what the stat cache vouches for is not looked at again. No
lock, lease or pin is taken, and nothing is written, so that read-only credentials are enough.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from .browse import Diff, DiffEntry, NotCompared, unknown_path
from .contents import ContentVerdict, compare_contents
from .engine import Engine
from .errors import Code, ProviderError, SnapcoreError, printable
from .manifest import IndexEntry, content_fields, decode_page
from .model import Checkpoint, Entry, FileStat, Kind, Note, Progress, RecordType, RootState, path_key
from .pagestates import PagePair, PageStates
from .protocols import ProgressCallback, Workspace
from .records import RecordReader
from .redaction import Redactor
from .scope import Scope
from .selection import FilePolicy
from .ticking import ticking
from .treecapture import known_entry, plain_entry
from .treefilter import left_out
from .treeslices import slice_scan

__all__ = ["CompareRequest", "compare", "refuse_half_swapped"]

CHANGED_PAGES: Final = 64  # pages that are fetched, and whose files are read, together
CHANGED_PAGES_AWAY: Final = 512  # where every read is a call
PAGES_AT_ONCE: Final = 1_024  # pages that are gone through together, most of them unchanged
READ_ATTEMPTS: Final = 3
SECOND: Final = 1_000_000_000  # in nanoseconds
VANISHED: Final = "vanished"
JOURNAL: Final = FileStat(b".snapcore-stage/journal", Kind.FILE, size=1)  # of a restore whose swap is not over


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareRequest:
    """What to compare; see `Repository.compare` for each. `roots` gives the workspace of each root by name."""

    checkpoint: Checkpoint
    roots: Mapping[str, Workspace]
    redactor: Redactor
    policy: FilePolicy | None = None
    paths: Sequence[bytes] | None = None
    reread: bool = False
    on_progress: ProgressCallback | None = None


async def compare(engine: Engine, request: CompareRequest) -> Diff:
    """How the live roots differ from the checkpoint's."""
    try:
        return await _Comparison(engine, request).run()
    except SnapcoreError as error:
        request.redactor.scrub_error(error)
        raise


async def refuse_half_swapped(workspace: Workspace) -> None:
    """Raise `ProviderError` `WORKSPACE_BUSY` when a restore is about to change the tree or was cut short while it did: what is
    there then is of two states. Nothing is done about it."""
    async for blocks in workspace.read([JOURNAL]):
        if all(block.problem for block in blocks):
            return
    raise ProviderError(
        f"A restore into {printable(workspace.root)} is running or was cut short: some of its files are of another state.",
        code=Code.WORKSPACE_BUSY,
        hint="Wait for it to end. If none is running, the next capture or restore of this workspace finishes it.",
        retryable=True,
    )


class _Comparison:
    def __init__(self, engine: Engine, request: CompareRequest) -> None:
        self._engine = engine
        self._request = request
        self._scope = Scope(request.paths)
        self._roots: list[_RootComparison] = []

    async def run(self) -> Diff:
        r = self._request
        states = [state for state in r.checkpoint.roots if state.name in r.roots]
        sandbox_id = r.roots[states[0].name].sandbox_id if states and not r.reread else ""
        self._roots = [_RootComparison(self._engine, r, state, self._scope, sandbox_id) for state in states]
        async with ticking(r.on_progress, self._progress):
            for root in self._roots:
                await root.run()
            for root in self._roots:
                await refuse_half_swapped(r.roots[root.name])
        unknown = sorted(self._scope.paths.difference(*(root.met for root in self._roots)) - {b""})
        if unknown:
            raise unknown_path(unknown[0])
        roots = sorted(self._roots, key=lambda root: root.name)
        return Diff.of([d for root in roots for d in root.found], [s for root in roots for s in root.skipped])

    def _progress(self) -> Progress:
        return Progress(
            "compare", sum(r.files for r in self._roots), sum(r.bytes for r in self._roots), self._request.checkpoint.totals.files
        )


@dataclass(slots=True)
class _Part:
    """What the scan found of one page. Of a page that did not change, only what the rest of the tree needs."""

    page: IndexEntry
    stats: Sequence[FileStat]
    changed: bool


class _RootComparison:
    """One root. `found` and `skipped` are complete after `run`, as is `met`: the paths of the scope that there are."""

    def __init__(self, engine: Engine, request: CompareRequest, state: RootState, scope: Scope, sandbox_id: str) -> None:
        policy = request.policy or FilePolicy.from_record(state.policy)
        self.name = state.name
        self.found: list[DiffEntry] = []
        self.skipped: list[NotCompared] = []
        self.met: set[bytes] = set()
        self.files = 0
        self.bytes = 0
        self._engine = engine
        self._reader = RecordReader(engine)
        self._state = state
        self._scope = scope
        self._workspace = request.roots[state.name]
        self._redactor = request.redactor
        self._policy = policy
        self._selection = policy.compile()
        self._restrict = request.policy is not None
        self._states = PageStates(engine, self._workspace, sandbox_id, state.policy)
        self._left_out_then = {s.path: s.reason for s in state.skipped}
        self._root_prefix = self._workspace.root.rstrip("/").encode("utf-8", "surrogateescape") + b"/"
        self._links = _HardLinks()
        self._below: bytes | None = None  # what lies below this is not compared
        self._tells_hidden = False  # whether entries that this hides are told
        self._excluded_below: bytes | None = None

    async def run(self) -> None:
        """Compare. Raises `SnapshotError` `MISSING_WORKSPACE` when there is no such folder."""
        await self._states.load()
        pages, _ = await self._reader.index(self._state.manifest)
        most = CHANGED_PAGES_AWAY if self._workspace.host_path is None else CHANGED_PAGES
        group: list[_Part] = []
        changed = 0
        async for page, stats in slice_scan(self._scan(), pages):
            part = self._part(page, stats)
            group.append(part)
            changed += part.changed
            if changed >= most or len(group) >= PAGES_AT_ONCE:
                await self._compare(group)
                group, changed = [], 0
        await self._compare(group)

    async def _scan(self) -> AsyncIterator[Sequence[FileStat]]:
        async for batch in self._workspace.scan(self._policy.compile(), cross_mounts=self._policy.cross_mounts):
            self.files += len(batch)
            yield batch

    def _part(self, page: IndexEntry, stats: Sequence[FileStat]) -> _Part:
        if self._scope.paths:
            self.met |= self._scope.paths & {s.path for s in stats}
        if not self._states.unchanged(page.page_id, page.entries, stats):
            return _Part(page, stats, changed=True)
        told = [s for s in stats if s.note or s.kind > Kind.LINK or (s.kind == Kind.FILE and s.nlink > 1)]
        return _Part(page, told, changed=False)

    async def _compare(self, group: Sequence[_Part]) -> None:
        changed = [part.page.page_id for part in group if part.changed]
        raws = await self._reader.fetch(changed, RecordType.PAGE) if changed else {}
        pairs = {
            part.page.page_id: PagePair(part.page.page_id, decode_page(raws[part.page.page_id]), part.stats)
            for part in group
            if part.changed
        }
        same, doubtful = await self._states.tell(list(pairs.values()))
        verdicts = await self._look([(s, e) for s, e in doubtful if self._scope.holds(e.path)])
        verdicts |= {path: (None, ContentVerdict(same=True)) for path in same}
        for part in group:
            if part.changed:
                self._merge(pairs[part.page.page_id], verdicts)
                continue
            for s in part.stats:
                if self._takes_part(s):
                    self._links.join(s)

    async def _look(self, pairs: Sequence[tuple[FileStat, Entry]]) -> dict[bytes, tuple[FileStat | None, ContentVerdict]]:
        """Of files that have to be read: what their stat was then, and what can be said. What changes meanwhile is read again."""
        out: dict[bytes, tuple[FileStat | None, ContentVerdict]] = {}
        for _ in range(READ_ATTEMPTS):
            again: list[tuple[FileStat, Entry]] = []
            verdicts = await compare_contents(self._engine, self._reader, self._workspace, pairs) if pairs else []
            for (s, e), verdict in zip(pairs, verdicts, strict=True):
                self.bytes += s.size
                now = s if verdict.steady else verdict.after
                if verdict.steady or now is None:
                    out[e.path] = (now, verdict)
                elif now.kind == Kind.FILE and now.size == e.size:
                    out[e.path] = (now, verdict)
                    again.append((now, e))
                else:
                    out[e.path] = (now, ContentVerdict(after=now))  # certainly another content
            pairs = again
        return out

    # ---- the merge

    def _merge(self, pair: PagePair, verdicts: Mapping[bytes, tuple[FileStat | None, ContentVerdict]]) -> None:
        """Both sides are in walk order."""
        entries, stats = {e.path: e for e in pair.entries}, {s.path: s for s in pair.stats}
        equal = entries.keys() == stats.keys()
        for path in entries if equal else sorted(entries.keys() | stats.keys(), key=path_key):
            entry, stat = entries.get(path), stats.get(path)
            if path in self._scope.paths:
                self.met.add(path)
            first = b""
            if stat is not None and self._takes_part(stat):
                first = self._links.join(stat)
            else:
                stat = None
            if entry is not None and self._is_hidden(entry):
                continue
            if not self._scope.holds(path):
                continue
            now, verdict = verdicts.get(path, (None, ContentVerdict()))
            self._judge(entry, stat and (now or stat), verdict, first)

    def _judge(self, entry: Entry | None, stat: FileStat | None, verdict: ContentVerdict, first: bytes) -> None:
        if stat is not None and (verdict.problem.startswith(VANISHED) or (not verdict.steady and verdict.after is None)):
            stat = None  # it went away after it was listed
        if stat is None:
            if entry is not None:
                self.found.append(DiffEntry(self.name, entry.path, entry, None))
            return
        same = verdict.same
        if verdict.problem or not verdict.steady:
            why = self._redactor.scrub_text(verdict.problem) or "changed at every attempt to read it"
            self._skip(stat.path, why)
            same = same or bool(verdict.problem)  # of what cannot be read, only the rest can differ
        live = self._live(stat, entry, same, first)
        if entry is None or content_fields(entry) != content_fields(live):
            self.found.append(DiffEntry(self.name, stat.path, entry, live))

    def _live(self, stat: FileStat, entry: Entry | None, same: bool, first: bytes) -> Entry:
        """The entry that a capture would make, as far as it is known."""
        if stat.kind != Kind.FILE:
            live = plain_entry(stat, self._root_prefix)
        elif entry is not None and entry.kind == Kind.FILE and same:
            live = known_entry(stat, entry)
        else:
            live = Entry(stat.path, Kind.FILE, stat.mode, stat.size, stat.mtime_ns, uid=stat.uid, gid=stat.gid)
        if stat.nlink > 1 and not stat.inode and entry is not None:
            first = entry.hardlink  # which names are of one file cannot be told here
        changes: dict[str, bytes | int] = {"hardlink": first} if first else {}
        coarse = not self._workspace.capabilities.mtimes
        if entry is not None and coarse and entry.mtime_ns // SECOND == stat.mtime_ns // SECOND:
            changes["mtime_ns"] = entry.mtime_ns  # some tools set whole seconds
        return msgspec.structs.replace(live, **changes) if changes else live

    # ---- what takes no part

    def _takes_part(self, stat: FileStat) -> bool:
        """Whether a scanned path can be in a checkpoint of this policy. What cannot is told once, but not what is excluded."""
        path = stat.path
        if self._below is not None and path.startswith(self._below):
            return False
        why, hides = left_out(stat), stat.note in (Note.EXCLUDED, Note.MOUNT, Note.UNREADABLE)
        if not why and stat.note != Note.EXCLUDED and path in self._left_out_then:
            why, hides = f"left out of the checkpoint: {self._left_out_then[path]}", True
        if not why and self._redactor.active:
            secret = self._redactor.names_with_secrets([(path, stat.target)])
            if secret:
                why, hides = f"the secret {secret[0]} is part of its path or target", True
        if hides and path:
            self._below, self._tells_hidden = path + b"/", not why and not self._restrict
        if why:
            self._skip(path, why)
        return not why and stat.note != Note.EXCLUDED

    def _is_hidden(self, entry: Entry) -> bool:
        """Whether an entry cannot be compared: it lies at or below what takes no part, or the policy given leaves it out."""
        path = entry.path
        if self._below is not None and (path + b"/").startswith(self._below):
            if self._tells_hidden:
                self._skip(self._below[:-1], "excluded now")
                self._tells_hidden = False
            return True
        if not self._restrict:
            return False
        if self._excluded_below is not None and path.startswith(self._excluded_below):
            return True
        if path and self._selection.excludes(path, entry.kind):
            self._excluded_below = path + b"/"
            return True
        return False

    def _skip(self, path: bytes, why: str) -> None:
        if self._scope.holds(path) or self._scope.leads_to(path):
            self.skipped.append(NotCompared(self.name, self._redactor.scrub_bytes(path), why))


class _HardLinks:
    """The hard-link groups that a scan met, by their first names. What had its last name is forgotten."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, int], tuple[bytes, int]] = {}

    def join(self, stat: FileStat) -> bytes:
        """Take the next name, in walk order. Returns the first name of its file, empty when this is it."""
        if stat.kind != Kind.FILE or stat.nlink <= 1 or not stat.inode:
            return b""
        key = (stat.device, stat.inode)
        first, left = self._groups.get(key, (stat.path, stat.nlink))
        if left <= 1:
            self._groups.pop(key, None)
        else:
            self._groups[key] = (first, left - 1)
        return first if first != stat.path else b""
