"""Compiled fits whose products are in float32 against the same fits with products in float64."""

import warnings

import dask
import numpy as np
import pytest
from references import COVARIANCE_TYPES
from sklearn.exceptions import ConvergenceWarning
from tiers import exhaustive_but

from emtau_dask import EMTau, FullEM, GaussianMixture
from emtau_dask.mixture.plan import plan_tiles

K, D = 4, 3
ROWS = np.concatenate(
    [np.random.default_rng(k).normal(size=(500, D)) + np.eye(K, D)[k] for k in range(K)]
).astype(np.float32)
START = {"weights_init": np.full(K, 1 / K), "means_init": np.eye(K, D)}


@pytest.mark.parametrize("covariance_type", exhaustive_but({"full", "tied_diag"}, COVARIANCE_TYPES))
@pytest.mark.parametrize("algorithm", [FullEM(), EMTau(tau=3, revisit=4)], ids=str)
def test_the_bound_is_within_1e_5_nats_of_the_float64_fit(covariance_type, algorithm):
    def fitted(rows):
        mixture = GaussianMixture(
            K,
            covariance_type=covariance_type,
            algorithm=algorithm,
            tol=0,
            max_iter=25,
            random_state=0,
            **START,
        )
        with warnings.catch_warnings(), dask.config.set({"emtau.compiled": "always"}):
            warnings.simplefilter("ignore", ConvergenceWarning)
            return mixture.fit(rows)

    single, double = fitted(ROWS), fitted(ROWS.astype(np.float64))
    assert plan_tiles(double.parameters_, np.dtype(np.float32)).single
    assert single.means_.dtype == np.float64
    assert np.abs(np.array(single.lower_bounds_) - np.array(double.lower_bounds_)).max() <= 1e-5
    assert not np.array_equal(single.means_, double.means_)
    assert np.abs(single.score(ROWS) - double.score(ROWS)) <= 1e-5
