"""Whether a holder is surely gone: only when that can be known."""

import os
import subprocess
import sys

import msgspec
import pytest

from snapcore.hosts import current_holder, is_gone
from snapcore.model import Holder


def changed(**fields: object) -> Holder:
    return msgspec.structs.replace(current_holder(), **fields)


def boot_with(**parts: str) -> str:
    machine, boot, namespace = current_holder().boot_id.split("/")
    return "/".join({"machine": machine, "boot": boot, "namespace": namespace, **parts}.values())


def ended_process() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    return process.pid


def test_this_process_runs() -> None:
    here = current_holder()
    assert here.pid == os.getpid()
    assert here.started > 0
    assert not is_gone(here)


def test_a_process_that_ended_is_gone() -> None:
    assert is_gone(changed(pid=ended_process()))
    assert is_gone(changed(pid=ended_process(), started=0))


def test_a_pid_that_is_used_again_is_of_another_process() -> None:
    assert is_gone(changed(started=current_holder().started - 1))


def test_a_process_that_was_not_waited_for_is_gone() -> None:
    script = "from snapcore.hosts import current_holder; print(current_holder().started, flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    holder = changed(pid=process.pid, started=int(process.stdout.readline()))
    assert not is_gone(holder)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert is_gone(holder)
    process.communicate()


def test_a_running_process_whose_start_is_unknown_is_not_judged() -> None:
    assert not is_gone(changed(started=0))
    assert not is_gone(changed(pid=1, started=0))


def test_a_process_of_another_host_is_not_judged() -> None:
    assert not is_gone(changed(host="elsewhere", pid=ended_process()))
    assert not is_gone(changed(host="elsewhere", boot_id=boot_with(boot="other")))


@pytest.mark.parametrize("holder", [Holder(), Holder(host="h"), Holder(pid=1), changed(boot_id=""), changed(pid=0)])
def test_a_holder_that_does_not_say_who_it_is_is_not_judged(holder: Holder) -> None:
    assert not is_gone(holder)


@pytest.mark.skipif(sys.platform != "linux", reason="process namespaces are Linux's")
def test_a_process_of_another_container_is_not_judged() -> None:
    """Containers share the boot id and often the host name, but not the pids."""
    pid = ended_process()
    assert not is_gone(changed(pid=pid, boot_id=boot_with(namespace="pid:[4026539999]")))
    assert not is_gone(changed(pid=pid, boot_id=boot_with(namespace="pid:[4026539999]", boot="other")))


def test_a_holder_of_an_earlier_boot_is_gone_unless_a_container_is_in_play(monkeypatch: pytest.MonkeyPatch) -> None:
    def judged(machine: str, namespace: str) -> bool:
        here = msgspec.structs.replace(current_holder(), boot_id=f"{machine}/now/{namespace}")
        monkeypatch.setattr("snapcore.hosts._holder", lambda pid: here)
        return is_gone(msgspec.structs.replace(here, boot_id=f"{machine}/before/{namespace}"))

    host = "pid:[4026531836]"
    assert judged("machine", host)
    if sys.platform == "linux":
        assert not judged("machine", "pid:[4026539999]")
        assert not judged("machine", "")
    assert not judged("", host)


def test_a_forked_child_is_a_holder_of_its_own() -> None:
    parent = current_holder()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, f"{current_holder().pid} {is_gone(parent)}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 100).decode() == f"{child} False"
    os.close(reading)
    os.close(writing)
