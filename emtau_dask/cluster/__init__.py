"""Where tasks run: the scheduler that dask chooses, what workers see, and errors of a cluster translated."""

from emtau_dask.cluster.access import differing_workers, prove_access, shared_data, shared_source
from emtau_dask.cluster.beside import looking
from emtau_dask.cluster.environment import numerical_environment
from emtau_dask.cluster.errors import cluster_errors
from emtau_dask.cluster.memory import memory_of_worker, task_processes
from emtau_dask.cluster.payload import Payload, in_use, opened
from emtau_dask.cluster.scatter import check_portable, resident
from emtau_dask.cluster.scheduler import (
    active_client,
    in_process,
    local_scheduler,
    local_threads,
    threads_of_process,
)
from emtau_dask.cluster.waiting import computed, warn_without_workers

__all__ = [
    "Payload",
    "active_client",
    "check_portable",
    "cluster_errors",
    "computed",
    "differing_workers",
    "in_process",
    "in_use",
    "local_scheduler",
    "local_threads",
    "looking",
    "memory_of_worker",
    "numerical_environment",
    "opened",
    "prove_access",
    "resident",
    "shared_data",
    "shared_source",
    "task_processes",
    "threads_of_process",
    "warn_without_workers",
]
