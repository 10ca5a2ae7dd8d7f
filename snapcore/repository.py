"""A repository: one place where checkpoints are kept, and what users do with it.

Restoring, browsing and verifying are imported where they are used: a capture starts 30 ms earlier for it.
"""

import asyncio
import dataclasses
import functools
import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from . import history
from .capturing import CaptureReport, CaptureRequest, RootRequest, capture
from .config import RepositoryConfig
from .engine import Engine
from .errors import Code, SnapshotError, printable
from .inspecting import Inspections, Secrets
from .leases import DEFAULT_TTL
from .model import Checkpoint, ThreadInfo, validate_thread_id
from .placement import refuse_own_files
from .protocols import BlobStore, CheckpointStore, ProgressCallback
from .redaction import Redactor
from .redaction_hooks import RedactionHook, RedactionPattern
from .sandbox_roots import Roots, opened_sandbox, restore_roots, root_requests
from .selection import FilePolicy
from .sessions import Sessions
from .transfer import Transfers, tree_paths

if TYPE_CHECKING:
    from .autocheckpoint import CheckpointEvery, FailureCallback, Sleep
    from .collecting import GcReport
    from .forgetting import ForgetReport
    from .forking import ForkReport
    from .restoring import Receipt, RestoreRequest
    from .usage import Usage
    from .verification import VerifyReport

__all__ = ["Repository", "RepositoryStats", "Roots", "Secrets"]

CheckpointList = list[Checkpoint]  # the class below has a method called list
ThreadList = list[ThreadInfo]


@dataclass(frozen=True, slots=True)
class RepositoryStats:
    """What a repository holds. `logical_bytes` sums all checkpoints' files; `raw_bytes` are the distinct records before
    compression, `stored_bytes` all packs in the blob store."""

    threads: int
    checkpoints: int
    packs: int
    records: int
    logical_bytes: int
    raw_bytes: int
    stored_bytes: int


class Repository(Sessions, Transfers, Inspections):
    """Open for work. Methods may be called concurrently; writers of one thread exclude each other by its lease."""

    def __init__(self, blobs: BlobStore, checkpoints: CheckpointStore, config: RepositoryConfig) -> None:
        super().__init__()
        self._engine = Engine(blobs, checkpoints, config)

    @property
    def blobs(self) -> BlobStore:
        """Where the bytes are."""
        return self._engine.blobs

    @property
    def checkpoints(self) -> CheckpointStore:
        """Where threads, heads and leases are."""
        return self._engine.checkpoints

    @property
    def config(self) -> RepositoryConfig:
        """What the repository pins for good."""
        return self._engine.config

    async def close(self) -> None:
        """Close both stores. Idempotent."""
        try:
            await self._close_providers()
        finally:
            await self._engine.close()

    # ---- capture

    async def capture(self, sandbox: Any, *, thread_id: str, **options: Any) -> Checkpoint:
        """Capture a sandbox as the next checkpoint of a thread; the options are those of `capture_with_report`."""
        return (await self.capture_with_report(sandbox, thread_id=thread_id, **options)).checkpoint

    async def capture_with_report(
        self,
        sandbox: Any,
        *,
        thread_id: str,
        label: str | None = None,
        policy: FilePolicy | None = None,
        secrets: Secrets = None,
        hooks: Sequence[RedactionHook] = (),
        patterns: Sequence[RedactionPattern] = (),
        allow_short_secrets: bool = False,
        conversation: Any = None,
        artifacts: Mapping[str, bytes] | None = None,
        workspace_root: str | None = None,
        roots: Roots | None = None,
        run_id: str | None = None,
        step: int | None = None,
        skip_unchanged: bool = False,
        wait: float | None = None,
        on_progress: ProgressCallback | None = None,
        reread: bool = False,
        idempotency_key: str | None = None,
        checkpoint_id: str | None = None,
        allow_any_root: bool = False,
        lease_ttl: float = DEFAULT_TTL,
    ) -> CaptureReport:
        """Capture a sandbox (an address or a handle), and say what that took.

        `label` makes the checkpoint a named one. `policy` says which files (`FilePolicy.default()`); `workspace_root` where,
        or `roots` several places by name, each a path or (path, policy). `secrets` (name to value), `hooks` and `patterns` are
        redacted before anything is hashed or stored. `conversation` (JSON) and `artifacts` (bytes by name) are saved with it.
        `skip_unchanged` returns the head when the content is the same. `wait` is how many seconds to wait for another writer.
        `reread` trusts no file time. `idempotency_key` returns the checkpoint that was made under the same key, if any.
        `checkpoint_id` is the id to use. `allow_any_root` permits `/` and home folders. `lease_ttl` is in seconds.

        Raises `SnapshotError` for what cannot be captured, `CheckpointWriterConflictError` when another writer holds the
        thread, `CheckpointWriterLostError` when the lease was lost, `RepositoryError` and `ProviderError` for the backends. The
        head has not moved then, unless the answer to the commit itself was lost.
        """
        redactor = Redactor.build(secrets, hooks=hooks, patterns=patterns, allow_short=allow_short_secrets)
        async with opened_sandbox(sandbox) as handle:
            request = CaptureRequest(
                thread_id=thread_id,
                roots=root_requests(handle, policy or FilePolicy.default(), workspace_root, roots),
                redactor=redactor,
                label=label,
                conversation=conversation,
                artifacts=artifacts or {},
                run_id=run_id,
                step=step,
                skip_unchanged=skip_unchanged,
                wait=wait,
                on_progress=on_progress,
                reread=reread,
                idempotency_key=idempotency_key,
                checkpoint_id=checkpoint_id,
                allow_any_root=allow_any_root,
                lease_ttl=lease_ttl,
            )
            refuse_own_files(self.blobs, self.checkpoints, [root.workspace for root in request.roots])
            return await capture(self._engine, request)

    def checkpoint_every(
        self,
        sandbox: Any,
        *,
        thread_id: str,
        seconds: float,
        baseline: bool = True,
        on_completion: bool = True,
        on_failure: "FailureCallback | None" = None,
        sleep: "Sleep" = asyncio.sleep,
        **options: Any,
    ) -> "CheckpointEvery":
        """Capture a sandbox every `seconds` seconds while an `async with` block runs: at its start (`baseline`), `seconds` after
        each capture, and at its end (`on_completion`; not when the block is cancelled). Nothing is made while nothing changes.

        A failed capture never ends the block. It is kept in `failures` of the object that `as` names, handed to `on_failure`
        and logged; one that may pass is tried again after 1, 2, 4, ... seconds. A capture is left out, and that reported, while
        another writer holds the thread; a sandbox that is gone ends it (`ended`). To capture by hand in the block, use
        `checkpoint(label)` of that object, which waits its turn. `options` are those of `capture_with_report`; `sleep` is what
        waits.

        Raises `SnapshotError` `INVALID_REQUEST` for a time that makes no sense.
        """
        from .autocheckpoint import CheckpointEvery

        validate_thread_id(thread_id)
        # an option that there is not is no failure to be kept
        inspect.signature(self.capture_with_report).bind(sandbox, thread_id=thread_id, label=None, skip_unchanged=True, **options)
        return CheckpointEvery(
            functools.partial(self.capture_with_report, sandbox, thread_id=thread_id, **options),
            thread_id=thread_id,
            seconds=seconds,
            baseline=baseline,
            on_completion=on_completion,
            on_failure=on_failure,
            sleep=sleep,
        )

    # ---- restore

    async def restore(
        self,
        sandbox: Any,
        *,
        thread_id: str,
        checkpoint_id: str | None = None,
        policy: FilePolicy | None = None,
        workspace_root: str | None = None,
        roots: Mapping[str, str] | None = None,
        paths: Sequence[bytes | str] | None = None,
        dry_run: bool = False,
        verify: Literal["stat", "content"] = "stat",
        owners: bool = False,
        reinject: bool = False,
        secrets: Secrets = None,
        hooks: Sequence[RedactionHook] = (),
        patterns: Sequence[RedactionPattern] = (),
        allow_short_secrets: bool = False,
        allow_empty: bool = False,
        safety_checkpoint: bool = False,
        allow_any_root: bool = False,
        on_progress: ProgressCallback | None = None,
    ) -> "Receipt | None":
        """Bring a sandbox into the state of a checkpoint, the head by default. None when the thread has no checkpoint.

        Files that are not in the checkpoint are removed, except what the policy excludes, what the capture skipped, and mount
        points. `policy` replaces the one saved with the checkpoint. `workspace_root` restores elsewhere; for a checkpoint of
        several roots, `roots` says by name where each goes; those not named are left out. `paths` limits it to files and
        folders. `dry_run` plans only. `verify="content"` reads everything back. `owners` restores owners, setuid and setgid.
        `reinject` puts the present values of `secrets` back. `allow_empty` permits that a non-empty folder becomes empty.

        `safety_checkpoint` captures the present state of these places first, with the same file policy, and with `secrets`,
        `hooks` and `patterns` redacted, which have to be those of the checkpoint (`INVALID_REQUEST`); what cannot be kept or
        read is left out of it and listed.

        Raises `SnapshotError` (`MISSING_CHECKPOINT` for an unknown `checkpoint_id`, `MISSING_BLOB`, `INVALID_BLOB`,
        `POLICY_REQUIRED`, `EMPTY_RESTORE`, `RESTORE_BLOCKED`, `INVALID_WORKSPACE`, `INVALID_REQUEST`: nothing was changed;
        `VERIFY_FAILED` after the change), `ProviderError`, `RepositoryError`.
        """
        validate_thread_id(thread_id)
        checkpoint = await self.get(thread_id, checkpoint_id)
        if checkpoint is None:
            if checkpoint_id is not None:
                raise history.missing(thread_id, checkpoint_id)
            return None
        redactor = Redactor.build(secrets, hooks=hooks, patterns=patterns, allow_short=allow_short_secrets)
        if verify not in ("stat", "content"):
            raise SnapshotError("verify must be 'stat' or 'content'.", code=Code.INVALID_REQUEST)
        if reinject and not redactor.names:
            raise SnapshotError("reinject needs secrets to put back.", code=Code.INVALID_REQUEST, hint="Pass secrets=.")
        from .restoring import RestoreRequest, restore

        async with opened_sandbox(sandbox) as handle:
            places = restore_roots(handle, checkpoint, workspace_root, roots)
            refuse_own_files(self.blobs, self.checkpoints, places.values())
            request = RestoreRequest(
                checkpoint=checkpoint,
                roots=places,
                redactor=redactor,
                policy=policy,
                paths=None if paths is None else tree_paths(paths),
                dry_run=dry_run,
                verify=verify,
                owners=owners,
                reinject=reinject,
                allow_empty=allow_empty,
                allow_any_root=allow_any_root,
                on_progress=on_progress,
            )
            if safety_checkpoint and not dry_run:
                await self._save_present(request)
            return await restore(self._engine, request)

    async def _save_present(self, r: "RestoreRequest") -> None:
        """Capture what a restore is about to change."""
        checkpoint = r.checkpoint
        salt = bytes.fromhex(self.config.salt)
        if checkpoint.redaction and await self._engine.run(r.redactor.fingerprint, salt) != checkpoint.redaction:
            raise SnapshotError(
                "The checkpoint was captured with other secrets, hooks or patterns than are given now: a safety checkpoint would"
                " store what was redacted then.",
                code=Code.INVALID_REQUEST,
                hint="Pass the same secrets, patterns and hooks, or restore without safety_checkpoint.",
            )
        present = []
        for state in checkpoint.roots:
            if state.name in r.roots:
                policy = r.policy or FilePolicy.from_record(state.policy)
                policy = dataclasses.replace(policy, on_unsupported="skip", on_unreadable="skip")
                present.append(RootRequest(state.name, r.roots[state.name], policy))
        request = CaptureRequest(
            thread_id=checkpoint.thread_id,
            roots=present,
            redactor=r.redactor,
            label="before-restore",
            allow_any_root=r.allow_any_root,
        )
        try:
            await capture(self._engine, request)
        except SnapshotError as error:
            # a folder that is not there yet has nothing to lose
            if error.code != Code.MISSING_WORKSPACE or len(present) > 1:
                raise

    # ---- history

    async def fork(
        self,
        thread_id: str,
        checkpoint_id: str | None = None,
        *,
        to_thread_id: str,
        at_step: int | None = None,
        new_id: str | None = None,
    ) -> Checkpoint:
        """Start the empty thread `to_thread_id` from a checkpoint: the head, `checkpoint_id`, or the newest at or before
        `at_step`. `new_id` is the id that its copy gets."""
        report = await self.fork_with_report(thread_id, checkpoint_id, to_thread_id=to_thread_id, at_step=at_step, new_id=new_id)
        return report.checkpoint

    async def fork_with_report(
        self,
        thread_id: str,
        checkpoint_id: str | None = None,
        *,
        to_thread_id: str,
        at_step: int | None = None,
        new_id: str | None = None,
    ) -> "ForkReport":
        """As `fork`; and say which operations between that checkpoint and `at_step` the fork lacks, and which of those can be run
        again in a session of the fork (`ForkReport.run_again`). A thread's steps are those of its present line of work.

        Raises `SnapshotError` `MISSING_CHECKPOINT`, `CheckpointConflictError` `SAME_THREAD` or `DESTINATION_NOT_EMPTY`.
        """
        from .forking import fork_with_report

        return await fork_with_report(self._engine, thread_id, checkpoint_id, to_thread_id, at_step=at_step, new_id=new_id)

    async def rewind(self, thread_id: str, checkpoint_id: str, *, new_id: str | None = None) -> Checkpoint:
        """Append a checkpoint with the content of an older one; `new_id` is the id to use. History is never rewritten."""
        return await history.rewind(self._engine, thread_id, checkpoint_id, new_id=new_id)

    async def label(self, thread_id: str, checkpoint_id: str, label: str | None) -> Checkpoint:
        """Give a checkpoint a label, or take it away."""
        return await history.set_label(self._engine, thread_id, checkpoint_id, label)

    async def delete(self, thread_id: str, checkpoint_id: str) -> Checkpoint:
        """Remove a checkpoint from its thread; what is returned is its last trace."""
        return await history.delete(self._engine, thread_id, checkpoint_id)

    async def delete_head(self, thread_id: str) -> Checkpoint:
        """Remove the newest checkpoint; the one before becomes the head."""
        return await history.delete(self._engine, thread_id, None)

    async def get(self, thread_id: str, checkpoint_id: str | None = None, *, label: str | None = None) -> Checkpoint | None:
        """A checkpoint by id, the newest with a label, or the head."""
        if checkpoint_id is not None:
            return await self.checkpoints.get(thread_id, checkpoint_id)
        if label is not None:
            return await self.checkpoints.by_label(thread_id, label)
        return await self.checkpoints.head(thread_id)

    async def list(self, thread_id: str) -> CheckpointList:
        """All checkpoints of a thread, oldest first."""
        return await self.checkpoints.checkpoints(thread_id)

    async def threads(self) -> ThreadList:
        """All threads that have a checkpoint, by id."""
        return await self.checkpoints.threads()

    async def resolve(self, spec: str, thread_id: str | None = None) -> Checkpoint:
        """The checkpoint that `latest`, `label:L`, an id or a unique prefix of one names.

        Raises `SnapshotError` `MISSING_CHECKPOINT`, or `AMBIGUOUS_ID` with the candidates.
        """
        if spec == "latest" or spec.startswith("label:"):
            if thread_id is None:
                raise SnapshotError(
                    f"'{printable(spec)}' needs a thread.", code=Code.INVALID_REQUEST, hint="Name one (--thread)."
                )
            label = spec.removeprefix("label:") if spec != "latest" else None
            found = await self.get(thread_id, label=label)
            if found is None:
                raise history.missing(thread_id, spec if label is not None else None)
            return found
        if not spec:
            raise SnapshotError("No checkpoint is named.", code=Code.INVALID_REQUEST, hint="Say latest, label:L, or an id.")
        found_many = await self.checkpoints.find(spec, thread_id)
        exact = [c for c in found_many if c.id == spec]
        if len(exact) == 1 or len(found_many) == 1:
            return (exact or found_many)[0]
        if not found_many:
            where = f"Thread {printable(thread_id)}" if thread_id else "The repository"
            raise SnapshotError(f"{where} has no checkpoint {printable(spec)}.", code=Code.MISSING_CHECKPOINT)
        raise SnapshotError(
            f"{printable(spec)} may be any of {', '.join(c.id for c in found_many)}.",
            code=Code.AMBIGUOUS_ID,
            hint="Give more of the id.",
        )

    # ---- upkeep

    async def verify(
        self,
        *,
        read_data: bool = False,
        read_data_subset: str | None = None,
        on_progress: ProgressCallback | None = None,
    ) -> "VerifyReport":
        """Check the database against the blob store; with `read_data` every stored byte. Changes nothing.

        `read_data_subset` reads a part: a share of the packs at random ("5%"), packs of a size ("500M"), or the n-th of t parts
        ("2/7"), which together are all packs. A store that cannot be read is an error, never a finding.
        """
        from .subset import parse_subset
        from .verification import verify

        if read_data and read_data_subset is not None:
            raise SnapshotError("Give either read_data or read_data_subset.", code=Code.INVALID_REQUEST)
        subset = None if read_data_subset is None else parse_subset(read_data_subset)
        return await verify(self._engine, read_data=read_data, subset=subset, on_progress=on_progress)

    async def gc(
        self,
        *,
        grace: float = 24 * 3600.0,
        repack: Literal["auto", "all", "none"] = "auto",
        dry_run: bool = False,
        on_progress: ProgressCallback | None = None,
    ) -> "GcReport":
        """Free what no checkpoint, restore or running capture needs, and merge small packs. Safe beside any other work.

        A pack that is needed no more is condemned, and deleted by the first gc after `grace` seconds, 0 for at once. `repack`
        merges small packs and those that are mostly dead (`auto`), also each of which a twentieth is dead (`all`), or none.
        `dry_run` says what would happen. Raises `RepositoryError` `DAMAGED` when a checkpoint cannot be read (nothing is freed
        then), `MAINTENANCE_LOST` when another gc was started meanwhile.
        """
        from .collecting import collect

        return await collect(self._engine, grace=grace, repack=repack, dry_run=dry_run, on_progress=on_progress)

    async def forget(
        self,
        thread_id: str | None = None,
        *,
        all_threads: bool = False,
        keep_last: int | None = None,
        keep_hourly: int | None = None,
        keep_daily: int | None = None,
        keep_weekly: int | None = None,
        keep_monthly: int | None = None,
        keep_yearly: int | None = None,
        keep_within: float | str | None = None,
        keep_labels: Collection[str] = (),
        keep_labeled: bool = True,
        dry_run: bool = False,
        wait: float | None = None,
        on_progress: ProgressCallback | None = None,
    ) -> "ForgetReport":
        """Remove the checkpoints of a thread, or with `all_threads` of each, that no rule keeps; see `KeepRules`.

        The head is always kept, and what has a label unless `keep_labeled=False`. `keep_within` is in seconds, or a text such as
        `30d12h`. What only removed checkpoints needed stays stored until `gc`. Raises `SnapshotError` `INVALID_REQUEST` when
        there is no rule or one that makes no sense, `MISSING_CHECKPOINT` when the thread has no checkpoint;
        `CheckpointWriterConflictError` when another writer holds the thread (with `all_threads`, such threads are skipped).
        `on_progress` is told of each thread of `all_threads`.
        """
        from .forgetting import KeepRules, forget, forget_all

        rules = KeepRules(
            last=keep_last,
            hourly=keep_hourly,
            daily=keep_daily,
            weekly=keep_weekly,
            monthly=keep_monthly,
            yearly=keep_yearly,
            within=keep_within,
            labels=keep_labels,
            labeled=keep_labeled,
        )
        if (thread_id is None) != all_threads:
            raise SnapshotError("Name one thread, or say all_threads=True.", code=Code.INVALID_REQUEST)
        if thread_id is None:
            return await forget_all(self._engine, rules, dry_run=dry_run, wait=wait, on_progress=on_progress)
        return await forget(self._engine, thread_id, rules, dry_run=dry_run, wait=wait)

    async def stats(self) -> RepositoryStats:
        """Sizes and numbers."""
        from .verification import PRESENT

        threads = await self.checkpoints.threads()
        logical = 0
        checkpoints = 0
        for thread in threads:
            for c in await self.checkpoints.checkpoints(thread.thread_id):
                logical += c.totals.bytes
                checkpoints += 1
        packs = [p for p in await self.checkpoints.packs() if p.state in PRESENT]
        records, raw = await self.checkpoints.record_totals()
        return RepositoryStats(len(threads), checkpoints, len(packs), records, logical, raw, sum(p.size for p in packs))

    async def usage(
        self, thread_id: str | None = None, *, checkpoints: bool = False, on_progress: ProgressCallback | None = None
    ) -> "Usage":
        """Who needs what is stored: the share of each thread, or of `thread_id`, and with `checkpoints` of each checkpoint of
        these. Reads the records that describe trees, each once.

        Raises `SnapshotError` `MISSING_CHECKPOINT` for a thread without any, `MISSING_BLOB` or `INVALID_BLOB` when a checkpoint
        is not whole.
        """
        from .usage import usage

        return await usage(self._engine, thread_id=thread_id, checkpoints=checkpoints, on_progress=on_progress)
