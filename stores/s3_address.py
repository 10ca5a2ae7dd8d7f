"""Addresses of S3 stores: `s3://bucket/prefix?endpoint=https://...&region=...`, and never a credential."""

import os
import re
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from snapcore.errors import Code, SnapshotError, printable

__all__ = ["S3Address", "parse_address"]

SCHEME: Final = "s3://"
MAX_PREFIX_BYTES: Final = 800  # S3 keys have at most 1,024 bytes, snapcore's own at most 200
_BUCKET: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_REGION: Final = re.compile(r"[A-Za-z0-9-]{1,63}")
_R2: Final = ".r2.cloudflarestorage.com"
_CREDENTIALS: Final = (
    "Leave credentials to the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY) or to a profile (AWS_PROFILE): addresses"
    " end up in logs."
)
_FORM: Final = "Write s3://bucket/prefix, or s3://bucket/prefix?endpoint=https://host&region=name."


@dataclass(frozen=True, slots=True)
class S3Address:
    """A bucket, a prefix without slashes at its ends (or empty), and where the service is; None leaves that to boto3."""

    bucket: str
    prefix: str = ""
    endpoint: str | None = None
    region: str | None = None

    @property
    def url(self) -> str:
        """The address in its canonical form."""
        path = f"{SCHEME}{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")
        asked = {name: value for name, value in (("endpoint", self.endpoint), ("region", self.region)) if value}
        return path + ("?" + urllib.parse.urlencode(asked, safe=":/") if asked else "")

    def effective_endpoint(self, environ: Mapping[str, str] = os.environ) -> str | None:
        """The endpoint of the address, or of the environment; None when neither names one."""
        return self.endpoint or environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL") or None

    def effective_region(self, environ: Mapping[str, str] = os.environ) -> str | None:
        """The region to sign for. R2 knows `auto` only; boto3 itself does not look at AWS_REGION, which other SDKs do. None
        leaves it to boto3's AWS_DEFAULT_REGION and profile."""
        if self.region:
            return self.region
        host = urllib.parse.urlsplit(self.effective_endpoint(environ) or "").hostname or ""
        if host.endswith(_R2):
            return "auto"
        return environ.get("AWS_REGION") or None


def parse_address(address: str) -> S3Address:
    """Read an address. Raises `SnapshotError` `INVALID_REQUEST`; the message repeats nothing that may be a credential."""
    place, _, query = address.removeprefix(SCHEME).partition("?")
    bucket, _, prefix = place.partition("/")
    if "@" in bucket or ":" in bucket:
        raise _refusal("An S3 address must not hold a user or a password.", _CREDENTIALS)
    if not _BUCKET.fullmatch(bucket):
        raise _refusal(f"{printable(bucket)!r} is no name of a bucket.", _FORM)
    return S3Address(bucket, _check_prefix(prefix), **_read_query(query))


def _check_prefix(prefix: str) -> str:
    prefix = prefix.strip("/")
    parts = prefix.split("/") if prefix else []
    if any(part in ("", ".", "..") for part in parts) or not prefix.isprintable():
        raise _refusal("The prefix of an S3 address has an empty part, '.', '..', or characters that cannot be printed.", _FORM)
    if len(prefix.encode()) > MAX_PREFIX_BYTES:
        raise _refusal(f"The prefix of an S3 address has at most {MAX_PREFIX_BYTES} bytes.", _FORM)
    return prefix


def _read_query(query: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in urllib.parse.parse_qsl(query, keep_blank_values=True):
        if name not in ("endpoint", "region"):
            # the value, and perhaps the name, may be a secret: neither is repeated
            raise _refusal("An S3 address takes endpoint and region, and nothing else.", _CREDENTIALS)
        found[name] = value
    if "endpoint" in found:
        found["endpoint"] = _check_endpoint(found["endpoint"])
    if "region" in found and not _REGION.fullmatch(found["region"]):
        raise _refusal("The region of an S3 address is no name of a region.", _FORM)
    return found


def _check_endpoint(endpoint: str) -> str:
    try:
        parts = urllib.parse.urlsplit(endpoint)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise _refusal("The endpoint of an S3 address is no URL.", _FORM) from None
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise _refusal("The endpoint of an S3 address must not hold a user, a password or a query.", _CREDENTIALS)
    if parts.scheme not in ("http", "https") or not host or not endpoint.isprintable():
        raise _refusal("The endpoint of an S3 address starts with https:// or http:// and names a host.", _FORM)
    return endpoint.rstrip("/")


def _refusal(message: str, hint: str) -> SnapshotError:
    return SnapshotError(message, code=Code.INVALID_REQUEST, hint=hint)
