"""The example of the page on Rebuno runs, and a missing package is told."""

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from snapcore.errors import Code, ProviderError

from ..docs_examples import run_page  # noqa: TID252  # the tests are no package that could be named
from .rebuno_kernel import RebunoKernel
from .rebuno_worker import AGENT, SECRET, ended, serving


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done: dict[str, Any] = {}
    with RebunoKernel(tmp_path) as kernel:

        async def serve(app: Any) -> None:
            async with serving(app) as url:
                kernel.register(AGENT, SECRET, f"{url}/webhook")
                done.update(await ended(kernel, kernel.create(AGENT, {"task": "fix it"})))

        run_page("docs/integrations/rebuno.md", serve=serve, secret=SECRET, kernel_url=kernel.url)
        assert (done["status"], done["output"]) == ("completed", "fix it\n")
        assert len(kernel.references(done["id"])) == 2
        assert len(os.listdir("sandboxes")) == 1


@pytest.mark.parametrize("module", ["rebuno", "rebuno_git"])
def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    for name in ("rebuno", "rebuno_git"):
        monkeypatch.delitem(sys.modules, f"snapcore.integrations.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "rebuno", None)
    with pytest.raises(ProviderError, match=r"pip install 'snapcore\[rebuno\]'") as caught:
        importlib.import_module(f"snapcore.integrations.{module}")
    assert caught.value.code == Code.MISSING_EXTRA
