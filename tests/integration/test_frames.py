"""Columns of data frames, and predictions of them with their index."""

import dask.dataframe as dd
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import sklearn
from fits import ROWS, START, mixture, quietly
from sklearn.base import clone

from emtau_dask import ConfigError, InvalidDataError

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
    assert (labels.name, scores.name) == ("label", "score")
    arrays = [fitted.predict(ROWS), fitted.score_samples(ROWS), fitted.predict_proba(ROWS)]
    for values, expected in zip(found, arrays, strict=True):
        assert isinstance(expected, np.ndarray)
        assert list(values.index) == list(FRAME.index)
        np.testing.assert_allclose(np.asarray(values), expected, rtol=1e-12)
    assert list(responsibilities.columns) == [0, 1, 2]


def predictions(fitted, X):
    return [fitted.predict(X), fitted.score_samples(X), fitted.predict_proba(X)]


def test_labels_of_a_frame_have_its_index_and_all_else_is_an_array_by_default(fitted):
    labels, *others = predictions(fitted, FRAME)
    pd.testing.assert_series_equal(labels, pd.Series(fitted.predict(ROWS), FRAME.index, name="label"))
    assert all(type(found) is np.ndarray for found in others)


def test_labels_of_polars_and_dask_are_theirs_and_of_pyarrow_an_array(fitted):
    expected = fitted.predict(ROWS)
    of_polars = fitted.predict(pl.from_pandas(FRAME))
    assert isinstance(of_polars, pl.Series)
    assert of_polars.name == "label"
    np.testing.assert_array_equal(of_polars, expected)
    of_dask = fitted.predict(dd.from_pandas(FRAME, npartitions=3, sort=False))
    assert isinstance(of_dask, dd.Series)
    pd.testing.assert_series_equal(
        of_dask.compute(), pd.Series(expected, FRAME.index, name="label"), check_index_type=False
    )
    of_arrow = fitted.predict(pa.Table.from_pandas(FRAME, preserve_index=False))
    assert type(of_arrow) is np.ndarray
    np.testing.assert_array_equal(of_arrow, expected)


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


def test_polars_where_it_is_asked_for(fitted):
    fitted.set_output(transform="polars")
    labels, scores, responsibilities = predictions(fitted, pl.from_pandas(FRAME))
    assert (labels.name, scores.name) == ("label", "score")
    assert responsibilities.columns == ["component_0", "component_1", "component_2"]
    np.testing.assert_allclose(responsibilities.to_numpy(), fitted.predict_proba(ROWS), rtol=1e-12)


def test_what_is_no_output_is_refused(fitted):
    with pytest.raises(ConfigError, match=r"transform='arrow'.*'pandas' or 'polars'"):
        fitted.set_output(transform="arrow")


WIDE = FRAME.assign(name="a", ident=np.arange(len(FRAME)))[["ident", "y", "name", "x"]]
CONTAINERS = {
    "pandas": lambda frame: frame,
    "polars": pl.from_pandas,
    "pyarrow": lambda frame: pa.Table.from_pandas(frame, preserve_index=False),
    "dask": lambda frame: dd.from_pandas(frame, npartitions=3, sort=False),
}


@pytest.mark.parametrize("library", CONTAINERS)
def test_the_columns_of_a_frame_are_chosen_in_their_order(fitted, library):
    wide = CONTAINERS[library](WIDE)
    model = mixture(max_iter=3, tol=0, **START)
    with pytest.warns(match="did not converge"):
        model.fit(wide, columns=["x", "y"])
    assert list(model.feature_names_in_) == ["x", "y"]
    np.testing.assert_allclose(model.means_, fitted.means_, rtol=1e-12)
    expected = fitted.predict(ROWS)
    np.testing.assert_array_equal(np.asarray(model.predict(wide, columns=["x", "y"])), expected)


@pytest.mark.parametrize("library", CONTAINERS)
def test_a_column_that_a_frame_lacks_is_refused_with_the_nearest(library):
    with pytest.raises(InvalidDataError, match=r"no column 'idemt'\. Did you mean 'ident'\?"):
        mixture().fit(CONTAINERS[library](WIDE), columns=["x", "idemt"])


@pytest.mark.parametrize("library", ["pandas", "pyarrow", "dask"])
def test_a_frame_with_a_name_twice_is_refused(library):
    twice = pd.concat([WIDE, WIDE[["x"]]], axis=1)
    if library == "pyarrow":
        twice = pa.table(list(twice.to_numpy().T), names=list(twice))
    elif library == "dask":
        twice = dd.from_pandas(twice, npartitions=3, sort=False)
    with pytest.raises(InvalidDataError, match=r"several columns.*a different name"):
        mixture().fit(twice, columns=["x", "y"])


def test_columns_without_an_order_are_refused():
    with pytest.raises(InvalidDataError, match="must be a list of one or more different names"):
        mixture().fit(WIDE, columns={"x", "y"})


def test_columns_of_an_array_are_refused():
    with pytest.raises(InvalidDataError, match=r"columns = \['x'\] .*data frame.*ndarray"):
        mixture().fit(ROWS, columns=["x"])


def test_a_frame_without_columns_is_refused():
    with pytest.raises(InvalidDataError, match="X has no columns"):
        mixture().fit(FRAME[[]])
