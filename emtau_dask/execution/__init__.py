"""Passes over chunks: a task for each batch of them, and a fixed tree of merges."""

from emtau_dask.execution.blas import hold_for_process, process_id, threads_side_by_side
from emtau_dask.execution.choice import choose_executor, here, one_thread
from emtau_dask.execution.collections import compute_collections
from emtau_dask.execution.executor import NO_SOURCE, ChunkInput, Executor, Pass, ReadingTask
from emtau_dask.execution.merge_tree import FAN_IN, MOST_CHUNKS, batches_of
from emtau_dask.execution.observer import PassObserver
from emtau_dask.execution.read_ahead import AheadBudget
from emtau_dask.execution.threads import lasting_threads

__all__ = [
    "FAN_IN",
    "MOST_CHUNKS",
    "NO_SOURCE",
    "AheadBudget",
    "ChunkInput",
    "Executor",
    "Pass",
    "PassObserver",
    "ReadingTask",
    "batches_of",
    "choose_executor",
    "compute_collections",
    "here",
    "hold_for_process",
    "lasting_threads",
    "one_thread",
    "process_id",
    "threads_side_by_side",
]
