"""What the scheduler says: one line an event on stderr, as JSON or as text, without secrets and without control characters.

Fields of a line, each where it has a meaning: `time`, `level`, `event`, `job`, `sandbox`, `thread`, `outcome`, `seconds`, `bytes`
(read), `stored`, `checkpoint`, `code` (of an error), `message`.
"""

import contextlib
import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final, Literal, TextIO

from snapcore.addresses import shown_address
from snapcore.errors import SnapcoreError, printable
from snapcore.redaction import Redactor
from snapcore.runs import JobRun, Outcome

from .lines import LineWriter

__all__ = ["Events", "LogFormat", "Scrubber", "logging_to"]

LogFormat = Literal["json", "text"]
Field = str | int | float | None

_EVENT: Final = "snapcore_event"
_FIELDS: Final = "snapcore_fields"
_LEVELS: Final = {Outcome.FAILED: logging.ERROR, Outcome.LOCKED: logging.WARNING}


class Scrubber:
    """Takes the secrets of all jobs, as last read, out of texts."""

    def __init__(self) -> None:
        self._redactors: dict[str, Redactor] = {}

    def learn(self, job: str, redactor: Redactor) -> None:
        """What a job's secrets are now."""
        self._redactors[job] = redactor

    def scrub(self, text: str) -> str:
        """`text` with `{secret:NAME}` for each."""
        for redactor in list(self._redactors.values()):
            text = redactor.scrub_text(text)
        return text


class Events:
    """Writes events to the log."""

    def __init__(self) -> None:
        self._log = logging.getLogger("snapcore.cron")

    def tell(self, event: str, message: str = "", *, level: int = logging.INFO, **fields: Field) -> None:
        """One event; fields that are None or empty are left out."""
        self._log.log(level, "%s", message, extra={_EVENT: event, _FIELDS: fields})

    def begun(self, job: str, sandbox: str, thread_id: str) -> None:
        """A capture begins."""
        self.tell("capturing", level=logging.DEBUG, job=job, sandbox=printable(shown_address(sandbox)), thread=thread_id)

    def skipped(self, job: str, sandbox: str, thread_id: str) -> None:
        """A run was left out."""
        self.tell(
            "skipped",
            "The run before has not ended.",
            level=logging.WARNING,
            job=job,
            sandbox=printable(shown_address(sandbox)),
            thread=thread_id,
            outcome="skipped",
        )

    def unrecorded(self, error: SnapcoreError) -> None:
        """A run is not in the repository's record."""
        self.tell("unrecorded", f"The run could not be recorded. {error}", level=logging.ERROR, code=str(error.code))

    def ran(self, run: JobRun) -> None:
        """What a run did; its outcome is the event."""
        self.tell(
            run.outcome,
            run.message,
            level=_LEVELS.get(run.outcome, logging.INFO),
            job=run.job,
            sandbox=run.sandbox,
            thread=run.thread_id,
            outcome=run.outcome,
            seconds=round((run.ended_at - run.started_at) / 1e6, 3),
            bytes=run.bytes_read,
            stored=run.bytes_stored,
            checkpoint=run.checkpoint_id,
            code=run.error,
        )


@contextlib.contextmanager
def logging_to(stream: TextIO, form: LogFormat, level: int, scrubber: Scrubber) -> Iterator[None]:
    """Send all logs of this process to a stream: of snapcore from `level` on, of other packages warnings and errors."""
    handler = _Handler(stream, _JsonFormatter(scrubber) if form == "json" else _TextFormatter(scrubber))
    root, own = logging.getLogger(), logging.getLogger("snapcore")
    before = own.level
    root.addHandler(handler)
    own.setLevel(level)
    try:
        yield
    finally:
        own.setLevel(before)
        root.removeHandler(handler)
        handler.close()


class _Handler(logging.Handler):
    """A log that is not read, or that nobody can write any more, stops no capture."""

    def __init__(self, stream: TextIO, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._lines = LineWriter(stream, self._lost)

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001  # of whatever another package wanted to say
            return
        self._lines.put(line)

    def close(self) -> None:
        """See `logging.Handler`."""
        self._lines.close()
        super().close()

    def _lost(self, count: int) -> str:
        message = f"{count} {'line' if count == 1 else 'lines'} of this log could not be written."
        fields = {"msg": message, "levelno": logging.WARNING, "levelname": "WARNING", _EVENT: "lost", _FIELDS: {}}
        return self.format(logging.makeLogRecord(fields))


class _Formatter(logging.Formatter):
    def __init__(self, scrubber: Scrubber) -> None:
        super().__init__()
        self._scrubber = scrubber

    def _line(self, record: logging.LogRecord) -> dict[str, Field]:
        """All of a record, in the order of a line."""
        fields: dict[str, Field] = getattr(record, _FIELDS, {"logger": record.name})
        message = record.getMessage()
        if record.exc_info and record.exc_info[0] is not None:
            message = f"{message} ({record.exc_info[0].__name__})"  # nobody knows what its text and its frames hold
        line: dict[str, Field] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "event": getattr(record, _EVENT, "log"),
            **fields,
            "message": message,
        }
        return {
            key: self._scrubber.scrub(value) if isinstance(value, str) else value
            for key, value in line.items()
            if value is not None and value != ""
        }


class _JsonFormatter(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(self._line(record))


class _TextFormatter(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = self._line(record)
        time, level, event = line.pop("time"), line.pop("level"), line.pop("event")
        message = line.pop("message", None)
        if line.get("outcome") == event:
            del line["outcome"]
        fields = (f"{key}={_quoted(value)}" for key, value in line.items() if value != 0 or key == "seconds")
        parts = [f"{time} {level:7} {event}", *fields]
        return printable(" ".join(parts) + (f": {message}" if message else ""))


def _quoted(value: Field) -> str:
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if any(ch in text for ch in " \"'=") else text
