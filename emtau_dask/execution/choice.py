"""Which executor runs a fit."""

from __future__ import annotations

import threading
from multiprocessing import parent_process
from typing import Any

import dask
import dask.threaded

from emtau_dask.execution.dask_graph import GraphExecutor, computed
from emtau_dask.execution.executor import Executor
from emtau_dask.execution.scheduler import active_client, local_scheduler, local_threads, threads_of_process
from emtau_dask.execution.threads import ThreadExecutor, threads_of_dask
from emtau_dask.interrupts import interruptible_at_once


def one_thread() -> Executor:
    """Return the executor that computes in the calling thread."""
    return ThreadExecutor(1, dask.get)


def choose_executor() -> Executor:
    """Return the executor for the scheduler of a config or context, else the active client, else threads.

    Raises
    ------
    ClusterError
        The client is asynchronous, or there is none where the setting asks for one.
    ConfigError
        Dask's ``scheduler`` setting names none.
    """
    client, schedule = active_client(), local_scheduler()
    if schedule is dask.threaded.get:
        return threads_of_dask(local_threads())
    return GraphExecutor(client) if schedule is None else one_thread()


def here() -> Executor:
    """Return an executor in this process, whatever its clients.

    In a task of dask, and in any thread but the main one, it computes in the calling thread: all of the
    machine's threads may be busy with other tasks.
    """
    is_main = threading.current_thread() is threading.main_thread() and parent_process() is None
    threads = threads_of_process()
    return ThreadExecutor(threads) if is_main and threads > 1 else one_thread()


def compute_collections(what: str, *collections: Any) -> tuple[Any, ...]:
    """Return the values of collections, as ``dask.compute`` does.

    Parameters
    ----------
    what : str
        What waits for the values, for messages.
    *collections : dask collection

    Raises
    ------
    ClusterError, ConfigError
        As `choose_executor` and `computed`.
    """
    with interruptible_at_once():
        return computed(active_client(), what, *collections)
