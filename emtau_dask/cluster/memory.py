"""How much memory the processes that run tasks may use, and how many tasks they run at a time."""

from __future__ import annotations

import sys
from typing import Any

from emtau_dask.cluster.errors import cluster_errors
from emtau_dask.cluster.scheduler import threads_of_process
from emtau_dask.io.files import usable_memory


def memory_of_worker(limit: int) -> int:
    """Return the bytes that tasks may use of a worker's memory limit.

    At four fifths of it dask pauses a worker, for good where its memory is not given back.
    """
    return limit * 4 // 5


def task_processes(client: Any) -> tuple[int, int] | None:
    """Return the bytes that a process which runs tasks may use, and its threads.

    Without a client it is this process, which may be a worker whose task this is. Of workers that differ it
    is the least memory and the most threads; None where there are no workers now.
    """
    if client is None:
        return _own_memory(), threads_of_process()
    with cluster_errors():
        answers = client.run(_worker, on_error="ignore")
    if not answers:
        return None
    shared = len(answers)
    limits = [min(limit or usable // shared, usable) for limit, usable, _ in answers.values()]
    return memory_of_worker(min(limits)), max(threads for _, _, threads in answers.values())


def _own_memory() -> int:
    distributed = sys.modules.get("distributed")
    try:
        worker = None if distributed is None else distributed.get_worker()
    except ValueError:  # no task of a worker
        worker = None
    limit = None if worker is None else worker.memory_manager.memory_limit
    return min(memory_of_worker(limit), usable_memory()) if limit else usable_memory()


def _worker(dask_worker: Any) -> tuple[int | None, int, int]:
    """Return a worker's memory limit, 0 or None for none, what its process may use, and its threads."""
    return dask_worker.memory_manager.memory_limit, usable_memory(), dask_worker.state.nthreads
