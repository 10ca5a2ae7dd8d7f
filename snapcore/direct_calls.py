"""`snapcore.capture` and `snapcore.restore`: for those who bring their own stores."""

from typing import TYPE_CHECKING, Any

from .model import Checkpoint
from .opening import borrowed
from .protocols import BlobStore, CheckpointStore

if TYPE_CHECKING:
    from .restoring import Receipt

__all__ = ["capture", "restore"]


async def capture(*, handle: Any, checkpoints: CheckpointStore, blobs: BlobStore, thread_id: str, **options: Any) -> Checkpoint:
    """Capture `handle` as the next checkpoint of a thread in the caller's own stores, which stay open.

    The options, results and errors are those of `Repository.capture`.
    """
    async with borrowed(blobs, checkpoints) as repository:
        return await repository.capture(handle, thread_id=thread_id, **options)


async def restore(
    *, handle: Any, checkpoints: CheckpointStore, blobs: BlobStore, thread_id: str, **options: Any
) -> "Receipt | None":
    """Restore a thread's head, or the checkpoint asked for, into `handle`. As `Repository.restore`."""
    async with borrowed(blobs, checkpoints) as repository:
        return await repository.restore(handle, thread_id=thread_id, **options)
