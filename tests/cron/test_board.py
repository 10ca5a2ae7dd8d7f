"""What tells how the scheduler is."""

import asyncio
import itertools
import time
from pathlib import Path
from typing import Any

import pytest

from snapcore.cron import board as boards
from snapcore.cron.board import Board
from snapcore.cron.jobs import make_plan
from snapcore.cron.logs import Events, Scrubber
from snapcore.settings_files import load_settings


async def test_a_health_file_that_takes_long_to_write_leaves_time_for_captures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = list[float]()

    def slow(path: str, document: dict[str, Any]) -> None:
        writes.append(time.monotonic())
        time.sleep(0.02)  # as thousands of sandboxes make it

    monkeypatch.setattr(boards, "write_atomically", slow)
    file = tmp_path / "jobs.toml"
    file.write_text('[cron]\nhealth-file = "health.json"\n[jobs.one]\nsandbox = "."\nevery = "1h"\n')
    board = Board(Events(), Scrubber(), lambda job, thread: None)
    board.plan(make_plan(load_settings(str(file))))
    while len(writes) < 3:
        board.publish()
        await asyncio.sleep(0)
    assert min(later - earlier for earlier, later in itertools.pairwise(writes)) >= 0.19
