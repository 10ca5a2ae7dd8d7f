"""Which files a capture takes and a restore may remove: policies, and the compiled form that scans use.

A policy has default exclusions, what the user includes, and what the user excludes. Excluding always wins, and what a
user excludes adds to the defaults; only `defaults=False` drops those. An excluded folder is not listed at all.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Concatenate, Final, Generic, Literal, ParamSpec, Self, TypedDict, Unpack, cast

from .errors import Code, SnapshotError, printable
from .model import Kind, PolicyRecord

__all__ = ["DEFAULT_EXCLUSIONS", "REBUILDABLE", "FilePolicy", "PathPredicate", "Rule", "Selection"]

PathPredicate = Callable[[str, str], bool]
"""Given a path (relative, `/`-separated, surrogate-escaped where it is not UTF-8) and one of `Kind.NAMES`."""
Rule = str | PathPredicate
"""A gitignore-style pattern, or a callable."""

P = ParamSpec("P")

REBUILDABLE: Final = frozenset(
    (
        b"node_modules",
        b".venv",
        b"__pycache__",
        b".tox",
        b".nox",
        b".mypy_cache",
        b".pytest_cache",
        b".ruff_cache",
    )
)
DEFAULT_EXCLUSIONS: Final = REBUILDABLE | {b".git"}
_WILDCARDS: Final = "*?[\\"
_ENVIRONMENT_PREFIX: Final = b".env"
_MARKED_FOLDERS: Final = {b"venv": b"pyvenv.cfg"}


class _RunOptions(TypedDict, total=False):
    on_unsupported: Literal["error", "skip"]
    on_unreadable: Literal["error", "skip"]
    on_torn: Literal["error", "keep"]
    on_limit: Literal["error", "skip"]
    max_file_bytes: int | None
    max_total_bytes: int | None
    max_files: int | None
    cross_mounts: bool


class _Options(_RunOptions, total=False):
    defaults: bool
    keep_git: bool
    keep_rebuildable: bool


class _Preset(Generic[P]):
    """A method that also works on the class, where it starts from the default policy."""

    def __init__(self, method: "Callable[Concatenate[FilePolicy, P], FilePolicy]") -> None:
        self._method = method
        self.__doc__ = method.__doc__

    def __get__(self, policy: "FilePolicy | None", owner: "type[FilePolicy]") -> "Callable[P, FilePolicy]":
        return functools.partial(self._method, owner() if policy is None else policy)


def _invalid(message: str, hint: str = "") -> SnapshotError:
    return SnapshotError(message, code=Code.INVALID_REQUEST, hint=hint)


@dataclasses.dataclass(frozen=True, slots=True)
class FilePolicy:
    """Which files belong to a checkpoint, and what to do about those that cannot be captured.

    `include` and `exclude` are a callable `(path, kind) -> bool`, or a list of gitignore-style patterns and callables.
    `exclude` wins. With an `include`, files and links are kept only when they match it: a pattern that matches a folder
    includes all under it; a callable is asked for each file. Folders are kept, except those in which no pattern could match.

    `defaults=False` drops the default exclusions; `keep_git` keeps `.git`, `keep_rebuildable` keeps `node_modules`, `.venv`
    and the other trees that a tool can rebuild. Limits are in bytes and files, None for none. `cross_mounts` also takes
    other file systems mounted inside the root.

    Raises `SnapshotError` `INVALID_REQUEST` for a value that makes no sense, and never for the state of a workspace.
    """

    include: PathPredicate | Sequence[Rule] = ()
    exclude: PathPredicate | Sequence[Rule] = ()
    defaults: bool = True
    keep_git: bool = False
    keep_rebuildable: bool = False
    on_unsupported: Literal["error", "skip"] = "error"
    on_unreadable: Literal["error", "skip"] = "error"
    on_torn: Literal["error", "keep"] = "error"
    on_limit: Literal["error", "skip"] = "error"
    max_file_bytes: int | None = None
    max_total_bytes: int | None = None
    max_files: int | None = None
    cross_mounts: bool = False

    def __post_init__(self) -> None:
        for field in ("include", "exclude"):
            object.__setattr__(self, field, _rules(getattr(self, field), field))
        for field in ("defaults", "keep_git", "keep_rebuildable", "cross_mounts"):
            if not isinstance(getattr(self, field), bool):
                raise _invalid(f"{field} must be true or false.")
        for field in ("on_unsupported", "on_unreadable", "on_torn", "on_limit"):
            allowed = ("error", "keep") if field == "on_torn" else ("error", "skip")
            if getattr(self, field) not in allowed:
                raise _invalid(f"{field} must be '{allowed[0]}' or '{allowed[1]}'.")
        for field in ("max_file_bytes", "max_total_bytes", "max_files"):
            limit = getattr(self, field)
            if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
                raise _invalid(f"{field} must be a positive whole number, or None for no limit.")
        patterns = [rule for rule in self._include if isinstance(rule, str)]
        if patterns and len(patterns) == len(self._include) and not any(keeps for keeps, _ in _compiled(tuple(patterns))):
            raise _invalid(
                "The include patterns match no file at all: they are comments, blank, or only negations.",
                "Name what to keep, or leave include out.",
            )

    @property
    def _include(self) -> tuple[Rule, ...]:
        return cast("tuple[Rule, ...]", self.include)

    @property
    def _exclude(self) -> tuple[Rule, ...]:
        return cast("tuple[Rule, ...]", self.exclude)

    @classmethod
    def default(cls) -> Self:
        """Everything but the default exclusions."""
        return cls()

    @classmethod
    def everything(cls) -> Self:
        """The whole tree, with no default exclusions: `.git` and `.env` files too."""
        return cls(defaults=False)

    @classmethod
    def patterns(cls, include: Sequence[str] = (), exclude: Sequence[str] = (), **options: Unpack[_Options]) -> Self:
        """A policy of gitignore-style patterns, which is saved with the checkpoint and used by restore."""
        return cls(include=include, exclude=exclude, **options)

    @_Preset
    def with_git(self) -> "FilePolicy":
        """This policy, or the default one, with `.git` kept."""
        return dataclasses.replace(self, keep_git=True)

    @_Preset
    def with_rebuildable(self) -> "FilePolicy":
        """This policy, or the default one, with `node_modules`, `.venv` and the like kept; `.git` and `.env*` stay out."""
        return dataclasses.replace(self, keep_rebuildable=True)

    @_Preset
    def with_exclude(self, *rules: Rule) -> "FilePolicy":
        """This policy, or the default one, with more exclusions (patterns or callables) added after those it has."""
        return dataclasses.replace(self, exclude=(*self._exclude, *_rules(rules, "exclude")))

    def compile(self) -> "Selection":
        """The policy in the form that scans use."""
        return Selection(self)

    def record(self) -> PolicyRecord:
        """What a checkpoint saves of this policy: which files it selects. Not portable when a callable takes part."""
        rules = (*self._include, *self._exclude)
        return PolicyRecord(
            include=tuple(rule for rule in self._include if isinstance(rule, str)),
            exclude=tuple(rule for rule in self._exclude if isinstance(rule, str)),
            defaults=self.defaults,
            with_git=self.keep_git,
            keep_rebuildable=self.keep_rebuildable,
            portable=all(isinstance(rule, str) for rule in rules),
            cross_mounts=self.cross_mounts,
        )

    @classmethod
    def from_record(cls, record: PolicyRecord, **options: Unpack[_RunOptions]) -> Self:
        """The policy that a checkpoint saved, with `options` added. Raises `SnapshotError` `POLICY_REQUIRED` when a callable
        took part in it."""
        if not record.portable:
            raise SnapshotError(
                "This checkpoint was captured with a callable in its file policy, which cannot be saved.",
                code=Code.POLICY_REQUIRED,
                hint="Pass the same policy again, so that nothing it left out is removed.",
            )
        options.setdefault("cross_mounts", record.cross_mounts)
        return cls(
            include=record.include,
            exclude=record.exclude,
            defaults=record.defaults,
            keep_git=record.with_git,
            keep_rebuildable=record.keep_rebuildable,
            **options,
        )


class Selection:
    """A compiled policy, as `ScanSelection` asks for it. Immutable, and safe to use from several threads.

    `pruned_names` and `pruned_prefixes` are names, and beginnings of names, that are excluded at any depth and whatever
    their kind: a remote scan can prune them at the source. `excludes` covers them too.
    """

    __slots__ = ("_decide", "marked_folders", "pruned_names", "pruned_prefixes")

    marked_folders: dict[bytes, bytes]
    pruned_names: frozenset[bytes]
    pruned_prefixes: tuple[bytes, ...]

    def __init__(self, policy: FilePolicy) -> None:
        names: set[bytes] = set()
        if policy.defaults:
            names |= DEFAULT_EXCLUSIONS
        if policy.keep_git:
            names.discard(b".git")
        if policy.keep_rebuildable:
            names -= REBUILDABLE
        self.pruned_names = frozenset(names)
        self.pruned_prefixes = (_ENVIRONMENT_PREFIX,) if policy.defaults else ()
        self.marked_folders = dict(_MARKED_FOLDERS) if policy.defaults and not policy.keep_rebuildable else {}
        self._decide = _decision(policy._include, policy._exclude)

    def excludes(self, path: bytes, kind: int) -> bool:
        """Whether this path is left out, given that no folder above it is. The root never is."""
        name = path.rpartition(b"/")[2]
        if name in self.pruned_names or name.startswith(self.pruned_prefixes):
            return True
        decide = self._decide
        return decide is not None and path != b"" and decide(path, kind)


def _rules(value: object, field: str) -> tuple[Rule, ...]:
    if callable(value):
        return (cast("PathPredicate", value),)
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise _invalid(f"{field} must be a callable or a list of patterns.", f"For one pattern, write {field}=['*.log'].")
    rules = tuple(value)
    for rule in rules:
        if not callable(rule) and not isinstance(rule, str):
            raise _invalid(f"{field} holds {rule!r}, which is neither a pattern (a text) nor a callable.")
    _compiled(tuple(rule for rule in rules if isinstance(rule, str)))
    return rules


_Matcher = tuple[bool, re.Pattern[str]]


@functools.lru_cache(maxsize=64)
def _compiled(patterns: tuple[str, ...]) -> tuple[_Matcher, ...]:
    """For each pattern that is no comment: whether a match counts as one (false for `!`), and the expression."""
    return tuple(matcher for pattern in patterns if (matcher := _matcher(pattern)) is not None)


def _matcher(pattern: str) -> _Matcher | None:
    if not pattern.strip() or pattern.startswith("#"):
        return None
    shown = printable(pattern)
    if "\n" in pattern or "\0" in pattern:
        raise _invalid(f"The pattern '{shown}' holds a line break or a NUL.", "Give one pattern for each list item.")
    try:
        pattern.encode()
    except UnicodeEncodeError:
        raise _invalid(f"The pattern '{shown}' is not valid text.", "Write ? for a byte that is not UTF-8.") from None
    from pathspec import GitIgnoreSpec

    # `a/**` names what is inside `a`, not `a` itself; pathspec lets it match the folder too.
    line = pattern + "/*" if pattern.endswith("/**") else pattern
    try:
        (parsed,) = GitIgnoreSpec.from_lines([line]).patterns
    except (ValueError, re.error):
        raise _invalid(f"The pattern '{shown}' is not a valid gitignore pattern.") from None
    expression = getattr(parsed, "regex", None)
    if parsed.include is None or expression is None:
        raise _invalid(f"The pattern '{shown}' can never match.", "Write it as in a .gitignore file.")
    return parsed.include, expression


_Decision = Callable[[bytes, int], bool]


def _decision(include: tuple[Rule, ...], exclude: tuple[Rule, ...]) -> _Decision | None:
    """Whether the user's rules leave a path out; None when there are none."""
    if not include and not exclude:
        return None
    excluded = _any_of(exclude)
    included = _any_of(include)
    reachable = _reachable(include)

    def decide(path: bytes, kind: int) -> bool:
        text = path.decode("utf-8", "surrogateescape")
        if excluded(text, kind):
            return True
        if not include:
            return False
        if kind == Kind.DIR and reachable(text):
            return False
        return not included(text, kind)

    return decide


def _any_of(rules: tuple[Rule, ...]) -> Callable[[str, int], bool]:
    """Whether the patterns together (the last that matches decides, as in gitignore) or any callable match a path."""
    matchers = _compiled(tuple(rule for rule in rules if isinstance(rule, str)))[::-1]
    predicates = [rule for rule in rules if not isinstance(rule, str)]

    def matches(text: str, kind: int) -> bool:
        # A line break in a name must hide nothing: `.` does not match it and `$` matches before it. No name holds a NUL.
        subject = text.replace("\n", "\0") if "\n" in text else text
        if kind == Kind.DIR:
            subject += "/"
        for keeps, expression in matchers:
            if expression.match(subject):
                if keeps:
                    return True
                break
        return any(predicate(text, Kind.NAMES[kind]) for predicate in predicates)

    return matches


def _reachable(include: tuple[Rule, ...]) -> Callable[[str], bool]:
    """Whether a folder could hold a match of the include rules, by the plain folder names that patterns begin with."""
    prefixes: list[list[str]] = []
    for rule in include:
        if not isinstance(rule, str):
            return lambda text: True
        if _matcher(rule) is None or rule.startswith("!"):
            continue
        body = rule.strip().rstrip("/")
        parts = body.lstrip("/").split("/")
        if "/" not in body or any(ch in parts[0] for ch in _WILDCARDS):
            return lambda text: True  # matches at any depth
        plain = itertools.takewhile(lambda part: not any(ch in part for ch in _WILDCARDS), parts)
        prefixes.append(list(plain))

    def reachable(text: str) -> bool:
        parts = text.split("/")
        return any(all(a == b for a, b in zip(parts, prefix, strict=False)) for prefix in prefixes)

    return reachable
