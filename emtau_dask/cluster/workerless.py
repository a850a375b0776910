"""What is said while a computation waits for a cluster that has no workers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from emtau_dask.cluster.beside import looking
from emtau_dask.errors import line_of_user, warn_user

LOOK_SECONDS = 2.0
LEAVE_SECONDS = 1.0
"""How long the end waits for the thread that looks, which may wait for a scheduler that is gone."""


def _message(client: Any, what: str) -> str:
    address = client.scheduler.address
    return (
        f"the scheduler at {address} has no workers: {what} waits until there is one. Start one (dask worker "
        f"{address}), or end this with Ctrl-C or SIGTERM. Where dask's "
        "distributed.scheduler.no-workers-timeout is set for the scheduler, the wait ends after that time "
        "with an error."
    )


def _has_none(client: Any) -> bool:
    """Return whether the scheduler says that it has no worker; False where it says nothing."""
    with suppress(Exception):
        return not client.nthreads()
    return False


@contextmanager
def missing_workers_reported(client: Any, what: str) -> Iterator[None]:
    """Warn while the block waits for a client's cluster, whenever that has no workers left.

    Parameters
    ----------
    client : distributed.Client or None
    what : str
        What waits.

    Warns
    -----
    UserWarning
        Within some seconds; once until there are workers again.
    """
    if client is None:
        yield
        return
    line = line_of_user()
    errors: list[Warning] = []

    def look(over: threading.Event) -> None:
        warned = False
        while not over.wait(LOOK_SECONDS):
            none = _has_none(client)
            if none and not warned and not over.is_set():
                try:
                    warn_user(_message(client, what), line=line)
                except Warning as error:
                    errors.append(error)
            warned = none

    with looking(look, "emtau-workers", LEAVE_SECONDS):
        yield
    if errors:
        raise errors[0]


def warn_without_workers(client: Any, what: str) -> None:
    """Warn where a client's cluster has no workers now.

    Parameters
    ----------
    client : distributed.Client or None
    what : str
        What will wait for one.
    """
    if client is not None and _has_none(client):
        warn_user(_message(client, what))
