"""Which sandboxes a job captures now, each into which thread. Two sandboxes never share one."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from snapcore.errors import Code, ProviderError, SnapcoreError, SnapshotError, printable
from snapcore.model import validate_thread_id

from .jobs import Job, sandbox_name
from .selectors import Found, list_sandboxes

__all__ = ["Refused", "Target", "Threads", "vanished"]


@dataclass(frozen=True, slots=True)
class Target:
    """One sandbox of a job, and its thread. On the way from the folder `below` to it no link is followed."""

    job: Job
    sandbox: str
    thread_id: str
    below: str | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """A sandbox that is not captured. `thread_id` is empty where its name makes none."""

    sandbox: str
    thread_id: str
    error: SnapcoreError


class Threads:
    """Who has which thread: a thread of one job is no other sandbox's as long as the job stands for its owner."""

    def __init__(self) -> None:
        self._owners: dict[str, dict[str, tuple[str, str | None]]] = {}  # thread -> job -> sandbox, workspace

    async def targets(self, job: Job) -> tuple[list[Target], list[Refused]]:
        """What the job stands for now, and what it may not capture. Raises as `list_sandboxes`."""
        if job.selector is None:
            assert job.sandbox is not None
            found: Sequence[Found] = [Found(sandbox_name(job.sandbox), job.sandbox)]
        else:
            found = await list_sandboxes(job.selector)
        return self._claim(job, found)

    def release(self, job: str) -> None:
        """The job is gone."""
        for thread_id, owners in list(self._owners.items()):
            owners.pop(job, None)
            if not owners:
                del self._owners[thread_id]

    def _claim(self, job: Job, found: Sequence[Found]) -> tuple[list[Target], list[Refused]]:
        self.release(job.name)
        refused: list[Refused] = []
        threads: dict[str, list[Found]] = defaultdict(list)
        for each in found:
            thread = job.thread_id(each.name)
            try:
                validate_thread_id(thread)
            except SnapshotError as error:
                refused.append(Refused(each.address, "", _unnamed(each, error)))
            else:
                threads[thread].append(each)
        targets: list[Target] = []
        for thread, sandboxes in threads.items():
            others = [owner for owner in self._owners.get(thread, {}).values() if owner != (sandboxes[0].address, job.workspace)]
            if len(sandboxes) > 1 or others:
                refused += [Refused(each.address, thread, _shared(thread)) for each in sandboxes]
            else:
                self._owners.setdefault(thread, {})[job.name] = (sandboxes[0].address, job.workspace)
                targets.append(Target(job, sandboxes[0].address, thread, sandboxes[0].below))
        return targets, refused


def vanished(target: Target) -> SnapcoreError:
    """The error for a sandbox that is not found any more."""
    if target.sandbox.startswith("docker:"):
        return ProviderError("The container does not run any more, or has lost its label.", code=Code.NO_SANDBOX)
    return SnapshotError("The folder is not there any more.", code=Code.MISSING_WORKSPACE)


def _unnamed(found: Found, error: SnapcoreError) -> SnapcoreError:
    return SnapshotError(
        f"The name '{printable(found.name)}' makes no thread id: {error.message}", code=Code.INVALID_ID, hint="Rename it."
    )


def _shared(thread: str) -> SnapcoreError:
    return SnapshotError(
        f"Another sandbox goes to the thread {printable(thread)}: it is not mixed with that one.",
        code=Code.INVALID_REQUEST,
        hint="Let thread tell them apart: with {name} and {job}.",
    )
