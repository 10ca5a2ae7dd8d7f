"""The tools that are measured, each as the whole commands a user would run, and how a command is measured."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

PASSWORD = {"RESTIC_PASSWORD": "benchmark", "BORG_PASSPHRASE": "benchmark", "BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK": "yes"}
EXCLUDES = (".git", "node_modules", ".env*", ".venv", "__pycache__")


@dataclass(frozen=True)
class Measure:
    """One run of a command: wall and processor seconds, peak resident memory in MB."""

    seconds: float
    processor: float
    peak_mb: float


def measure(command: Sequence[str], cwd: Path | None = None) -> Measure:
    """Run a command to its end. Raises `subprocess.CalledProcessError` when it fails (warnings of borg and snapcore do not)."""
    start = time.perf_counter()
    with subprocess.Popen(
        list(command), cwd=cwd, env=os.environ | PASSWORD, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        assert process.stderr is not None
        errors = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 1, 3) or (process.returncode == 1 and command[0] != "borg"):
        raise subprocess.CalledProcessError(process.returncode, list(command), stderr=errors)
    return Measure(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def tree_bytes(folder: Path) -> int:
    """The size of all files below a folder."""
    return sum(p.lstat().st_size for p in folder.rglob("*") if p.is_file() and not p.is_symlink())


@dataclass(frozen=True)
class Tool:
    """A backup tool: its name, how to make a repository, and the commands for a capture and for a restore."""

    name: str
    init: Callable[[Path], Sequence[str]] | None
    capture: Callable[[Path, Path], Sequence[str]]
    restore: Callable[[Path, Path], Sequence[str]]

    @property
    def available(self) -> bool:
        """Whether it is installed here."""
        return self.name in ("snapcore", "tar | zstd") or shutil.which(self.name) is not None

    def fresh(self, repository: Path) -> None:
        """An empty repository."""
        shutil.rmtree(repository, ignore_errors=True)
        if self.init is None:
            repository.mkdir(parents=True)
        else:
            measure(self.init(repository))


SNAPCORE = str(Path(sys.executable).with_name("snapcore"))


def _restic_excludes() -> list[str]:
    return [part for name in EXCLUDES for part in ("--exclude", name)]


def _borg_excludes() -> list[str]:
    return [part for name in EXCLUDES for part in ("--exclude", f"sh:**/{name}")]


def _tar_excludes() -> str:
    return " ".join(f"--exclude={name!r}" for name in EXCLUDES)


TOOLS = (
    Tool(
        "snapcore",
        lambda repo: [SNAPCORE, "init", "--repo", str(repo)],
        lambda repo, tree: [SNAPCORE, "capture", str(tree), "--repo", str(repo), "--thread", "bench", "-q"],
        lambda repo, out: [SNAPCORE, "restore", str(out), "--repo", str(repo), "--thread", "bench", "-q"],
    ),
    Tool(
        "restic",
        lambda repo: ["restic", "-q", "-r", str(repo), "init"],
        lambda repo, tree: ["restic", "-q", "-r", str(repo), "backup", *_restic_excludes(), str(tree)],
        lambda repo, out: ["restic", "-q", "-r", str(repo), "restore", "latest", "--target", str(out)],
    ),
    Tool(
        "borg",
        lambda repo: ["borg", "init", "-e", "none", str(repo)],
        lambda repo, tree: ["borg", "create", "-C", "zstd,3", *_borg_excludes(), f"{repo}::{{now:%s%f}}", str(tree)],
        lambda repo, out: ["sh", "-c", f"cd {out} && borg extract {repo}::$(borg list --short --last 1 {repo})"],
    ),
    Tool(
        "tar | zstd",
        None,
        lambda repo, tree: [
            "sh",
            "-c",
            f"tar cf - {_tar_excludes()} -C {tree} . | zstd -3 -T0 -q -f -o {repo}/tree.tar.zst",
        ],
        lambda repo, out: ["sh", "-c", f"zstd -dcq {repo}/tree.tar.zst | tar xf - -C {out} 2>/dev/null"],
    ),
)
