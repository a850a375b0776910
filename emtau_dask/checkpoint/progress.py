"""How what a run remembers of its steps is laid out in two arrays of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emtau_dask.ascent import Ascent, HeldMoments, Kind, Pair, Point, Trial
from emtau_dask.checkpoint.schema import AscentEntry, CycleEntry, ParametersEntry, PointEntry, ProgressEntry
from emtau_dask.em import Cycle, Progress
from emtau_dask.mixture.model import MixtureParameters

BESIDE_PAIRS = 3
"""Moments of an ascent beside its pairs: the point's, its response, and the trial's."""
ORIGINS = 3
"""Of the ascent, of that of all rows, and of the held moments."""

Write = Callable[[MixtureParameters], ParametersEntry]
Read = Callable[[ParametersEntry], MixtureParameters]


def moments_kept(memory: int) -> int:
    """Return how many vectors of moments a run has at most."""
    return 2 * (2 * memory + BESIDE_PAIRS) + 1


def packed(progress: Progress, write: Write, origins: NDArray[Any], moments: NDArray[Any]) -> dict[str, Any]:
    """Write a run's origins and moments into two arrays, in order; return the entry's other fields.

    ``write`` stores parameters.
    """
    place = iter(range(len(moments)))
    cycle = progress.cycle
    fields: dict[str, Any] = {
        "level": progress.level,
        "level_began": progress.level_began,
        "damping": progress.damping,
        "failures": progress.failures,
        "unsure": _or_none(progress.unsure),
        "heat": progress.heat,
        "chosen": progress.chosen,
        "doubt": progress.doubt,
        "measure_all": progress.measure_all,
        "ascent": _ascent(progress.ascent, write, moments, place),
        "cycle": None,
    }
    origins[0] = progress.ascent.origins
    if cycle is not None:
        outer = _ascent(cycle.outer, write, moments, place)
        moments[next(place)] = cycle.held.moments
        origins[1], origins[2] = cycle.outer.origins, cycle.held.origins
        fields["cycle"] = CycleEntry(outer=outer, entropy=cycle.held.entropy, gap=_or_none(cycle.gap))
    return fields


def _ascent(ascent: Ascent, write: Write, moments: NDArray[Any], place: Iterator[int]) -> AscentEntry:
    for pair in ascent.pairs:
        moments[next(place)] = pair.step
        moments[next(place)] = pair.decrease
    point, trial = ascent.point, ascent.trial
    if point is not None:
        moments[next(place)] = point.moments
        moments[next(place)] = point.response
    if trial.moments is not None:
        moments[next(place)] = trial.moments
    return AscentEntry(
        pairs=len(ascent.pairs),
        point=None
        if point is None
        else PointEntry(parameters=write(point.parameters), objective=point.objective),
        trial=trial.moments is not None,
        kind=trial.kind.value,
        length=trial.length,
        predicted=_or_none(trial.predicted),
        radius=_or_none(ascent.radius),
    )


def unpacked(entry: ProgressEntry, read: Read, origins: NDArray[Any], moments: NDArray[Any]) -> Progress:
    """Return what `packed` wrote; raises `IndexError` or `StopIteration` for counts that cannot be."""
    place = iter(range(len(moments)))
    ascent = _read_ascent(entry.ascent, read, origins[0], moments, place)
    cycle = None
    if entry.cycle is not None:
        outer = _read_ascent(entry.cycle.outer, read, origins[1], moments, place)
        held = HeldMoments(origins[2], moments[next(place)], entry.cycle.entropy)
        cycle = Cycle(outer, held, _or_nan(entry.cycle.gap))
    return Progress(
        ascent,
        entry.level,
        entry.level_began,
        cycle,
        entry.damping,
        entry.failures,
        _or_nan(entry.unsure),
        entry.heat,
        entry.chosen,
        entry.doubt,
        entry.measure_all,
    )


def _read_ascent(
    entry: AscentEntry, read: Read, origins: NDArray[Any], moments: NDArray[Any], place: Iterator[int]
) -> Ascent:
    pairs = tuple(Pair(moments[next(place)], moments[next(place)]) for _ in range(entry.pairs))
    point = None
    if entry.point is not None:
        found = read(entry.point.parameters)
        point = Point(found, entry.point.objective, moments[next(place)], moments[next(place)])
    trial = Trial(
        moments[next(place)] if entry.trial else None,
        Kind(entry.kind),
        entry.length,
        _or_nan(entry.predicted),
    )
    radius = math.inf if entry.radius is None else entry.radius
    return Ascent(origins, pairs, point, trial, radius)


def _or_none(value: float) -> float | None:
    return value if np.isfinite(value) else None


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
