"""Listing a bucket whatever the service makes of it.

Every page is asked for by the token of the one before. A service that gives a token twice, or goes on and on without
anything new, is asked for what comes after the last key; when that brings nothing new, all is listed. Services that do not
know ListObjectsV2, or answer it as if it were the first version, are listed by the first.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from blake3 import blake3
from botocore.exceptions import ClientError

from snapcore.idset import IdSet

from .s3_errors import WrongAnswerError, is_unknown_call

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

__all__ = ["Listing"]

PAGE: Final = 1000
MAX_EMPTY: Final = 1000  # pages without anything new: a service may have to pass by as many deleted objects


@dataclass(slots=True)
class Listing:
    """One listing: `ask` makes the next request, `take` reads its answer, until `done`. `ask` may be repeated."""

    bucket: str
    prefix: str
    done: bool = False
    _old_style: bool = False
    _token: str = ""  # the next page's; empty for what comes after `_last`
    _last: str = ""  # the greatest key so far
    _empty: int = 0
    _tokens: set[str] = field(default_factory=set)
    _seen: IdSet = field(default_factory=IdSet)

    def ask(self, client: "S3Client") -> dict[str, Any]:
        """The next page. Raises `WrongAnswerError` for one that says nothing, such as an empty body."""
        try:
            page = self._ask(client)
        except ClientError as error:
            if self._old_style or not is_unknown_call(error):
                raise
            self._go_back_to_old_style()
            page = self._ask(client)
        if "IsTruncated" not in page:
            raise WrongAnswerError
        return page

    def take(self, page: dict[str, Any]) -> list[tuple[str, int]]:
        """(key, size) of each object of a page that lies under the prefix and was not listed yet."""
        found = [(item["Key"], item["Size"]) for item in page.get("Contents", ()) if item["Key"].startswith(self.prefix)]
        fresh = set(self._seen.add_new(_digest(key) for key, _ in found))
        new = []
        for key, size in found:
            if _digest(key) in fresh:
                fresh.remove(_digest(key))
                new.append((key, size))
        self._last = max([self._last, *(key for key, _ in new)], key=str.encode)
        self._empty = 0 if new else self._empty + 1
        self._turn(page)
        return new

    def _ask(self, client: "S3Client") -> dict[str, Any]:
        if self._old_style:
            marker = self._token or self._last
            return dict(client.list_objects(Bucket=self.bucket, Prefix=self.prefix, MaxKeys=PAGE, Marker=marker))
        if self._token:
            return dict(
                client.list_objects_v2(Bucket=self.bucket, Prefix=self.prefix, MaxKeys=PAGE, ContinuationToken=self._token)
            )
        return dict(client.list_objects_v2(Bucket=self.bucket, Prefix=self.prefix, MaxKeys=PAGE, StartAfter=self._last))

    def _turn(self, page: dict[str, Any]) -> None:
        """Decide what to ask for next."""
        if not page["IsTruncated"]:
            self.done = True
            return
        by_key = not self._token
        if not self._old_style and "KeyCount" not in page and "NextContinuationToken" not in page:
            self._go_back_to_old_style()
            return
        token = page.get("NextMarker" if self._old_style else "NextContinuationToken") or ""
        if token and token not in self._tokens and self._empty < MAX_EMPTY:
            self._tokens.add(token)
            self._token = token
            return
        self._token = ""
        self.done = by_key and self._empty > 0

    def _go_back_to_old_style(self) -> None:
        self._old_style, self._token = True, ""


def _digest(key: str) -> bytes:
    return blake3(key.encode()).digest()
