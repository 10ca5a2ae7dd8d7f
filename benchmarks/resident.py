"""A process that stays up: captures FOLDER into REPOSITORY once for each line on stdin, and prints the seconds it took."""

import asyncio
import sys
import time

import snapcore


async def main(repository: str, folder: str) -> None:
    async with snapcore.open_repository(repository, create=False) as repo:
        for _ in sys.stdin:
            start = time.perf_counter()
            await repo.capture(folder, thread_id="bench")
            print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
