"""Which of the field cases (what users of sandboxes and backup tools ran into) is held by which test.

A test says which cases it holds in its docstring: `Case 17: ...`, `Cases 8, 9 and 41: ...`. Tests that other folders have
for a reason of their own are named in `ELSEWHERE`; cases about parts that this release does not have are in `NOT_YET`.
"""

import ast
import re
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).parents[1]
CASES = range(1, 53)
ELSEWHERE = {
    13: ("providers/test_direct_tree.py", "test_a_stage_of_another_user_is_finished_without_its_owners"),
    35: ("stores/test_sql_processes.py", "test_a_frozen_process_keeps_its_lease"),
    36: ("stores/test_sql_processes.py", "test_the_database_decides_when_a_lease_ends_whatever_a_clients_clock_says"),
    38: ("stores/test_sql_processes.py", "test_a_lease_that_runs_out_before_the_commit_of_another_process_is_lost"),
    44: ("engine/test_cancel.py", "test_a_capture_cancelled_at_any_await_moves_no_head_or_commits"),
    45: ("stores/test_local_blobs.py", "test_data_is_synced_before_it_gets_its_name_and_the_folder_after"),
    49: ("providers/test_direct_tree.py", "test_a_user_restores_into_read_only_folders"),
    51: ("cli/test_commands.py", "test_control_characters_never_reach_the_terminal"),
}
NOT_YET: dict[int, str] = {}


def numbers(text: str) -> set[int]:
    """The cases that a docstring names."""
    found: set[int] = set()
    for listed in re.findall(r"\bCases? ((?:\d+(?:, | and | to )?)+)", text):
        found.update(int(number) for number in re.findall(r"\d+", listed))
        for first, last in re.findall(r"(\d+) to (\d+)", listed):
            found.update(range(int(first), int(last)))
    return found


def functions() -> list[tuple[str, str, str]]:
    """(module, name, docstring) of each test."""
    return [
        (path.relative_to(TESTS).as_posix(), node.name, ast.get_docstring(node) or "")
        for path in sorted([*TESTS.rglob("test_*.py"), *TESTS.rglob("*_cases.py")])
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    ]


def test_docstrings_are_understood() -> None:
    assert numbers("Case 17: all names") == {17}
    assert numbers("Cases 8, 9 and 41: typed") == {8, 9, 41}
    assert numbers("Cases 14 to 17, 39: odd names. Case 3 too") == {14, 15, 16, 17, 39, 3}
    assert numbers("In case 4 and other Cases") == set()


def test_every_case_is_held_by_a_test_or_about_a_part_that_is_not_there() -> None:
    held: dict[int, list[str]] = defaultdict(list)
    for module, name, text in functions():
        for number in numbers(text):
            held[number].append(f"{module}::{name}")
    for number, (module, name) in ELSEWHERE.items():
        held[number].append(f"{module}::{name}")
    assert [number for number in CASES if number not in held and number not in NOT_YET] == []
    assert [number for number in held if number not in CASES] == []
    assert [held[number] for number in NOT_YET if number in held] == []  # it is there now: take it off the list


def test_the_tests_named_elsewhere_exist() -> None:
    there = {(module, name) for module, name, _ in functions()}
    assert [place for place in ELSEWHERE.values() if place not in there] == []
