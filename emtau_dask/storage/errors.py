"""Errors of file systems and URLs, translated into what to do."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dask.utils import format_bytes

from emtau_dask.errors import EmtauError, InvalidDataError, StorageError, cause_of, counted, shutdown_named

_REMEDIES = {
    errno.ENOSPC: "The disk is full{room}: free space",
    errno.EDQUOT: "The quota is used up: free space",
    errno.EFBIG: "The file would be larger than this process may write: raise the limit (ulimit -f)",
    errno.EROFS: "The file system is read-only: make it writable",
    errno.EACCES: "Permission is denied: make it readable and writable for this user",
    errno.ENOTSUP: "The file system has neither hard links nor a rename that replaces nothing, one of which "
    "commits need: choose a place on another",
    errno.EPERM: "The file system does not permit it: make it writable for this user",
    errno.ENOENT: "The folder has vanished: restore it",
    errno.ESTALE: "The folder has vanished: mount it again",
    errno.ENOTDIR: "A file lies where a folder should be: remove it",
    errno.EEXIST: "A file lies where a folder should be: remove it",
    errno.EISDIR: "A folder lies where a file should be: remove it",
    errno.ENAMETOOLONG: "The name is too long for the file system: give a shorter one",
    errno.EMFILE: "Too many files are open: raise this process's limit (ulimit -n)",
    errno.ENFILE: "Too many files are open on this host: close some",
    errno.EIO: "The device failed: see the system's log, and restore it",
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
"""The beginnings of messages for denied access if the error's class does not say so; 530 is FTP's."""


def reason_of(error: BaseException) -> str:
    """Return the type and the message of an error, on one line without a full stop."""
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(" .:")


def remedy_of(
    error: BaseException, place: str | Path | None = None, otherwise: str = "Restore access to it"
) -> str:
    """Return what is wrong and what to do about it, without a full stop.

    For a full disk it says how much is free at the local path ``place``. For errors without a known remedy
    it is ``otherwise``.
    """
    number = error.errno if isinstance(error, OSError) else None
    text = _REMEDIES.get(number or 0, otherwise)
    return text.replace("{room}", _room_at(place)) if "{room}" in text else text


@contextmanager
def writing_errors(what: str, place: str | Path) -> Iterator[None]:
    """Raise `StorageError` for errors of the system while ``what`` is written to a local path."""
    try:
        yield
    except EmtauError:
        raise
    except OSError as error:
        raise StorageError(
            f"{what} cannot be written to {place} ({reason_of(error)}). {remedy_of(error, place)}, or choose "
            "another place. What was there is as it was."
        ) from error


def _room_at(place: str | Path | None) -> str:
    """Return how much of a path's file system is free, in brackets; "" if that is not known."""
    if place is None:
        return ""
    path = Path(place)
    try:
        above = next(folder for folder in (path, *path.parents) if folder.exists())
        bytes_free, files = shutil.disk_usage(above).free, os.statvfs(above)
    except OSError:
        return ""
    names = f", room for {counted(files.f_favail, 'file')} more" if files.f_files else ""
    return f" ({format_bytes(bytes_free)} free{names})"


# Error classes are recognised by name, since most belong to packages that may be missing.
_INTERRUPTED = {
    "ClientPayloadError",
    "ConnectionResetError",
    "IncompleteRead",
    "IncompleteReadError",
    "ResponseStreamingError",
    "ServerDisconnectedError",
}


def _kinds(error: BaseException) -> set[str]:
    return {kind.__name__ for kind in type(error).__mro__}


def _status(error: BaseException) -> int:
    status = getattr(error, "status", None) or getattr(error, "code", None)
    return status if isinstance(status, int) else 0


def is_server_error(error: Exception) -> bool:
    """Return whether an error is one of the server, which does not say whether a file exists."""
    known = _kinds(error) & (_INTERRUPTED | _UNREACHABLE | _DENIED)
    return bool(known) or _status(error) in (401, 403) or _status(error) >= 500


def is_temporary(error: Exception) -> bool:
    """Return whether the same request may succeed a moment later."""
    return bool(_kinds(error) & _INTERRUPTED) or getattr(error, "status", 0) in (500, 502, 503, 504)


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
    if kinds & _INTERRUPTED or isinstance(error, OSError) or _status(error) >= 500:
        return "The server failed, or the connection to it: try again"
    return "Restore it, or write it again"


@contextmanager
def read_errors(what: str, *, remote: bool) -> Iterator[None]:
    """Raise `InvalidDataError` for any error while ``what``, which begins the message, is read.

    ``remote`` says that it is behind a URL, for which there are other remedies.
    """
    try:
        with shutdown_named():
            yield
    except EmtauError:
        raise
    except Exception as error:
        remedy = (remote_remedy if remote else _local_remedy)(error)
        raise InvalidDataError(f"{what} cannot be read ({reason_of(error)}). {remedy}.") from cause_of(error)
