"""The settings in dask's configuration under ``emtau``."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import Literal

import dask
from dask.utils import parse_bytes

from emtau_dask.errors import ConfigError

AUTO: Literal["auto"] = "auto"
READ_AHEAD_BYTES = 2**26


@dataclass(frozen=True)
class DaskSettings:
    """The settings, as `read_settings` finds them.

    Attributes
    ----------
    cache_bytes : int or "auto"
        ``emtau.cache-bytes``: maximum bytes that each process caches between passes; 0 caches nothing. The
        value of "auto", the default, depends on the fit and its memory (`em.memory.automatic_cache`).
    read_ahead_bytes : int
        ``emtau.read-ahead-bytes``: maximum bytes that a pass reads ahead; 0 reads nothing ahead.
    compiled, direct_reads : "auto", "always" or "never"
        ``emtau.compiled``, and ``emtau.direct-reads`` (the setting of the process that reads).
    """

    cache_bytes: int | Literal["auto"]
    read_ahead_bytes: int
    compiled: str
    direct_reads: str


def read_settings() -> DaskSettings:
    """Return the current settings.

    Raises
    ------
    ConfigError
        A setting is neither a number of bytes nor one of its allowed texts.
    """
    return DaskSettings(
        _bytes_or_auto("emtau.cache-bytes"),
        _bytes("emtau.read-ahead-bytes", READ_AHEAD_BYTES),
        choice_setting("emtau.compiled"),
        choice_setting("emtau.direct-reads"),
    )


def scratch_place() -> str:
    """Return the folder for the rows of CSV: dask's ``emtau.scratch``, else its ``temporary-directory``."""
    place = dask.config.get("emtau.scratch", None) or dask.config.get("temporary-directory", None)
    return str(place or tempfile.gettempdir())


def _bytes_or_auto(key: str) -> int | Literal["auto"]:
    return AUTO if dask.config.get(key, AUTO) == AUTO else _bytes(key, 0, " or 'auto'")


def _bytes(key: str, default: int, words: str = "") -> int:
    value = dask.config.get(key, default)
    try:
        size = -1 if isinstance(value, bool) else int(parse_bytes(value))
    except (TypeError, ValueError, AttributeError, OverflowError):
        size = -1
    if size < 0:
        raise ConfigError(
            f"dask's setting {key} is {value!r}; give a number of bytes, such as 0 or '256 MiB'{words}."
        )
    return size


def choice_setting(key: str) -> str:
    """Return dask's setting ``key``: "auto" (by default), "always" or "never"; raises `ConfigError`."""
    setting = dask.config.get(key, "auto")
    if setting not in ("auto", "always", "never"):
        raise ConfigError(f"dask's setting {key} is {setting!r}; give 'auto', 'always' or 'never'.")
    return str(setting)
