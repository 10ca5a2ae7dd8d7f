"""What an S3 service's errors mean: try again, try again with less, or tell the user, in words and with what to do.

Messages hold a service's error code, never its message: some services repeat keys and signatures there.
"""

import enum
import re
from typing import Final

from botocore import exceptions as botocore
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from snapcore.errors import Code, RepositoryError

__all__ = [
    "SERVICE_ERRORS",
    "Trouble",
    "WrongAnswerError",
    "error_code",
    "is_missing",
    "is_refused_range",
    "is_unknown_call",
    "is_wordless",
    "refusal",
    "retry_after",
    "trouble",
]


class WrongAnswerError(Exception):
    """An answer that arrived and cannot be right, such as another range than the one asked for: the request is repeated."""


# all that a request may raise; anything else is a defect and passes through
SERVICE_ERRORS: Final = (ClientError, BotoCoreError, ResponseParserError, WrongAnswerError)

_CODE: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_UNKNOWN_CALL: Final = frozenset({"NotImplemented", "501", "MethodNotAllowed", "405", "InvalidArgument", "InvalidRequest"})
_THROTTLED: Final = frozenset(
    {
        "BandwidthLimitExceeded",
        "ClientClosedRequest",
        "PriorRequestNotComplete",
        "ReducedRateLimitExceeded",
        "RequestLimitExceeded",
        "RequestThrottled",
        "RequestThrottledException",
        "RequestTimeout",
        "ServiceUnavailable",
        "SlowDown",
        "SlowDownRead",
        "SlowDownWrite",
        "Throttling",
        "ThrottlingException",
        "ThrottledException",
        "TooManyRequests",
        "TooManyRequestsException",
    }
)
_THROTTLED_STATUS: Final = frozenset({408, 429, 499, 503})
# not the caller's fault, or the network's: the same request may well come through
_PASSING: Final = frozenset(
    {
        "BadDigest",
        "ConditionalRequestConflict",
        "IncompleteBody",
        "InternalError",
        "OperationAborted",
        "XAmzContentSHA256Mismatch",
    }
)
_UNREACHABLE: Final = (
    botocore.EndpointConnectionError,
    botocore.ConnectTimeoutError,
    botocore.ProxyConnectionError,
    botocore.SSLError,
    ResponseParserError,  # a proxy's page, or no S3 service at all
)
_DROPPED: Final = (
    botocore.HTTPClientError,  # the connection was closed, or nothing came for too long
    botocore.IncompleteReadError,
    WrongAnswerError,
)

_RIGHTS_HINT: Final = (
    "The credentials need s3:GetObject, s3:PutObject and s3:DeleteObject on the prefix, and s3:ListBucket on the bucket:"
    " without the last, a missing blob looks like a forbidden one."
)
_CREDENTIALS_HINT: Final = (
    "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or run where the machine has a role of its own."
)
_REGION_HINT: Final = "Name the bucket's region: AWS_REGION, or ?region=NAME in the address."
_RENEW_HINT: Final = "Get new credentials, for example with 'aws sso login'."
_KNOWN: Final[dict[str, tuple[Code, str, str]]] = {
    "NoSuchBucket": (
        Code.NO_BUCKET,
        "There is no such bucket",
        "Create the bucket first, or check its name and the endpoint: snapcore never creates one.",
    ),
    "InvalidBucketName": (Code.NO_BUCKET, "The service does not accept the bucket's name", "Check the address."),
    "PermanentRedirect": (Code.WRONG_REGION, "The bucket is in another region", _REGION_HINT),
    "301": (Code.WRONG_REGION, "The bucket is in another region", _REGION_HINT),
    "TemporaryRedirect": (Code.WRONG_REGION, "The bucket is in another region", _REGION_HINT),
    "AuthorizationHeaderMalformed": (
        Code.WRONG_REGION,
        "Requests are signed for another region than the bucket's",
        _REGION_HINT,
    ),
    "IllegalLocationConstraintException": (Code.WRONG_REGION, "The bucket is in another region", _REGION_HINT),
    "IllegalLocationConstraint": (Code.WRONG_REGION, "The bucket is in another region", _REGION_HINT),
    "InvalidRegionName": (Code.WRONG_REGION, "The service does not know the region", _REGION_HINT),
    "RequestTimeTooSkewed": (
        Code.CLOCK_SKEW,
        "The clock of this machine differs too much from the service's",
        "Set this machine's clock (it should be kept by NTP), then try again.",
    ),
    "InvalidAccessKeyId": (Code.ACCESS_DENIED, "The service does not know the access key", _CREDENTIALS_HINT),
    "SignatureDoesNotMatch": (
        Code.ACCESS_DENIED,
        "The secret key does not belong to the access key",
        "Check AWS_SECRET_ACCESS_KEY (it was perhaps cut when it was copied), and that a proxy does not change requests.",
    ),
    "ExpiredToken": (Code.ACCESS_DENIED, "The credentials have expired", _RENEW_HINT),
    "TokenRefreshRequired": (Code.ACCESS_DENIED, "The credentials have expired", _RENEW_HINT),
    "InvalidToken": (Code.ACCESS_DENIED, "The session token is not valid", _RENEW_HINT),
    "AccountProblem": (Code.ACCESS_DENIED, "There is a problem with the account", "See the provider's console."),
    "AccessDenied": (Code.ACCESS_DENIED, "Access is denied", _RIGHTS_HINT),
    "QuotaExceeded": (Code.STORE_FULL, "The quota is used up", "Make room or raise the quota, then try again."),
    "XMinioStorageFull": (Code.STORE_FULL, "There is no room", "Make room, then try again."),
    "InsufficientStorage": (Code.STORE_FULL, "There is no room", "Make room, then try again."),
    "507": (Code.STORE_FULL, "There is no room", "Make room, then try again."),
    "EntityTooLarge": (Code.STORE_FULL, "The service takes no blob of this size", "A pack has up to 32 MiB: raise the limit."),
    "413": (Code.STORE_FULL, "The service or a proxy takes no blob of this size", "A pack has up to 32 MiB: raise the limit."),
    "InvalidObjectState": (
        Code.STORE_UNAVAILABLE,
        "The blob was moved to an archive class",
        "Restore it from the archive, and exempt this prefix from lifecycle rules.",
    ),
}
_SAME_AS: Final = {
    "403": "AccessDenied",
    "Forbidden": "AccessDenied",
    "AllAccessDisabled": "AccessDenied",
    "401": "AccessDenied",
    "Unauthorized": "AccessDenied",
    "UnauthorizedAccess": "AccessDenied",
    "InvalidSecurity": "AccessDenied",
}


class Trouble(enum.Enum):
    """What to do about a failed request."""

    THROTTLED = "throttled"  # try again later, with fewer requests at once
    PASSING = "passing"  # try again
    UNREACHABLE = "unreachable"  # try again, but not for long: the address may be wrong
    FINAL = "final"  # tell the user


def error_code(error: BaseException) -> str:
    """A service's error code, or the kind of failure; safe to show."""
    if not isinstance(error, ClientError):
        return type(error).__name__
    found = str(error.response.get("Error", {}).get("Code", ""))
    return found if _CODE.fullmatch(found) else str(_status(error))


def is_missing(error: ClientError) -> bool:
    """Whether the service itself says that there is no such object. A mere 404 may be of a proxy, or mean the bucket."""
    return error_code(error) == "NoSuchKey"


def is_wordless(error: ClientError) -> bool:
    """Whether it is a refusal without a code, as those of HEAD are, and not one that passes."""
    status = _status(error)
    return error_code(error) == str(status) and status < 500 and status not in _THROTTLED_STATUS


def is_refused_range(error: ClientError) -> bool:
    """Whether the answer says that the object has no such range."""
    return _status(error) == 416 or error_code(error) == "InvalidRange"


def is_unknown_call(error: ClientError) -> bool:
    """Whether the service may not know this kind of request at all."""
    return error_code(error) in _UNKNOWN_CALL


def trouble(error: BaseException) -> Trouble:
    """What to do about a failure. A service that answers anything unclear is asked again: only what says in so many words
    that it will not change is final."""
    if isinstance(error, ClientError):
        code, status = error_code(error), _status(error)
        if code in _KNOWN or code in _SAME_AS:
            return Trouble.FINAL
        if code in _THROTTLED or status in _THROTTLED_STATUS:
            return Trouble.THROTTLED
        if code == "404":
            return Trouble.UNREACHABLE  # no service answers without a code of its own: a proxy, or no S3 at all
        if code in _PASSING or (status >= 500 and status != 501):
            return Trouble.PASSING
        return Trouble.FINAL
    if _is_bad_certificate(error):
        return Trouble.FINAL
    if isinstance(error, _UNREACHABLE):
        return Trouble.UNREACHABLE
    if isinstance(error, _DROPPED):
        return Trouble.PASSING
    return Trouble.FINAL


def _is_bad_certificate(error: BaseException) -> bool:
    return isinstance(error, botocore.SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error)


def retry_after(error: BaseException) -> float:
    """Seconds that the service asks to wait; 0 when it does not say."""
    if not isinstance(error, ClientError):
        return 0.0
    value = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("retry-after", "")
    return float(value) if value.isascii() and value.isdigit() else 0.0


def refusal(error: BaseException, what: str, url: str) -> RepositoryError:
    """The error for the user. `what` says which call failed; `url` holds no credentials."""
    code, words, hint, retryable = _explain(error)
    return RepositoryError(f"{what} in {url}: {words} ({error_code(error)}).", code=code, hint=hint, retryable=retryable)


def _explain(error: BaseException) -> tuple[Code, str, str, bool]:
    if isinstance(error, ClientError):
        code = error_code(error)
        known = _KNOWN.get(_SAME_AS.get(code, code))
        if known is not None:
            return *known, known[0] is Code.STORE_FULL
        if trouble(error) is Trouble.THROTTLED:
            return Code.STORE_UNAVAILABLE, "The service kept asking for fewer requests", "Try again later.", True
        if trouble(error) is Trouble.PASSING:
            return Code.STORE_UNAVAILABLE, "The service kept failing", "Try again later.", True
        if trouble(error) is Trouble.UNREACHABLE:
            return Code.STORE_UNAVAILABLE, "What answers is no S3 service", "Check the endpoint and the network.", True
        return Code.STORE_UNAVAILABLE, "The service refused the request", "Run 'snapcore store test' on this address.", False
    if isinstance(error, botocore.NoCredentialsError | botocore.PartialCredentialsError):
        return Code.ACCESS_DENIED, "There are no credentials", _CREDENTIALS_HINT, False
    if isinstance(error, botocore.ProfileNotFound):
        return Code.ACCESS_DENIED, "There is no such profile", "Check AWS_PROFILE.", False
    if isinstance(error, botocore.SSOError | botocore.TokenRetrievalError | botocore.LoginError):
        return Code.ACCESS_DENIED, "The sign-in has expired", _RENEW_HINT, False
    if isinstance(error, botocore.CredentialRetrievalError):
        return Code.ACCESS_DENIED, "The credentials could not be had", _CREDENTIALS_HINT, False
    if _is_bad_certificate(error):
        words = "The service's certificate is not accepted"
        return Code.STORE_UNAVAILABLE, words, "Check the endpoint; a certificate of your own goes into AWS_CA_BUNDLE.", False
    if isinstance(error, _UNREACHABLE):
        return Code.STORE_UNAVAILABLE, "The service cannot be reached", "Check the endpoint and the network.", True
    if trouble(error) is Trouble.PASSING:
        return Code.STORE_UNAVAILABLE, "The connection kept failing", "Check the endpoint and the network.", True
    return Code.STORE_UNAVAILABLE, "The request cannot be made", "Check the address and the AWS configuration.", False


def _status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
