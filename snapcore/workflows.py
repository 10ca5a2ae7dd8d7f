"""Workflows: steps that are declared once, and run from where the run before came to."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal, Unpack

import msgspec

from .errors import Code, SnapcoreError, SnapshotError, StepFailedError
from .ledger import Operation
from .model import Checkpoint, validate_text
from .operations import checkpoint_operation, exec_operation, write_operation
from .redaction import Redactor
from .replay import describe
from .sandboxes import Binding, SandboxProvider, SandboxSpec, argument_list, check_environment
from .session_opening import create_session, resume_session
from .session_options import SessionArguments, SessionOptions, session_options
from .workflow_plans import Plan, make_plan

if TYPE_CHECKING:
    from .outputs import Writable
    from .sandboxes import OutputCallback
    from .session import Session
    from .sessions import Sessions

__all__ = ["StepCallback", "StepResult", "Workflow", "WorkflowResult", "workflow"]

_OWN: Final = frozenset(("replay", "rerun_uncertain"))  # session options that a workflow decides itself


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """A step of a run: its number, from 1, and what became of it. `about` tells the step, without secrets. A step that was
    `replayed` was done by an earlier run. `exit_code` and outputs are those of a command, `checkpoint` that of a checkpoint."""

    number: int
    kind: Literal["exec", "write", "checkpoint"]
    about: str
    state: Literal["started", "done", "replayed", "failed"]
    exit_code: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    truncated: bool = False
    checkpoint: Checkpoint | None = None


StepCallback = Callable[[StepResult], None]
"""Called with each step as it starts, and with what became of it."""


class WorkflowResult(msgspec.Struct, frozen=True, kw_only=True):
    """A run that came to its end. It went on from `started_from`, with the first `covered` steps done; from scratch, in a new
    sandbox, when that is None; `reason` says why. `binding` finds the sandbox, which lives on unless it was to be destroyed."""

    thread_id: str
    binding: Binding
    started_from: Checkpoint | None
    covered: int
    reason: str
    steps: tuple[StepResult, ...]
    warnings: tuple[str, ...] = ()
    failures: tuple[SnapcoreError, ...] = ()  # of automatic captures


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exec:
    command: str | tuple[str, ...] = field(repr=False)
    stdin: bytes = field(repr=False)
    cwd: str | None
    environment: Mapping[str, str] = field(repr=False)
    user: str | None
    timeout: float | None
    affects: bool
    outside: bool | None
    at_most_once: bool
    allow: frozenset[int]

    def operation(self, redactor: Redactor, root: str) -> Operation:
        return exec_operation(
            redactor,
            self.command,
            root=root,
            stdin=self.stdin,
            cwd=self.cwd,
            environment=self.environment,
            user=self.user,
        )

    def accepts(self, exit_code: int | None) -> bool:
        return exit_code in self.allow

    async def run(self, run: "_Run", number: int, about: str) -> StepResult:
        outcome = await run.session.exec(
            self.command,
            stdin=self.stdin,
            cwd=self.cwd,
            environment=self.environment,
            user=self.user,
            timeout=self.timeout,
            on_output=run.on_output,
            affects=self.affects,
            outside=self.outside,
            at_most_once=self.at_most_once,
            rerun=number in run.rerun,
        )
        good: Literal["done", "replayed"] = "replayed" if outcome.replayed else "done"
        return StepResult(
            number=number,
            kind="exec",
            about=about,
            state=good if self.accepts(outcome.exit_code) else "failed",
            exit_code=outcome.exit_code,
            stdout=outcome.stdout,
            stderr=outcome.stderr,
            truncated=outcome.truncated,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Write:
    path: str
    data: bytes = field(repr=False)

    def operation(self, redactor: Redactor, root: str) -> Operation:
        return write_operation(redactor, self.path, self.data, root=root)

    def accepts(self, exit_code: int | None) -> bool:
        return True

    async def run(self, run: "_Run", number: int, about: str) -> StepResult:
        await run.session.write_file(self.path, self.data)
        return StepResult(number=number, kind="write", about=about, state="replayed" if number <= run.plan.covered else "done")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checkpoint:
    label: str
    native: bool

    def operation(self, redactor: Redactor, root: str) -> Operation:
        return checkpoint_operation(redactor, self.label)

    def accepts(self, exit_code: int | None) -> bool:
        return True

    async def run(self, run: "_Run", number: int, about: str) -> StepResult:
        made = await run.session.checkpoint(self.label, native=self.native)
        state: Literal["done", "replayed"] = "replayed" if made.id in run.plan.known else "done"
        return StepResult(number=number, kind="checkpoint", about=about, state=state, checkpoint=made)


_Step = _Exec | _Write | _Checkpoint


@dataclass(frozen=True, slots=True)
class _Run:
    """One run of a workflow."""

    session: "Session"
    plan: Plan
    redactor: Redactor
    on_output: "OutputCallback | Writable | None"
    on_step: StepCallback | None
    rerun: frozenset[int]

    async def step(self, step: _Step, number: int) -> StepResult:
        about = describe(step.operation(self.redactor, self.session.binding.workspace_root))
        self._tell(StepResult(number=number, kind=_kind(step), about=about, state="started"))
        try:
            result = await step.run(self, number, about)
        except SnapcoreError as error:
            error.add_note(f"In step {number} of the workflow: {about}")
            raise
        self._tell(result)
        if result.state == "failed":
            raise StepFailedError(
                f"Step {number} ended with exit code {result.exit_code}: {about}.",
                step=number,
                exit_code=result.exit_code or 0,
                stderr=result.stderr,
                hint="The next run goes on from the newest checkpoint whose steps are unchanged.",
            )
        return result

    def _tell(self, result: StepResult) -> None:
        if self.on_step is not None:
            self.on_step(result)


def _kind(step: _Step) -> Literal["exec", "write", "checkpoint"]:
    return "exec" if isinstance(step, _Exec) else "write" if isinstance(step, _Write) else "checkpoint"


@dataclass(frozen=True, slots=True)
class Workflow:
    """A sandbox and the steps to be taken in it, as declared by `workflow`. Each method returns another workflow with one thing
    more; none changes the one that it is called on."""

    thread_id: str = "workflow"
    _provider: SandboxProvider | None = field(default=None, repr=False)
    _spec: SandboxSpec = field(default_factory=SandboxSpec)
    _options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    _steps: tuple[_Step, ...] = ()

    def sandbox(self, provider: SandboxProvider, **options: Unpack[SessionArguments]) -> "Workflow":
        """Where the steps are taken: a new sandbox of `provider`. `options` are those of `Repository.session`, such as `spec`,
        but for `replay` and `rerun_uncertain`."""
        given = _checked(options)
        return replace(self, _provider=provider, _spec=given.pop("spec", None) or SandboxSpec(), _options=given)

    def exec(
        self,
        command: Sequence[str] | str,
        *,
        stdin: bytes = b"",
        cwd: str | None = None,
        environment: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout: float | None = None,
        affects: bool = True,
        outside: bool | None = None,
        at_most_once: bool = False,
        allow: Collection[int] = (0,),
    ) -> "Workflow":
        """A command, as for `Session.exec`. An exit code that is not in `allow` ends the run with `StepFailedError`."""
        argument_list(command)
        check_environment(environment or {})
        return self._with(
            _Exec(
                command=command if isinstance(command, str) else tuple(command),
                stdin=stdin,
                cwd=cwd,
                environment=dict(environment or {}),
                user=user,
                timeout=timeout,
                affects=affects,
                outside=outside,
                at_most_once=at_most_once,
                allow=frozenset(allow),
            )
        )

    def write_file(self, path: str, data: bytes | str) -> "Workflow":
        """A file, as for `Session.write_file`."""
        return self._with(_Write(path=path, data=data.encode() if isinstance(data, str) else bytes(data)))

    def checkpoint(self, label: str, *, native: bool = False) -> "Workflow":
        """A checkpoint, as for `Session.checkpoint`: a later run goes on from there as long as the steps before are unchanged."""
        validate_text(label, "A label", code=Code.INVALID_ENTRY)
        return self._with(_Checkpoint(label=label, native=native))

    async def run(
        self,
        repository: "Sessions",
        *,
        thread_id: str | None = None,
        on_output: "OutputCallback | Writable | None" = None,
        on_step: StepCallback | None = None,
        rerun: Collection[int] = (),
        destroy: bool = False,
        **options: Unpack[SessionArguments],
    ) -> WorkflowResult:
        """Take the steps, in a thread of its own: from the newest checkpoint whose steps are unchanged and went well, in a new
        sandbox that it is restored into, or from scratch.

        `on_output` gets what commands write, as for `Session.exec`, and `on_step` each step. What was begun and is in no
        checkpoint is done again, but for steps that are `at_most_once`: those raise `ReplayDivergedError` `OPERATION_UNCERTAIN`
        unless their number is in `rerun`. `destroy` ends the sandbox with the run. `options` are more of those of `sandbox`,
        such as `secrets`.

        Raises `StepFailedError` for a command that failed, and what the steps raise.
        """
        if self._provider is None:
            raise SnapshotError(
                "The workflow has no sandbox.", code=Code.INVALID_REQUEST, hint="Declare one: workflow().sandbox(provider)."
            )
        thread = self.thread_id if thread_id is None else thread_id
        given: dict[str, Any] = {"spec": self._spec, **self._options, **_checked(options), "rerun_uncertain": True}
        chosen = session_options(**given)
        plan = await make_plan(repository._engine, thread, self._steps, self._provider, chosen)
        session = await self._begin(repository, thread, plan, chosen)
        run = _Run(session, plan, chosen.redactor, on_output, on_step, frozenset(rerun))
        try:
            results = [await run.step(step, number) for number, step in enumerate(self._steps, 1)]
        finally:
            await (session.destroy() if destroy else session.close())
        return WorkflowResult(
            thread_id=thread,
            binding=session.binding,
            started_from=plan.checkpoint,
            covered=plan.covered,
            reason=plan.reason,
            steps=tuple(results),
            warnings=tuple(session.warnings),
            failures=tuple(session.failures),
        )

    async def _begin(self, repository: "Sessions", thread_id: str, plan: Plan, options: SessionOptions) -> "Session":
        assert self._provider is not None
        repository._providers[self._provider.name] = self._provider  # for a resume that names none
        if plan.again:
            # the name is that of an earlier sandbox, which may still be there
            options = replace(options, spec=msgspec.structs.replace(options.spec or self._spec, name=None))
        if plan.checkpoint is None:
            return await create_session(repository, self._provider, thread_id, options)
        strict = replace(options, replay="strict")
        return await resume_session(repository, thread_id, None, plan.checkpoint.id, self._provider, strict)

    def _with(self, step: _Step) -> "Workflow":
        return replace(self, _steps=(*self._steps, step))


def workflow(thread_id: str = "workflow") -> Workflow:
    """An empty workflow, to be declared by its methods and run by `run`, in the thread `thread_id` unless that names another."""
    return Workflow(thread_id)


def _checked(options: Mapping[str, Any]) -> dict[str, Any]:
    if wrong := sorted(_OWN & options.keys()):
        raise SnapshotError(f"A workflow decides {wrong[0]} itself.", code=Code.INVALID_REQUEST)
    return dict(options)
