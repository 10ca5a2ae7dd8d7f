"""The service `process.Process` of a sandbox of the E2B test server. Messages are dicts, as Connect's JSON codec has them.

As in E2B's own agent, a command outlives the stream that started it, and its time limit ends that one process only.
"""

import base64
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Iterator
from typing import Any, Final

from .e2b_server_chroot import Chroot, SandboxUser

__all__ = ["Message", "Processes", "RpcError"]

Message = dict[str, Any]

_PIECE: Final = 32 << 10
_TICK: Final = 0.05  # seconds between looks at what a stream's sandbox and client do
_SIGNALS: Final = {"SIGNAL_SIGKILL": signal.SIGKILL, "SIGNAL_SIGTERM": signal.SIGTERM}


_ENDINGS: Final[dict[int, str]] = {signal.SIGKILL: "killed", signal.SIGTERM: "terminated"}


class RpcError(Exception):
    """An answer with a Connect error code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class _Listener:
    """A stream that shows what a command writes."""

    def __init__(self) -> None:
        self.closed = False
        self._events: queue.Queue[Message] = queue.Queue(64)

    def put(self, event: Message) -> None:
        while not self.closed:
            try:
                self._events.put(event, timeout=_TICK)
                break
            except queue.Full:
                continue

    def get(self) -> Message | None:
        try:
            return self._events.get(timeout=_TICK)
        except queue.Empty:
            return None


class _Command:
    """A process that was started by a client."""

    def __init__(self, process: subprocess.Popen[bytes], request: Message) -> None:
        self.process = process
        self.config: Message = request.get("process", {})
        self.tag: str | None = request.get("tag")
        self.late = False
        self.input = threading.Lock()
        self._listeners: list[_Listener] = []
        self._guard = threading.Lock()
        self._end: Message | None = None

    def listen(self) -> _Listener:
        listener = _Listener()
        with self._guard:
            self._listeners.append(listener)
            if self._end is not None:
                listener.put(self._end)
        return listener

    def run(self, seconds: float | None) -> None:
        """Hand on what it writes until it has ended; on a thread of its own."""
        timer = threading.Timer(seconds, self._time_out) if seconds else None
        if timer is not None:
            timer.daemon = True
            timer.start()
        errors = threading.Thread(target=self._pump, args=("stderr",), daemon=True)
        errors.start()
        self._pump("stdout")
        errors.join()
        code = self.process.wait()
        if timer is not None:
            timer.cancel()
        self.close_input()
        with self._guard:
            self._end = {"event": {"end": _ended(code)}}
            for listener in self._listeners:
                listener.put(self._end)

    def write(self, data: bytes) -> None:
        """Write to its input, from one request at a time."""
        with self.input:
            try:
                assert self.process.stdin is not None
                self.process.stdin.write(data)
                self.process.stdin.flush()
            except (OSError, ValueError) as error:
                raise RpcError("internal", f"error writing to stdin: {error}") from error

    def close_input(self) -> None:
        with self.input:
            try:
                assert self.process.stdin is not None
                self.process.stdin.close()
            except OSError:
                return  # it had ended before it read all

    def _time_out(self) -> None:
        self.late = True
        self.process.kill()

    def _pump(self, name: str) -> None:
        pipe = getattr(self.process, name)
        while data := os.read(pipe.fileno(), _PIECE):
            event = {"event": {"data": {name: base64.b64encode(data).decode()}}}
            for listener in list(self._listeners):
                listener.put(event)
        pipe.close()


class Processes:
    """What runs in one sandbox on behalf of clients."""

    def __init__(self, chroot: Chroot, environment: dict[str, str]) -> None:
        self._chroot = chroot
        self._environment = environment
        self._commands: dict[int, _Command] = {}

    def start(self, request: Message, user: SandboxUser, seconds: float | None) -> Iterator[Message | None]:
        """Events of a new command, None each time there is none for a while."""
        config = request.get("process", {})
        if "pty" in request:
            raise RpcError("unimplemented", "The test server has no terminals.")
        cwd = config.get("cwd") or user.home
        if not os.path.isdir(self._chroot.outside(cwd)):
            raise RpcError("invalid_argument", f"cwd '{cwd}' does not exist")
        environment = {**self._environment, **config.get("envs", {})}
        process = self._chroot.start([config.get("cmd", ""), *config.get("args", [])], user, cwd, environment)
        command = self._commands[process.pid] = _Command(process, request)
        if not request.get("stdin", False):
            command.close_input()
        listener = command.listen()
        threading.Thread(target=self._run, args=(command, seconds), daemon=True).start()
        return self._events(command, listener)

    def connect(self, request: Message) -> Iterator[Message | None]:
        """Events of a running command from now on."""
        command = self._find(request)
        return self._events(command, command.listen())

    def list(self) -> Message:
        """What runs."""
        return {
            "processes": [
                {"pid": pid, "config": command.config} | ({"tag": command.tag} if command.tag else {})
                for pid, command in list(self._commands.items())
            ]
        }

    def send_input(self, request: Message) -> Message:
        """Write to a command's input."""
        self._find(request).write(base64.b64decode(request.get("input", {}).get("stdin", "")))
        return {}

    def stream_input(self, requests: Iterator[Message]) -> Message:
        """Write to a command's input what comes along."""
        command: _Command | None = None
        for request in requests:
            if "start" in request:
                command = self._find(request["start"])
            elif "data" in request and command is not None:
                command.write(base64.b64decode(request["data"].get("input", {}).get("stdin", "")))
        return {}

    def close_stdin(self, request: Message) -> Message:
        """End a command's input."""
        self._find(request).close_input()
        return {}

    def send_signal(self, request: Message) -> Message:
        """Signal the command's own process."""
        command = self._find(request)
        number = _SIGNALS.get(request.get("signal", ""))
        if number is None:
            raise RpcError("invalid_argument", "invalid signal")
        command.process.send_signal(number)
        return {}

    def _run(self, command: _Command, seconds: float | None) -> None:
        command.run(seconds)
        self._commands.pop(command.process.pid, None)

    def _find(self, request: Message) -> _Command:
        selector = request.get("process", {})
        for pid, command in list(self._commands.items()):
            if pid == selector.get("pid") or (command.tag and command.tag == selector.get("tag")):
                return command
        raise RpcError("not_found", f"process with pid {selector.get('pid')} not found")

    @staticmethod
    def _events(command: _Command, listener: _Listener) -> Iterator[Message | None]:
        try:
            yield {"event": {"start": {"pid": command.process.pid}}}
            while True:
                event = listener.get()
                if event is not None and "end" in event["event"] and command.late:
                    raise RpcError("deadline_exceeded", "context deadline exceeded")
                yield event
                if event is not None and "end" in event["event"]:
                    return
        finally:
            listener.closed = True


def _ended(code: int) -> Message:
    if code >= 0:
        return {"exitCode": code, "exited": True, "status": f"exit status {code}"} | (
            {"error": f"exit status {code}"} if code else {}
        )
    status = f"signal: {_ENDINGS.get(-code, 'other')}"
    return {"exitCode": -1, "exited": False, "status": status, "error": status}
