"""Who the user of a container is, by its own /etc/passwd and /etc/group: the engine's archive API would ask the host's."""

from typing import Final

from snapcore.errors import Code, ProviderError, printable
from snapcore.model import Kind

from .docker_client import DockerEngine
from .docker_tar import TarReader

__all__ = ["user_ids"]

MAX_FILE: Final = 1 << 20
MAX_ID: Final = (1 << 32) - 2


def user_ids(engine: DockerEngine, container: str, user: str) -> tuple[int, int]:
    """(uid, gid) of a container's `User`: empty, a name, an id, or either with `:group`. Blocks. Raises `ProviderError`
    `NOT_CAPABLE` for a name that the container does not know."""
    name, _, group = user.partition(":")
    uid, gid = 0, 0
    if name:
        found = _find(engine, container, "/etc/passwd", name, fields=4)
        if found is not None:
            uid, gid = _number(found[2]), _number(found[3])
        elif name.isdigit():
            uid = _number(name)
        else:
            raise _unknown(name)
    if group:
        listed = _find(engine, container, "/etc/group", group, fields=3)
        if listed is None and not group.isdigit():
            raise _unknown(group)
        gid = _number(listed[2] if listed is not None else group)
    return uid, gid


def _find(engine: DockerEngine, container: str, path: str, name: str, *, fields: int) -> list[str] | None:
    """The fields of the first line whose name, or else whose id, is `name`."""
    lines = [line.split(":") for line in _text(engine, container, path).splitlines()]
    lines = [line for line in lines if len(line) >= fields and line[2].isdigit()]
    return next((line for line in lines if line[0] == name), None) or next((line for line in lines if line[2] == name), None)


def _text(engine: DockerEngine, container: str, path: str) -> str:
    try:
        with engine.get_archive(container, path) as (_, pieces):
            reader = TarReader(pieces)
            member = next(reader.members(), None)
            if member is None or member.kind != Kind.FILE or member.size > MAX_FILE:
                return ""
            return b"".join(reader.content()).decode("utf-8", "replace")
    except FileNotFoundError:
        return ""


def _number(text: str) -> int:
    return min(int(text), MAX_ID) if text.isdigit() and len(text) < 12 else 0


def _unknown(name: str) -> ProviderError:
    return ProviderError(f"The container does not know the user or group {printable(name)}.", code=Code.NOT_CAPABLE)
