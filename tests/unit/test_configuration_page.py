"""docs/configuration.md names every key of a settings file, with its default."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from snapcore.cli.effective import DEFAULTS, VARIABLES
from snapcore.settings import (
    TABLES,
    CronSettings,
    GcSettings,
    JobSettings,
    KeepSettings,
    PolicySettings,
    SecretSource,
    Settings,
)

PAGE = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text("utf-8")
SECTIONS: dict[str, Any] = {
    "Top of the file": Settings,
    "`[policy]`": PolicySettings,
    "`[secrets]`": SecretSource,
    "`[cron]`": CronSettings,
    "`[cron.gc]`": GcSettings,
    "`[jobs.NAME]`": JobSettings,
    "`[jobs.NAME.keep]`": KeepSettings,
}


def rows(heading: str) -> dict[str, str]:
    """Key -> default, as the table below a heading has them."""
    section = re.split(r"^#+ ", PAGE.partition(f"\n### {heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    found = re.findall(r"^\| `([a-z-]+)` \|(?:[^|]*)\| ([^|]*) \|", section, re.MULTILINE)
    assert len(dict(found)) == len(found)
    return dict(found)


def default(field: Any) -> str:
    if field.default is None:
        return "none"
    if field.default is msgspec.NODEFAULT or isinstance(field.default, msgspec.Struct):
        return "empty"
    return f"`{msgspec.json.encode(field.default).decode()}`"


@pytest.mark.parametrize("heading", SECTIONS)
def test_every_key_is_named_with_its_default(heading: str) -> None:
    fields = msgspec.structs.fields(SECTIONS[heading])
    assert rows(heading) == {field.encode_name: default(field) for field in fields}


def test_every_variable_and_common_default_is_named() -> None:
    table = PAGE.partition("\n## What goes before what\n")[2].partition("\n## ")[0]
    for key, name in VARIABLES.items():
        (row,) = [line for line in table.splitlines() if f"`{name}`" in line]
        assert f"`--{key}`" in row
        if DEFAULTS.get(key):
            assert f"`{DEFAULTS[key]}`" in row


def test_no_table_is_left_out() -> None:
    assert set(SECTIONS.values()) == set(TABLES)
