"""Tiles in which some components are scored by features, and the others in the centred form."""

from __future__ import annotations

from typing import Any, NamedTuple

from emtau_dask.mixture.compiled.centred import CentredBuffers, CentredConstants, CentredMoments
from emtau_dask.mixture.compiled.features import FeatureBuffers, FeatureConstants, FeatureMoments
from emtau_dask.mixture.compiled.loop import collect, fill, finish, implement, score
from emtau_dask.mixture.numerics import Floats


class MixedConstants(NamedTuple):
    """What is the same for all blocks under one Θ."""

    by_features: FeatureConstants
    centred: CentredConstants
    least: float  # the exponentials of smaller numbers are taken for 0
    ceiling: float  # log-densities less scores, nats


class MixedBuffers(NamedTuple):
    """Buffers of one thread; the scores of both parts are rows of the scores, first those by features."""

    by_features: FeatureBuffers
    centred: CentredBuffers
    scores: Floats  # (K, T)
    sums: Floats  # (T,)
    peaks: Floats  # (T,)


class MixedMoments(NamedTuple):
    """Of a block."""

    by_features: FeatureMoments
    centred: CentredMoments


def _fill(constants: Any, rows: Any, buffers: Any) -> None:
    fill(constants.by_features, rows, buffers.by_features)
    fill(constants.centred, rows, buffers.centred)


def _score(constants: Any, buffers: Any) -> None:
    score(constants.by_features, buffers.by_features)
    score(constants.centred, buffers.centred)


def _collect(constants: Any, rows: Any, weights: Any, buffers: Any, moments: Any) -> None:
    collect(constants.by_features, rows, weights, buffers.by_features, moments.by_features)
    collect(constants.centred, rows, weights, buffers.centred, moments.centred)


def _finish(constants: Any, buffers: Any, moments: Any) -> None:
    finish(constants.by_features, buffers.by_features, moments.by_features)
    finish(constants.centred, buffers.centred, moments.centred)


implement(fill, MixedConstants, _fill)
implement(score, MixedConstants, _score)
implement(collect, MixedConstants, _collect)
implement(finish, MixedConstants, _finish)
