"""One run of a job in one sandbox, and one gc: what is done, and what is recorded of it."""

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from snapcore.addresses import shown_address
from snapcore.autocheckpoint import attempted
from snapcore.engine import finish
from snapcore.errors import CheckpointWriterConflictError, Code, ProviderError, SnapcoreError, SnapshotError, printable
from snapcore.forgetting import KeepRules
from snapcore.redaction import Redactor
from snapcore.runs import MAX_ADDRESS, MAX_MESSAGE, JobRun, Outcome
from snapcore.settings import SecretSource

from .jobs import GC, Collection, Job, Plan
from .logs import Events, Scrubber
from .targets import Refused, Target, Threads
from .threads import apart

if TYPE_CHECKING:
    from snapcore.capturing import CaptureReport
    from snapcore.repository import Repository

__all__ = ["Ended", "Logged", "Observer", "Runner", "run_once"]

GIVE_UP_SECONDS: Final = 5.0  # for a command that gives a secret to be killed
_MICROSECONDS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Ended:
    """A run, and whether trying again before its next time may help."""

    run: JobRun
    again: bool = False


class Observer(Protocol):
    """Who is told of runs."""

    def begun(self, target: Target) -> None:
        """A capture begins."""
        ...

    def ended(self) -> None:
        """A capture that began is over, whatever came of it."""
        ...

    def ran(self, run: JobRun) -> None:
        """What a run did. Each run is told once."""
        ...

    def recorded(self, error: SnapcoreError | None) -> None:
        """A run was kept in the repository, or why not."""
        ...


class Logged:
    """An `Observer` that only writes the log. `unrecorded` says whether the repository failed to keep a run."""

    def __init__(self, events: Events) -> None:
        self.unrecorded = False
        self._events = events

    def begun(self, target: Target) -> None:
        """See `Observer`."""
        self._events.begun(target.job.name, target.sandbox, target.thread_id)

    def ended(self) -> None:
        """See `Observer`."""

    def ran(self, run: JobRun) -> None:
        """See `Observer`."""
        self._events.ran(run)

    def recorded(self, error: SnapcoreError | None) -> None:
        """See `Observer`."""
        if error is not None:
            self.unrecorded = True
            self._events.unrecorded(error)


class Runner:
    """Runs jobs in an open repository. Nothing that goes wrong in a run is raised; it is in what is returned, recorded and
    told. `clock` gives seconds since the epoch."""

    def __init__(
        self,
        repo: "Repository",
        observer: Observer,
        scrubber: Scrubber,
        *,
        folder: str,
        may_run: bool,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._repo = repo
        self._observer = observer
        self._scrubber = scrubber
        self._folder = folder
        self._may_run = may_run
        self._clock = clock

    async def capture(self, target: Target) -> Ended:
        """Capture one sandbox, then let its retention do its work. Cancelled, it gives up what it holds, and the run is recorded
        as interrupted."""
        started = self._now()
        self._observer.begun(target)
        try:
            ended = await self._captured(target, started)
        except asyncio.CancelledError:
            await finish(self._keep(self._run(target, started, Outcome.INTERRUPTED, message="The scheduler was stopped.")))
            raise
        finally:
            self._observer.ended()
        await finish(self._keep(ended.run))
        return ended

    async def fail(self, job: str, error: SnapcoreError, *, sandbox: str = "", thread_id: str = "") -> Ended:
        """A run that failed before there was anything to capture."""
        run = self._made(job, self._now(), Outcome.FAILED, error, sandbox=sandbox, thread_id=thread_id)
        await finish(self._keep(run))
        return Ended(run, error.retryable)

    async def refuse(self, job: Job, refused: Refused) -> Ended:
        """A sandbox that the job may not capture."""
        return await self.fail(job.name, refused.error, sandbox=refused.sandbox, thread_id=refused.thread_id)

    async def collect(self, gc: Collection) -> Ended:
        """Free what nothing needs any more."""
        started = self._now()
        try:
            found = await attempted(self._repo.gc(grace=gc.grace))
        except asyncio.CancelledError:
            await finish(self._keep(self._made(GC, started, Outcome.INTERRUPTED, message="The scheduler was stopped.")))
            raise
        if not isinstance(found, SnapcoreError):
            from snapcore.collecting import Fate

            run = self._made(GC, started, Outcome.COLLECTED, message=f"{found.size(Fate.FREED)} bytes were freed.")
        elif found.code == Code.MAINTENANCE_LOST:  # another gc took over, and does the same
            run = self._made(GC, started, Outcome.INTERRUPTED, found)
        else:
            run = self._made(GC, started, Outcome.FAILED, found)
        await finish(self._keep(run))
        return Ended(run, isinstance(found, SnapcoreError) and found.retryable and run.outcome == Outcome.FAILED)

    # ---- steps

    async def _captured(self, target: Target, started: int) -> Ended:
        job = target.job
        limit = asyncio.timeout(job.timeout)
        try:
            async with limit:
                values = await self._secrets(job)
                found = values if isinstance(values, SnapcoreError) else await self._capture(target, values)
        except TimeoutError:
            if not limit.expired():
                raise
            found = ProviderError(
                f"The run did not end within {job.timeout:g} seconds.",
                code=Code.EXEC_TIMEOUT,
                hint="Give the job more time (timeout), or less to capture.",
                retryable=True,
            )
        if isinstance(found, CheckpointWriterConflictError):
            return Ended(self._run(target, started, Outcome.LOCKED, found), again=True)
        if isinstance(found, SnapcoreError):
            return Ended(self._run(target, started, Outcome.FAILED, found), again=found.retryable)
        return Ended(await self._retained(target, started, found))

    async def _secrets(self, job: Job) -> dict[str, bytes] | SnapcoreError:
        """The values of the job's secrets as they are now."""
        if not job.secrets:
            return {}
        values = await attempted(self._read(job.secrets))
        if isinstance(values, SnapcoreError):
            return values
        try:
            self._scrubber.learn(job.name, Redactor.build(values))
        except SnapshotError as error:
            return error
        return values

    async def _read(self, sources: Mapping[str, SecretSource]) -> dict[str, bytes]:
        """The values of secrets. A cancelled caller waits for no command, and leaves none behind."""
        from snapcore.secret_sources import secret_values

        given_up, giving_up = os.pipe()

        def read() -> dict[str, bytes]:
            try:
                return secret_values(sources, folder=self._folder, may_run=self._may_run, given_up=given_up)
            finally:
                os.close(given_up)

        reading = asyncio.ensure_future(apart(read))
        reading.add_done_callback(lambda done: done.cancelled() or done.exception())  # it was seen
        try:
            return await asyncio.shield(reading)
        finally:
            os.close(giving_up)
            await asyncio.wait([reading], timeout=GIVE_UP_SECONDS)

    async def _capture(self, target: Target, values: Mapping[str, bytes]) -> "CaptureReport | SnapcoreError":
        job = target.job
        return await attempted(
            self._repo.capture_with_report(
                target.sandbox if target.below is None else _without_links(target, target.below),
                thread_id=target.thread_id,
                label=job.label,
                policy=job.policy,
                secrets=values or None,
                workspace_root=job.workspace if target.below is None else None,
                skip_unchanged=True,
            )
        )

    async def _retained(self, target: Target, started: int, report: "CaptureReport") -> JobRun:
        """The run of a capture that went well, after its retention. That this fails is told; the capture stays one that went
        well."""
        forgotten, failure = 0, None
        if report.created and target.job.keep is not None:
            found = await attempted(self._repo.forget(target.thread_id, **_options(target.job.keep)))
            if not isinstance(found, SnapcoreError):
                forgotten = len(found.forgotten)
            elif not isinstance(found, CheckpointWriterConflictError):  # the next capture's retention does it
                failure = found
        run = self._run(target, started, Outcome.CAPTURED if report.created else Outcome.UNCHANGED, failure)
        texts = [*([f"Retention: {run.message}"] if failure else []), *report.warnings]
        if report.skipped:
            texts.append(f"{len(report.skipped)} paths were left out.")
        return msgspec.structs.replace(
            run,
            checkpoint_id=report.checkpoint.id,
            files_read=report.files_read,
            bytes_read=report.bytes_read,
            bytes_stored=report.bytes_stored,
            forgotten=forgotten,
            warnings=len(report.warnings) + len(report.skipped) + (failure is not None),
            message=self._scrubber.scrub(" ".join(texts))[:MAX_MESSAGE],
        )

    async def _keep(self, run: JobRun) -> None:
        """Tell of a run, and record it; that the repository cannot be written to is told, and stops nothing."""
        self._observer.ran(run)
        try:
            await self._repo.checkpoints.record_run(run)
        except SnapcoreError as error:
            self._observer.recorded(error)
        else:
            self._observer.recorded(None)

    # ---- values

    def _now(self) -> int:
        return max(0, int(self._clock() * _MICROSECONDS))

    def _address(self, sandbox: str) -> str:
        return printable(shown_address(self._scrubber.scrub(sandbox)))[:MAX_ADDRESS]

    def _told(self, error: SnapcoreError) -> str:
        """What an error says; one that names thousands of paths is cut."""
        text = self._scrubber.scrub(str(error))
        return text if len(text) <= MAX_MESSAGE else f"{text[: MAX_MESSAGE - 3]}..."

    def _run(
        self, target: Target, started: int, outcome: str, error: SnapcoreError | None = None, *, message: str = ""
    ) -> JobRun:
        return self._made(
            target.job.name, started, outcome, error, message=message, sandbox=target.sandbox, thread_id=target.thread_id
        )

    def _made(
        self,
        job: str,
        started: int,
        outcome: str,
        error: SnapcoreError | None = None,
        *,
        message: str = "",
        sandbox: str = "",
        thread_id: str = "",
    ) -> JobRun:
        return JobRun(
            id=secrets.token_hex(16),
            job=job,
            sandbox=self._address(sandbox),
            thread_id=self._scrubber.scrub(thread_id),
            started_at=started,
            ended_at=max(started, self._now()),
            outcome=outcome,
            error=None if error is None else str(error.code),
            message=message if error is None else self._told(error),
        )


def _without_links(target: Target, below: str) -> object:
    """The workspace of a folder that a selector found: who owns it may have put a link in its place since."""
    from snapcore.providers.direct import DirectWorkspace

    return DirectWorkspace(os.path.join(target.sandbox, target.job.workspace or ""), below=below)


def _options(rules: KeepRules) -> dict[str, Any]:
    """Rules as `Repository.forget` takes them."""
    return {f"keep_{name}": value for name, value in msgspec.structs.asdict(rules).items()}


async def run_once(plan: Plan, runner: Runner, events: Events, *, gc: bool = False) -> list[JobRun]:
    """Run all jobs of a plan now, once, and then gc when asked for; what each run did."""
    threads = Threads()
    runs: list[JobRun] = []
    targets: list[Target] = []
    for job in plan.jobs.values():
        try:
            found, refused = await threads.targets(job)
        except SnapcoreError as error:
            runs.append((await runner.fail(job.name, error)).run)
            continue
        if not found and not refused:
            events.tell("nothing-selected", "The selector matches nothing.", job=job.name)
        runs += [(await runner.refuse(job, each)).run for each in refused]
        targets += found
    slots = asyncio.Semaphore(plan.parallel)

    async def capture(target: Target) -> JobRun:
        async with slots:
            return (await runner.capture(target)).run

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(capture(target)) for target in targets]
    runs += [task.result() for task in tasks]
    if gc:
        runs.append((await runner.collect(plan.gc)).run)
    return runs
