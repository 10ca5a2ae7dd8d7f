"""Checkpoints between the steps of an agent's loop: before the first, after every few, and at the end."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from snapcore.autocheckpoint import attempted, tell
from snapcore.capturing import CaptureReport
from snapcore.errors import CheckpointWriterConflictError, printable
from snapcore.repository import Repository

from .tool_schemas import told

__all__ = ["CheckpointReport", "StepCheckpoints"]

MAX_REPORTS = 100


class CheckpointReport(msgspec.Struct, frozen=True):
    """What became of one automatic checkpoint. `outcome`: `saved`, `unchanged` (`checkpoint_id` is the head then), `skipped`
    (another writer holds the thread) or `failed`; `code` and `message` say why."""

    moment: Literal["baseline", "step", "end"]
    outcome: Literal["saved", "unchanged", "skipped", "failed"]
    step: int
    checkpoint_id: str | None = None
    code: str = ""
    message: str = ""

    def fields(self) -> dict[str, Any]:
        """The same for the result of a tool."""
        out: dict[str, Any] = {"outcome": self.outcome}
        if self.checkpoint_id is not None:
            out["id"] = self.checkpoint_id
        if self.code:
            out |= {"code": self.code, "message": self.message}
        return out


class StepCheckpoints:
    """Captures `sandbox` into a thread: a baseline, then after every `every` steps, then at the end when steps came since.

    A capture that fails never raises: it is reported to `on_report` and kept in `reports` (the last 100), and the next step
    tries again. What `on_report` raises fails nothing either. Steps are counted on from the newest that the thread has, so that
    none names two states. `options` are those of `Repository.capture`. Not for concurrent calls."""

    def __init__(
        self,
        repo: Repository,
        thread_id: str,
        sandbox: Any,
        *,
        every: int = 5,
        baseline: bool = True,
        at_end: bool = True,
        options: Mapping[str, Any] | None = None,
        on_report: Callable[[CheckpointReport], None] | None = None,
    ) -> None:
        self._repo = repo
        self._thread_id = thread_id
        self._sandbox = sandbox
        self._every = every
        self._baseline = baseline
        self._at_end = at_end
        self._options = dict(options or {})
        self._on_report = on_report
        self._pending = 0  # steps since the last checkpoint
        self._steps = 0
        self._earlier: int | None = None  # steps of whoever worked in the thread before; unknown until the store has answered
        self.reports: list[CheckpointReport] = []

    @property
    def step(self) -> int:
        """The number of the latest step."""
        return (self._earlier or 0) + self._steps

    async def begin(self) -> CheckpointReport | None:
        """Before a step: takes the baseline when it is the first. The step counts whatever becomes of it."""
        report = await self._capture("baseline") if self._baseline else None
        self._baseline = False
        self._steps += 1
        self._pending += 1
        return report

    async def end(self) -> CheckpointReport | None:
        """After a step."""
        return await self._capture("step") if self._pending >= self._every else None

    async def finish(self) -> CheckpointReport | None:
        """After the last step."""
        return await self._capture("end") if self._at_end and self._pending else None

    async def _capture(self, moment: Literal["baseline", "step", "end"]) -> CheckpointReport:
        found = await attempted(self._captured())
        if isinstance(found, CaptureReport):
            self._pending = 0
            report = CheckpointReport(moment, "saved" if found.created else "unchanged", self.step, found.checkpoint.id)
        else:
            outcome: Literal["skipped", "failed"] = "skipped" if isinstance(found, CheckpointWriterConflictError) else "failed"
            word, message, _ = told(found)
            report = CheckpointReport(moment, outcome, self.step, None, word, printable(message))
        self.reports = [*self.reports[1 - MAX_REPORTS :], report]
        await tell(self._on_report, report)
        return report

    async def _captured(self) -> CaptureReport:
        if self._earlier is None:
            steps = (checkpoint.step for checkpoint in await self._repo.list(self._thread_id))
            self._earlier = max((step for step in steps if step is not None), default=0)
        options = {"skip_unchanged": True, "step": self.step, **self._options, "thread_id": self._thread_id}
        return await self._repo.capture_with_report(self._sandbox, **options)
