"""Whole repositories: `init`, `verify`."""

from typing import Annotated, Final

import typer

from snapcore.addresses import shown_address

from .output import count, print_json, print_line, size
from .progress import progress
from .runtime import Exit, Invocation, UsageError, address_errors, command, usage_errors

__all__ = ["init", "verify"]


EXAMPLES: Final = {
    "init": (
        "snapcore init",
        "snapcore init --repo ./repository",
        "# packs in a bucket, the rest in Postgres, for many machines",
        "snapcore init -r s3://my-bucket/snapcore --database postgresql://db/snapcore",
    ),
    "verify": (
        "snapcore verify",
        "snapcore verify --read-data",
        "# all of it in a week, a part each day",
        "snapcore verify --read-data-subset 2/7",
    ),
}


@command
async def init(invocation: Invocation) -> int:
    """Create a repository."""
    import snapcore

    with address_errors():
        repo = await snapcore.init_repository(invocation.repo, database=invocation.database)
    repository_id = repo.config.repository_id
    await repo.close()
    place = shown_address(invocation.repo)
    if invocation.json:
        print_json({"message_type": "init", "repo": place, "repository_id": repository_id})
    elif invocation.tells:
        print_line(f"created repository {repository_id} in {place}")
    return Exit.DONE


@command
async def verify(
    invocation: Invocation,
    *,
    read_data: Annotated[bool, typer.Option("--read-data", help="Read every byte back and check it.")] = False,
    read_data_subset: Annotated[
        str | None,
        typer.Option(
            "--read-data-subset", metavar="PART", help="Read a part: 5% or 500M at random, or 2/7, the second of seven."
        ),
    ] = None,
) -> int:
    """Check that all that the checkpoints need is there. Ends with 1 when it is not."""
    if read_data and read_data_subset is not None:
        raise UsageError("--read-data and --read-data-subset exclude each other.")
    async with invocation.repository() as repo:
        with usage_errors(), progress(invocation, "verify") as on_progress:
            report = await repo.verify(read_data=read_data, read_data_subset=read_data_subset, on_progress=on_progress)
    if invocation.json:
        print_json(
            {
                "message_type": "verify",
                "ok": report.ok,
                "checkpoints": report.checkpoints,
                "packs": report.packs,
                "records": report.records,
                "bytes_read": report.bytes_read,
                "problems": [
                    {
                        "kind": problem.kind,
                        "subject": problem.subject,
                        "message": problem.message,
                        "checkpoints": [{"thread_id": thread, "id": each} for thread, each in problem.checkpoints],
                    }
                    for problem in report.problems
                ],
            }
        )
    elif not report.ok or invocation.tells:
        for problem in report.problems:
            print_line(f"{problem.kind}: {problem.message}")
            for thread, each in problem.checkpoints:
                print_line(f"  needed by checkpoint {each} of thread {thread}")
        verdict = "no problem found" if report.ok else count(len(report.problems), "problem")
        held = f"{count(report.checkpoints, 'checkpoint')}, {count(report.packs, 'pack')}, {count(report.records, 'record')}"
        read = f"{size(report.bytes_read)} read" if report.bytes_read else "contents not read (--read-data)"
        print_line(f"{verdict}: {held}, {read}")
    return Exit.DONE if report.ok else Exit.FAILED
