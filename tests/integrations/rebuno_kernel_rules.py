"""What the kernel of the tests does with executions, steps and resources; see `rebuno_kernel`."""

import hashlib
import json
import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

Json = dict[str, Any]
ENDED: Final = ("completed", "failed", "cancelled")
SETTLED: Final = ("succeeded", "failed")


class Refused(Exception):  # noqa: N818  # an answer, not a fault of the kernel
    """An answer other than 2xx."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"code": code, "message": message}


class Rules:
    """The state, in memory and in a file, and what is done with it. Methods are called with `changed` held."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "kernel.json"
        self.changed = threading.Condition(threading.RLock())
        self.agents: dict[str, Json] = {}
        self.executions: dict[str, Json] = {}
        self.hold: set[str] = set()  # targets of steps that wait for an approval

    def load(self) -> None:
        """Forget what is not in the file."""
        if self._file.exists():
            stored = json.loads(self._file.read_text())
            self.agents, self.executions = stored["agents"], stored["executions"]

    def deliver(self, execution: Json, url: str | None = None) -> None:
        """Tell the agent."""
        raise NotImplementedError

    # ---- executions

    def execution(self, execution_id: str) -> Json:
        if execution_id not in self.executions:
            raise Refused(404, "not_found", "no such execution")
        return self.executions[execution_id]

    def view(self, execution: Json) -> Json:
        names = ("id", "agent_id", "input", "status", "output", "failure_reason", "session", "forked_from", "fork_seq")
        return {name: execution[name] for name in names}

    def _new(self, agent_id: str, given: Any, session: str) -> Json:
        execution: Json = {
            "id": new_id(), "agent_id": agent_id, "input": given, "session": session, "status": "running", "output": None,
            "failure_reason": "", "forked_from": None, "fork_seq": 0, "state": None, "parent": None,
            "dispatch": {"id": new_id(), "attempt": 1}, "counts": {}, "events": [], "steps": {}, "resources": {},
            "checkpoints": [],
        }  # fmt: skip
        self.executions[execution["id"]] = execution
        return execution

    def create_execution(self, body: Json) -> Json:
        with self.changed:
            session = body.get("session") or ""
            turns = [e for e in self.executions.values() if session and e["session"] == session and e["status"] == "completed"]
            execution = self._new(body["agent_id"], body.get("input"), session)
            self._log(execution, "execution.created")
            if turns:
                execution["parent"] = turns[-1]["id"]
                for resource in turns[-1]["resources"].values():
                    kept = {**resource, "generation": 0, "count": 0, "checkpoint_ref": ""}
                    execution["resources"][kept["key"]] = kept
                    kept["registered"] = self._log(execution, "resource.registered", key=kept["key"])
            self.store()
            self.deliver(execution)
            return self.view(execution)

    def previous(self, execution: Json) -> Any:
        return self.executions[execution["parent"]]["state"] if execution["parent"] else None

    def end(self, execution: Json, status: str, body: Json) -> None:
        execution |= {"status": status, "output": body.get("output"), "state": body.get("state")}
        execution["failure_reason"] = body.get("error", "")
        self._log(execution, f"execution.{status}")
        self.store()

    def _log(self, execution: Json, kind: str, **payload: Any) -> int:
        number = len(execution["events"]) + 1
        event = {"execution_id": execution["id"], "event_seq": number, "type": kind, "payload": payload}
        execution["events"].append(event)
        return number

    def store(self) -> None:
        draft = self._file.with_suffix(f".{threading.get_ident()}")
        draft.write_text(json.dumps({"agents": self.agents, "executions": self.executions}))
        os.replace(draft, self._file)
        self.changed.notify_all()

    # ---- steps

    def step(self, execution: Json, step_id: str) -> Json:
        if step_id not in execution["steps"]:
            raise Refused(404, "not_found", "no such step")
        found: Json = execution["steps"][step_id]
        return found

    def submit(self, execution: Json, body: Json) -> Json:
        identity = json.dumps([body["kind"], body["target"], body["args"]], sort_keys=True)
        occurrence = execution["counts"].get(identity, 0)
        execution["counts"][identity] = occurrence + 1
        step_id = step_id_of(execution["id"], identity, occurrence)
        step = execution["steps"].get(step_id)
        if step is not None and step["status"] in SETTLED:
            return {"decision": "replay", "step_id": step_id, "result": step["result"], "error": step["error"]}
        for key in body["resources"]:
            if key not in execution["resources"]:
                raise Refused(400, "validation_error", f"unknown resource {key!r}")
        if body["target"] in self.hold:
            execution["status"] = "blocked"
            self.store()
            return {"decision": "blocked", "step_id": step_id}
        touched = self._touch(execution, body)
        execution["steps"][step_id] = {
            "step_id": step_id, "execution_id": execution["id"], "kind": body["kind"], "target": body["target"],
            "args": body["args"], "status": "executing", "result": None, "error": None, "resources": body["resources"],
            "identity": identity, "occurrence": occurrence,
        }  # fmt: skip
        generations = {each["key"]: each["generation"] for each in touched}
        number = self._log(execution, "step.executing", step_id=step_id, generations=generations)
        for checkpoint in execution["checkpoints"]:
            if checkpoint["key"] in generations and not checkpoint["until"]:
                checkpoint["until"] = number
        self.store()
        return {"decision": "proceed", "step_id": step_id, "resources": touched}

    def _touch(self, execution: Json, body: Json) -> list[Json]:
        touched = []
        for resource in execution["resources"].values():
            affects = body["kind"] != "llm_call" and resource["key"] in body["resources"]
            if not affects and resource["coverage_reuse"]:
                continue
            resource["generation"] += 1
            every = resource["every_steps"]
            due = bool(affects and every and (resource["count"] + 1) % every == 0)
            touched.append({"key": resource["key"], "generation": resource["generation"], "due": due})
        return touched

    def settle(self, execution: Json, step_id: str, body: Json) -> Json:
        step = self.step(execution, step_id)
        if step["status"] not in SETTLED:
            step["status"] = "failed" if "error" in body else "succeeded"
            step["result"], step["error"] = body.get("result"), body.get("error")
            for key in step["resources"]:
                execution["resources"][key]["count"] += 1
            self._log(execution, f"step.{step['status']}", step_id=step_id)
            self.record(execution, body)
        return {"decision": "proceed", "step_id": step_id}

    # ---- resources

    def register_resource(self, execution: Json, body: Json) -> Json:
        resource = execution["resources"].get(body["key"])
        fixed = ("driver_id", "configuration", "coverage_reuse")
        if resource is None:
            resource = {**body, "generation": 0, "count": 0, "binding": None, "checkpoint_ref": ""}
            resource["registered"] = self._log(execution, "resource.registered", key=body["key"])
            execution["resources"][body["key"]] = resource
        elif any(resource[name] != body[name] for name in fixed):
            raise Refused(409, "conflict", "it is registered with another driver, configuration, or coverage_reuse")
        elif not resource["every_steps"]:  # checkpoints may be turned on later, and stay on
            resource |= {name: body[name] for name in ("every_steps", "on_completion")}
        self.store()
        covered = any(
            c["key"] == body["key"] and c["generation"] == resource["generation"] and not c["until"]
            for c in execution["checkpoints"]
        )
        return {**resource, "covered": covered}

    def bind(self, execution: Json, key: str, body: Json) -> None:
        resource = execution["resources"].get(key)
        if resource is None:
            raise Refused(404, "not_found", "no such resource")
        if resource["binding"] is None:
            resource["binding"] = body["binding"]
            self._log(execution, "resource.bound", key=key, binding=body["binding"])
            self.store()
        elif resource["binding"] != body["binding"]:
            raise Refused(409, "conflict", "it is bound already")

    def record(self, execution: Json, body: Json) -> None:
        covered_from = len(execution["events"])
        writing = {key for step in execution["steps"].values() if step["status"] == "executing" for key in step["resources"]}
        for failure in body.get("capture_failures", ()):
            self._log(execution, "resource.checkpoint_failed", **failure)
        for capture in body.get("captures", ()):
            key, generation = capture["key"], capture["generation"]
            if generation != execution["resources"][key]["generation"] or key in writing:
                self._log(execution, "resource.checkpoint_failed", key=key, generation=generation, error="stale_generation")
                continue
            ref = capture["checkpoint_ref"]
            execution["checkpoints"].append({"key": key, "generation": generation, "ref": ref, "from": covered_from, "until": 0})
            self._log(execution, "resource.checkpointed", key=key, generation=generation, checkpoint_ref=ref)
        self.store()

    # ---- forks

    def fork_execution(self, execution_id: str, body: Json) -> Json:
        with self.changed:
            source, at = self.execution(execution_id), body["at_seq"]
            fork = self._new(source["agent_id"], source["input"], body.get("session") or "")
            fork |= {"forked_from": source["id"], "fork_seq": at}
            self._log(fork, "execution.created")
            self._log(fork, "execution.forked", source_execution_id=source["id"], fork_seq=at)
            places = self._copy_steps(source, fork, at)
            for resource in source["resources"].values():
                if resource["registered"] <= at:
                    self._copy_resource(source, fork, resource, at, places)
            self.store()
            self.deliver(fork)
            return self.view(fork)

    def _copy_steps(self, source: Json, fork: Json, at: int) -> Callable[[int], int]:
        """Steps that had settled by then. What is returned tells where in the fork's events an event of the source is."""
        before = source["events"][:at]
        settled = {e["payload"]["step_id"] for e in before if e["type"] in ("step.succeeded", "step.failed")}
        renamed = {}
        for old in settled:
            step = source["steps"][old]
            new = step_id_of(fork["id"], step["identity"], step["occurrence"])
            renamed[old] = new
            fork["steps"][new] = {**step, "step_id": new, "execution_id": fork["id"]}
        base, copied = len(fork["events"]), []
        for event in before:
            payload = event["payload"]
            if event["type"].startswith("step.") and payload["step_id"] in renamed:
                self._log(fork, event["type"], **{**payload, "step_id": renamed[payload["step_id"]]})
                copied.append(event["event_seq"])
        return lambda number: base + sum(each <= number for each in copied)

    def _copy_resource(self, source: Json, fork: Json, resource: Json, at: int, place: Callable[[int], int]) -> None:
        key = resource["key"]
        known = [c for c in source["checkpoints"] if c["key"] == key and c["from"] <= at]
        chosen = next((c for c in reversed(known) if not c["until"] or at < c["until"]), known[-1] if known else None)
        covered = chosen is not None and (not chosen["until"] or at < chosen["until"])
        steps = [e for e in source["events"][:at] if e["type"] == "step.executing" and key in e["payload"]["generations"]]
        generation = steps[-1]["payload"]["generations"][key] if steps else 0
        copy = {**resource, "binding": None, "checkpoint_ref": chosen["ref"] if chosen else ""}
        copy["generation"] = generation if covered else generation + 1
        copy["count"] = sum(key in step["resources"] for step in fork["steps"].values())
        copy["registered"] = place(resource["registered"])
        fork["resources"][key] = copy
        self._log(fork, "resource.initialized", key=key, generation=copy["generation"], checkpoint_ref=copy["checkpoint_ref"])
        for checkpoint in known:
            until = 0 if checkpoint["until"] > at else checkpoint["until"] and place(checkpoint["until"])
            fork["checkpoints"].append({**checkpoint, "from": place(checkpoint["from"]), "until": until})


def step_id_of(execution_id: str, identity: str, occurrence: int) -> str:
    return hashlib.sha256(json.dumps([execution_id, identity, occurrence]).encode()).hexdigest()


def new_id() -> str:
    """As a UUID of version 7: in order of time."""
    digits = f"{time.time_ns() // 1_000_000:012x}7{secrets.token_hex(2)[:3]}8{secrets.token_hex(8)[:15]}"
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
