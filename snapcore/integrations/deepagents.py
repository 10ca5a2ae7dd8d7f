"""deepagents with snapcore: its backends are captured and restored, and sandboxes of snapcore are its backends.

backend = HandleBackend(handle)                                     # a sandbox of snapcore for an agent
await repo.capture(sandbox_of(backend), thread_id="thread-1")       # and back, of any backend with a shell
async with checkpointed(backend, repo, thread_id="thread-1") as backend: ...
"""

from .deepagents_backend import HandleBackend
from .deepagents_checkpoints import CheckpointedBackend, checkpointed
from .deepagents_handle import BackendSandbox, sandbox_of

__all__ = ["BackendSandbox", "CheckpointedBackend", "HandleBackend", "checkpointed", "sandbox_of"]
