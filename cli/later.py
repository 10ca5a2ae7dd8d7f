"""Modules that are loaded when something of them is first asked for."""

import importlib
import sys
import threading
from types import ModuleType
from typing import Any, Final

__all__ = ["load_when_used"]

_replacing: Final = threading.Lock()


class _Later(ModuleType):
    """Stands for a module that has not been loaded. Whoever got hold of it is led to the module itself."""

    def __getattr__(self, attribute: str) -> Any:
        with _replacing:
            if sys.modules.get(self.__name__) is self:
                del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), attribute)


def load_when_used(parent: ModuleType, child: str) -> None:
    """Let imports of a submodule that nobody has imported so far load nothing.

    `importlib.util.LazyLoader` does not do for that: a second import of such a module loads it.
    """
    name = f"{parent.__name__}.{child}"
    if name not in sys.modules:
        sys.modules[name] = _Later(name)
        setattr(parent, child, sys.modules[name])
