"""Collections of dask, computed as passes are: no later computation waits for what an interrupt left."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import dask
from dask.core import flatten
from dask.local import nested_get

from emtau_dask.cluster import computed
from emtau_dask.execution.choice import choose_executor
from emtau_dask.execution.threads import ThreadExecutor
from emtau_dask.interrupts import Stop, interruptible_at_once

ALL = "emtau-all"


def _together(*values: Any) -> tuple[Any, ...]:
    return values


def _get(executor: ThreadExecutor, given: Any, keys: Any, **_: Any) -> Any:
    """Compute keys of a graph or expression, as dask's schedulers do; in threads of this call alone."""
    graph: Mapping[Any, Any] = given.__dask_graph__() if hasattr(given, "__dask_graph__") else given
    wanted = list(flatten([keys]))
    tasks = {**graph, ALL: (_together, *wanted)}
    found = executor.compute(tasks, ALL, 2, Stop())
    return nested_get(keys, dict(zip(wanted, found, strict=True)))


def compute_collections(what: str, *collections: Any) -> tuple[Any, ...]:
    """Return the values of collections, as ``dask.compute`` does.

    In this process it is done by threads of this call alone: an interrupt that falls where the main thread
    hands a task to dask's own leaves their lock taken, and the next computation would wait for ever.

    Parameters
    ----------
    what : str
        What waits for it, for messages.
    *collections : dask collection

    Raises
    ------
    ClusterError, ConfigError
        As `choose_executor` and `computed`.
    """
    executor = choose_executor()
    if isinstance(executor, ThreadExecutor):
        return tuple(dask.compute(*collections, scheduler=partial(_get, executor)))
    with interruptible_at_once():
        return computed(executor.client, what, *collections)
