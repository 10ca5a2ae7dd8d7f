"""Single requests about one object, as blocking functions of a client. Each checks that the answer is what was asked for."""

import contextlib
import re
from typing import TYPE_CHECKING, Any, Final

from botocore.exceptions import ClientError

from .s3_errors import WrongAnswerError, is_missing, is_refused_range, is_wordless

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

__all__ = ["delete", "read", "size_of"]

_CONTENT_RANGE: Final = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


def size_of(client: "S3Client", bucket: str, name: str) -> int | None:
    """The object's size in bytes, or None when there is none."""
    try:
        return client.head_object(Bucket=bucket, Key=name)["ContentLength"]
    except ClientError as error:
        if not is_wordless(error):
            raise
    # An answer to HEAD has no body that would tell a missing object from a missing bucket, or from a proxy that has lost its
    # service, nor an expired token from a wrong region. A read does.
    return read(client, bucket, name, 0, 1)[1]


def read(client: "S3Client", bucket: str, name: str, offset: int, length: int | None) -> tuple[bytes, int | None]:
    """(bytes `[offset, offset + length)`, the object's size); the size alone counts when it ends before that, and is None when
    there is no such object. Raises `WrongAnswerError` for a body that is not what the answer's head promised."""
    asked: dict[str, Any] = {}
    if offset or length is not None:
        asked["Range"] = f"bytes={offset}-" + ("" if length is None else str(offset + length - 1))
    try:
        answer = client.get_object(Bucket=bucket, Key=name, **asked)
    except ClientError as error:
        if is_missing(error):
            return b"", None
        if asked and is_refused_range(error):
            return b"", _size_before(client, bucket, name, offset)
        raise
    with contextlib.closing(answer["Body"]) as body:  # as a context manager it would be urllib3's stream, with errors of its own
        start, end, size = _extent(answer)
        wanted = size if length is None else min(offset + length, size)
        # the whole object is as good: there are services and proxies that do not know ranges
        if (start, end) != (0, size) and (start, end) != (offset, wanted):
            raise WrongAnswerError
        data = body.read()
    if len(data) != end - start:  # botocore and urllib3 look too, but not in all of their releases
        raise WrongAnswerError
    return data[offset - start : max(wanted, offset) - start], size


def delete(client: "S3Client", bucket: str, name: str) -> None:
    """Remove the object; none there is no error, also for services that say so."""
    try:
        client.delete_object(Bucket=bucket, Key=name)
    except ClientError as error:
        if not is_missing(error):
            raise


def _size_before(client: "S3Client", bucket: str, name: str, offset: int) -> int:
    """The size of an object in which, as the service says, no byte lies at `offset`."""
    size = client.head_object(Bucket=bucket, Key=name)["ContentLength"]
    if size > offset:
        raise WrongAnswerError
    return size


def _extent(answer: Any) -> tuple[int, int, int]:
    """(first byte, byte after the last, size of the object) that the answer's head promises."""
    sent, found = answer.get("ContentLength"), answer.get("ContentRange")
    if sent is not None and found is None:
        return 0, sent, sent
    match = _CONTENT_RANGE.fullmatch(found or "")
    if match is None:
        raise WrongAnswerError
    first, last, size = (int(part) for part in match.groups())
    if not first <= last < size or last - first + 1 != sent:
        raise WrongAnswerError
    return first, last + 1, size
