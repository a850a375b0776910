"""Predictions of DataFrames have their index where scikit-learn's settings ask for it."""

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import sklearn
from fits import ROWS, START, mixture, quietly
from sklearn.base import clone

from emtau_dask import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore:X does not have valid feature names")
FRAME = pd.DataFrame(ROWS, columns=["x", "y"], index=[f"row {n}" for n in range(len(ROWS))])


@pytest.fixture
def fitted():
    return quietly(mixture(max_iter=3, tol=0, **START), FRAME)


def checked(found, fitted, series, frame):
    """Compare labels, scores and responsibilities with those of the array; `found` are the three."""
    labels, scores, responsibilities = found
    assert isinstance(labels, series)
    assert isinstance(scores, series)
    assert isinstance(responsibilities, frame)
    assert (labels.name, scores.name) == ("component", "log_likelihood")
    arrays = [fitted.predict(ROWS), fitted.score_samples(ROWS), fitted.predict_proba(ROWS)]
    for values, expected in zip(found, arrays, strict=True):
        assert isinstance(expected, np.ndarray)
        assert list(values.index) == list(FRAME.index)
        np.testing.assert_allclose(np.asarray(values), expected, rtol=1e-12)
    assert list(responsibilities.columns) == [0, 1, 2]


def predictions(fitted, X):
    return [fitted.predict(X), fitted.score_samples(X), fitted.predict_proba(X)]


def test_arrays_are_the_default(fitted):
    assert all(type(found) is np.ndarray for found in predictions(fitted, FRAME))


def test_the_estimators_own_setting(fitted):
    assert fitted.set_output(transform="pandas") is fitted
    checked(predictions(fitted, FRAME), fitted, pd.Series, pd.DataFrame)
    assert type(fitted.set_output().predict(FRAME)) is pd.Series
    assert type(fitted.set_output(transform="default").predict(FRAME)) is np.ndarray


def test_scikit_learns_config_and_the_estimators_own_goes_first(fitted):
    with sklearn.config_context(transform_output="pandas"):
        checked(predictions(fitted, FRAME), fitted, pd.Series, pd.DataFrame)
        assert type(fitted.set_output(transform="default").predict(FRAME)) is np.ndarray


def test_a_dask_frame_has_lazy_ones(fitted):
    fitted.set_output(transform="pandas")
    lazy = predictions(fitted, dd.from_pandas(FRAME, npartitions=3, sort=False))
    assert isinstance(lazy[0], dd.Series)
    assert isinstance(lazy[2], dd.DataFrame)
    checked([found.compute() for found in lazy], fitted, pd.Series, pd.DataFrame)


def test_labels_of_the_fit_and_a_clone():
    model = mixture(max_iter=3, tol=0, **START).set_output(transform="pandas")
    with pytest.warns(match="did not converge"):
        labels = clone(model).fit_predict(FRAME)
    assert list(labels.index) == list(FRAME.index)


def test_what_is_no_output_is_refused(fitted):
    with pytest.raises(ConfigError, match=r"transform='polars'.*'pandas'"):
        fitted.set_output(transform="polars")
