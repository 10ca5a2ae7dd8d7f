"""What only an S3 service can be asked for: abilities that snapcore does without, and the service's clock."""

import datetime
import email.utils
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

from botocore.exceptions import ClientError

from .probe import DiffersError
from .s3_errors import error_code

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

    from .s3 import S3BlobStore

__all__ = ["S3Probe"]

MAX_SKEW: Final = 900.0  # seconds; services refuse requests that are 15 minutes off
WORRYING_SKEW: Final = 60.0


class S3Probe:
    """Checks of one store. `key` names a blob of the probe."""

    def __init__(self, store: "S3BlobStore", key: Callable[[str], str]) -> None:
        self._store = store
        self._key = key

    def steps(self) -> list[tuple[str, bool, Callable[[], Awaitable[str]]]]:
        """(name, whether snapcore needs it, the check)."""
        return [
            ("the clocks agree", True, self.clock),
            ("delete several at once", False, self.batch_delete),
            ("store only if absent (If-None-Match)", False, self.conditional_put),
        ]

    async def clock(self) -> str:
        """How far the service's clock is from this machine's."""

        def ask(client: "S3Client", bucket: str, prefix: str) -> str | None:
            answer: Any = client.head_object(Bucket=bucket, Key=prefix + self._key("small-0"))
            date: str | None = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
            return date

        date = await self._store.request("The service's clock cannot be read", ask)
        if date is None:
            return "the service does not tell the time"
        here = datetime.datetime.now(datetime.UTC)
        skew = abs((email.utils.parsedate_to_datetime(date) - here).total_seconds())
        if skew > MAX_SKEW:
            raise DiffersError(f"they differ by {skew:.0f} s: set this machine's clock")
        return f"they differ by {skew:.0f} s: set this machine's clock" if skew > WORRYING_SKEW else ""

    async def batch_delete(self) -> str:
        """snapcore deletes one by one in any case."""
        names = [self._key(f"small-{number}") for number in (3, 4)]

        def ask(client: "S3Client", bucket: str, prefix: str) -> str:
            try:
                client.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": prefix + name} for name in names]})
            except ClientError as error:
                return error_code(error)
            return ""

        refused = await self._store.request("Blobs cannot be deleted at once", ask)
        if refused:
            raise DiffersError(f"refused ({refused}); snapcore deletes one by one")
        return ""

    async def conditional_put(self) -> str:
        """snapcore never relies on it: some services ignore it, and store all the same."""
        name = self._key("small-0")

        def ask(client: "S3Client", bucket: str, prefix: str) -> str:
            try:
                client.put_object(Bucket=bucket, Key=prefix + name, Body=b"second", IfNoneMatch="*")
            except ClientError as error:
                return error_code(error)
            return "ignored"

        answer = await self._store.request("A blob cannot be stored", ask)
        if answer == "ignored":
            raise DiffersError("ignored: what was there was replaced")
        if answer not in ("PreconditionFailed", "412"):
            raise DiffersError(f"refused ({answer})")
        return ""
