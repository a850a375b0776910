"""Predictions and scores of a fitted model: lazy for lazy data, and scikit-learn's values."""

from collections.abc import Callable
from typing import NamedTuple

import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import zarr
from counting import plans_counted
from oracles import starts
from references import COVARIANCE_TYPES

from emtau_dask import GaussianMixture
from emtau_dask.cli.predict import LabelOptions, write_labels
from emtau_dask.data.opening import open_source
from emtau_dask.em import predict
from emtau_dask.em.history import SilentObserver

ROWS, _ = starts.mixture(200, 3, 3, separation=3.0, seed=3)
ROWS.setflags(write=False)
METHODS = ("predict", "predict_proba", "score_samples")


@pytest.fixture(scope="module", params=COVARIANCE_TYPES)
def model(request):
    mixture = GaussianMixture(3, covariance_type=request.param, algorithm="em", tol=1e-3, random_state=0)
    return mixture.fit(ROWS)


@pytest.fixture(scope="module")
def one_model():
    return GaussianMixture(3, algorithm="em", tol=1e-3, random_state=0).fit(ROWS)


def plain_dask(path):
    return da.from_array(ROWS, chunks=(70, 3))


def features_split(path):
    return da.from_array(ROWS, chunks=(70, (1, 2)))


def empty_chunks(path):
    return da.from_array(ROWS, chunks=((0, 70, 0, 130, 0), 3))


def computed_dask(path):
    return (da.from_array(ROWS, chunks=(70, 3)) * 2) / 2


def zarr_array(path):
    return zarr.create_array(store=path / "x.zarr", data=ROWS, chunks=(70, 2))


def from_zarr(path):
    zarr_array(path)
    return da.from_zarr(str(path / "x.zarr"))


def npy_source(path):
    np.save(path / "x.npy", ROWS)
    return open_source(str(path / "x.npy"))


LAZY = [plain_dask, features_split, empty_chunks, computed_dask, zarr_array, from_zarr, npy_source]


@pytest.fixture(params=LAZY, ids=lambda make: make.__name__)
def lazy(request, tmp_path):
    return request.param(tmp_path)


@pytest.mark.parametrize("method", METHODS)
class TestLazy:
    def test_lazy_data_has_lazy_predictions_of_known_shape_and_type(self, one_model, lazy, method):
        expected, found = (getattr(one_model, method)(X) for X in (ROWS, lazy))
        assert type(expected) is np.ndarray
        assert isinstance(found, da.Array)
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert np.allclose(found.compute(), expected, rtol=1e-12, atol=1e-300)

    def test_row_chunks_are_those_of_the_data(self, one_model, method):
        assert getattr(one_model, method)(empty_chunks(None)).chunks[0] == (0, 70, 0, 130, 0)

    def test_nothing_is_computed_before(self, one_model, method):
        def explode(block):
            raise AssertionError("computed")

        X = da.from_array(ROWS, chunks=(70, 3)).map_blocks(explode, dtype=float, meta=np.empty((0, 0)))
        getattr(one_model, method)(X)

    def test_a_part_can_be_computed_alone(self, one_model, method):
        found = getattr(one_model, method)(plain_dask(None))[70:75].compute()
        assert np.allclose(found, getattr(one_model, method)(ROWS[70:75]), rtol=1e-12)

    def test_the_kernel_is_planned_once_for_all_chunks(self, one_model, method):
        with plans_counted() as planned:
            getattr(one_model, method)(plain_dask(None)).compute()
        assert len(planned) == 1

    def test_float32_rows_are_scored_in_float64(self, one_model, method):
        single = ROWS.astype("float32")
        found, expected = (getattr(one_model, method)(rows) for rows in (single, single.astype(float)))
        assert found.dtype == expected.dtype
        assert np.array_equal(found, expected)


def test_a_dask_frame_has_lazy_labels(one_model):
    labels = one_model.predict(dd.from_pandas(pd.DataFrame(ROWS, columns=["x", "y", "z"]), npartitions=2))
    assert np.array_equal(labels.compute(), one_model.predict(ROWS))


@pytest.mark.parametrize("method", METHODS)
def test_blocks_are_scored_where_they_lie(one_model, method, monkeypatch):
    made, scored, score = [], [], predict.score_chunk

    def note(block):
        made.append(block + 0)
        return made[-1]

    def noted(loaded, *others):
        scored.append(loaded.rows)
        return score(loaded, *others)

    monkeypatch.setattr(predict, "score_chunk", noted)
    X = da.from_array(ROWS, chunks=(70, 3)).map_blocks(note, dtype=float, meta=np.empty((0, 0)))
    getattr(one_model, method)(X).compute(scheduler="synchronous")
    assert list(map(id, scored)) == list(map(id, made))


def test_the_kernel_is_planned_once_for_all_labels_that_are_written(one_model, tmp_path):
    zarr_array(tmp_path)
    source = open_source(str(tmp_path / "x.zarr"))
    with plans_counted() as planned:
        options = LabelOptions(probabilities=True)
        write_labels(one_model, source, tmp_path / "labels.zarr", options, observer=SilentObserver())
    assert len(source.chunk_rows) == 3
    assert len(planned) == 1


class Twin(NamedTuple):
    """The nearest type of scikit-learn's: its name, what its covariances are, how many more are free."""

    name: str
    values: Callable
    surplus: int


TWINS = {
    "tied_diag": Twin("tied", np.diag, 3),
    "tied_spherical": Twin("spherical", lambda one: np.full(3, one), 2),
}
"""Of three components of three features."""


class TestAgainstScikitLearn:
    @pytest.mark.parametrize("method", METHODS)
    def test_predictions(self, model, method):
        expected = getattr(model.to_sklearn(), method)(ROWS)
        assert np.allclose(getattr(model, method)(ROWS), expected, rtol=1e-9, atol=1e-12)

    @pytest.mark.parametrize("method", ["score", "bic", "aic"])
    @pytest.mark.parametrize("make", [np.asarray, lambda rows: plain_dask(None)], ids=["numpy", "dask"])
    def test_scores(self, model, method, make):
        expected = getattr(model.to_sklearn(), method)(ROWS)
        if method != "score" and model.covariance_type in TWINS:
            # The twin has more parameters: K d + K - 1 of means and weights, and those of its covariances.
            surplus = TWINS[model.covariance_type].surplus
            expected -= surplus * (np.log(len(ROWS)) if method == "bic" else 2)
        found = getattr(model, method)(make(ROWS))
        assert isinstance(found, float)
        assert found == pytest.approx(expected, rel=1e-12)

    def test_the_twin_has_the_settings_and_fitted_values(self, model):
        twin, own = model.to_sklearn(), TWINS.get(model.covariance_type)
        for name in ("n_components", "tol", "reg_covar", "max_iter", "lower_bound_"):
            assert getattr(twin, name) == getattr(model, name), name
        assert twin.covariance_type == (own.name if own else model.covariance_type)
        for name in ("weights_", "means_", "covariances_", "precisions_"):
            expected = getattr(model, name)
            if own and name in ("covariances_", "precisions_"):
                expected = own.values(expected)
            assert np.array_equal(getattr(twin, name), expected), name
        assert not np.shares_memory(twin.means_, model.means_)


@pytest.mark.parametrize("method", ["bic", "aic"])
@pytest.mark.filterwarnings("ignore:X has unknown chunk sizes")
def test_criteria_of_unknown_chunk_sizes(one_model, method):
    X = plain_dask(None)
    assert getattr(one_model, method)(X[X[:, 0] < 1e9]) == pytest.approx(getattr(one_model, method)(ROWS))


def test_fit_predict_is_fit_then_predict():
    settings = {"n_components": 3, "algorithm": "em", "tol": 1e-3, "random_state": 0}
    expected = GaussianMixture(**settings).fit(ROWS).predict(ROWS)
    assert np.array_equal(GaussianMixture(**settings).fit_predict(ROWS), expected)


def test_fit_predict_of_dask_is_lazy():
    labels = GaussianMixture(3, algorithm="em", tol=1e-3, random_state=0).fit_predict(plain_dask(None))
    assert isinstance(labels, da.Array)


def test_fit_predict_takes_weights(one_model):
    weights = np.ones(200)
    mixture = GaussianMixture(3, algorithm="em", tol=1e-3, random_state=0)
    assert np.array_equal(mixture.fit_predict(ROWS, sample_weight=weights), one_model.predict(ROWS))


class TestSample:
    def test_rows_come_in_order_of_component_and_a_seed_draws_the_same_again(self, model):
        rows, labels = model.sample(100)
        assert (rows.shape, labels.shape) == ((100, 3), (100,))
        assert np.array_equal(labels, np.sort(labels))
        assert np.array_equal(model.sample(100)[0], rows)

    def test_components_are_drawn_by_weight(self, model):
        counts = np.bincount(model.sample(20_000)[1], minlength=3)
        assert np.allclose(counts / 20_000, model.weights_, atol=5 * 0.5 / np.sqrt(20_000))

    def test_the_drawn_rows_are_as_likely_as_the_model_says(self, model):
        """Mean log-likelihood of draws against the same mean over draws by scikit-learn."""
        ours, theirs = model.score_samples(model.sample(20_000)[0]), model.to_sklearn().sample(20_000)[0]
        reference = model.score_samples(theirs)
        error = np.sqrt((ours.var() + reference.var()) / 20_000)
        assert abs(ours.mean() - reference.mean()) < 5 * error
