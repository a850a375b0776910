import warnings

import pytest
from sklearn.exceptions import ConvergenceWarning


@pytest.fixture(params=["numpy", "compiled"])
def fit(request, monkeypatch):
    """Fit the package to X from an explicit start with a case's policy: tol=0, 25 iterations, reg_covar=0.

    Every test runs twice: rows go by calls of NumPy, and by compiled tiles where they can.
    """
    import dask  # not at the top: the oracles' own tests run without the package

    import emtau_dask
    from emtau_dask.em import iteration
    from emtau_dask.kernels import dispatch

    setting = {"numpy": "never", "compiled": "always"}[request.param]
    chosen, kernels = [], dispatch.Kernels

    def noted(plan, *, compiled):
        chosen.append(compiled)
        return kernels(plan, compiled=compiled)

    monkeypatch.setattr(iteration, "Kernels", noted)

    def fit(X, given, case, *, sample_weight=None, **options):
        if isinstance(given, dict):
            k, start, fit_options = len(given["means_init"]), given, {}
        else:
            k, start, fit_options = given.shape[1], {}, {"responsibilities_init": given}
        options = {"tol": 0, "max_iter": 25, "reg_covar": 0, **options}
        model = emtau_dask.GaussianMixture(k, algorithm=case.package(emtau_dask), **start, **options)
        with warnings.catch_warnings(), dask.config.set({"emtau.compiled": setting}):
            warnings.simplefilter("ignore", ConvergenceWarning)
            model.fit(X, sample_weight=sample_weight, **fit_options)
        assert set(chosen) == {request.param == "compiled"}
        return model

    return fit
