"""One call about a ledger in a process of its own, which stops inside its transaction: `python ledger_process.py URL HOLD JOB`.

Before it commits it says "inside" and waits for a line; then it prints what came out. HOLD names a function of `sql_ledger`, at
whose end it stops, or is "start": it stops before the transaction begins.
"""

import asyncio
import sys
from typing import Any

import msgspec

from snapcore.errors import SnapcoreError
from snapcore.ledger import Claim, Event
from snapcore.model import Checkpoint, WriterLease
from snapcore.protocols import Commit
from snapcore.stores import sql_ledger
from snapcore.stores.sql import SqlCheckpointStore


class Job(msgspec.Struct):
    """What to call, and with what."""

    call: str  # claim | append | commit
    claim: Claim | None = None
    event: Event | None = None
    lease: WriterLease | None = None
    checkpoint: Checkpoint | None = None
    commit: Commit | None = None


async def work(store: SqlCheckpointStore, job: Job) -> str:
    """What came out: `done`, or the name of the error."""
    calls: dict[str, Any] = {
        "claim": lambda: store.claim_ledger(job.lease, "f" * 32),  # type: ignore[arg-type]
        "append": lambda: store.append_event(job.claim, job.event),  # type: ignore[arg-type]
        "commit": lambda: store.append(job.lease, job.checkpoint, job.commit),  # type: ignore[arg-type]
    }
    try:
        await calls[job.call]()
    except SnapcoreError as error:
        return type(error).__name__
    return "done"


def stop() -> None:
    print("inside", flush=True)
    sys.stdin.readline()


async def main(url: str, hold: str, job: Job) -> None:
    if hold == "start":
        stop()
    else:
        whole = getattr(sql_ledger, hold)

        def held(*arguments: Any) -> Any:
            result = whole(*arguments)
            stop()
            return result

        setattr(sql_ledger, hold, held)
    store = SqlCheckpointStore(url)
    print(await work(store, job))
    await store.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], msgspec.json.decode(sys.argv[3], type=Job)))
