"""The boto3 client of one store, made on one of the store's threads, since that takes some 100 ms."""

import functools
import urllib.parse
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from snapcore.errors import Code, RepositoryError

from .s3_address import S3Address

if TYPE_CHECKING:
    from botocore.loaders import Loader
    from mypy_boto3_s3 import S3Client

__all__ = ["S3Credentials", "S3Settings", "make_client", "missing_extra"]

AWS_HOSTS: Final = (".amazonaws.com", ".amazonaws.com.cn")


@dataclass(frozen=True, slots=True)
class S3Credentials:
    """Explicit credentials, which no repr shows. Without any, boto3 looks for its own: environment, profile, role."""

    access_key_id: str = field(repr=False)
    secret_access_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class S3Settings:
    """Limits of one store: requests and bytes under way at once, puts that serve it best, and timeouts in seconds."""

    requests_at_once: int = 16
    bytes_at_once: int = 128 << 20
    uploads_at_once: int = 3
    connect_timeout: float = 10.0
    read_timeout: float = 60.0


def make_client(address: S3Address, credentials: S3Credentials | None, settings: S3Settings) -> "S3Client":
    """A client. Raises `RepositoryError` (`MISSING_EXTRA` when boto3 is not installed), and what botocore raises."""
    try:
        import boto3
        from botocore.config import Config
        from botocore.session import Session
    except ImportError:
        raise missing_extra() from None
    config = Config(
        # the default since boto3 1.36 adds checksums that R2, older Ceph and MinIO, and GCS refuse
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        # boto3 itself takes the path style for an endpoint from the environment or a profile
        s3={"addressing_style": "path"} if address.endpoint else {},
        retries={"mode": "standard", "total_max_attempts": 1},  # the store repeats requests itself
        connect_timeout=settings.connect_timeout,
        read_timeout=settings.read_timeout,
        max_pool_connections=settings.requests_at_once,
        tcp_keepalive=True,
        user_agent_extra="snapcore",
    )
    known = credentials or S3Credentials("", "")
    session = Session()
    session.register_component("data_loader", _loader())
    try:
        client = boto3.session.Session(botocore_session=session).client(
            "s3",
            config=config,
            endpoint_url=address.endpoint,
            region_name=address.effective_region(),
            aws_access_key_id=known.access_key_id or None,
            aws_secret_access_key=known.secret_access_key or None,
            aws_session_token=known.session_token,
        )
    except ValueError:
        raise RepositoryError(
            "The endpoint or the region that the environment or the AWS profile gives is not valid.",
            code=Code.INVALID_REQUEST,
            hint="Check AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL and AWS_REGION.",
        ) from None
    if not (urllib.parse.urlsplit(client.meta.endpoint_url).hostname or "").endswith(AWS_HOSTS):
        client.meta.events.register_last("before-parameter-build.s3", _stay_in_region)
    return client


def _stay_in_region(context: dict[str, Any], **_: Any) -> None:
    """Have botocore not look for the bucket's region: where an answer does not name it, as AWS's do, it asks without end."""
    context["s3_redirect"]["redirected"] = True


@functools.cache
def _loader() -> "Loader":
    """What botocore reads of its description of S3, read once a process: most of the time that making a client takes."""
    from botocore.loaders import create_loader

    return create_loader()


def missing_extra() -> RepositoryError:
    """The error for a machine without boto3."""
    return RepositoryError(
        "S3 stores need boto3, which is not installed.", code=Code.MISSING_EXTRA, hint="pip install 'snapcore[s3]'"
    )
