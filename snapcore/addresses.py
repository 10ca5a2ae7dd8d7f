"""Addresses as they may be shown, to people and in logs."""

import re
from typing import Final

__all__ = ["HIDDEN", "shown_address"]

HIDDEN: Final = "***"
_SCHEME: Final = re.compile(r"([a-z][a-z0-9+.-]*)://", re.ASCII | re.IGNORECASE)
_COMMAND: Final = re.compile(r"exec:\s*(\S*)(.*)", re.DOTALL)
_NAMED_USERS: Final = re.compile(r"(?:ssh|postgres(?:ql)?(?:\+[a-z0-9]+)?)$")  # a user of other schemes may be a key
_PLACE: Final = re.compile(
    r"(?:\[[0-9a-fA-F:.]*\]|[^:/]*)(?::[0-9]*)?(?:/|$)"
)  # a port that is no number is a password without a host
_SHOWN_OPTIONS: Final = frozenset(("endpoint", "region", "schema", "sslmode"))


def shown_address(address: str) -> str:
    """The address of a repository, a database or a sandbox without what may be a credential: passwords, the users of services
    that take keys for users, options that are not known to be harmless, and all but the first word of a command."""
    if command := _COMMAND.fullmatch(address):
        return f"exec:{command[1]} {HIDDEN}" if command[2].strip() else address
    scheme = _SCHEME.match(address)
    if scheme is None or (scheme[1].lower() == "file" and address[scheme.end() :].startswith(("/", "~"))):
        return address
    place, mark, options = address[scheme.end() :].partition("?")
    if "@" in options or "#" in place:
        # Of what begins there nobody can tell whether it is a part of a password.
        return f"{scheme[0]}{HIDDEN}"
    shown = "&".join(map(_shown_option, options.split("&"))) if options else ""
    return f"{scheme[0]}{_without_password(scheme[1].lower(), place)}{mark}{shown}"


def _without_password(scheme: str, place: str) -> str:
    """All between the user and the last `@` is a password, which may hold anything when it was written without escapes."""
    user = re.split("[:/@]", place, maxsplit=1)[0]
    after = place[len(user) : len(user) + 1]
    if "@" not in place:
        return place if _PLACE.match(place) else HIDDEN
    if after not in (":", "@"):
        return place
    shown = user if _NAMED_USERS.match(scheme) else HIDDEN
    return f"{shown}{f':{HIDDEN}' if after == ':' else ''}@{place.rpartition('@')[2]}"


def _shown_option(option: str) -> str:
    name, separator, value = option.partition("=")
    if not separator:
        return HIDDEN
    return f"{name}={shown_address(value)}" if name in _SHOWN_OPTIONS else f"{name}={HIDDEN}"
