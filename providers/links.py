"""Where a symbolic link leads, found without ever following it out of the workspace."""

from collections.abc import Callable, Sequence
from typing import Final

__all__ = ["inside", "link_leads_out"]

MAX_LINK_HOPS: Final = 40  # as the kernel's own limit


def inside(target: bytes, root: bytes) -> bytes | None:
    """The part of an absolute `target` below `root`, None when it does not name the root or something below it."""
    if target == root:
        return b""
    prefix = root.rstrip(b"/") + b"/"
    return target[len(prefix) :] if target.startswith(prefix) else None


def link_leads_out(path: bytes, target: bytes, roots: Sequence[bytes], target_of: Callable[[bytes, bytes], bytes | None]) -> bool:
    """Whether the link at `path` leads out of the root, which has the absolute names `roots`.

    `target_of(parent, name)` gives a link's target, empty bytes for anything else, None when there is nothing. Resolved
    as the kernel would, but never out of the root: through other links, `..` taken from where they lead. Below a name
    that is not there the rest is taken as written. A loop leads nowhere, so not outside.
    """
    here = path.split(b"/")[:-1]
    pending: list[bytes] = []  # components to go, the next one last

    def follow(text: bytes) -> bool:
        if text.startswith(b"/"):
            inner = next((part for part in (inside(text, root) for root in roots) if part is not None), None)
            if inner is None:
                return False
            here.clear()
            text = inner
        pending.extend(reversed(text.split(b"/")))
        return True

    if not follow(target):
        return True
    hops, real = 1, True
    while pending:
        name = pending.pop()
        if name in (b"", b"."):
            continue
        if name == b"..":
            if not here:
                return True
            here.pop()
            real = True
            continue
        if real:
            next_target = target_of(b"/".join(here), name)
            if next_target:
                hops += 1
                if hops > MAX_LINK_HOPS:
                    return False
                if not follow(next_target):
                    return True
                continue
            real = next_target is not None
        here.append(name)
    return False
