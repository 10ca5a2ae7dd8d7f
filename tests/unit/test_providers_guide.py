"""The provider of the guide, as it stands there, passes the suite that the guide runs on it."""

import re
from pathlib import Path
from typing import Any

GUIDE = (Path(__file__).parents[2] / "docs" / "providers.md").read_text("utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)

names: dict[str, Any] = {"__name__": __name__}
for block in BLOCKS:
    exec(compile(block, "docs/providers.md", "exec"), names)

TestFolders = names["TestFolders"]


def test_the_provider_is_about_as_short_as_the_guide_says() -> None:
    lines = [line for line in BLOCKS[0].splitlines() if line.strip()]
    code = [line for line in lines if not line.startswith(("import ", "from "))]
    assert len(code) <= 60
