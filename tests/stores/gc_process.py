"""One call of a store in a process of its own, which stops inside its transaction: `python gc_process.py URL HOLD JOB`.

Before it commits it says "inside" and waits for a line; then it prints what came out. HOLD names the function after which
it stops, as `module.function`, or "start": before the transaction begins.
"""

import asyncio
import importlib
import sys
from typing import Any

import msgspec

from snapcore.errors import SnapcoreError
from snapcore.maintenance import Maintenance
from snapcore.model import Checkpoint, PackWrite, WriterLease
from snapcore.protocols import Commit
from snapcore.stores.sql import SqlCheckpointStore


class Job(msgspec.Struct):
    """What to call, and with what."""

    call: str
    run: Maintenance | None = None
    mark: int = 0
    packs: tuple[str, ...] = ()
    moved: PackWrite | None = None
    lease: WriterLease | None = None
    checkpoint: Checkpoint | None = None
    commit: Commit | None = None


async def work(store: SqlCheckpointStore, job: Job) -> str:
    """What came out: packs, an id, or the name of the error."""
    calls: dict[str, Any] = {
        "start": lambda: store.start_maintenance(),
        "condemn": lambda: store.condemn(job.run, job.mark, job.packs),  # type: ignore[arg-type]
        "sweep": lambda: store.sweep(job.run, grace=0),  # type: ignore[arg-type]
        "move": lambda: store.move_records(job.run, job.mark, job.moved, job.packs),  # type: ignore[arg-type]
        "commit": lambda: store.append(job.lease, job.checkpoint, job.commit),  # type: ignore[arg-type]
        "acquire": lambda: store.acquire_writer("thread"),
    }
    try:
        result = await calls[job.call]()
    except SnapcoreError as error:
        return type(error).__name__ if error.code != "MAINTENANCE_LOST" else str(error.code)
    return " ".join(result) if isinstance(result, list) else "done"


def stop() -> None:
    print("inside", flush=True)
    sys.stdin.readline()


async def main(url: str, hold: str, job: Job) -> None:
    if hold == "start":
        stop()
    else:
        place, name = hold.rsplit(".", 1)
        module = importlib.import_module(f"snapcore.stores.{place}")
        whole = getattr(module, name)

        def held(*arguments: Any, **options: Any) -> Any:
            result = whole(*arguments, **options)
            stop()
            return result

        setattr(module, name, held)
    store = SqlCheckpointStore(url)
    print(await work(store, job))
    await store.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], msgspec.json.decode(sys.argv[3], type=Job)))
