"""A backend of deepagents whose files are captured as an agent changes them."""

from types import TracebackType
from typing import Any, Self

from snapcore.autocheckpoint import FailureCallback
from snapcore.errors import Code, SnapcoreError

from .deepagents_captures import Captures

try:
    from deepagents.backends.protocol import (
        BackendProtocol,
        DeleteResult,
        EditResult,
        ExecuteResponse,
        FileDownloadResponse,
        FileUploadResponse,
        GlobResult,
        GrepResult,
        LsResult,
        ReadResult,
        SandboxBackendProtocol,
        WriteResult,
        execute_accepts_timeout,
    )
except ImportError as error:
    raise SnapcoreError(
        "deepagents is not installed.", code=Code.MISSING_EXTRA, hint="Install it: pip install 'snapcore[deepagents]'."
    ) from error

__all__ = ["CheckpointedBackend", "checkpointed"]


class CheckpointedBackend(SandboxBackendProtocol):
    """Does what `inner` does; see `checkpointed`. Reading calls go straight through."""

    def __init__(self, inner: SandboxBackendProtocol, captures: Captures) -> None:
        self.inner = inner
        self._captures = captures

    @property
    def id(self) -> str:
        """The inner backend's."""
        return self.inner.id

    @property
    def failures(self) -> list[SnapcoreError]:
        """Automatic captures that failed, the newest 100, oldest first. None of them failed a call."""
        return self._captures.failures

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._captures.finish()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._captures.afinish()

    # ---- calls that may affect files

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        options = self._timed(timeout)
        return self._captures.around(lambda: self.inner.execute(command, **options), _always)

    async def aexecute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        options = self._timed(timeout)
        return await self._captures.aaround(lambda: self.inner.aexecute(command, **options), _always)

    def _timed(self, timeout: int | None) -> dict[str, Any]:
        return {"timeout": timeout} if timeout is not None and execute_accepts_timeout(type(self.inner)) else {}

    def write(self, file_path: str, content: str) -> WriteResult:
        return self._captures.around(lambda: self.inner.write(file_path, content), _succeeded)

    async def awrite(self, file_path: str, content: str) -> WriteResult:
        return await self._captures.aaround(lambda: self.inner.awrite(file_path, content), _succeeded)

    def edit(self, file_path: str, old_string: str, new_string: str, replace_all: bool = False) -> EditResult:
        return self._captures.around(lambda: self.inner.edit(file_path, old_string, new_string, replace_all), _succeeded)

    async def aedit(self, file_path: str, old_string: str, new_string: str, replace_all: bool = False) -> EditResult:
        return await self._captures.aaround(lambda: self.inner.aedit(file_path, old_string, new_string, replace_all), _succeeded)

    def delete(self, file_path: str) -> DeleteResult:
        return self._captures.around(lambda: self.inner.delete(file_path), _always)

    async def adelete(self, file_path: str) -> DeleteResult:
        return await self._captures.aaround(lambda: self.inner.adelete(file_path), _always)

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        return self._captures.around(lambda: self.inner.upload_files(files), _one_succeeded)

    async def aupload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        return await self._captures.aaround(lambda: self.inner.aupload_files(files), _one_succeeded)

    # ---- calls that read

    def read(self, file_path: str, offset: int = 0, limit: int = 2000) -> ReadResult:
        return self.inner.read(file_path, offset, limit)

    async def aread(self, file_path: str, offset: int = 0, limit: int = 2000) -> ReadResult:
        return await self.inner.aread(file_path, offset, limit)

    def ls(self, path: str) -> LsResult:
        return self.inner.ls(path)

    async def als(self, path: str) -> LsResult:
        return await self.inner.als(path)

    def glob(self, pattern: str, path: str | None = None) -> GlobResult:
        return self.inner.glob(pattern, path)

    async def aglob(self, pattern: str, path: str | None = None) -> GlobResult:
        return await self.inner.aglob(pattern, path)

    def grep(self, pattern: str, path: str | None = None, glob: str | None = None, **options: Any) -> GrepResult:
        return self.inner.grep(pattern, path, glob, **options)

    async def agrep(self, pattern: str, path: str | None = None, glob: str | None = None, **options: Any) -> GrepResult:
        return await self.inner.agrep(pattern, path, glob, **options)

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        return self.inner.download_files(paths)

    async def adownload_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        return await self.inner.adownload_files(paths)


class _WithoutDelete(CheckpointedBackend):
    """deepagents looks at the class for whether it has `delete`, and offers no tool for it then."""

    delete = BackendProtocol.delete
    adelete = BackendProtocol.adelete


def checkpointed(
    backend: SandboxBackendProtocol,
    repository: Any,
    *,
    thread_id: str | None = None,
    root: str | None = None,
    every: int = 1,
    on_failure: FailureCallback | None = None,
    **capture_options: Any,
) -> CheckpointedBackend:
    """`backend` with checkpoints: before the first call that may change files (`execute`, `write`, `edit`, `delete`,
    `upload_files`), after `every` so many, and, when it is left as a context manager, for those that are not covered yet.

    The thread is `thread_id`, or that of the graph whose tool makes the call. `root` is the folder in the sandbox, if it is not
    the backend's own (see `sandbox_of`). Of several calls at once the last to end captures. An unchanged workspace makes no new
    checkpoint. A capture that fails never fails a call: it is logged, told to `on_failure` and kept in `failures`; the next
    call tries again. Further options are those of `Repository.capture`. `repository` as for `GraphFiles`.

    Raises `SnapshotError` `INVALID_REQUEST`, and `ProviderError` `NOT_CAPABLE` for a backend without a sandbox.
    """
    captures = Captures(
        backend,
        repository,
        thread_id=thread_id,
        root=root,
        every=every,
        on_failure=on_failure,
        options=capture_options,
    )
    kind = CheckpointedBackend if type(backend).delete is not BackendProtocol.delete else _WithoutDelete
    return kind(backend, captures)


def _always(_: object) -> bool:
    return True


def _succeeded(result: WriteResult | EditResult) -> bool:
    return result.error is None


def _one_succeeded(results: list[FileUploadResponse]) -> bool:
    return any(each.error is None for each in results)
