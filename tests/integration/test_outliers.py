"""Outliers of a mixture: a quantile from few passes, scikit-learn's protocol, the command."""

import dask
import dask.array as da
import numpy as np
import pandas as pd
import pytest
import zarr
from commands import emtau
from oracles import starts
from sklearn.covariance import EmpiricalCovariance
from sklearn.frozen import FrozenEstimator
from sklearn.utils.estimator_checks import parametrize_with_checks

from emtau_dask import ConfigError, GaussianMixture, InvalidDataError, MixtureOutlierDetector
from emtau_dask.estimator import outliers
from emtau_dask.estimator.outliers import score_quantile

ROWS, _ = starts.mixture(600, 3, 2, separation=3.0, seed=4)
ROWS.setflags(write=False)
SHARES = (0.01, 0.1, 1 / 3, 0.5)


def normal(rng, n):
    return rng.normal(size=n) * 10 - 5


def few_different(rng, n):
    return rng.integers(-2, 3, size=n) * 1.0


def nearly_equal(rng, n):
    return -1 - 1e-9 * rng.random(n)


def over_hundreds_of_octaves(rng, n):
    return -np.exp(rng.normal(size=n) * 100)


def with_both_zeros(rng, n):
    return np.where(rng.random(n) < 0.5, -0.0, 0.0)


MAKERS = [normal, few_different, nearly_equal, over_hundreds_of_octaves, with_both_zeros]


def blocks_counted(values, chunks):
    """A lazy array, and the list to which each of its blocks adds its length when it is computed."""
    asked = []

    def note(block):
        asked.append(len(block))
        return block

    lazy = da.from_array(values, chunks=chunks).map_blocks(note, dtype=float, meta=np.empty(0))
    return lazy, asked


def in_chunks(values, chunks):
    return da.from_array(values, chunks=chunks)


class TestQuantile:
    @pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
    def test_of_few_scores_it_is_that_of_numpy_to_the_bit(self, make):
        for n in (1, 2, 9, 500):
            values = make(np.random.default_rng(n), n)
            for share in SHARES:
                expected = np.quantile(values, share)
                with dask.config.set(scheduler="synchronous"):
                    assert score_quantile(in_chunks(values, -(-n // 9)), share) == expected
                assert score_quantile(values, share) == expected

    @pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
    def test_of_many_it_is_an_order_statistic_within_a_millionth(self, make, monkeypatch):
        monkeypatch.setattr(outliers, "MAX_COMPUTED", 0)
        for n in (1, 2, 9, 500):
            values = make(np.random.default_rng(n), n)
            for share in SHARES:
                expected = np.sort(values)[int((n - 1) * share)]
                with dask.config.set(scheduler="synchronous"):
                    found = {score_quantile(in_chunks(values, chunks), share) for chunks in (n, -(-n // 9))}
                (found,) = found
                assert expected - 1e-6 * abs(expected) <= found <= expected
                assert (values < found).sum() <= share * n

    @pytest.mark.parametrize(("kept", "passes"), [(2**23, 1), (999, 2)])
    def test_how_often_it_computes_each_block(self, kept, passes, monkeypatch):
        monkeypatch.setattr(outliers, "MAX_COMPUTED", kept)
        lazy, asked = blocks_counted(normal(np.random.default_rng(0), 1000), chunks=100)
        with dask.config.set(scheduler="synchronous"):
            score_quantile(lazy, 0.1)
        assert asked == [100] * 10 * passes

    def test_empty_chunks_and_chunks_of_unknown_size(self):
        values = normal(np.random.default_rng(0), 300)
        lazy = in_chunks(values, ((0, 100, 0, 200),))
        assert score_quantile(lazy, 0.1) == np.quantile(values, 0.1)
        expected = np.quantile(values[values < 0], 0.1, method="lower")
        assert score_quantile(lazy[lazy < 0], 0.1) == pytest.approx(expected, rel=1e-6)

    @pytest.mark.parametrize("kept", [2**23, -1])
    def test_no_values(self, kept, monkeypatch):
        monkeypatch.setattr(outliers, "MAX_COMPUTED", kept)
        with pytest.raises(InvalidDataError, match="no rows"):
            score_quantile(in_chunks(np.empty(0), 1), 0.1)


@pytest.mark.exhaustive
@parametrize_with_checks([MixtureOutlierDetector(GaussianMixture(random_state=0), contamination=0.1)])
def test_estimator_checks(estimator, check):
    check(estimator)


def detector(n_components=3, contamination=0.05):
    mixture = GaussianMixture(n_components, tol=1e-3, random_state=0)
    return MixtureOutlierDetector(mixture, contamination=contamination)


class TestDetector:
    def test_the_threshold_is_the_quantile_of_the_scores(self):
        made = detector().fit(ROWS)
        scores = GaussianMixture(3, tol=1e-3, random_state=0).fit(ROWS).score_samples(ROWS)
        assert made.offset_ == np.quantile(scores, 0.05)
        assert np.array_equal(made.predict(ROWS), np.where(scores < np.quantile(scores, 0.05), -1, 1))
        assert (made.predict(ROWS) == -1).sum() == 30
        assert np.array_equal(made.decision_function(ROWS), scores - made.offset_)
        assert np.array_equal(made.fit_predict(ROWS), made.predict(ROWS))

    def test_outliers_of_one_component_are_the_rows_of_the_largest_mahalanobis_distances(self):
        distances = EmpiricalCovariance().fit(ROWS).mahalanobis(ROWS)
        expected = np.where(distances > np.quantile(distances, 0.93), -1, 1)
        assert np.array_equal(detector(1, contamination=0.07).fit_predict(ROWS), expected)

    def test_a_fitted_mixture_is_not_fitted_again(self):
        gm = GaussianMixture(3, tol=1e-3, random_state=0).fit(ROWS)
        made = MixtureOutlierDetector(FrozenEstimator(gm), contamination=0.05).fit(ROWS[:300])
        assert made.offset_ == np.quantile(gm.score_samples(ROWS[:300]), 0.05)
        assert np.array_equal(made.score_samples(ROWS), gm.score_samples(ROWS))

    def test_the_mixture_that_was_given_stays_as_it_was(self):
        made = detector()
        made.fit(ROWS)
        assert not hasattr(made.estimator, "means_")

    def test_lazy_data_has_lazy_labels_and_the_same_threshold(self):
        whole = detector().fit(ROWS)
        frozen = MixtureOutlierDetector(FrozenEstimator(whole.estimator_), contamination=0.05)
        X = da.from_array(ROWS, chunks=(200, 2))
        made = frozen.fit(X)
        labels = made.predict(X)
        assert isinstance(labels, da.Array)
        assert (labels.shape, labels.dtype, labels.chunks) == ((600,), np.intp, ((200, 200, 200),))
        assert made.offset_ == pytest.approx(whole.offset_, rel=1e-12)
        assert np.array_equal(labels.compute(), whole.predict(ROWS))

    def test_the_threshold_of_a_fitted_mixture_reads_each_chunk_once(self):
        gm = GaussianMixture(3, tol=1e-3, random_state=0).fit(ROWS)
        lazy, asked = blocks_counted(ROWS, chunks=(100, 2))
        MixtureOutlierDetector(FrozenEstimator(gm)).fit(lazy)
        assert asked == [100] * 6

    def test_names_of_features(self, tmp_path):
        frame = pd.DataFrame(ROWS, columns=["x", "y"])
        made = detector().fit(frame)
        assert list(made.feature_names_in_) == ["x", "y"]
        frame.assign(z=0.0).to_parquet(tmp_path / "rows.parquet", index=False)
        stored = detector().fit(str(tmp_path / "rows.parquet"), columns=["x", "y"])
        assert np.array_equal(stored.predict(str(tmp_path / "rows.parquet")).compute(), made.predict(frame))

    @pytest.mark.parametrize("value", [0, -0.1, 0.6, 1, np.nan, "0.1", None, True])
    def test_an_impossible_share(self, value):
        with pytest.raises(ConfigError, match=r"contamination = .* above 0 and at most 0\.5"):
            detector(contamination=value).fit(ROWS)

    def test_a_fit_that_fails_leaves_the_detector_as_it_was(self):
        made = detector().fit(ROWS)
        before = made.offset_
        with pytest.raises(InvalidDataError):
            made.fit(np.full((10, 2), np.nan))
        assert made.offset_ == before


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("command")
    GaussianMixture(3, tol=1e-3, random_state=0).fit(ROWS).save(place / "model.zarr")
    zarr.create_array(store=place / "rows.zarr", data=ROWS, chunks=(250, 2))
    return place


def predict(folder, name, share):
    places = (folder / each for each in ("model.zarr", "rows.zarr", name))
    return emtau("predict", *places, "--outliers", share)


class TestCommand:
    def test_it_writes_labels_of_outliers(self, folder):
        run = predict(folder, "out.zarr", "0.05")
        assert run.exit_code == 0, run.output
        out = zarr.open_group(folder / "out.zarr", mode="r")
        gm = GaussianMixture.load(folder / "model.zarr")
        scores = gm.score_samples(ROWS)
        threshold = np.quantile(scores, 0.05)
        assert out["outliers"].dtype == np.int8
        assert np.array_equal(out["outliers"][:], np.where(scores < threshold, -1, 1))
        assert np.array_equal(out["labels"][:], gm.predict(ROWS))
        assert out.attrs["outliers"]["contamination"] == 0.05
        assert out.attrs["outliers"]["threshold"] == pytest.approx(threshold, rel=1e-12)

    @pytest.mark.parametrize("share", ["0", "0.6", "nan", "many"])
    def test_an_impossible_share_is_wrong_usage(self, folder, share):
        run = predict(folder, "never.zarr", share)
        assert run.exit_code == 2
        assert "at most 0.5" in run.stderr or "'many' is not a valid float" in run.stderr
        assert not (folder / "never.zarr").exists()
