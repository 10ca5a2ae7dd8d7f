"""A worker process of its own, for tests that stop or kill it.

    python session_worker.py REPOSITORY SANDBOXES COMMAND

opens a session of thread `t`, writes a file, runs a command, and says how everything ended, each on a line. It waits for a
line on stdin before it goes on after the command.
"""

import asyncio
import sys
from collections.abc import Awaitable

import snapcore
from snapcore.providers.local import LocalProvider


async def tell(what: str, work: Awaitable[object]) -> None:
    try:
        await work
    except snapcore.SnapcoreError as error:
        print(what, error.code, flush=True)
    else:
        print(what, "done", flush=True)


async def main(repository: str, sandboxes: str, command: str) -> None:
    async with snapcore.open_repository(repository) as repo:
        session = await repo.session(LocalProvider(sandboxes), thread_id="t")
        await tell("open", session.write_file("mine", "1"))
        await tell("exec", session.exec(command))
        await asyncio.to_thread(sys.stdin.readline)
        await tell("exec", session.exec("echo again >> ran-by-the-old-one"))
        await tell("write", session.write_file("mine", "2"))
        await tell("checkpoint", session.checkpoint("the old one's"))
        await tell("fork", session.fork("u"))
        await tell("destroy", session.destroy())
        await tell("close", session.close())


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
