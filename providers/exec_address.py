"""The addresses `exec:COMMAND FOLDER` and `ssh://[USER@]HOST[:PORT][/FOLDER]`: what command of this host leads into a sandbox.

An address may be shown, logged and stored, so one that holds a credential is refused.
"""

import os
import re
import shlex
import socket
import urllib.parse
from typing import Final

import msgspec

from snapcore.errors import Code, SnapshotError
from snapcore.sandboxes import check_path

__all__ = ["Target", "parse_address", "parse_exec", "parse_ssh"]

DEFAULT_ROOT: Final = "/workspace"
PLACE: Final = "{}"  # as the last word of a command: what follows comes as one argument, quoted for a shell
SSH: Final = (
    *("ssh", "-a", "-x", "-T"),  # what is on the other side gets no agent, no display and no terminal
    *("-o", "BatchMode=yes"),  # never asks
    *("-o", "RemoteCommand=none", "-o", "ClearAllForwardings=yes", "-o", "PermitLocalCommand=no"),
    *("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"),  # a connection that is dead ends within a minute
)
NO_SSH: Final = "That is no address like ssh://user@host:22/folder."  # it is not shown: a password may be in it

_USER: Final = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.+-]*", re.ASCII)
_HOST: Final = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.-]*|[0-9A-Fa-f:.]+(%[A-Za-z0-9_.-]+)?", re.ASCII)
_LOGIN: Final = re.compile(r"(^|//)[^/@\s:]*:[^/@\s]+@(?!sha256:)")
_HEADER: Final = re.compile(r"(?i)\b(proxy-)?authorization\s*[:=]|\bbearer\s+\S")
_SECRET: Final = re.compile(r"(?i)-*[\w.-]*(passw(or)?d|secret|token|api[-_]?key|credential)s?(=|$)", re.ASCII)


class Target(msgspec.Struct, frozen=True):
    """Where an address leads: `prefix` is the command before `sh -c SCRIPT`; `quoted` as in `CommandShell`."""

    scheme: str
    address: str
    sandbox_id: str
    prefix: tuple[str, ...]
    quoted: bool
    root: str


def parse_address(address: str) -> Target:
    """An `exec:` or `ssh:` address. Raises `SnapshotError` `INVALID_REQUEST`."""
    return parse_exec(address) if address.startswith("exec:") else parse_ssh(address)


def parse_exec(address: str) -> Target:
    """`exec:kubectl exec -i pod -- /workspace`: words as a shell would split them, the last of them the folder in the sandbox.

    ssh joins arguments and hands them to a shell, so it gets one that is quoted; a last word `{}` before the folder says that
    another command does so too. The sandbox's id holds this host's name, since elsewhere the same words may lead elsewhere.
    """
    try:
        words = shlex.split(address.removeprefix("exec:"))
    except ValueError as error:
        raise _refused(f"The address cannot be split into words: {str(error).lower()}.") from None
    if any(not word.isprintable() for word in words):
        raise _refused("The address holds a control character.")
    if len(words) < 2 or not words[-1].startswith("/"):
        raise _refused("An exec: address is a command and, as its last word, an absolute folder.")
    *command, root = words
    _refuse_credentials(words)
    quoted = os.path.basename(command[0]) == "ssh"
    if command[-1] == PLACE:
        quoted = True
        command.pop()
    if not command or not command[0] or command[0].startswith("-") or PLACE in command:
        raise _refused(f"The command of an exec: address begins with a program; {PLACE} can only be its last word.")
    shown = shlex.join(words[:-1])
    return Target(
        scheme="exec",
        address=f"exec:{shlex.join(words)}",
        sandbox_id=f"exec:{socket.gethostname()}:{shown}",
        prefix=tuple(command),
        quoted=quoted,
        root=check_path(root),
    )


def parse_ssh(address: str) -> Target:
    """`ssh://dev@host:2222/srv/project`, by OpenSSH's client and its configuration; `/workspace` when there is no folder.
    Percent-escapes of the folder are decoded."""
    try:
        parts = urllib.parse.urlsplit(address if address.isprintable() else "", allow_fragments=False)
        port = parts.port
    except ValueError:
        raise _refused(NO_SSH) from None
    user, colon, _ = parts.netloc.rpartition("@")[0].partition(":")
    if colon:
        raise _refused("An ssh: address holds no password.", "Use a key or an agent, as ~/.ssh/config says.")
    host = parts.netloc.rpartition("@")[2]
    host = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if parts.query or not _HOST.fullmatch(host) or ("@" in parts.netloc and not _USER.fullmatch(user)):
        raise _refused(NO_SSH)
    root = os.fsdecode(urllib.parse.unquote_to_bytes(parts.path)).rstrip("/") or DEFAULT_ROOT
    if root.startswith("/~"):
        raise _refused("The folder of an ssh: address is absolute: ~ is not looked up.")
    login = f"{user}@{host}" if user else host
    shown = f"ssh://{user}@" if user else "ssh://"
    shown += (f"[{host}]" if ":" in host else host) + (f":{port}" if port is not None else "")
    return Target(
        scheme="ssh",
        address=shown + urllib.parse.quote(os.fsencode(check_path(root))),
        sandbox_id=shown,
        prefix=(*SSH, *(("-p", str(port)) if port is not None else ()), "--", login),
        quoted=True,
        root=check_path(root),
    )


def _refuse_credentials(words: list[str]) -> None:
    """Refuse what looks like a password or a token: the address is shown, and arguments are seen by every user of a host."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        typed = os.path.basename(word) == "sshpass" and following.startswith("-p")
        name = _SECRET.match(word)
        valued = name is not None and (name[3] == "=" or (word.startswith("-") and not following.startswith(("-", "/"))))
        if typed or valued or _LOGIN.search(word) or _HEADER.search(word):
            raise _refused(
                "The address seems to hold a password or a token.",
                "Let the command take it from its own configuration or from an environment variable.",
            )


def _refused(message: str, hint: str = "See the page about the command line for its form.") -> SnapshotError:
    return SnapshotError(message, code=Code.INVALID_REQUEST, hint=hint)
