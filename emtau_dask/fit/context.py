"""What a fit owns while it goes on, and gives back when it ends."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from emtau_dask.em import Context, FitObserver
from emtau_dask.execution import Executor, interrupts_as_they_are, threads_side_by_side
from emtau_dask.io.cache import RowCache, release_rows
from emtau_dask.settings import Settings

RELEASE_SECONDS = 5.0
"""How long the end of a fit waits for workers to remove what they keep for it."""


@contextmanager
def open_context(
    executor: Executor, observer: FitObserver, settings: Settings, *, keeps_rows: bool
) -> Iterator[Context]:
    """Give the context of a fit; of what it owns nothing stays after the end.

    It owns the limit of BLAS to one thread, and what this process and workers keep of rows between passes.

    Parameters
    ----------
    executor : Executor
    observer : FitObserver
    settings : Settings
    keeps_rows : bool
        Whether the policy keeps row state, so that active rows are worth keeping too.
    """
    with (
        interrupts_as_they_are(),
        threads_side_by_side(),
        _row_cache(executor, settings.cache_bytes if keeps_rows else 0) as cache,
    ):
        yield Context(observer, cache, settings.read_ahead_bytes)


@contextmanager
def _row_cache(executor: Executor, limit: int) -> Iterator[RowCache | None]:
    """Give a cache of active rows and row state; None where it would hold nothing.

    There is none where tasks run in a pool of processes, which need not outlast a pass and cannot be told
    of the end.
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
    """Let workers remove what they keep; one that does not answer does so when other fits follow."""

    def tell() -> None:
        with suppress(Exception):
            client.run(release_rows, token, on_error="ignore")

    telling = threading.Thread(target=tell, name="emtau-cache-release", daemon=True)
    telling.start()
    telling.join(RELEASE_SECONDS)
