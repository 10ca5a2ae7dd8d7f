"""The plan of a restore, as `restore --dry-run` shows it."""

import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from snapcore.model import Kind

from .output import count, path_fields, path_list, path_text, print_line, print_table, size

if TYPE_CHECKING:
    from snapcore.planned import PlannedChange
    from snapcore.restoring import RestorePlan

__all__ = ["plan_fields", "print_plan"]

SHOWN: Final = 50  # paths of a group on a terminal, unless all are asked for
GROUPS: Final = (("remove", "-", "removed"), ("add", "+", "added"), ("change", "~", "changed"))  # what hurts comes first

Row = tuple[str, str, str, str, str]


def plan_fields(plan: "RestorePlan") -> dict[str, Any]:
    """A plan as JSON has it."""
    return {
        "removes": path_list(plan.removes),
        "adds": path_list(plan.adds),
        "changes": path_list(plan.changes),
        "bytes": plan.bytes,
        "paths": [
            {
                "root": each.root,
                **path_fields(each.path),
                "action": each.action,
                "kind": Kind.NAMES[each.kind],
                "size": each.size,
                "size_before": each.size_before,
                "why": list(each.why),
            }
            for each in plan.paths
        ],
    }


def print_plan(plan: "RestorePlan", *, all_paths: bool) -> None:
    """A table of all that would be done, removals first, and a line for each kind of change. On a terminal a long list is cut
    unless `all_paths`."""
    several = len({each.root for each in plan.paths}) > 1
    limit = None if all_paths or not sys.stdout.isatty() else SHOWN
    rows = [row for group in GROUPS for row in _rows(plan.paths, *group[:2], several=several, limit=limit)]
    if not rows:
        return
    print_table(("", "BEFORE", "AFTER", "WHAT", "PATH"), rows, right=(1, 2))
    for action, sign, done in GROUPS:
        group = [each for each in plan.paths if each.action == action]
        if group:
            before = f"{size(sum(each.size_before for each in group))}, then " if action == "change" else ""
            print_line(f"{sign} {count(len(group), 'path')} {done}: {before}{size(sum(each.size for each in group))}")


def _rows(paths: "Sequence[PlannedChange]", action: str, sign: str, *, several: bool, limit: int | None) -> Iterator[Row]:
    group = [each for each in paths if each.action == action]
    for each in islice(group, limit):
        is_file = each.kind == Kind.FILE
        before = size(each.size if action == "remove" else each.size_before)
        after = size(each.size)
        yield (
            sign,
            before if action != "add" and (is_file or each.size_before) else "",
            after if action != "remove" and is_file else "",
            _what(each),
            f"{each.root}:{path_text(each.path)}" if several else path_text(each.path),
        )
    if limit is not None and len(group) > limit:
        yield (sign, "", "", "", f"... and {len(group) - limit:,} more; -v shows all")


def _what(change: "PlannedChange") -> str:
    """The kind of what comes or goes; in what the two differ of what changes."""
    name = Kind.NAMES[change.kind]
    if change.why == ("kind",):
        return f"now a {name}"
    return ", ".join(change.why) or name
