"""Which paths of a tree some work is about."""

from collections.abc import Iterable

__all__ = ["Scope"]


class Scope:
    """Which paths are meant: all, or those at and below the paths asked for."""

    def __init__(self, paths: Iterable[bytes] | None) -> None:
        self.paths = frozenset[bytes]() if paths is None else frozenset(p.strip(b"/") for p in paths)
        """The paths asked for."""
        self.whole = paths is None or b"" in self.paths
        """Whether everything is meant."""

    def holds(self, path: bytes) -> bool:
        """Whether `path` is one of the paths or lies below one."""
        if self.whole:
            return True
        return any(path == p or path.startswith(p + b"/") for p in self.paths)

    def leads_to(self, path: bytes) -> bool:
        """Whether one of the paths lies below `path`."""
        return any(not path or p.startswith(path + b"/") for p in self.paths)
