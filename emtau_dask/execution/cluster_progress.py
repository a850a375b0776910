"""How far a pass on a cluster is: its scheduler is asked now and then, and no task has anything to send."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from emtau_dask.cluster import looking
from emtau_dask.execution.graph import PassGraph
from emtau_dask.execution.observer import PassObserver

LOOK_SECONDS, LEAVE_SECONDS = 1.0, 5.0
NOT_DONE = ("waiting", "queued", "no-worker", "processing")
"""States of tasks that have not run."""


def _question() -> Callable[..., dict[str, int] | None]:
    """Return what a scheduler runs. Being local, it travels as code: the scheduler may lack this package."""

    def states(layer: str, dask_scheduler: Any = None) -> dict[str, int] | None:
        group = dask_scheduler.task_groups.get(layer)
        return None if group is None else dict(group.states)

    return states


def chunks_of_states(states: Mapping[str, int], n_chunks: int) -> int:
    """Return about how many chunks are done, where tasks of equal numbers of chunks are in these states."""
    n_tasks = sum(states.values())
    waiting = sum(states.get(state, 0) for state in NOT_DONE)
    return n_chunks * (n_tasks - waiting) // n_tasks if n_tasks else 0


@contextmanager
def counted(client: Any, graph: PassGraph, observer: PassObserver) -> Iterator[None]:
    """Tell ``observer`` of chunks while the block computes a graph on a cluster, and of all at its end.

    A scheduler that does not answer, or runs no functions for clients, is not asked again in this pass.
    """
    n_chunks = sum(map(len, graph.chunks_of.values()))
    told = 0

    def look(over: threading.Event) -> None:
        nonlocal told
        question = _question()
        with suppress(Exception):
            while not over.wait(LOOK_SECONDS):
                states = client.run_on_scheduler(question, graph.layer)
                done = 0 if states is None else chunks_of_states(states, n_chunks)
                if done > told and not over.is_set():
                    observer.chunks_done(done - told)
                    told = done

    with looking(look, "emtau-progress", LEAVE_SECONDS):
        yield
    observer.chunks_done(n_chunks - told)
