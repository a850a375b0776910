"""Whether active rows and row state are cached between passes, in how many bytes, and for how long."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from emtau_dask.cluster import active_client, in_process
from emtau_dask.em import Problem
from emtau_dask.io.cache import RowCache, release_rows
from emtau_dask.io.objects import RowFields
from emtau_dask.settings import byte_setting

CACHE_BYTES = 2**25
RELEASE_SECONDS = 5.0
"""How long the end of a fit waits for workers to remove what they keep for it."""


def cache_limit() -> int:
    """Return the bytes that each process may keep between passes in memory: dask's ``emtau.cache-bytes``.

    By default `CACHE_BYTES`; 0 is no cache at all.

    Raises
    ------
    ConfigError
        The setting is no number of bytes.
    """
    return byte_setting("emtau.cache-bytes", CACHE_BYTES)


@contextmanager
def kept_between_passes(problem: Problem, fields: RowFields | None) -> Iterator[Problem]:
    """Give the problem with a cache for its active rows and row state, of which nothing stays after the end.

    There is none where it might hold nothing, where no row state is kept (``fields`` are None), nor where
    the tasks run in a pool of processes, which need not outlast a pass and cannot be told of the end.
    """
    client, limit = active_client(), cache_limit()
    if not limit or fields is None or (client is None and not in_process()):
        yield problem
        return
    cache = RowCache(uuid.uuid4().hex, limit)
    try:
        yield replace(problem, cache=cache)
    finally:
        release_rows(cache.token)
        if client is not None:
            _release_on(client, cache.token)


def _release_on(client: Any, token: str) -> None:
    """Let workers remove what they keep; one that does not answer does so when other fits follow."""

    def tell() -> None:
        with suppress(Exception):
            client.run(release_rows, token, on_error="ignore")

    telling = threading.Thread(target=tell, name="emtau-cache-release", daemon=True)
    telling.start()
    telling.join(RELEASE_SECONDS)
