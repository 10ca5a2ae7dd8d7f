"""The scheduler: many jobs in one process, until it is told to stop."""

import asyncio
import logging
import os
import random
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from snapcore.engine import stop
from snapcore.errors import Code, SnapcoreError, SnapshotError, printable
from snapcore.runs import JobRun

from .board import Board
from .jobs import GC, Job, Plan
from .logs import Events, Scrubber
from .running import Ended, Runner
from .schedule import Every, Key, Retries, Schedule, is_missed
from .scheduling import began, entry_id, follow_clock, is_due, new_scheduler, retry_id, trigger
from .targets import Target, Threads, vanished
from .threads import end_process_after

if TYPE_CHECKING:
    from snapcore.repository import Repository

__all__ = ["Daemon"]

OPEN_FIRST: Final = 1.0  # seconds until a repository that could not be opened is tried again
OPEN_LONGEST: Final = 60.0
HEARTBEAT: Final = Every(30.0)  # the health file is rewritten at least so often
_HOPELESS: Final = (Code.INVALID_REQUEST, Code.UNKNOWN_SCHEME, Code.MISSING_EXTRA)  # of a repository's address

_SIGNAL_CODE: Final = 128  # of a process that a signal ended, and its number; as a shell tells it

OpenRepository = Callable[[], "AbstractAsyncContextManager[Repository]"]


@dataclass(eq=False, slots=True)
class _Turn:
    """Work of a job in a thread that runs, or waits for its turn."""

    task: asyncio.Task[None]
    begun: bool = False


class Daemon:
    """Runs a plan. `load` reads it again on SIGHUP; `open_repository` opens its repository.

    Each job has one entry in the scheduler, which looks up its sandboxes and starts a capture of each; a sandbox whose capture
    still runs is left out. A failed or locked run that may go better soon has an entry of its own for the next try.
    """

    def __init__(
        self,
        plan: Plan,
        load: Callable[[], Plan],
        open_repository: OpenRepository,
        events: Events,
        scrubber: Scrubber,
        *,
        chance: random.Random | None = None,
    ) -> None:
        self._plan = plan
        self._load = load
        self._open_repository = open_repository
        self._events = events
        self._scrubber = scrubber
        self._chance = chance or random.SystemRandom()
        self._scheduler = new_scheduler()
        self._board = Board(events, scrubber, self._next_run)
        self._threads = Threads()
        self._slots = asyncio.Semaphore(plan.parallel)
        self._runner: Runner | None = None
        self._turns: dict[Key, _Turn] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._present: dict[str, dict[str, Target]] = {}  # job -> thread -> what was there when it was looked up last
        self._retries = Retries(self._chance)
        self._history: dict[Key, list[JobRun]] = {}  # the newest run that went well, and the newest of all
        self._reloading = asyncio.Lock()
        self._stopping: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def run(self) -> int:
        """Work until SIGTERM or SIGINT, whose number is returned. Captures that run then are cancelled, and leave nothing behind.
        A second signal ends the process at once, and so does the end of the plan's `stop_timeout`.

        Raises `SnapshotError` `INVALID_REQUEST` when the address to listen at cannot be used.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop, number)
        loop.add_signal_handler(signal.SIGHUP, self._hang_up, sys.stderr.isatty())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGHUP,))  # one that came since the file was read counts
        async with self._reloading:
            await self._board.listen(self._plan.listen)
        work = asyncio.create_task(self._work())
        try:
            either: list[asyncio.Future[Any]] = [work, self._stopping]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not self._stopping.done():
                await work  # it ends by itself only when something is wrong with it
            return self._stopping.result()
        finally:
            running = self._running()
            self._events.tell("stopping", f"Runs that are given up: {running}." if running else "")
            self._board.stopping()
            await stop([work])
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
            await self._board.close()
            self._events.tell("stopped")

    def _stop(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(each)
            # the first process of a container is not ended by a signal that it does not handle
            signal.signal(each, _end_at_once if os.getpid() == 1 else signal.SIG_DFL)
        end_process_after(self._plan.stop_timeout, _SIGNAL_CODE + number, self._tell_cut_off)
        self._stopping.set_result(number)

    def _tell_cut_off(self) -> None:
        message = f"What does not answer is waited for no longer. Runs that are cut off: {self._running()}."
        self._events.tell("cut-off", message, level=logging.WARNING)

    def _running(self) -> int:
        return sum(turn.begun for turn in list(self._turns.values()))

    def _hang_up(self, from_terminal: bool) -> None:
        """SIGHUP asks for a reload; or tells that the terminal is gone from which this was started, and ends it."""
        if self._stopping.done():
            return
        if from_terminal and not sys.stderr.isatty():
            self._stop(signal.SIGTERM)
        else:
            self._spawn(self._reload())

    async def _work(self) -> None:
        jobs = len(self._plan.jobs)
        self._events.tell("started", f"{jobs} {'job' if jobs == 1 else 'jobs'} of {printable(self._plan.path)}")
        self._board.plan(self._plan)
        async with AsyncExitStack() as stack:
            repo = await self._opened(stack)
            folder, may_run = self._plan.folder, self._plan.may_run
            self._runner = Runner(repo, self._board, self._scrubber, folder=folder, may_run=may_run)
            await self._read_history(repo)
            self._scheduler.start()
            self._scheduler.add_job(self._beat, trigger(HEARTBEAT, datetime.now(UTC)), id="heartbeat")
            try:
                self._start_gc()
                for job in self._plan.jobs.values():
                    self._start_job(job)
                await follow_clock(self._scheduler, self._set_back)  # until it is cancelled
            finally:
                self._scheduler.shutdown(wait=False)
                await stop([*self._tasks])

    async def _opened(self, stack: AsyncExitStack) -> "Repository":
        """The repository, as soon as it can be opened. Raises `SnapcoreError` for an address that makes no sense."""
        pause = OPEN_FIRST
        while True:
            try:
                repo = await stack.enter_async_context(self._open_repository())
            except SnapcoreError as error:
                if error.code in _HOPELESS:
                    raise
                self._board.repository(error)
                message = f"{error} Next try in {pause:g} s."
                self._events.tell("repository-unavailable", message, level=logging.ERROR, code=str(error.code))
            else:
                self._board.repository(None)
                return repo
            await asyncio.sleep(pause)
            pause = min(pause * 2, OPEN_LONGEST)

    async def _read_history(self, repo: "Repository") -> None:
        """What the jobs did before this process began."""
        try:
            runs = await repo.checkpoints.last_runs()
        except SnapcoreError as error:
            self._events.tell("history-unknown", str(error), level=logging.WARNING, code=str(error.code))
            return
        for run in runs:
            self._history.setdefault((run.job, run.thread_id), []).append(run)

    # ---- schedules

    def _start_job(self, job: Job) -> None:
        """Put a job into the scheduler, and catch up on what it missed."""
        runs = [run for (name, _), found in self._history.items() if name == job.name for run in found]
        self._schedule(job.name, job.schedule, runs, self._fire)
        self._begin((job.name, ""), self._capture_all(job, only_due=True))

    def _start_gc(self) -> None:
        gc, runs = self._plan.gc, self._history.get((GC, ""), [])
        if gc.schedule is None:
            return
        for run in runs:
            self._board.seed(run)
        self._schedule(GC, gc.schedule, runs, self._fire)
        if is_due(gc.schedule, runs):
            self._begin((GC, ""), self._collect())

    def _schedule(self, name: str, schedule: Schedule, runs: list[JobRun], work: Callable[[str], Any]) -> None:
        """Begin `work` by a schedule; an interval goes on from the last run that went well."""
        now = datetime.now(UTC)
        good = [began(run) for run in runs if run.good]
        last = max(good) if good and not is_missed(schedule, max(good), now) else now
        self._scheduler.add_job(work, trigger(schedule, last), args=(name,), id=entry_id(name), replace_existing=True)

    async def _fire(self, name: str) -> None:
        """A job's time has come."""
        if name == GC:
            self._begin((GC, ""), self._collect())
        elif name in self._plan.jobs:
            self._begin((name, ""), self._capture_all(self._plan.jobs[name]))

    async def _try_again(self, name: str, thread_id: str) -> None:
        """What failed may go better now."""
        target = self._present.get(name, {}).get(thread_id)
        if target is None:
            await self._fire(name)
        else:
            self._launch(target)

    def _set_back(self, seconds: float) -> None:
        self._events.tell("clock-set-back", f"The clock was set back by {seconds:.0f} s.", level=logging.WARNING)

    async def _beat(self) -> None:
        self._board.publish()

    def _after(self, key: Key, schedule: Schedule, ended: Ended) -> None:
        """Try again soon where that may help, and the schedule would come later."""
        self._remember(key, ended.run)
        if not ended.again:
            self._settle(key)
            return
        now = datetime.now(UTC)
        at = self._retries.again(key, schedule, now)
        regular = self._next_run(key[0], "")
        if regular is not None and at < regular:
            self._scheduler.add_job(self._try_again, "date", run_date=at, args=key, id=retry_id(key), replace_existing=True)
            self._events.tell("retry", f"Next try in {(at - now).total_seconds():.1f} s.", job=key[0], thread=key[1])

    def _settle(self, key: Key) -> None:
        """Nothing is to be tried again."""
        self._retries.settle(key)
        self._unschedule(retry_id(key))

    def _unschedule(self, entry: str) -> None:
        if self._scheduler.get_job(entry) is not None:
            self._scheduler.remove_job(entry)

    def _next_run(self, job: str, thread_id: str) -> datetime | None:
        entries = [self._scheduler.get_job(entry) for entry in (entry_id(job), retry_id((job, thread_id)))]
        # what is put into a scheduler that does not run has no time
        return min((entry.next_run_time for entry in entries if hasattr(entry, "next_run_time")), default=None)

    def _remember(self, key: Key, run: JobRun) -> None:
        """A job that is changed goes on from its last runs."""
        good = [each for each in self._history.get(key, []) if each.good][-1:]
        self._history[key] = [run] if run.good else [*good, run]

    # ---- runs

    async def _capture_all(self, job: Job, *, only_due: bool = False) -> None:
        """Start a capture of each sandbox of a job; with `only_due`, of those that were missed while no scheduler ran."""
        for target in await self._targets(job):
            runs = self._history.get((job.name, target.thread_id), [])
            if only_due:
                for run in runs:
                    self._board.seed(run)
            if not only_due or is_due(job.schedule, runs):
                self._launch(target)

    async def _targets(self, job: Job) -> list[Target]:
        """The sandboxes of a job now. What cannot be captured, and what is gone since they were looked up last, is reported."""
        assert self._runner is not None
        try:
            targets, refused = await self._threads.targets(job)
        except SnapcoreError as error:
            self._after((job.name, ""), job.schedule, await self._runner.fail(job.name, error))
            return []
        self._settle((job.name, ""))
        for each in refused:
            await self._runner.refuse(job, each)
        present = {target.thread_id: target for target in targets}
        refused_threads = {each.thread_id for each in refused}
        for thread_id, gone in self._present.get(job.name, {}).items():
            if (job.name, thread_id) in self._turns:
                present.setdefault(thread_id, gone)  # its capture tells first
            elif thread_id not in present and thread_id not in refused_threads:
                await self._vanished(gone)
        self._present[job.name] = present
        self._board.retain(job.name, refused_threads | set(present))
        if not targets and not refused:
            self._events.tell("nothing-selected", "The selector matches nothing.", job=job.name)
        return targets

    async def _vanished(self, target: Target) -> None:
        """A sandbox that a selector does not find any more fails once, and is not asked after again."""
        assert self._runner is not None
        key = (target.job.name, target.thread_id)
        self._settle(key)
        await self._runner.fail(target.job.name, vanished(target), sandbox=target.sandbox, thread_id=target.thread_id)
        self._history.pop(key, None)

    def _launch(self, target: Target) -> None:
        """Start a capture of a sandbox, unless one goes on."""
        key = (target.job.name, target.thread_id)
        if not self._begin(key, self._take_turn(target, key)):
            self._board.skipped(target.job.name, target.sandbox, target.thread_id)

    async def _take_turn(self, target: Target, key: Key) -> None:
        assert self._runner is not None
        if target.job.jitter:
            await asyncio.sleep(self._chance.uniform(0, target.job.jitter))
        async with self._slots:
            self._turns[key].begun = True
            ended = await self._runner.capture(target)
        if target.job.name in self._plan.jobs:
            self._after(key, target.job.schedule, ended)
        else:
            self._board.retain(target.job.name, set())

    async def _collect(self) -> None:
        gc = self._plan.gc
        if self._runner is not None and gc.schedule is not None:
            self._turns[GC, ""].begun = True
            self._after((GC, ""), gc.schedule, await self._runner.collect(gc))

    # ---- reloading

    async def _reload(self) -> None:
        """Take over what has changed in the file; a file that is not valid changes nothing."""
        async with self._reloading:
            await self._reload_alone()

    async def _reload_alone(self) -> None:
        old = self._plan
        try:
            new = self._load()
            if (new.repo, new.database) != (old.repo, old.database):
                raise SnapshotError(
                    "repo and database cannot change while the scheduler runs.", code=Code.INVALID_REQUEST, hint="Restart it."
                )
            if new.listen != old.listen:
                await self._board.listen(new.listen)
        except SnapcoreError as error:
            self._board.configuration(error)
            self._events.tell("reload-failed", f"{error} The old jobs go on.", level=logging.ERROR, code=str(error.code))
            return
        self._board.configuration(None)
        self._apply(old, new)

    def _apply(self, old: Plan, new: Plan) -> None:
        self._plan = new
        self._board.plan(new)
        if new.parallel != old.parallel:
            self._slots = asyncio.Semaphore(new.parallel)  # what runs holds a place among the old ones
        gone, added = set(old.jobs) - set(new.jobs), set(new.jobs) - set(old.jobs)
        changed = {name for name in set(old.jobs) & set(new.jobs) if old.jobs[name] != new.jobs[name]}
        self._events.tell("reloaded", f"Jobs: {len(added)} new, {len(changed)} changed, {len(gone)} gone.")
        if self._runner is None:
            return  # all of them start once there is a repository
        for name in sorted(gone | changed):
            self._stop_job(name)
        for name in sorted(added | changed):
            self._start_job(new.jobs[name])
        if new.gc != old.gc:
            self._unschedule(entry_id(GC))
            self._start_gc()

    def _stop_job(self, name: str) -> None:
        """Take a job out of the scheduler. A capture that runs goes on to its end."""
        self._unschedule(entry_id(name))
        for key in self._retries.of_job(name):
            self._settle(key)
        for key, turn in list(self._turns.items()):
            if key[0] == name and not turn.begun:
                del self._turns[key]
                turn.task.cancel()
        self._threads.release(name)
        self._present.pop(name, None)
        self._board.retain(name, set())

    # ---- tasks

    def _begin(self, key: Key, work: Coroutine[Any, Any, None]) -> bool:
        """Begin work of a job in a thread, unless such work goes on."""
        if key in self._turns:
            work.close()
            return False
        turn = self._turns[key] = _Turn(self._spawn(work))

        def over(_: asyncio.Task[None]) -> None:
            if self._turns.get(key) is turn:
                del self._turns[key]

        turn.task.add_done_callback(over)
        return True

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._over)
        return task

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # What is foreseen does not come here. The schedule goes on.
            self._events.tell("error", f"A run ended with {type(error).__name__}.", level=logging.ERROR)


def _end_at_once(number: int, _: object) -> None:
    os._exit(_SIGNAL_CODE + number)
