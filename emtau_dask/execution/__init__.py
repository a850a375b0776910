"""Passes over chunks: a task for each batch of them, and a fixed tree of merges."""

from emtau_dask.execution.interrupts import interrupts_as_they_are
from emtau_dask.execution.merge_tree import FAN_IN, batches_of
from emtau_dask.execution.observer import PassObserver
from emtau_dask.execution.passes import NO_SOURCE, ReadingTask, run_pass
from emtau_dask.execution.process_settings import hold_for_process, this_process, threads_side_by_side
from emtau_dask.execution.read_ahead import AheadBudget, read_ahead_limit

__all__ = [
    "FAN_IN",
    "NO_SOURCE",
    "AheadBudget",
    "PassObserver",
    "ReadingTask",
    "batches_of",
    "hold_for_process",
    "interrupts_as_they_are",
    "read_ahead_limit",
    "run_pass",
    "this_process",
    "threads_side_by_side",
]
