"""Sums of parts of the rows, merged, against sums over all rows in extended precision."""

import importlib.util
import warnings

import dask
import dask.array as da
import numpy as np
import pytest
import scipy.special
from references import COVARIANCE_TYPES, drawn, log_joint, naive_statistics
from sklearn.exceptions import ConvergenceWarning

from emtau_dask import EMTau, GaussianMixture
from emtau_dask.kernels.dispatch import Kernels
from emtau_dask.mixture import features, plan
from emtau_dask.mixture.plan import plan_kernel
from emtau_dask.mixture.statistics import merge_sums

HAS_NUMBA = importlib.util.find_spec("numba") is not None
COMPILED = pytest.param(True, marks=pytest.mark.skipif(not HAS_NUMBA, reason="numba is not installed"))
LENGTHS = (1, 40, 7, 64, 3, 29, 11, 1, 5)


def by_features(parameters):
    return plan_kernel(parameters)


def centred(parameters):
    return plan_kernel(parameters).centred


CASES = [(each, by_features) for each in COVARIANCE_TYPES] + [("full", centred)]


def parts_of(rows):
    ends = np.cumsum(LENGTHS)
    return [rows[end - length : end] for end, length in zip(ends, LENGTHS, strict=True)]


def summed_apart(kernels, parts):
    """The sums of each part, by a kernel of its own."""
    found = []
    for part in parts:
        kernel = kernels.acquire(len(part))
        kernel.accumulate(np.ascontiguousarray(part), None, None)
        found.append(kernels.release(kernel))
    return found


@pytest.mark.parametrize("compiled", [False, COMPILED])
@pytest.mark.parametrize(("covariance_type", "form"), CASES)
def test_merged_sums_of_parts_are_the_statistics_of_all_rows(covariance_type, form, compiled):
    parameters = drawn(covariance_type)
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(sum(LENGTHS), 4)) * 2
    kernels = Kernels(form(parameters), compiled=compiled)
    sums = summed_apart(kernels, parts_of(rows))
    structure = parameters.structure
    first = merge_sums(structure, [None, *sums[:4]])
    found = kernels.plan.statistics(merge_sums(structure, [first, None, *sums[4:]]))
    responsibilities = scipy.special.softmax(log_joint(rows, parameters), axis=1)
    weights, means, scatter = naive_statistics(rows, responsibilities, covariance_type)
    assert np.allclose(found.weights, weights.astype(float), rtol=1e-12)
    assert np.allclose(found.means, means.astype(float), rtol=1e-11, atol=1e-12)
    assert np.allclose(found.scatter, scatter.astype(float), rtol=1e-11, atol=1e-11 * float(scatter.max()))


def test_sums_of_no_rows_are_none():
    structure = drawn("full").structure
    assert merge_sums(structure, []) is None
    assert merge_sums(structure, [None, None]) is None


@pytest.fixture
def statistics_made(monkeypatch):
    """How many rows of features became statistics: the components of each."""
    made, wrapped = [], features.statistics_of_moments

    def counted(structure, frame, moments):
        made.append(len(moments[0]))
        return wrapped(structure, frame, moments)

    monkeypatch.setattr(plan, "statistics_of_moments", counted)
    return made


@pytest.mark.parametrize("compiled", ["never", pytest.param("always", marks=COMPILED.marks)])
def test_a_pass_over_many_chunks_makes_statistics_once(statistics_made, compiled):
    """And once more for the rows that become inactive, however many chunks they are in."""
    rng = np.random.default_rng(0)
    rows = np.concatenate([rng.normal(size=(400, 2)) - 20, rng.normal(size=(400, 2)) + 20])
    rng.shuffle(rows)
    start = {
        "weights_init": [0.5, 0.5],
        "means_init": [[-20.0, -20], [20, 20]],
        "precisions_init": [np.eye(2)] * 2,
    }

    def fit(algorithm):
        statistics_made.clear()
        with warnings.catch_warnings(), dask.config.set({"emtau.compiled": compiled}):
            warnings.simplefilter("ignore", ConvergenceWarning)
            mixture = GaussianMixture(2, algorithm=algorithm, tol=0, max_iter=4, **start)
            mixture.fit(da.from_array(rows, chunks=(10, 2)))
        return mixture.history_

    assert [record.full_pass for record in fit("em")] == [True] * 4
    assert statistics_made == [2] * 4
    assert [record.full_pass for record in fit(EMTau(tau=1, revisit=1))] == [True] * 4
    assert statistics_made == [2] * 8
