"""The jobs of a settings file, checked before anything runs: a mistake names the file, the job and the key."""

import dataclasses
import os
import re
from dataclasses import dataclass
from typing import Final
from zoneinfo import ZoneInfo

import msgspec

from snapcore.durations import parse_duration
from snapcore.errors import Code, SnapcoreError, SnapshotError, printable
from snapcore.forgetting import KeepRules
from snapcore.model import validate_thread_id
from snapcore.registry import split_scheme
from snapcore.selection import FilePolicy
from snapcore.settings import JobSettings, KeepSettings, SecretSource, Settings
from snapcore.settings_files import Loaded, check_sandbox_address

from .schedule import Every, Schedule, parse_cron, parse_every, parse_zone
from .selectors import Selector, parse_selector

__all__ = ["GC", "Collection", "Job", "Plan", "make_plan", "sandbox_name"]

GC: Final = "gc"
"""What the runs of gc are recorded as; no job may have that name."""

MAX_PARALLEL: Final = 256
_FIELD: Final = re.compile(r"\{([^{}]*)\}|[{}]")


@dataclass(frozen=True, slots=True)
class Job:
    """One job. `sandbox` is an address whose folder is absolute; `selector` stands in its place for many. Times are seconds."""

    name: str
    sandbox: str | None
    selector: Selector | None
    workspace: str | None
    thread: str
    schedule: Schedule
    jitter: float
    timeout: float | None
    label: str | None
    policy: FilePolicy
    secrets: dict[str, SecretSource]
    keep: KeepRules | None

    def thread_id(self, name: str) -> str:
        """The thread of the sandbox with that name."""
        values = {"name": name, "job": self.name}
        return _FIELD.sub(lambda found: values[found[1]], self.thread)


@dataclass(frozen=True, slots=True)
class Collection:
    """When gc runs, if ever, and the grace that it gives in seconds."""

    schedule: Schedule | None
    grace: float


@dataclass(frozen=True, slots=True)
class Plan:
    """All that the scheduler does, and where it keeps checkpoints. `listen` is a host and a port; `may_run` says whether commands
    of the file may be started; `stop_timeout` is seconds."""

    path: str
    folder: str
    may_run: bool
    jobs: dict[str, Job]
    gc: Collection
    parallel: int
    health_file: str | None
    listen: tuple[str, int] | None
    stop_timeout: float
    repo: str = ""
    database: str | None = None


def make_plan(loaded: Loaded, only: tuple[str, ...] = (), *, repo: str = "", database: str | None = None) -> Plan:
    """The jobs of a file, or those named in `only` (`gc` among them). Raises `SnapshotError` `INVALID_REQUEST`."""
    return dataclasses.replace(_Reader(loaded).plan(only), repo=repo, database=database)


class _Reader:
    """Reads one file."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._path = loaded.path
        self._folder = loaded.folder
        self._named = loaded.named
        self._settings: Settings = loaded.settings

    def plan(self, only: tuple[str, ...]) -> Plan:
        settings, cron = self._settings, self._settings.cron
        unknown = sorted(set(only) - set(settings.jobs) - {GC})
        if unknown:
            raise SnapshotError(
                f"{self._file}: there is no job '{printable(unknown[0])}'.",
                code=Code.INVALID_REQUEST,
                hint=f"It has: {', '.join(map(printable, settings.jobs)) or 'none'}.",
            )
        if not 1 <= cron.parallel <= MAX_PARALLEL:
            raise self._wrong("[cron]", "parallel", f"is a number between 1 and {MAX_PARALLEL}")
        zone = parse_zone(cron.timezone, f"{self._file}: [cron]: timezone")
        jobs = {name: self._job(name, job, zone) for name, job in settings.jobs.items()}
        if not jobs:
            raise SnapshotError(
                f"{self._file}: it has no jobs.",
                code=Code.INVALID_REQUEST,
                hint='Add a table [jobs.NAME] with sandbox = "DIR" and every = "15min".',
            )
        self._check_apart(jobs)
        gc = self._collection(zone)
        if GC in only and gc.schedule is None:
            raise self._wrong("[cron.gc]", "every", "is missing: nothing says when gc runs", 'Write every = "1d".')
        if only:
            jobs = {name: job for name, job in jobs.items() if name in only}
            gc = gc if GC in only else Collection(None, gc.grace)
        return Plan(
            path=self._path,
            folder=self._folder,
            may_run=self._named,
            jobs=jobs,
            gc=gc,
            parallel=cron.parallel,
            health_file=None if cron.health_file is None else self._place(cron.health_file),
            listen=None if cron.listen is None else self._listen(cron.listen),
            stop_timeout=parse_duration(cron.stop_timeout, f"{self._file}: [cron]: stop-timeout"),
        )

    @property
    def _file(self) -> str:
        return printable(self._path)

    def _wrong(self, table: str, key: str, what: str, hint: str = "") -> SnapshotError:
        return SnapshotError(f"{self._file}: {table}: {key} {what}.", code=Code.INVALID_REQUEST, hint=hint)

    def _collection(self, zone: ZoneInfo) -> Collection:
        gc = self._settings.cron.gc
        table = f"{self._file}: [cron.gc]"
        grace = parse_duration(gc.grace, f"{table}: grace", zero=True)
        if gc.every is not None and gc.cron is not None:
            raise self._wrong("[cron.gc]", "every", "and cron exclude each other")
        if gc.every is not None:
            return Collection(parse_every(gc.every, f"{table}: every"), grace)
        return Collection(None if gc.cron is None else parse_cron(gc.cron, zone, f"{table}: cron"), grace)

    def _job(self, name: str, job: JobSettings, zone: ZoneInfo) -> Job:
        table = f"[jobs.{printable(name)}]"
        if name == GC:
            raise self._wrong(table, GC, "is what gc is recorded as: no job may have that name")
        try:
            validate_thread_id(name)
        except SnapshotError:
            raise self._wrong(table, "the name", "is empty, too long, or holds control characters") from None
        if (job.sandbox is None) == (job.select is None):
            raise self._wrong(table, "sandbox", "or select has to be there, and just one of them")
        schedule = self._schedule(table, job, zone)
        jitter = 0.0 if job.jitter is None else parse_duration(job.jitter, f"{self._file}: {table}: jitter", zero=True)
        if isinstance(schedule, Every) and jitter >= schedule.seconds:
            raise self._wrong(table, "jitter", "has to be shorter than every")
        self._check_thread(table, name, job)
        made = Job(
            name=name,
            sandbox=None if job.sandbox is None else self._address(table, job.sandbox),
            selector=None if job.select is None else parse_selector(job.select, self._folder, f"{self._file}: {table}: select"),
            workspace=job.workspace,
            thread=job.thread,
            schedule=schedule,
            jitter=jitter,
            timeout=None if job.timeout is None else parse_duration(job.timeout, f"{self._file}: {table}: timeout"),
            label=job.label,
            policy=self._policy(table, job),
            secrets={**self._settings.secrets, **job.secrets},
            keep=None if job.keep is None else self._keep(table, job.keep, job.label),
        )
        if made.secrets and not self._named and any(source.command is not None for source in made.secrets.values()):
            raise self._wrong(
                table, "secrets", "start a command, and the file was only found", f"Name it: snapcore cron run {self._file}"
            )
        return made

    def _schedule(self, table: str, job: JobSettings, zone: ZoneInfo) -> Schedule:
        if (job.every is None) == (job.cron is None):
            raise self._wrong(table, "every", "or cron has to be there, and just one of them")
        if job.timezone is not None:
            zone = parse_zone(job.timezone, f"{self._file}: {table}: timezone")
        if job.cron is not None:
            return parse_cron(job.cron, zone, f"{self._file}: {table}: cron")
        if job.timezone is not None:
            raise self._wrong(table, "timezone", "means nothing beside every")
        return parse_every(job.every or "", f"{self._file}: {table}: every")

    def _check_thread(self, table: str, name: str, job: JobSettings) -> None:
        for found in _FIELD.finditer(job.thread):
            if found[1] not in ("name", "job"):
                raise self._wrong(table, "thread", f"holds '{printable(found[0])}'", "There are {name} and {job}.")
        if job.select is not None and "{name}" not in job.thread:
            raise self._wrong(
                table,
                "thread",
                "has to tell the sandboxes of select apart",
                'Write {name} into it: thread = "{job}-{name}".',
            )
        try:
            validate_thread_id(_FIELD.sub(name, job.thread))
        except SnapshotError as error:
            raise self._wrong(table, "thread", f"makes no thread id: {error.message.rstrip('.')}") from None

    def _policy(self, table: str, job: JobSettings) -> FilePolicy:
        given = self._settings.policy if job.policy is None else job.policy
        try:
            return given.policy()
        except SnapcoreError as error:
            raise self._wrong(table, "policy", f"makes no sense: {error.message.rstrip('.')}", error.hint) from None

    def _keep(self, table: str, keep: KeepSettings, label: str | None) -> KeepRules:
        try:
            rules = KeepRules(**msgspec.structs.asdict(keep))
        except SnapcoreError as error:
            raise self._wrong(table, "keep", f"makes no sense: {error.message.rstrip('.')}", error.hint) from None
        if label is not None and keep.labeled:
            raise self._wrong(
                table,
                "keep",
                "would keep every checkpoint: what has a label stays, and label gives them one",
                "Write labeled = false there, or leave out label.",
            )
        return rules

    def _address(self, table: str, address: str) -> str:
        """The address of a sandbox; a folder is one of the file's folder."""
        check_sandbox_address(self._loaded, address, f"{table} sandbox")
        if address.startswith("exec:"):
            return address
        if not address or "\0" in address:
            raise self._wrong(table, "sandbox", "is empty or no valid path")
        placed = self._loaded.address(address)
        return os.path.normpath(placed) if placed.startswith("/") else placed

    def _place(self, path: str) -> str:
        return os.path.normpath(os.path.join(self._folder, os.path.expanduser(path)))

    def _listen(self, text: str) -> tuple[str, int]:
        host, colon, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
        is_port = port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535
        if not colon or not is_port or (":" in host and "[" not in text):
            raise self._wrong(
                "[cron]", "listen", f"is '{printable(text)}', not HOST:PORT", "Such as 127.0.0.1:9464 or [::1]:9464."
            )
        return host or "127.0.0.1", int(port)

    def _check_apart(self, jobs: dict[str, Job]) -> None:
        """Refuse two sandboxes in one thread, as far as the file alone tells."""
        owners: dict[str, Job] = {}
        for job in jobs.values():
            if job.sandbox is None:
                continue
            thread = job.thread_id(sandbox_name(job.sandbox))
            other = owners.setdefault(thread, job)
            if (other.sandbox, other.workspace) != (job.sandbox, job.workspace):
                raise self._wrong(
                    f"[jobs.{printable(job.name)}]",
                    "thread",
                    f"is that of another sandbox, in job {printable(other.name)}",
                    "Each sandbox needs a thread of its own.",
                )


def sandbox_name(address: str) -> str:
    """What `{name}` stands for in the job of one sandbox: the container's name, the folder's, or the host's."""
    if address.startswith("exec:"):
        return address.rsplit(maxsplit=1)[-1].rstrip("/").rpartition("/")[2]
    scheme, rest = split_scheme(address)
    if scheme == "file":
        return os.path.basename(rest.rstrip("/"))
    return re.split(r"[/?]", rest, maxsplit=1)[0].rpartition("@")[2]
