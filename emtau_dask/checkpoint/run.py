"""A run as others see it, under way, killed or finished: parameters, history, and the state of every row."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from operator import getitem
from typing import Any
from uuid import uuid4

import dask.array as da
import numpy as np
from dask.highlevelgraph import HighLevelGraph

from emtau_dask.checkpoint.reader import SavedFit, open_newest
from emtau_dask.checkpoint.rows import CommittedRows, ScoredNext
from emtau_dask.data.source import chunk_ranges
from emtau_dask.em.history import FitHistory
from emtau_dask.em.settings import EmSettings, most_on_samples
from emtau_dask.em.state import RunState
from emtau_dask.mixture.parameters import MixtureParameters
from emtau_dask.policies.policy import ACTIVE
from emtau_dask.storage.commits import open_log
from emtau_dask.storage.row_state import RowFields, SlotState
from emtau_dask.storage.stores import object_store


@dataclass(frozen=True, eq=False)
class Run:
    """A run as its newest commit has it; `open_run` returns one.

    The arrays of its rows are attributes, too, by their names: ``run.active``, and what the policy keeps,
    such as ``run.label`` and ``run.count``.

    Attributes
    ----------
    location : str
    commit : int
        The commit's number.
    iteration : int
        Iterations made; 0 while the run has no parameters yet.
    history : FitHistory
        One record for each of them.
    parameters : MixtureParameters or None
        With ``weights`` (K,), ``means`` (K, d), ``covariances`` and ``precisions_cholesky`` in scikit-learn's
        shapes, float64. None until the first start has ended.
    stop_reason : str or None
        ``"tol"``, ``"no-active-rows"`` or ``"max-iter"``; None while the run goes on.
    rows : mapping of str to dask array
        Of shape (N,), in the order and chunks of the data's rows. ``active``, bool: the rows that the next
        iteration scores. With `FullEM` these are all rows; while a fit is on a sample, the sample's; between
        full passes of `EMSampled`, those that stand for all. The others are as the policy keeps them
        (`EMTau`: ``label``, the row's last component, and ``count``, for how many iterations it has been
        there): masked arrays where the policy keeps nothing of inactive rows, as `EMTau` does.
    """

    location: str
    commit: int
    iteration: int
    history: FitHistory
    parameters: MixtureParameters | None
    stop_reason: str | None
    rows: Mapping[str, da.Array]

    def __getattr__(self, name: str) -> da.Array:
        """Return an array of the rows by its name."""
        rows = self.__dict__.get("rows", {})
        if name in rows:
            return rows[name]
        raise AttributeError(
            f"{type(self).__name__} has no attribute {name!r}; the arrays that this run keeps of its rows "
            f"are {', '.join(rows)}."
        )

    def __dir__(self) -> list[str]:
        """Name the arrays, too."""
        return [*super().__dir__(), *self.rows]


def open_run(path: Any) -> Run:
    """Open a run that is under way, was killed, or has ended; nothing is written.

    What is returned is the run as its newest commit has it. The arrays of its rows are read when they are
    computed, each object by the digest that the commit states. A run that goes on removes what only older
    commits needed: then computing them raises, and the run has to be opened again.

    Parameters
    ----------
    path : str, Path or zarr store
        Of a checkpoint: a folder, or an fsspec URL.

    Returns
    -------
    Run

    Raises
    ------
    CheckpointError
        There is no run, or it was written by another version.
    CheckpointCorruptError
        None of its commits is whole.

    Examples
    --------
    >>> run = open_run("run.zarr")  # doctest: +SKIP
    >>> run.active.mean().compute()  # doctest: +SKIP
    0.083
    """
    saved = open_newest(open_log(object_store(path)))
    state = saved.state.current or saved.state.best
    records = () if state is None else state.records
    return Run(
        saved.log.objects.location,
        saved.number,
        len(records),
        FitHistory(records, saved.state.notes),
        None if state is None else state.parameters,
        None if state is None else state.stop_reason,
        _arrays(saved, state),
    )


def _scored_next(config: EmSettings, state: RunState | None) -> ScoredNext | None:
    """Return which rows the next iteration scores; None where row state says that."""
    if config.acceleration is not None:
        level = 0 if state is None or state.progress is None else state.progress.level
        made = 0 if state is None else state.iteration
        if level < len(config.shares) and made < most_on_samples(config.max_iter):
            return ScoredNext(config.acceleration.samples, level)
    return ScoredNext() if state is None or state.full_pass_next else None


def _arrays(saved: SavedFit, state: RunState | None) -> dict[str, da.Array]:
    """Return the arrays of a run's rows by name; those of one chunk are read together."""
    slots: Mapping[int, SlotState] = {} if state is None else state.slots
    fields = next((slot.object.fields for slot in slots.values()), RowFields((ACTIVE,), ("bool",), 1))
    rows = CommittedRows(saved.log.objects, saved.number, fields, _scored_next(saved.config, state))
    chunk_rows = [length for length, count in saved.manifest.data.chunks for _ in range(count)]
    token = uuid4().hex
    ranges = chunk_ranges(chunk_rows)
    read: dict[Hashable, Any] = {
        (f"rows-{token}", chunk): (rows.read, chunk_range, slots.get(chunk))
        for chunk, chunk_range in ranges.items()
    }
    layers, arrays = {f"rows-{token}": read}, {}
    for name, dtype in fields.by_name.items():
        layer = f"{name}-{token}"
        empty = np.zeros(0, dtype)
        meta = empty if name in (ACTIVE, *fields.kept) else np.ma.MaskedArray(empty)
        own = {
            (layer, chunk): (getitem, (f"rows-{token}", chunk), name) if chunk in ranges else meta
            for chunk in range(len(chunk_rows))
        }
        graph = HighLevelGraph({**layers, layer: own}, {f"rows-{token}": set(), layer: {f"rows-{token}"}})
        arrays[name] = da.Array(graph, layer, (tuple(chunk_rows),), meta=meta)
    return arrays
