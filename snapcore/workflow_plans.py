"""Where a run of a workflow begins: the newest checkpoint that the declared steps lead to."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .engine import Engine
from .errors import Code, SnapshotError
from .ledger import Event, Operation, SpecRecord
from .model import Checkpoint
from .redaction import Redactor
from .replay import Ledgers, Line
from .sandboxes import SandboxProvider, SandboxSpec
from .session_options import SessionOptions
from .session_spec import is_of, spec_record
from .trails import operation_key

__all__ = ["Declared", "Plan", "make_plan"]


class Declared(Protocol):
    """A step that is declared."""

    def operation(self, redactor: Redactor, root: str) -> Operation:
        """What tells it from other steps."""
        ...

    def accepts(self, exit_code: int | None) -> bool:
        """Whether the step went well when it ended so."""
        ...


@dataclass(frozen=True, slots=True)
class Plan:
    """A run's beginning: the checkpoint, None for from scratch; how many steps it has; why. `known` are the ids of the
    checkpoints that there are, `again` says that the thread was worked on before."""

    checkpoint: Checkpoint | None
    covered: int
    reason: str
    known: frozenset[str]
    again: bool


async def make_plan(
    engine: Engine, thread_id: str, steps: Sequence[Declared], provider: SandboxProvider, options: SessionOptions
) -> Plan:
    """The newest checkpoint of the thread whose operations are the first of the steps, each of which went well, in a sandbox that
    was made as it is declared now."""
    kept = await engine.checkpoints.checkpoints(thread_id)
    known = frozenset(checkpoint.id for checkpoint in kept)
    ledgers = Ledgers(engine.checkpoints)
    again = bool(kept) or bool(len(await ledgers.trail(thread_id)))
    changed = ""  # why the newest checkpoints are of no use
    for checkpoint in reversed(kept):
        try:
            line = await ledgers.line(checkpoint)
        except SnapshotError as error:
            if error.code != Code.MISSING_CHECKPOINT:
                raise
            changed = changed or "what led to the newest checkpoint was deleted"
            continue
        if line.sandbox is not None and not _same_sandbox(line.sandbox, provider, options):
            changed = changed or "the sandbox was declared otherwise"
            continue
        covered, why = await _covered(ledgers, line, steps, options)
        if not why:
            return Plan(checkpoint, covered, changed or _told(covered, len(steps)), known, again)
        changed = changed or why
    return Plan(None, 0, changed or "the thread has no checkpoint", known, again)


def _told(covered: int, steps: int) -> str:
    return f"{covered} of {steps} steps are done and unchanged"


def _same_sandbox(made: Event, provider: SandboxProvider, options: SessionOptions) -> bool:
    """Whether a sandbox was made as it is declared now, as far as that decides what a step does there."""
    before = made.spec or SpecRecord()
    now = spec_record(options.spec or SandboxSpec(), options)
    return is_of(made, provider) and _essence(before) == _essence(now)


def _essence(spec: SpecRecord) -> tuple[object, ...]:
    return spec.image, spec.user, spec.workspace_root, spec.environment, spec.options, spec.roots


async def _covered(ledgers: Ledgers, line: Line, steps: Sequence[Declared], options: SessionOptions) -> tuple[int, str]:
    """How many of the steps a line has, and why it is of no use, if it is. Checkpoints on the line may be passed over, as in a
    replay."""
    binding = line.sandbox.binding if line.sandbox is not None else None
    root = binding.workspace_root if binding is not None else (options.spec or SandboxSpec()).workspace_root
    covered = 0
    for place in range(len(line)):
        step = steps[covered] if covered < len(steps) else None
        if step is None or line.key(place) != operation_key(step.operation(options.redactor, root)):
            if line.is_checkpoint(place):
                continue
            return covered, f"step {covered + 1} is not the one that was run" if step is not None else "steps were removed"
        if not line.is_checkpoint(place) and not step.accepts((await ledgers.event(line.point_of(place))).exit_code):
            return covered, f"step {covered + 1} failed"
        covered += 1
    return covered, ""
