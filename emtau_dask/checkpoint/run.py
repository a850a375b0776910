"""A run as its checkpoint has it, unfinished or finished: parameters, history, and row state."""

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
from emtau_dask.em.settings import EmSettings, max_sample_iterations
from emtau_dask.em.state import RunState
from emtau_dask.mixture.parameters import MixtureParameters
from emtau_dask.policies.policy import ACTIVE
from emtau_dask.storage.commits import open_log
from emtau_dask.storage.row_state import RowFields, RowStateRef
from emtau_dask.storage.stores import object_store


@dataclass(frozen=True, eq=False)
class Run:
    """A run as its newest commit has it; `open_run` returns one.

    The arrays of its rows are attributes too: ``run.active``, and those of the policy, such as ``run.label``
    and ``run.count``.

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
        iteration scores. With `FullEM` these are all rows; while a fit is on a sample, its rows; between full
        passes of `EMSampled`, the rows with sampling weights. The others are those of the policy (`EMTau`:
        ``label``, the row's last component, and ``count``, the number of its iterations there). They are
        masked arrays if the policy keeps no values of inactive rows, like `EMTau`.
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
        """Return the names of the arrays too."""
        return [*super().__dir__(), *self.rows]


def open_run(path: Any) -> Run:
    """Open a run that is running, was killed, or has ended; nothing is written.

    The arrays of its rows are read when they are computed, and compared with the digests in the commit. A run
    that goes on removes objects that only older commits need. Then computing the arrays raises
    `CheckpointError`; open the run again.

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
        None of its commits is intact.

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
    """Return which rows the next iteration scores; None if row state says that."""
    if config.acceleration is not None:
        index = 0 if state is None or state.progress is None else state.progress.sample_index
        made = 0 if state is None else state.iteration
        if index < len(config.shares) and made < max_sample_iterations(config.max_iter):
            return ScoredNext(config.acceleration.samples, index)
    return ScoredNext() if state is None or state.full_pass_next else None


def _arrays(saved: SavedFit, state: RunState | None) -> dict[str, da.Array]:
    """Return the arrays of a run's rows, by name; all arrays of a chunk are read at once."""
    row_state: Mapping[int, RowStateRef] = {} if state is None else state.row_state
    fields = next((stored.object.fields for stored in row_state.values()), RowFields((ACTIVE,), ("bool",), 1))
    rows = CommittedRows(saved.log.objects, saved.number, fields, _scored_next(saved.config, state))
    chunk_rows = [length for length, count in saved.manifest.data.chunks for _ in range(count)]
    token = uuid4().hex
    ranges = chunk_ranges(chunk_rows)
    read: dict[Hashable, Any] = {
        (f"rows-{token}", chunk): (rows.read, chunk_range, row_state.get(chunk))
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
