"""What lies behind fsspec URLs: the one way to it."""

from emtau_dask.io.remote.urls import (
    Url,
    answers_within,
    is_unreachable,
    is_url,
    missing_package,
    plain_path,
    read_errors,
    remote_remedy,
    suffix_of,
    upload_seconds,
)
from emtau_dask.io.remote.zarr_store import UrlStore, byte_limits

__all__ = [
    "Url",
    "UrlStore",
    "answers_within",
    "byte_limits",
    "is_unreachable",
    "is_url",
    "missing_package",
    "plain_path",
    "read_errors",
    "remote_remedy",
    "suffix_of",
    "upload_seconds",
]
