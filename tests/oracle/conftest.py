import warnings

import pytest
from sklearn.exceptions import ConvergenceWarning


@pytest.fixture
def fit():
    """Fit the package to X from an explicit start with a case's policy: tol=0, 25 iterations, reg_covar=0."""
    import emtau_dask  # not at the top: the oracles' own tests run without the package

    def fit(X, given, case, *, sample_weight=None, **options):
        if isinstance(given, dict):
            k, start, fit_options = len(given["means_init"]), given, {}
        else:
            k, start, fit_options = given.shape[1], {}, {"responsibilities_init": given}
        options = {"tol": 0, "max_iter": 25, "reg_covar": 0, **options}
        model = emtau_dask.GaussianMixture(k, algorithm=case.package(emtau_dask), **start, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            return model.fit(X, sample_weight=sample_weight, **fit_options)

    return fit
