"""What belongs to a process while a fit lasts."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from emtau_dask.em import Context, FitObserver
from emtau_dask.execution import Executor, threads_side_by_side
from emtau_dask.interrupts import interruptible
from emtau_dask.io.cache import RowCache, release_rows
from emtau_dask.settings import read_settings

RELEASE_SECONDS = 5.0
"""How long the end of a fit waits for workers to remove what they keep for it."""


@contextmanager
def open_context(executor: Executor, observer: FitObserver, cache_bytes: int = 0) -> Iterator[Context]:
    """Open the context of a fit: BLAS is limited to one thread, and active rows are cached between passes.

    At the end the limit and all caches, those of workers too, are removed. ``cache_bytes`` are those that
    each process may keep in memory, 0 for no cache.
    """
    with (
        interruptible(),
        threads_side_by_side(),
        _row_cache(executor, cache_bytes) as cache,
    ):
        yield Context(observer, cache, read_settings().read_ahead_bytes)


@contextmanager
def _row_cache(executor: Executor, limit: int) -> Iterator[RowCache | None]:
    """Open a cache of active rows and row state, None where ``limit`` is 0.

    Also None for a pool of processes: they may end with a pass, and cannot be notified of the fit's end.
    """
    client = executor.client
    if not limit or (client is None and not executor.in_process):
        yield None
        return
    cache = RowCache(uuid.uuid4().hex, limit)
    try:
        yield cache
    finally:
        release_rows(cache.token)
        if client is not None:
            _release_on(client, cache.token)


def _release_on(client: Any, token: str) -> None:
    """Let workers remove their caches; one that does not answer removes them in a later fit."""

    def tell() -> None:
        with suppress(Exception):
            client.run(release_rows, token, on_error="ignore")

    telling = threading.Thread(target=tell, name="emtau-cache-release", daemon=True)
    telling.start()
    telling.join(RELEASE_SECONDS)
