"""Which executor runs the passes of a fit: dask's own precedence decides."""

from __future__ import annotations

import dask.local
import dask.threaded

from emtau_dask.cluster import active_client, local_scheduler, local_threads
from emtau_dask.execution.dask_graph import GraphExecutor
from emtau_dask.execution.executor import Executor
from emtau_dask.execution.threads import ThreadExecutor, compute_here, compute_in_threads


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
    """Return what `choose_executor` does where that computes in this process, else its threads.

    Raises as `choose_executor`.
    """
    chosen = choose_executor()
    return chosen if chosen.in_process else ThreadExecutor(local_threads(), compute_in_threads)
