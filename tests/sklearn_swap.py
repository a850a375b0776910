"""A pytest plugin that puts our class in the place of scikit-learn's `GaussianMixture`.

Loaded with ``-p sklearn_swap`` by tests/integration/test_sklearn_judge.py, in a process of its own,
before scikit-learn's test module imports the name.
"""

from functools import wraps

import sklearn.mixture

import emtau_dask

SKLEARN_DEFAULTS = {"algorithm": "em", "tol": 1e-3, "max_iter": 100}


class GaussianMixture(emtau_dask.GaussianMixture):
    """Ours with traditional EM and scikit-learn's defaults; messages that are matched hold the name."""

    @wraps(emtau_dask.GaussianMixture.__init__)
    def __init__(self, n_components=1, **settings):
        super().__init__(n_components, **(SKLEARN_DEFAULTS | settings))


sklearn.mixture.GaussianMixture = GaussianMixture
