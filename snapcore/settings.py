"""`snapcore.toml`: what the command and the scheduler of checkpoints need to know, as people write it down.

The same keys stand in `[tool.snapcore]` of a `pyproject.toml`. Names have hyphens. A key that there is not is an error, so that a
slip of the pen never drops an exclusion or a secret.
"""

from typing import Annotated, Final, Literal

import msgspec

from .selection import FilePolicy

__all__ = [
    "TABLES",
    "CronSettings",
    "GcSettings",
    "JobSettings",
    "KeepSettings",
    "PolicySettings",
    "SecretSource",
    "Settings",
]


Text = Annotated[str, msgspec.Meta(min_length=1)]
"""A text that is not empty."""
Limit = Annotated[int, msgspec.Meta(ge=1)]


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="kebab"):
    """A table of the file."""


class SecretSource(_Table, frozen=True, kw_only=True):
    """Where the value of a secret comes from: just one of an environment variable, a file, or a command's stdout. One line break
    at the end of the file, or of what the command writes, is no part of it."""

    env: Text | None = None
    file: Text | None = None
    command: Text | tuple[str, ...] | None = None  # a text is split as a shell splits it; no shell runs it

    def __post_init__(self) -> None:
        if [self.env, self.file, self.command].count(None) != 2:
            raise ValueError("It takes just one of env, file and command")


class PolicySettings(_Table, frozen=True, kw_only=True):
    """Which files belong to a checkpoint: the options of `FilePolicy`. `everything` drops the default exclusions."""

    include: tuple[Text, ...] = ()
    exclude: tuple[Text, ...] = ()
    everything: bool = False
    with_git: bool = False
    keep_rebuildable: bool = False
    on_unsupported: Literal["error", "skip"] = "error"
    on_unreadable: Literal["error", "skip"] = "error"
    on_torn: Literal["error", "keep"] = "error"
    on_limit: Literal["error", "skip"] = "error"
    max_files: Limit | None = None
    max_file_bytes: Limit | None = None
    max_total_bytes: Limit | None = None
    cross_mounts: bool = False

    def policy(self) -> FilePolicy:
        """As the engine takes it. Raises `SnapshotError` `INVALID_REQUEST`."""
        return FilePolicy(
            include=self.include,
            exclude=self.exclude,
            defaults=not self.everything,
            keep_git=self.with_git,
            keep_rebuildable=self.keep_rebuildable,
            on_unsupported=self.on_unsupported,
            on_unreadable=self.on_unreadable,
            on_torn=self.on_torn,
            on_limit=self.on_limit,
            max_files=self.max_files,
            max_file_bytes=self.max_file_bytes,
            max_total_bytes=self.max_total_bytes,
            cross_mounts=self.cross_mounts,
        )


class KeepSettings(_Table, frozen=True, kw_only=True):
    """Which checkpoints stay: the rules of `forget`."""

    last: int | None = None
    hourly: int | None = None
    daily: int | None = None
    weekly: int | None = None
    monthly: int | None = None
    yearly: int | None = None
    within: str | None = None
    labels: tuple[str, ...] = ()
    labeled: bool = True


class GcSettings(_Table, frozen=True, kw_only=True):
    """When space is freed: at most one of `every` (a duration) and `cron` (an expression of five fields); never when there is
    neither."""

    every: str | None = None
    cron: str | None = None
    grace: str = "24h"


class JobSettings(_Table, frozen=True, kw_only=True):
    """One job: what to capture, when, and what stays of it.

    `sandbox` is an address; `select` is a selector, which stands for any number of sandboxes: `docker:label=KEY[=VALUE]` (the
    running containers with that label; `/FOLDER` in them is `workspace`) or `folders:PATTERN` (the folders that a glob pattern
    matches). Just one of the two. `thread` may hold `{name}` (the container's or the folder's name) and `{job}`; with a selector
    it has to tell the sandboxes apart. Just one of `every` and `cron`. `jitter` delays each run by a random time up to it.
    """

    sandbox: str | None = None
    select: str | None = None
    workspace: str | None = None
    thread: str = "{job}"
    every: str | None = None
    cron: str | None = None
    timezone: str | None = None
    jitter: str | None = None
    label: str | None = None
    timeout: str | None = None  # a run that takes longer is given up, and counts as failed
    policy: PolicySettings | None = None  # None: the one of the whole file
    secrets: dict[str, SecretSource] = {}  # besides those of the whole file
    keep: KeepSettings | None = None


class CronSettings(_Table, frozen=True, kw_only=True):
    """What holds for all jobs. `timezone` is an IANA name, of schedules that name none. `parallel` is how many captures run at
    once. `health-file` is rewritten after each run; `listen` (`HOST:PORT`) serves `/health` and `/metrics`. `stop-timeout` is how
    long a scheduler that was told to stop waits for what does not answer."""

    timezone: str = "UTC"
    parallel: int = 4
    health_file: str | None = None
    listen: str | None = None
    stop_timeout: str = "20s"
    gc: GcSettings = GcSettings()


class Settings(_Table, frozen=True, kw_only=True):
    """The whole file. Paths are relative to its folder."""

    repo: Text | None = None
    database: Text | None = None
    thread: Text | None = None
    progress: Literal["auto", "plain", "none"] | None = None
    policy: PolicySettings = PolicySettings()
    secrets: dict[str, SecretSource] = {}
    cron: CronSettings = CronSettings()
    jobs: dict[str, JobSettings] = {}


TABLES: Final[tuple[type[msgspec.Struct], ...]] = (
    Settings,
    PolicySettings,
    SecretSource,
    CronSettings,
    GcSettings,
    JobSettings,
    KeepSettings,
)
"""Every table of the file."""
