"""URLs as text."""

from __future__ import annotations

from pathlib import PurePosixPath

from fsspec.implementations.local import LocalFileSystem

from emtau_dask.messages import masked_url

S3, GS, HTTP = ("s3", "s3a"), ("gs", "gcs"), ("http", "https")
EXTRAS = {**dict.fromkeys(S3, "s3"), **dict.fromkeys(GS, "gs")}


def is_url(path: str) -> bool:
    """Return whether ``path`` is an fsspec URL, such as ``s3://bucket/rows.zarr``."""
    return "://" in path or "::" in path


def plain_path(path: str) -> str:
    """Return the local path that a ``file://`` URL means; anything else as it is."""
    if path.startswith(("file://", "local://")):
        return str(LocalFileSystem._strip_protocol(path))
    return path


def suffix_of(path: str) -> str:
    """Return the ending of a path, or of a URL without its query, such as ``.npy``; "" for none."""
    bare = path.partition("?")[0] if is_url(path) else path
    return PurePosixPath(bare).suffix


def protocol_of(url: str) -> str:
    """Return what a URL begins with, such as ``s3``."""
    return url.partition("://")[0].partition("::")[0]


def has_keys(url: str) -> bool:
    """Return whether a URL of an object store holds keys, which do not belong before its bucket."""
    bare = url.partition("?")[0].partition("#")[0]
    return protocol_of(url) in S3 + GS and masked_url(bare) != bare


def missing_package(url: str, error: ImportError) -> str:
    """Return the message for a URL whose file system lacks a package."""
    protocol = protocol_of(url)
    extra = EXTRAS.get(protocol)
    remedy = f"pip install 'emtau_dask[{extra}]'" if extra else "see the package that it names"
    return f"{protocol}:// needs a package that is missing ({error}): {remedy}"
