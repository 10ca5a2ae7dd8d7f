"""Try out where blobs are to be kept."""

from typing import TYPE_CHECKING, Annotated, Final

import typer

from .options import Debug, Json, Quiet
from .output import print_json, print_line, print_table, size
from .runtime import Exit, Invocation, address_errors, run_command

if TYPE_CHECKING:
    from snapcore.stores.probe import ProbeReport

__all__ = ["store_test"]


EXAMPLES: Final = {"store test": ("snapcore store test ./repository", "snapcore store test s3://my-bucket/snapcore")}


def store_test(
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="The blob store: s3://bucket/prefix, or a folder.")],
    *,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Try out a bucket or a folder: what it supports, what of that snapcore needs, how fast it is. Ends with 1 when something
    is lacking. What is stored for it is removed again."""
    invocation = Invocation(json=json, quiet=quiet, debug=debug)
    raise typer.Exit(run_command(invocation, lambda: _test(invocation, address)))


async def _test(invocation: Invocation, address: str) -> int:
    from snapcore.stores.probe import probe

    with address_errors():
        report = await probe(address)
    if invocation.json:
        print_json(_fields(report))
    elif invocation.tells or not report.ok:
        _tell(report)
    return Exit.DONE if report.ok else Exit.FAILED


def _tell(report: "ProbeReport") -> None:
    answers = ("no", "yes")
    print_table(
        ("", "works", "needed", ""),
        ((check.name, answers[check.works], answers[check.needed], check.seen) for check in report.checks),
    )
    print_line("")
    if report.put_seconds is not None and report.get_seconds is not None:
        print_line(f"a small blob: stored in {report.put_seconds * 1000:.0f} ms, read in {report.get_seconds * 1000:.0f} ms")
    if report.upload_rate is not None and report.download_rate is not None:
        print_line(f"a large blob: {size(round(report.upload_rate))}/s up, {size(round(report.download_rate))}/s down")
    for key in report.left_behind:
        print_line(f"could not be removed again: {key}")
    verdict = "snapcore can keep its blobs here" if report.ok else "snapcore cannot keep its blobs here"
    print_line(f"{verdict}: {report.address}")


def _fields(report: "ProbeReport") -> dict[str, object]:
    return {
        "message_type": "store test",
        "ok": report.ok,
        "address": report.address,
        "checks": [
            {"name": check.name, "needed": check.needed, "works": check.works, "seen": check.seen} for check in report.checks
        ],
        "put_seconds": report.put_seconds,
        "get_seconds": report.get_seconds,
        "upload_bytes_per_second": report.upload_rate,
        "download_bytes_per_second": report.download_rate,
        "left_behind": report.left_behind,
    }
