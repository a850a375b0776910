"""Tiles in which some components are scored by features, and the others in the centred form."""

from __future__ import annotations

from typing import Any, NamedTuple

from emtau_dask.kernels.centred import CentredBuffers, CentredConstants, CentredMoments
from emtau_dask.kernels.centred import collect as collect_centred
from emtau_dask.kernels.centred import fill as fill_centred
from emtau_dask.kernels.centred import finish as finish_centred
from emtau_dask.kernels.centred import score as score_centred
from emtau_dask.kernels.features import FeatureBuffers, FeatureConstants, FeatureMoments, complete
from emtau_dask.kernels.features import collect as collect_features
from emtau_dask.kernels.features import score as score_features
from emtau_dask.kernels.loop import loops_of
from emtau_dask.kernels.products import inlined
from emtau_dask.mixture.linalg import Floats


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


@inlined
def _fill(constants: Any, rows: Any, buffers: Any) -> None:
    fill_centred(constants.centred, rows, buffers.centred)
    centre = constants.by_features.centre
    for f in range(centre.shape[1]):
        difference, coordinate = buffers.by_features.differences[f], buffers.centred.coordinates[f]
        middle = centre[0, f]
        for t in range(len(difference)):
            difference[t] = coordinate[t] - middle
    complete(constants.by_features, buffers.by_features)


@inlined
def _score(constants: Any, buffers: Any) -> None:
    score_features(constants.by_features, buffers.by_features)
    score_centred(constants.centred, buffers.centred)


@inlined
def _collect(constants: Any, rows: Any, weights: Any, buffers: Any, moments: Any) -> None:
    collect_features(constants.by_features, rows, weights, buffers.by_features, moments.by_features)
    collect_centred(constants.centred, rows, weights, buffers.centred, moments.centred)


@inlined
def _finish(constants: Any, buffers: Any, moments: Any) -> None:
    finish_centred(constants.centred, buffers.centred, moments.centred)


loops = loops_of("mixed", fill=_fill, score=_score, collect=_collect, finish=_finish)
