"""Which files a policy keeps, and how policies combine, are saved and are refused."""

import pytest

from snapcore.errors import Code, SnapshotError
from snapcore.model import Kind
from snapcore.selection import FilePolicy


def kept(policy: FilePolicy, path: bytes, kind: int = Kind.FILE) -> bool:
    """Whether neither the path nor a folder above it is left out."""
    selection = policy.compile()
    above = [path[:end] for end, byte in enumerate(path) if byte == ord("/")]
    return not any(selection.excludes(folder, Kind.DIR) for folder in above) and not selection.excludes(path, kind)


DEFAULTS = [
    (b".git", Kind.DIR),
    (b"vendor/lib/.git", Kind.FILE),
    (b"node_modules", Kind.DIR),
    (b"packages/a/node_modules", Kind.LINK),
    (b".env", Kind.FILE),
    (b"app/.env.production", Kind.FILE),
    (b".envrc", Kind.FILE),
    (b".venv", Kind.DIR),
    (b"src/__pycache__", Kind.DIR),
    (b".tox", Kind.DIR),
    (b".nox", Kind.DIR),
    (b".mypy_cache", Kind.DIR),
    (b".pytest_cache", Kind.DIR),
    (b"a/b/.ruff_cache", Kind.DIR),
]


@pytest.mark.parametrize(("path", "kind"), DEFAULTS)
def test_default_exclusions_hold_at_any_depth_and_everything_drops_them(path: bytes, kind: int) -> None:
    assert not kept(FilePolicy.default(), path, kind)
    assert kept(FilePolicy.everything(), path, kind)


@pytest.mark.parametrize(
    "path", [b"", b"src/main.py", b".gitignore", b"environment", b"my.env", b"venv", b"git", b"node_modules2"]
)
def test_names_that_only_resemble_a_default_exclusion_are_kept(path: bytes) -> None:
    assert kept(FilePolicy.default(), path)


def test_a_venv_folder_is_excluded_by_what_it_holds() -> None:
    assert FilePolicy.default().compile().marked_folders == {b"venv": b"pyvenv.cfg"}
    assert FilePolicy.everything().compile().marked_folders == {}
    assert FilePolicy.with_rebuildable().compile().marked_folders == {}


def test_with_git_keeps_git_and_nothing_else() -> None:
    assert FilePolicy.with_git() == FilePolicy.default().with_git()
    assert kept(FilePolicy.with_git(), b".git/config")
    assert not kept(FilePolicy.with_git(), b".env")


def test_keeping_rebuildable_trees_still_leaves_out_git_and_environment_files() -> None:
    policy = FilePolicy.with_rebuildable()
    assert kept(policy, b"node_modules/x.js")
    assert kept(policy, b".venv/bin/python")
    assert not kept(policy, b"node_modules/x/.git", Kind.DIR)
    assert not kept(policy, b"node_modules/x/.env")


def test_user_exclusions_add_to_the_defaults() -> None:
    for policy in (
        FilePolicy.patterns(exclude=["*.log"]),
        FilePolicy.with_exclude("*.log"),
        FilePolicy(exclude=lambda path, kind: path.endswith(".log")),
    ):
        assert not kept(policy, b"a/b.log")
        assert not kept(policy, b".env")
        assert kept(policy, b"a/b.py")
    assert kept(FilePolicy.patterns(exclude=["*.log"], defaults=False), b".env")


def test_with_exclude_adds_to_what_was_excluded_before_even_to_a_callable() -> None:
    policy = FilePolicy(exclude=lambda path, kind: path == "one").with_exclude("two").with_exclude("three")
    assert [kept(policy, name) for name in (b"one", b"two", b"three", b"four")] == [False, False, False, True]


def test_an_exclusion_cannot_undo_a_default_one() -> None:
    assert not kept(FilePolicy.patterns(exclude=["!.env", "!.git/"]), b".env")


@pytest.mark.parametrize(
    ("pattern", "path", "kind", "matches"),
    [
        ("build/", b"a/build", Kind.DIR, True),
        ("build/", b"a/build", Kind.FILE, False),
        ("build/", b"a/build", Kind.LINK, False),
        ("/build", b"build", Kind.FILE, True),
        ("/build", b"a/build", Kind.FILE, False),
        ("a/*.txt", b"a/x.txt", Kind.FILE, True),
        ("a/*.txt", b"a/b/x.txt", Kind.FILE, False),
        ("a/**/x", b"a/b/c/x", Kind.FILE, True),
        ("data/**", b"data", Kind.DIR, False),
        ("data/**", b"data/x", Kind.FILE, True),
        ("*.pem", b"line\nbreak/key.pem", Kind.FILE, True),
        ("*.pem", b"key.pem\n", Kind.FILE, False),
        ("*.pem", b"\xff\xfe.pem", Kind.FILE, True),
        ("?.pem", b"\xff.pem", Kind.FILE, True),
        ("# comment", b"# comment", Kind.FILE, False),
        ("", b"x", Kind.FILE, False),
    ],
)
def test_patterns_have_gitignore_meaning(pattern: str, path: bytes, kind: int, matches: bool) -> None:
    assert FilePolicy.patterns(exclude=[pattern]).compile().excludes(path, kind) is matches


def test_the_last_pattern_that_matches_decides() -> None:
    policy = FilePolicy.patterns(exclude=["data/**", "!data/keep"])
    assert kept(policy, b"data/keep")
    assert not kept(policy, b"data/drop")


def test_include_patterns_keep_matches_and_all_under_a_matching_folder() -> None:
    policy = FilePolicy.patterns(include=["src/", "*.md"])
    assert kept(policy, b"src/deep/file.c")
    assert kept(policy, b"docs/page.md")
    assert not kept(policy, b"docs/page.rst")
    assert kept(policy, b"docs", Kind.DIR)


def test_folders_in_which_no_include_pattern_can_match_are_not_walked() -> None:
    selection = FilePolicy.patterns(include=["/src/lib/*.py", "docs/api/**"]).compile()
    for folder in (b"src", b"src/lib", b"docs", b"docs/api", b"docs/api/v1"):
        assert not selection.excludes(folder, Kind.DIR)
    for folder in (b"data", b"src/bin", b"docs/old", b"lib"):
        assert selection.excludes(folder, Kind.DIR)
    assert not selection.excludes(b"", Kind.DIR)


def test_exclude_wins_over_include() -> None:
    policy = FilePolicy.patterns(include=["src/"], exclude=["*.tmp"])
    assert kept(policy, b"src/a")
    assert not kept(policy, b"src/a.tmp")


def test_callables_get_the_path_as_text_and_the_kind_by_name() -> None:
    seen: list[tuple[str, str]] = []

    def include(path: str, kind: str) -> bool:
        seen.append((path, kind))
        return path.endswith(".py")

    policy = FilePolicy(include=include)
    assert kept(policy, b"a/\xff.py")
    assert not kept(policy, b"a/link", Kind.LINK)
    assert kept(policy, b"folder", Kind.DIR)  # it may hold what is included
    assert seen == [("a/\udcff.py", "file"), ("a/link", "link")]


def test_a_pattern_policy_survives_its_record() -> None:
    policy = FilePolicy.patterns(include=["src/"], exclude=["*.log"], defaults=False).with_git()
    record = policy.record()
    assert record.portable
    assert FilePolicy.from_record(record) == policy
    assert FilePolicy.from_record(record, on_unsupported="skip").on_unsupported == "skip"
    assert FilePolicy.from_record(FilePolicy.with_rebuildable().record()) == FilePolicy.with_rebuildable()
    crossing = FilePolicy(cross_mounts=True)
    assert FilePolicy.from_record(crossing.record()) == crossing
    assert not FilePolicy.from_record(crossing.record(), cross_mounts=False).cross_mounts


def test_a_callable_cannot_be_saved() -> None:
    record = FilePolicy(exclude=lambda path, kind: False).record()
    assert not record.portable
    with pytest.raises(SnapshotError) as caught:
        FilePolicy.from_record(record)
    assert caught.value.code == Code.POLICY_REQUIRED


@pytest.mark.parametrize(
    "options",
    [
        {"exclude": "*.log"},
        {"exclude": b"*.log"},
        {"exclude": 7},
        {"exclude": [b"*.log"]},
        {"exclude": ["[z-a]"]},
        {"exclude": ["!"]},
        {"exclude": ["/"]},
        {"exclude": ["[abc"]},
        {"exclude": ["a\nb"]},
        {"exclude": ["\udcff"]},
        {"include": ["# only a comment"]},
        {"include": ["!negation"]},
        {"defaults": "no"},
        {"on_unsupported": "keep"},
        {"on_unreadable": "ignore"},
        {"on_torn": "skip"},
        {"on_limit": ""},
        {"max_files": 0},
        {"max_file_bytes": -1},
        {"max_total_bytes": True},
        {"max_files": 1.5},
    ],
)
def test_values_that_make_no_sense_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(SnapshotError) as caught:
        FilePolicy(**options)  # type: ignore[arg-type]
    assert caught.value.code == Code.INVALID_REQUEST
    assert next(iter(options)) in str(caught.value) or "pattern" in str(caught.value)


def test_what_a_remote_scan_prunes_is_what_the_selection_excludes() -> None:
    selection = FilePolicy.default().compile()
    for name in selection.pruned_names:
        assert selection.excludes(b"any/where/" + name, Kind.DIR)
    for prefix in selection.pruned_prefixes:
        assert selection.excludes(b"any/where/" + prefix + b"x", Kind.FILE)
    assert FilePolicy.everything().compile().pruned_names == frozenset()
    assert FilePolicy.everything().compile().pruned_prefixes == ()
