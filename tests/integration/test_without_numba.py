"""Fits where numba is not installed; `.ci/run` runs these after it uninstalls numba."""

from importlib.util import find_spec

import dask
import pytest
from fits import ROWS, START, assert_same_bits, mixture, quietly

from emtau_dask import ConfigError
from emtau_dask.em import compiling

pytestmark = pytest.mark.skipif(find_spec("numba") is not None, reason="numba is installed")


def fit(compiled):
    with dask.config.set({"emtau.compiled": compiled}):
        return quietly(mixture(algorithm="em", tol=0, max_iter=8, **START), ROWS)


def test_a_fit_of_any_size_goes_by_numpy(monkeypatch):
    monkeypatch.setattr(compiling, "MIN_PRODUCTS", 1)
    assert_same_bits(fit("auto"), fit("never"))


def test_who_asks_for_compiled_loops_reads_what_to_install():
    with pytest.raises(ConfigError, match=r"emtau\.compiled is 'always'.*pip install numba"):
        fit("always")
