"""A small mixture, and fits of it to compare: shared by the tests of the estimator."""

import warnings

import numpy as np
from oracles import starts
from sklearn.exceptions import ConvergenceWarning

from emtau_dask import GaussianMixture

ROWS, _ = starts.mixture(300, 3, 2, separation=3.0, seed=7)
ROWS.setflags(write=False)
START = starts.start(ROWS, 3, "full", seed=1)
CHUNKS = (0, 90, 0, 110, 100)
FITTED = ("weights_", "means_", "covariances_", "precisions_", "precisions_cholesky_", "lower_bounds_")


def mixture(**settings):
    return GaussianMixture(**({"n_components": 3, "algorithm": "em", "random_state": 0} | settings))


def quietly(model, X, **fit_options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return model.fit(X, **fit_options)


def resumed(run, X, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return GaussianMixture.resume(run, X, **options)


def assert_same_bits(a, b):
    for name in FITTED:
        assert np.asarray(getattr(a, name)).tobytes() == np.asarray(getattr(b, name)).tobytes(), name


def assert_close(a, b, rtol=1e-10):
    for name in FITTED:
        assert np.allclose(getattr(a, name), getattr(b, name), rtol=rtol, atol=rtol), name
