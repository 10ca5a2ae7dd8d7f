"""snapcore on a running container beside `docker commit`, `docker cp` and `docker export`: seconds, engine calls, MB moved.

    python benchmarks/run.py --docker IMAGE

The engine is that of DOCKER_HOST or the default socket; IMAGE has sh, find and tar. What Docker's own commands do is done through
the package `docker`, and their streams are written to a file.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import snapcore
from snapcore.providers.docker import DockerSandbox, docker

__all__ = ["containers"]

ROOT: Final = "/workspace"
MB: Final = 1e6

Table = dict[str, dict[str, dict[str, float]]]


def containers(work: Path, make: Callable[[Path], None], step: Callable[[Path, int], None], image: str) -> Table:
    """Measure once each; the table as the other benchmarks give it."""
    return asyncio.run(_run(work, make, step, image))


async def _run(work: Path, make: Callable[[Path], None], step: Callable[[Path, int], None], image: str) -> Table:
    tree = work / "tree"
    make(tree)
    table: Table = {}
    # a bind mount, so that a step of an agent changes what the container sees; commit and export get a copy inside of it
    sandboxes = docker(image=image, options={"network_mode": "none", "binds": [f"{tree}:{ROOT}"]})
    sandbox = await sandboxes.create()
    try:
        await sandbox.exec(["cp", "-a", ROOT, "/copy"])
        async with snapcore.open_repository(str(work / "repository")) as repo:
            for name in ("first capture in Docker", "capture in Docker, nothing changed"):
                await _capture(table, name, repo, sandbox)
            step(tree, 1)
            await _capture(table, "capture in Docker, 15 files changed", repo, sandbox)
        api, container = sandbox.engine.api, sandbox.binding.sandbox_id
        out = work / "out.tar"
        peers: dict[str, Callable[[], int]] = {
            "docker cp": lambda: _save(out, api.get_archive(container, "/copy")[0]),
            "docker export": lambda: _save(out, api.export(container)),
        }
        for name, peer in peers.items():
            start = time.perf_counter()
            moved = peer()
            _note(table, name, time.perf_counter() - start, 1, moved)
        start = time.perf_counter()
        committed = api.commit(container)["Id"]
        _note(table, "docker commit", time.perf_counter() - start, 1, 0)
        api.remove_image(committed, force=True)
    finally:
        await sandboxes.provider.destroy(sandbox.binding)
        await sandboxes.close()
    return table


async def _capture(table: Table, work: str, repo: snapcore.Repository, sandbox: DockerSandbox) -> None:
    traffic = sandbox.engine.traffic
    calls, moved = traffic.calls, traffic.received + traffic.sent
    start = time.perf_counter()
    await repo.capture(sandbox, thread_id="bench")
    table[work] = {"snapcore": _row(time.perf_counter() - start, traffic.calls - calls, traffic.received + traffic.sent - moved)}


def _note(table: Table, tool: str, seconds: float, calls: int, moved: int) -> None:
    for by_tool in table.values():  # Docker's own are the same work whatever changed
        by_tool[tool] = _row(seconds, calls, moved)


def _row(seconds: float, calls: int, moved: int) -> dict[str, float]:
    return {"seconds": round(seconds, 2), "calls": calls, "MB moved": round(moved / MB, 2)}


def _save(path: Path, pieces: Iterable[bytes]) -> int:
    with path.open("wb") as out:
        for piece in pieces:
            out.write(piece)
    return path.stat().st_size
