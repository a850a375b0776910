"""Which executor runs a fit."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial
from multiprocessing import parent_process
from typing import Any

import dask
import dask.threaded
from dask.core import flatten
from dask.local import nested_get

from emtau_dask.execution.dask_graph import GraphExecutor, computed
from emtau_dask.execution.executor import Executor
from emtau_dask.execution.scheduler import active_client, local_scheduler, local_threads, threads_of_process
from emtau_dask.execution.threads import (
    ThreadExecutor,
    compute_here,
    compute_in_own_threads,
    compute_in_threads,
)
from emtau_dask.interrupts import Stop, interruptible_at_once

ALL = "emtau-all"


def one_thread() -> Executor:
    """Return the executor that computes in the calling thread."""
    return ThreadExecutor(1, compute_here)


def choose_executor() -> Executor:
    """Return the executor for the scheduler of a config or context, else the active client, else threads.

    Raises
    ------
    ClusterError
        The client is asynchronous, or gone.
    ConfigError
        Dask's ``scheduler`` setting names none.
    """
    client, schedule = active_client(), local_scheduler()
    if schedule is dask.threaded.get:
        return ThreadExecutor(local_threads(), compute_in_threads)
    if schedule is dask.local.get_sync:
        return ThreadExecutor(1, compute_here)
    return GraphExecutor(client)


def here() -> Executor:
    """Return an executor of this process, whatever its clients, with threads that no other task waits for.

    In a task of dask, and in any other thread than the main one, it is the calling thread: all of the
    machine's threads may be at work beside it.
    """
    first = threading.current_thread() is threading.main_thread() and parent_process() is None
    threads = threads_of_process()
    if not first or threads == 1:
        return one_thread()
    return ThreadExecutor(threads, partial(compute_in_own_threads, threads=threads))


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
