"""Errors of file systems behind URLs: which of them are temporary, and what to do about the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from emtau_dask.errors import EmtauError, InvalidDataError, shutdown_named
from emtau_dask.io.files import reason_of, remedy_of
from emtau_dask.messages import cause_of

# Error classes are recognised by name, since most belong to packages that may be missing.
_BROKEN_OFF = {
    "ClientPayloadError",
    "ConnectionResetError",
    "IncompleteRead",
    "IncompleteReadError",
    "ResponseStreamingError",
    "ServerDisconnectedError",
}
_UNREACHABLE = {
    "ClientConnectorError",
    "ConnectTimeoutError",
    "ConnectionClosedError",
    "ConnectionRefusedError",
    "EndpointConnectionError",
    "FSTimeoutError",
    "ReadTimeoutError",
    "ServerTimeoutError",
    "TimeoutError",
    "gaierror",
}
_DENIED = {
    "AuthenticationException",
    "DefaultCredentialsError",
    "LogonFailure",
    "NoCredentialsError",
    "PartialCredentialsError",
    "PermissionError",
    "RefreshError",
    "SMBAuthenticationError",
}
_DENIALS = ("Forbidden", "530 ")
"""Begins the messages of errors whose class says nothing; 530 is FTP's."""


class AnswerTooLongError(Exception):
    """A server sent more than was asked for."""


def _kinds(error: BaseException) -> set[str]:
    return {kind.__name__ for kind in type(error).__mro__}


def _status(error: BaseException) -> int:
    status = getattr(error, "status", None) or getattr(error, "code", None)
    return status if isinstance(status, int) else 0


def is_of_the_server(error: Exception) -> bool:
    """Return whether an error is of the server, so that it does not say whether a file exists."""
    known = _kinds(error) & (_BROKEN_OFF | _UNREACHABLE | _DENIED)
    return bool(known) or _status(error) in (401, 403) or _status(error) >= 500


def is_passing(error: Exception) -> bool:
    """Return whether the same request may succeed a moment later."""
    return bool(_kinds(error) & _BROKEN_OFF) or getattr(error, "status", 0) in (500, 502, 503, 504)


def is_unreachable(error: Exception) -> bool:
    """Return whether an error says that a server does not answer, after all attempts."""
    return bool(_kinds(error) & _UNREACHABLE)


def is_conflict(error: Exception) -> bool:
    """Return whether the server said 409: of S3 a ClientError behind an OSError, of Google an HttpError."""
    for link in (error, error.__cause__):
        response = getattr(link, "response", None)
        if isinstance(response, dict):
            return bool(response.get("ResponseMetadata", {}).get("HTTPStatusCode") == 409)
        if getattr(link, "code", None) == 409:
            return True
    return False


def _local_remedy(error: Exception) -> str:
    kinds = _kinds(error)
    if "FileNotFoundError" in kinds:
        return "Nothing is there: check the name, or restore it"
    if kinds & _DENIED:
        return "Access is denied: make it readable for this user"
    return remedy_of(error, otherwise="Restore it, or write it again")


def remote_remedy(error: Exception) -> str:
    """Return what is wrong behind a URL and what to do about it, without a full stop."""
    kinds = _kinds(error)
    if "FileNotFoundError" in kinds:
        return "Nothing is there: check the name, its bucket too"
    if kinds & _DENIED or _status(error) in (401, 403) or str(error).startswith(_DENIALS):
        return (
            "Access is denied: give credentials that may use it, or for public data set "
            "FSSPEC_S3_ANON=true (s3://) or FSSPEC_GS_TOKEN=anon (gs://)"
        )
    if kinds & _UNREACHABLE:
        return "The server does not answer: check the network and the endpoint (for s3:// AWS_ENDPOINT_URL)"
    if kinds & _BROKEN_OFF or isinstance(error, OSError) or _status(error) >= 500:
        return "The server failed, or the connection to it: try again"
    return "Restore it, or write it again"


@contextmanager
def read_errors(what: str, *, remote: bool) -> Iterator[None]:
    """Raise `InvalidDataError` for any error while ``what``, which begins the message, is read.

    ``remote`` says that it is behind a URL, where other remedies fit.
    """
    try:
        with shutdown_named():
            yield
    except EmtauError:
        raise
    except Exception as error:
        remedy = (remote_remedy if remote else _local_remedy)(error)
        raise InvalidDataError(f"{what} cannot be read ({reason_of(error)}). {remedy}.") from cause_of(error)
