"""What the page on guarantees says to be tested is tested."""

import re

from ..docs_examples import ROOT  # noqa: TID252  # the tests are no package that could be named

PAGE = (ROOT / "docs" / "guarantees.md").read_text("utf-8")


def test_every_guarantee_names_tests_that_there_are() -> None:
    table = PAGE.split("## Guarantees\n", 1)[1].split("\n## ", 1)[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    for row in rows:
        named = re.findall(r"`([a-z]+/test_\w+\.py)`", row)
        assert named, row
        assert [name for name in named if "def test_" not in (ROOT / "tests" / name).read_text("utf-8")] == []
