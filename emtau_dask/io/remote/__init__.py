"""What lies behind fsspec URLs: rows and checkpoints are read and written through this folder."""

from emtau_dask.io.remote.errors import is_unreachable, read_errors, remote_remedy
from emtau_dask.io.remote.filesystem import OpenedPath, RemotePath, Url
from emtau_dask.io.remote.stream import opened_stream
from emtau_dask.io.remote.urls import is_url, missing_package, plain_path, suffix_of
from emtau_dask.io.remote.zarr_store import UrlStore, byte_limits

__all__ = [
    "OpenedPath",
    "RemotePath",
    "Url",
    "UrlStore",
    "byte_limits",
    "is_unreachable",
    "is_url",
    "missing_package",
    "opened_stream",
    "plain_path",
    "read_errors",
    "remote_remedy",
    "suffix_of",
]
