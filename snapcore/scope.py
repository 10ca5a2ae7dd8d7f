"""Which paths of a tree some work is about."""

from collections.abc import Iterable

__all__ = ["Scope"]


class Scope:
    """Which paths are meant: all, or those at and below the paths asked for."""

    def __init__(self, paths: Iterable[bytes] | None) -> None:
        self._paths = None if paths is None else frozenset(p.strip(b"/") for p in paths)

    @property
    def whole(self) -> bool:
        """Whether everything is meant."""
        return self._paths is None or b"" in self._paths

    @property
    def paths(self) -> frozenset[bytes]:
        """The paths asked for."""
        return self._paths or frozenset()

    def holds(self, path: bytes) -> bool:
        """Whether `path` is one of the paths or lies below one."""
        if self.whole:
            return True
        return any(path == p or path.startswith(p + b"/") for p in self.paths)

    def leads_to(self, path: bytes) -> bool:
        """Whether one of the paths lies below `path`."""
        return any(not path or p.startswith(path + b"/") for p in self.paths)
