"""Which executor runs the passes of a fit: dask's own precedence decides."""

from __future__ import annotations

import threading
from functools import partial
from multiprocessing import parent_process

import dask.local
import dask.threaded

from emtau_dask.cluster import active_client, local_scheduler, local_threads, threads_of_process
from emtau_dask.execution.dask_graph import GraphExecutor
from emtau_dask.execution.executor import Executor
from emtau_dask.execution.threads import (
    ThreadExecutor,
    compute_here,
    compute_in_own_threads,
    compute_in_threads,
)


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
