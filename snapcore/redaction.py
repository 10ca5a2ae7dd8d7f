"""Taking secrets out of everything that is stored or shown, and putting them back on request.

A `Redactor` holds the secrets of one capture in memory. In file contents each occurrence, in any written form
(`redaction_forms`), is replaced by zero bytes of the same length; in text by `{secret:NAME}`. The values are in no stored
record, message, `repr` or pickle; what is stored of a set is an scrypt fingerprint.
"""

import bisect
import hmac
import json
import os
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn

import msgspec

from .errors import SnapcoreError
from .model import Redaction
from .protocols import Buffer
from .redaction_forms import FORMS_VERSION, encode
from .redaction_hooks import RedactionHook, RedactionPattern, checked_name, invalid
from .redaction_match import Cover, Matcher, Span, find_first, join_records, zero
from .redaction_stream import RedactionStream, find_spans, redact_whole

__all__ = ["MIN_SECRET_BYTES", "NO_REDACTION", "RedactionHook", "RedactionPattern", "Redactor", "zeroed"]

MIN_SECRET_BYTES: Final = 6
_BYTES: Final = (bytes, bytearray, memoryview)  # scrubbed before they are written in base64
_NUMBER: Final = re.compile(rb"[0-9.eE+-]+")
_LONE_SURROGATES: Final = re.compile("([\ud800-\udc7f\udd00-\udfff]+)")  # those that stand for no undecodable byte


class Redactor:
    """The secrets, hooks and patterns in force. Made by `build`; immutable, and safe to use from several threads."""

    __slots__ = ("_detectors", "_margin", "_matcher", "_numeric", "_values", "active")

    def __init__(self, values: Mapping[str, bytes], hooks: Sequence[RedactionHook], patterns: Sequence[RedactionPattern]) -> None:
        self._values = dict(values)
        self._detectors: tuple[RedactionHook | RedactionPattern, ...] = (*hooks, *patterns)
        self._matcher = Matcher(self._values.items()) if self._values else None
        self._margin = max((detector.max_match for detector in self._detectors), default=0)
        self._numeric = bool(self._detectors) or any(_NUMBER.fullmatch(value) for value in self._values.values())
        self.active = bool(self._values or self._detectors)

    @classmethod
    def build(
        cls,
        secrets: Mapping[str, str | bytes] | Iterable[str | bytes] | None = None,
        *,
        hooks: Sequence[RedactionHook] = (),
        patterns: Sequence[RedactionPattern] = (),
        allow_short: bool = False,
    ) -> "Redactor":
        """A redactor for `secrets` by name (a list is named `secret-1`, ...), hooks and patterns.

        White space around a text value, as files leave it, is no part of the secret. Values of less than 6 bytes are refused
        unless `allow_short`. Raises `SnapshotError` `INVALID_REQUEST`, which never shows a value.
        """
        values: dict[str, bytes] = {}
        for number, (key, value) in enumerate(_named(secrets), 1):
            name = checked_name(key, f"secret number {number}")
            values[name] = _checked_value(value, name, allow_short=allow_short)
        names = [*values, *(hook.name for hook in hooks), *(pattern.name for pattern in patterns)]
        if len(set(names)) != len(names):
            raise invalid("Two of the secrets, redaction hooks and patterns have the same name.", "Give each its own.")
        redactor = cls(values, hooks, patterns)
        if redactor._matcher is not None and find_first(redactor._matcher, [name.encode() for name in names]):
            raise invalid("The name of a secret, hook or pattern holds the value of a secret.", "Names are stored and shown.")
        return redactor

    def __repr__(self) -> str:
        return f"<Redactor of {len(self._values)} secrets, {len(self._detectors)} hooks and patterns>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("A Redactor holds secrets and cannot be pickled or copied.")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the secrets, hooks and patterns."""
        return (*self._values, *(detector.name for detector in self._detectors))

    @property
    def reach(self) -> int:
        """The most bytes that one match can take: of data that was cut, so many before the cut may hold a part of a secret."""
        return max(self._matcher.reach if self._matcher is not None else 0, self._margin)

    # ---- file contents

    def redact(self, path: bytes, data: Buffer) -> tuple[Buffer, tuple[Redaction, ...]]:
        """A whole file without its secrets, and what was taken out, by offset. `data` itself when there is nothing.

        The records cover exactly the zeroed ranges. Where matches overlap, the fewest that cover all are recorded.
        """
        if not self.active:
            return data, ()
        out, records = redact_whole(data, self._matcher, self._detect(path), self._margin)
        return out, tuple(records)

    def redact_many(self, items: Iterable[tuple[bytes, Buffer]]) -> list[tuple[Buffer, tuple[Redaction, ...]]]:
        """`redact` for each of many small whole files (path, data), in order."""
        if not self.active:
            return [(data, ()) for _, data in items]
        # Joining files into one buffer was measured: the automaton costs so little a call that the copy does not pay.
        return [self.redact(path, data) for path, data in items]

    def stream(self, path: bytes) -> RedactionStream:
        """A stream that redacts one file piece by piece; the same result as `redact`, whatever the pieces."""
        return RedactionStream(self._matcher, self._detect(path), self._margin)

    def _detect(self, path: bytes) -> Callable[[bytes], Iterable[Span]] | None:
        if not self._detectors:
            return None
        text = path.decode("utf-8", "surrogateescape")
        return lambda block: [span for detector in self._detectors for span in detector.spans(text, block)]

    # ---- names

    def names_with_secrets(self, items: Sequence[tuple[bytes, bytes]]) -> dict[int, str]:
        """By index, of each (path, link target) that holds a secret in any form: the name of the first."""
        if self._matcher is None:
            return {}
        names: list[bytes] = []
        owners: list[int] = []
        for index, item in enumerate(items):
            for name in item:
                if name:
                    names.append(name)
                    owners.append(index)
        found: dict[int, str] = {}
        for place, secret in find_first(self._matcher, names).items():
            found.setdefault(owners[place], secret)
        return found

    # ---- text

    def scrub_text(self, text: str) -> str:
        """`text` with `{secret:NAME}` for every secret in any form, and for whatever a hook or a pattern finds."""
        if not self.active or not text:
            return text
        try:
            data = text.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            parts = _LONE_SURROGATES.split(text)
            return "".join(part if i % 2 else self.scrub_text(part) for i, part in enumerate(parts))
        scrubbed = self.scrub_bytes(data)
        return text if scrubbed is data else scrubbed.decode("utf-8", "surrogateescape")

    def scrub_bytes(self, data: bytes) -> bytes:
        """`scrub_text` for text as bytes in an encoding that holds ASCII, such as a command's output."""
        records = self._text_records(data)
        if not records:
            return data
        out: list[bytes] = []
        position = 0
        for record in records:
            out += (data[position : record.offset], b"{secret:", record.name.encode(), b"}")
            position = max(position, record.offset + record.length)
        out.append(data[position:])
        return b"".join(out)

    def _text_records(self, data: bytes) -> Sequence[Redaction]:
        matches = self._matcher.find(data) if self._matcher is not None else []
        detect = self._detect(b"")
        spans = find_spans(data, detect, self._margin) if detect is not None else []
        if not matches and not spans:
            return ()
        cover = Cover(runs=False)
        for match in matches:
            cover.add(match)
        return join_records(cover.finish(), spans)

    def redact_json(self, value: Any) -> Any:
        """A JSON value with every string and key scrubbed as text; a number that holds a secret becomes such a text.

        Whatever is written as JSON is taken for what it becomes there: dataclasses, structs, sets, times. The value is not
        changed; what is unchanged may be shared with the result. Keys that become equal are numbered. Raises `SnapshotError`
        `INVALID_REQUEST`, which never shows a value, for what cannot be written as JSON.
        """
        if not self.active:
            return value
        try:
            return self._redact_plain(msgspec.to_builtins(value, builtin_types=_BYTES))
        except (TypeError, ValueError, RecursionError) as error:
            raise invalid(f"A value cannot be written as JSON ({type(error).__name__}).") from None

    def _redact_plain(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.scrub_text(value)
        if isinstance(value, _BYTES):
            return self.scrub_bytes(bytes(value))
        if isinstance(value, dict):
            return self._redact_object(value)
        if isinstance(value, list | tuple):
            return [self._redact_plain(item) for item in value]
        if self._numeric and isinstance(value, int | float) and not isinstance(value, bool):
            text = json.dumps(value)
            scrubbed = self.scrub_text(text)
            return value if scrubbed == text else scrubbed
        return value

    def _redact_object(self, value: dict[Any, Any]) -> dict[Any, Any]:
        out: dict[Any, Any] = {}
        for key, item in value.items():
            new = unique = self._redact_plain(key)
            number = 1
            while unique in out or (new != key and unique in value):
                number += 1
                unique = f"{new} ({number})"
            out[unique] = self._redact_plain(item)
        return out

    # ---- errors

    def scrub_error(self, error: SnapcoreError) -> None:
        """Take the secrets out of an error in place: its texts, notes and chain.

        An error of another kind in the chain that holds a secret is cut off with all behind it, and noted, scrubbed, instead.
        """
        if not self.active:
            return
        seen: set[int] = set()
        current: BaseException | None = error
        while isinstance(current, SnapcoreError) and id(current) not in seen:
            seen.add(id(current))
            current.args = self._scrub_value(current.args)
            for name, value in list(vars(current).items()):
                if name != "code":  # stable, and never from outside
                    setattr(current, name, self._scrub_value(value))
            current = self._scrub_chain(current, seen)

    def _scrub_chain(self, error: BaseException, seen: set[int]) -> BaseException | None:
        """Scrub the causes of an error up to the next of our own, which is returned."""
        while True:
            explicit = error.__cause__ is not None
            following = error.__cause__ if explicit else error.__context__
            if explicit and error.__context__ is not following:
                error.__context__ = None  # hidden by the cause, and may hold anything
            if following is None or isinstance(following, SnapcoreError) or id(following) in seen:
                return following
            seen.add(id(following))
            if self._shows_secret(following):
                text = self.scrub_text("".join(traceback.format_exception_only(following)).strip())
                if explicit or not error.__suppress_context__:
                    error.add_note(f"Caused by {text}")
                error.__cause__ = error.__context__ = None
                return None
            error = following

    def _shows_secret(self, error: BaseException) -> bool:
        render = traceback.format_exception if isinstance(error, BaseExceptionGroup) else traceback.format_exception_only
        text = "".join((*render(error), repr(error.args), repr(vars(error))))
        values = (error.args, vars(error))
        return self.scrub_text(text) != text or any(self._scrub_value(value) != value for value in values)

    def _scrub_value(self, value: Any) -> Any:
        if isinstance(value, str):
            plain = str(value)
            scrubbed = self.scrub_text(plain)
            return value if scrubbed == plain else scrubbed
        if isinstance(value, bytes):
            return self.scrub_bytes(value)
        if type(value) in (tuple, list, set, frozenset):
            return type(value)(self._scrub_value(item) for item in value)
        if isinstance(value, dict):
            return {self._scrub_value(key): self._scrub_value(item) for key, item in value.items()}
        return value

    # ---- identity

    def fingerprint(self, salt: bytes) -> bytes:
        """32 bytes that change whenever a secret, a hook's version or a pattern does; empty when nothing is redacted.

        scrypt (RFC 7914; N=2^14, r=8, p=1: 16 MiB and tens of milliseconds a guess) with the repository's salt, so that what
        is stored does not help to guess a secret. Computed once a process for each set and salt.
        """
        if not self.active:
            return b""
        identity = msgspec.msgpack.encode(
            (
                FORMS_VERSION,
                sorted(self._values.items()),
                sorted((d.name, d.version, d.max_match) for d in self._detectors if isinstance(d, RedactionHook)),
                sorted(d.identity() for d in self._detectors if isinstance(d, RedactionPattern)),
            )
        )
        key = hmac.digest(_process_key, len(salt).to_bytes(8, "big") + salt + identity, "sha256")
        known = _fingerprints.get(key)
        if known is None:
            import hashlib

            known = hashlib.scrypt(identity, salt=salt, n=2**14, r=8, p=1, dklen=32)
            _fingerprints[key] = known
        return known

    # ---- putting back

    def reinject(self, redactions: Sequence[Redaction], data_offset: int, data: Buffer) -> tuple[Buffer, list[Redaction]]:
        """A block of a redacted file, from `data_offset` of it, with the present values put back, and the records in it that
        stay zero: of another name, of another length in that form, or at odds with the record that they overlap.

        `redactions` are all records of the file; the result does not depend on how the file is cut into blocks. `data` itself
        when no record is in it.
        """
        touched = _touched(redactions, data_offset, len(data))
        if not touched:
            return data, []
        out = bytearray(data)
        left: list[Redaction] = []
        previous: tuple[int, bytes] | None = None
        for index in touched:
            record = redactions[index]
            if previous is None and index:
                before = redactions[index - 1]
                previous = before.offset, self._value_of(before) or b""
            value = self._value_of(record)
            if value is None or (previous is not None and not _agree(*previous, record.offset, value)):
                left.append(record)
            else:
                first = max(record.offset, data_offset)
                last = min(record.offset + record.length, data_offset + len(out))
                out[first - data_offset : last - data_offset] = value[first - record.offset : last - record.offset]
            previous = record.offset, value or b""
        return out, left

    def _value_of(self, record: Redaction) -> bytes | None:
        """The present bytes of a record: its secret in its form, as often as it fits; None when it does not fit."""
        value = self._values.get(record.name)
        written = encode(value, record.form) if value is not None else None
        if not written or record.length % len(written):
            return None
        return written * (record.length // len(written))


_process_key: Final = os.urandom(32)
_fingerprints: Final[dict[bytes, bytes]] = {}  # by keyed hash: the key dies with the process

NO_REDACTION: Final = Redactor({}, (), ())
"""Takes nothing out, and costs nothing."""


def zeroed(data: Buffer, offset: int, redactions: Sequence[Redaction]) -> Buffer:
    """A block of a file, from `offset` of it, with the ranges of the file's records zeroed; `data` itself when none is in it.

    Equal to the stored block exactly when the live file differs in nothing but what was taken out.
    """
    touched = _touched(redactions, offset, len(data))
    if not touched:
        return data
    out = bytearray(data)
    zero(out, offset, ((redactions[i].offset, redactions[i].offset + redactions[i].length) for i in touched))
    return out


def _touched(redactions: Sequence[Redaction], offset: int, size: int) -> range:
    """The indexes of the records (ordered by offset, and so by end) that lie in a block, at least in part."""
    first = bisect.bisect_right(redactions, offset, key=lambda record: record.offset + record.length)
    last = bisect.bisect_left(redactions, offset + size, key=lambda record: record.offset)
    return range(first, last)


def _agree(offset: int, value: bytes, next_offset: int, next_value: bytes) -> bool:
    overlap = offset + len(value) - next_offset
    return overlap <= 0 or value[-overlap:] == next_value[:overlap]


def _named(secrets: Mapping[str, str | bytes] | Iterable[str | bytes] | None) -> Iterator[tuple[object, object]]:
    if secrets is None:
        return iter(())
    if isinstance(secrets, Mapping):
        return iter(secrets.items())
    if isinstance(secrets, str | bytes):
        raise invalid("secrets is a single text.", "Pass a mapping from name to value, or a list of values.")
    return ((f"secret-{number}", value) for number, value in enumerate(secrets, 1))


def _checked_value(value: object, name: str, *, allow_short: bool) -> bytes:
    if isinstance(value, str):
        try:
            data = value.strip().encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise invalid(f"The value of secret '{name}' is not valid text.", "Pass it as bytes.") from None
    elif isinstance(value, bytes):
        data = value.strip() if _is_text(value) else value
    else:
        raise invalid(f"The value of secret '{name}' is neither text nor bytes.")
    if not data:
        raise invalid(f"The value of secret '{name}' is empty.", "Leave it out.")
    if not data.strip(b"\0"):
        raise invalid(f"The value of secret '{name}' consists of zero bytes.", "Leave it out: zeros take its place.")
    if len(data) < MIN_SECRET_BYTES and not allow_short:
        raise invalid(
            f"The value of secret '{name}' has less than {MIN_SECRET_BYTES} bytes and would be found everywhere.",
            "Use allow_short_secrets to take it nevertheless.",
        )
    return data


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True
