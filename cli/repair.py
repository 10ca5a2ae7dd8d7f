"""`repair`: what can be done for a repository that is hurt."""

from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from .output import checkpoint_fields, count, print_json, print_line
from .progress import progress
from .runtime import Exit, Invocation, address_errors, command

if TYPE_CHECKING:
    from snapcore.repairing import RepairReport
    from snapcore.repairplan import RepairAction, RepairPlan

__all__ = ["repair"]

EXAMPLES: Final = {"repair": ("snapcore repair", "snapcore repair --yes", "snapcore repair --read-data --yes")}

LINES_OF_A_KIND: Final = 10  # a database made anew has an action for each pack


@command
async def repair(
    invocation: Invocation,
    *,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do it. Without, only say what would be done.")] = False,
    read_data: Annotated[
        bool, typer.Option("--read-data", help="Read every byte of every pack to find what is damaged.")
    ] = False,
) -> int:
    """Make whole what can be made whole, from the packs alone if need be. Deletes nothing. Ends with 1 when something stays
    hurt, or without --yes when there is something to do."""
    import snapcore

    invocation.tell_repository()
    if yes:
        with progress(invocation, "repair") as on_progress, address_errors():
            report = await snapcore.repair_repository(
                invocation.repo, database=invocation.database, read_data=read_data, on_progress=on_progress
            )
        return _tell_report(invocation, report)
    with progress(invocation, "repair") as on_progress, address_errors():
        plan = await snapcore.plan_repair(
            invocation.repo, database=invocation.database, read_data=read_data, on_progress=on_progress
        )
    return _tell_plan(invocation, plan)


def _tell_plan(invocation: Invocation, plan: "RepairPlan") -> int:
    hurt = sorted({*plan.report.hurt, *plan.hurt})
    if invocation.json:
        print_json({"message_type": "repair", "dry_run": True, **_fields(plan.actions, hurt, plan)})
    elif plan.actions or hurt or invocation.tells:
        _print_actions("would", plan.actions)
        _print_rest(hurt, plan, "is hurt as it stands")
        if plan.actions:
            print_line(f"{count(len(plan.actions), 'thing')} to do: run it again with --yes")
        else:
            print_line("nothing to do")
    return Exit.FAILED if plan.actions or hurt else Exit.DONE


def _tell_report(invocation: Invocation, report: "RepairReport") -> int:
    if invocation.json:
        print_json({"message_type": "repair", "dry_run": False, **_fields(report.done, report.hurt, report)})
    elif report.hurt or invocation.tells:
        _print_actions("did", report.done)
        _print_rest(report.hurt, report, "is still hurt")
        print_line(f"{count(len(report.done), 'thing')} done" if report.done else "nothing to do")
        if report.hurt:
            print_line("the next capture of the same files stores again what is missing of them")
    return Exit.DONE if report.ok else Exit.FAILED


def _print_actions(verb: str, actions: "list[RepairAction]") -> None:
    told: dict[str, int] = {}
    for action in actions:
        told[action.step] = told.get(action.step, 0) + 1
        if told[action.step] <= LINES_OF_A_KIND:
            print_line(f"{verb}: {action.message}")
    for step, number in told.items():
        if number > LINES_OF_A_KIND:
            print_line(f"{verb}: {number - LINES_OF_A_KIND} more of {step}")


def _print_rest(hurt: list[tuple[str, str]], found: "RepairPlan | RepairReport", state: str) -> None:
    for thread, each in hurt:
        print_line(f"checkpoint {each} of thread {thread} {state}")
    for c in found.uncommitted:
        print_line(f"left out, never committed: checkpoint {c.id} of thread {c.thread_id}")
    for c in found.incomplete:
        print_line(f"left out, not whole: checkpoint {c.id} of thread {c.thread_id}")
    for note in found.notes:
        print_line(f"note: {note}")


def _fields(actions: "list[RepairAction]", hurt: list[tuple[str, str]], found: "RepairPlan | RepairReport") -> dict[str, Any]:
    return {
        "actions": [{"step": a.step, "subject": a.subject, "message": a.message} for a in actions],
        "hurt": [{"thread_id": thread, "id": each} for thread, each in hurt],
        "uncommitted": [checkpoint_fields(c) for c in found.uncommitted],
        "incomplete": [checkpoint_fields(c) for c in found.incomplete],
        "notes": found.notes,
    }
