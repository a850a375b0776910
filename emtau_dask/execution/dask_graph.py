"""Passes as graphs that dask computes elsewhere: on a cluster, in processes, or as the user has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar, cast

from dask.callbacks import Callback
from dask.delayed import Delayed
from dask.highlevelgraph import HighLevelGraph

from emtau_dask.cluster import Payload, cluster_errors, computed, local_threads
from emtau_dask.execution.cluster_progress import counted
from emtau_dask.execution.executor import Pass
from emtau_dask.execution.graph import SharedWork, graph_of
from emtau_dask.execution.observer import PassObserver
from emtau_dask.interrupts import Stop, interruptible_at_once
from emtau_dask.versions import software

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class GraphExecutor:
    """Runs passes by the scheduler that dask's own precedence chooses, in other processes.

    Attributes
    ----------
    client : distributed.Client or None
        None for a scheduler of this machine's processes, or of the user's.
    """

    client: Any

    @property
    def in_process(self) -> bool:
        """No."""
        return False

    @property
    def threads(self) -> int:
        """As many as dask would use in this process."""
        return local_threads()

    @property
    def workers(self) -> int:
        """The threads of all workers now; without a client, those of this process."""
        if self.client is None:
            return self.threads
        with cluster_errors():
            return max(1, sum(int(threads) for threads in self.client.nthreads().values()))

    def map_reduce(self, work: Pass[T], observer: PassObserver) -> T | None:
        """See `Executor.map_reduce`."""
        observer.stage(work.stage, len(work.items))
        if not work.items:
            return None
        shared = SharedWork(work.task, work.merge, None, Stop())
        with cluster_errors():
            payload = shared if self.client is None else Payload.of(shared, made_with=software())
            graph = graph_of(work, payload)
            layers = HighLevelGraph.from_collections(graph.layer, graph.tasks)
            watched = (
                Callback(posttask=graph.count(observer))
                if self.client is None
                else counted(self.client, graph, observer)
            )
            with watched, interruptible_at_once():
                root = Delayed(graph.root, layers, layer=graph.layer)
                (value,) = computed(self.client, work.stage, root)
        return cast("T", value)
