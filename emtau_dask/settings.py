"""Sizes that a user sets in dask's configuration."""

from __future__ import annotations

import dask
from dask.utils import parse_bytes

from emtau_dask.errors import ConfigError


def byte_setting(key: str, default: int) -> int:
    """Return the number of bytes that dask's configuration has under ``key``.

    Raises
    ------
    ConfigError
        It is no number of bytes.
    """
    value = dask.config.get(key, default)
    try:
        size = -1 if isinstance(value, bool) else int(parse_bytes(value))
    except (TypeError, ValueError, AttributeError, OverflowError):
        size = -1
    if size < 0:
        raise ConfigError(
            f"dask's setting {key} is {value!r}; give a number of bytes, such as 0 or '256 MiB'."
        )
    return size
