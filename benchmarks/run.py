"""snapcore beside restic, borg and tar | zstd, on one tree, in alternating runs: medians, ratios to restic, and JSON.

    python benchmarks/run.py                         a made tree: 25,000 files and one of 150 MB
    python benchmarks/run.py --tree DIR              a copy of a folder of yours
    python benchmarks/run.py --maker SCRIPT          SCRIPT make DIR --files N --big-mb N, and SCRIPT step DIR --seed N
    python benchmarks/run.py --growth                how cost grows with files, checkpoints, threads and bytes (growth.py)
    python benchmarks/run.py --s3                    snapcore and restic against an S3 server with latency (s3.py)
    python benchmarks/run.py --docker IMAGE          a running container beside docker commit, cp and export (containers.py)

Seconds depend on the machine and on what else it does; the ratios within one run are what counts.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tools import SNAPCORE, TOOLS, Measure, Tool, measure, tree_bytes

SECRETS = 10
TARGETS = {  # from docs/benchmarks.md: work, the measure it is compared with, the largest ratio
    "first capture": [("restic", 0.38), ("tar | zstd", 1.4)],
    "capture, 15 files changed": [("restic", 0.3)],
    "restore, empty folder": [("restic", 0.4)],
    "restore, 15 files differ": [("restic full restore", 0.15)],
    "capture with 10 secrets": [("snapcore first capture", 1.3)],
    "store size": [("restic", 1.02)],
    "restore from S3, empty folder": [("restic", 0.5)],
    "capture, 15 files changed, in a process that stays up": [("find -printf", 4.0)],
}


class Bench:
    """Collects measures by work and tool."""

    def __init__(self, work: Path, make: Callable[[Path], None], step: Callable[[Path, int], None], rounds: int) -> None:
        self.work = work
        self.tree = work / "tree"
        self.make = make
        self.step = step
        self.rounds = rounds
        self.tools = [t for t in TOOLS if t.available]
        self.measures: dict[str, dict[str, list[Measure]]] = defaultdict(lambda: defaultdict(list))
        self.sizes: dict[str, float] = {}
        self.added: list[int] = []
        self._seed = 0

    def run(self) -> None:
        self.say("making the tree")
        self.make(self.tree)
        for number in range(self.rounds):
            self.say(f"round {number + 1} of {self.rounds}")
            self._round(number)

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def _order(self, number: int) -> list[Tool]:
        shift = number % len(self.tools)
        return self.tools[shift:] + self.tools[:shift]

    def _repository(self, tool: Tool) -> Path:
        return self.work / f"repository-{tool.name.split()[0]}"

    def _next_seed(self) -> int:
        self._seed += 1
        return self._seed

    def _round(self, number: int) -> None:
        self._warm()
        for tool in self._order(number):
            repository = self._repository(tool)
            tool.fresh(repository)
            self._time("first capture", tool, tool.capture(repository, self.tree))
            if number == 0:
                self.sizes[tool.name] = tree_bytes(repository)
        self._secrets()
        for tool in self._order(number):
            if tool.name != "tar | zstd":
                self._time("capture, nothing changed", tool, tool.capture(self._repository(tool), self.tree))
        self.step(self.tree, self._next_seed())
        for tool in self._order(number):
            if tool.name != "tar | zstd":
                before = tree_bytes(self._repository(tool) / "packs") if tool.name == "snapcore" else 0
                self._time("capture, 15 files changed", tool, tool.capture(self._repository(tool), self.tree))
                if tool.name == "snapcore":
                    self.added.append(tree_bytes(self._repository(tool) / "packs") - before)
        self._stays_up()
        for tool in self._order(number):
            out = self.work / "out"
            with self._cleared(out):
                self._time("restore, empty folder", tool, tool.restore(self._repository(tool), out))
        self._delta_restore()

    def _time(self, work: str, tool: Tool, command: Any) -> None:
        self.measures[work][tool.name].append(measure(command))

    @contextmanager
    def _cleared(self, folder: Path) -> Iterator[None]:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        os.sync()  # what others wrote must not be written during this run
        yield
        shutil.rmtree(folder)

    def _warm(self) -> None:
        subprocess.run(["sh", "-c", f"tar cf - -C {self.tree} . | cat >/dev/null"], check=True)

    def _secrets(self) -> None:
        repository = self.work / "repository-secrets"
        tool = self.tools[0]
        tool.fresh(repository)
        rng = random.Random(7)
        names = []
        for number in range(SECRETS):
            name = f"BENCH_SECRET_{number}"
            os.environ[name] = rng.randbytes(20).hex()
            names += ["--secret-env", name]
        self.measures["capture with 10 secrets"]["snapcore"].append(measure([*tool.capture(repository, self.tree), *names]))
        shutil.rmtree(repository)

    def _stays_up(self) -> None:
        repository = self._repository(self.tools[0])
        command = ["find", str(self.tree), "-printf", "%s %T@ %C@ %i %p\\0"]
        work = "capture, 15 files changed, in a process that stays up"
        self.measures[work]["find -printf"].append(measure(command))
        # the process that stays up is one of its own, told by lines when the tree has changed
        resident = [sys.executable, str(Path(__file__).with_name("resident.py")), str(repository), str(self.tree)]
        with subprocess.Popen(resident, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            seconds = []
            for _ in range(4):
                self.step(self.tree, self._next_seed())
                process.stdin.write("capture\n")
                process.stdin.flush()
                seconds.append(float(process.stdout.readline()))
            process.stdin.close()
        self.measures[work]["snapcore"].append(Measure(statistics.median(seconds[1:]), 0, 0))

    def _delta_restore(self) -> None:
        """The tree was captured, then changed in a step: back to what was captured."""
        tool = self.tools[0]
        repository = self._repository(tool)
        measure(tool.capture(repository, self.tree))
        self.step(self.tree, self._next_seed())
        self._time("restore, 15 files differ", tool, tool.restore(repository, self.tree))

    # ---- results

    def table(self) -> dict[str, dict[str, dict[str, float]]]:
        out: dict[str, dict[str, dict[str, float]]] = {}
        for work, by_tool in self.measures.items():
            out[work] = {
                name: {
                    "seconds": round(statistics.median(m.seconds for m in runs), 3),
                    "peak_mb": round(max(m.peak_mb for m in runs), 1),
                }
                for name, runs in by_tool.items()
            }
        out["store size"] = {name: {"mb": round(size / 1e6, 1)} for name, size in self.sizes.items()}
        out["bytes added by a 15-file capture"] = {"snapcore": {"kb": round(statistics.median(self.added or [0]) / 1e3, 1)}}
        return out


def ratios(table: dict[str, dict[str, dict[str, float]]]) -> list[tuple[str, str, float, float]]:
    """(work, compared with, ratio, target) for each target whose peer was measured."""
    out = []
    for work, targets in TARGETS.items():
        own = table.get(work, {}).get("snapcore")
        for peer, target in targets:
            where = {
                "restic full restore": ("restore, empty folder", "restic"),
                "snapcore first capture": ("first capture", "snapcore"),
            }
            row, name = where.get(peer, (work, peer))
            other = table.get(row, {}).get(name)
            if own is not None and other is not None:
                key = "mb" if "mb" in own else "seconds"
                out.append((work, peer, own[key] / other[key], target))
    return out


def show(table: dict[str, dict[str, dict[str, float]]]) -> None:
    for work, by_tool in table.items():
        print(f"\n{work}")
        for name, values in by_tool.items():
            print(f"    {name:<14}" + "  ".join(f"{value:>9.2f} {unit}" for unit, value in values.items()))
    print(f"\n{'work':<56}{'compared with':<24}{'ratio':>7}{'target':>8}")
    for work, peer, ratio, target in ratios(table):
        print(f"{work:<56}{peer:<24}{ratio:>7.2f}{target:>8.2f}  {'met' if ratio <= target else 'MISSED'}")


def _maker(args: argparse.Namespace) -> tuple[Callable[[Path], None], Callable[[Path, int], None]]:
    if args.maker:
        script = [sys.executable, args.maker]

        def make(tree: Path) -> None:
            size = ["--files", str(args.files), "--big-mb", str(args.big_mb)]
            subprocess.run([*script, "make", str(tree), *size], check=True)

        def step(tree: Path, seed: int) -> None:
            subprocess.run([*script, "step", str(tree), "--seed", str(seed)], check=True)

        return make, step
    if args.tree:

        def copy(tree: Path) -> None:
            shutil.copytree(args.tree, tree, symlinks=True)

        return copy, _touch_some
    # made by processes of their own: a child's peak memory counts from what its parent had

    def call(code: str) -> None:
        subprocess.run([sys.executable, "-c", f"from snapcore.testing.trees import make_tree, mutate_tree; {code}"], check=True)

    return (
        lambda tree: call(f"make_tree({str(tree)!r}, files={args.files}, big_bytes={args.big_mb * 1_000_000})"),
        lambda tree, seed: call(f"mutate_tree({str(tree)!r}, {seed})"),
    )


def _touch_some(tree: Path, seed: int) -> None:
    """Append to 15 files of a user's tree."""
    found = sorted(p for p in tree.rglob("*") if p.is_file() and not p.is_symlink() and ".git" not in p.parts)
    for path in random.Random(seed).sample(found, min(15, len(found))):
        with path.open("ab") as out:
            out.write(b"changed %d\n" % seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", help="measure on a copy of this folder")
    parser.add_argument("--maker", help="a script that makes and changes trees")
    parser.add_argument("--files", type=int, default=25_000)
    parser.add_argument("--big-mb", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="write the table to this file")
    parser.add_argument(
        "--growth", nargs="*", metavar="PART", help="measure how cost grows instead: files checkpoints threads bytes"
    )
    parser.add_argument("--s3", action="store_true", help="measure against an S3 server instead (s3.py)")
    parser.add_argument("--docker", metavar="IMAGE", help="measure on a container of this image instead (containers.py)")
    parser.add_argument("--scratch", help="folder for trees and repositories (default: a temporary one)")
    args = parser.parse_args()
    if not Path(SNAPCORE).exists():
        parser.error("snapcore is not installed beside this Python")
    with tempfile.TemporaryDirectory(prefix="snapcore-bench-", dir=args.scratch) as scratch:
        if args.growth is not None:
            from growth import growth

            table = growth(Path(scratch), args.growth)
        elif args.s3:
            from s3 import s3

            table = s3(Path(scratch), *_maker(args))
        elif args.docker:
            from containers import containers

            table = containers(Path(scratch), *_maker(args), args.docker)
        else:
            bench = Bench(Path(scratch), *_maker(args), args.rounds)
            bench.run()
            table = bench.table()
        show(table)
        if args.json:
            Path(args.json).write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
