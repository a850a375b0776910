"""Choosing a number of components: the true one, what is read, and the same bits anywhere."""

import json
import math
import warnings
from collections import Counter
from types import SimpleNamespace

import dask
import dask.array as da
import numpy as np
import pandas as pd
import pytest
import zarr
from clusters import processes
from counting import Reads
from scipy.special import logsumexp
from scipy.stats import entropy, multivariate_normal
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture as SklearnMixture
from tiers import exhaustive_but
from zarr.storage import LocalStore

from emtau_dask import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointMismatchError,
    ConfigError,
    GaussianMixture,
    InvalidDataError,
    open_run,
    select_components,
)
from emtau_dask.data.row_random import hashed_uniforms

MEANS = np.array([[0.0, 0.0], [7.0, 0.0], [0.0, 7.0]])
N_ROWS = 1500


def drawn(rows, weights=(0.5, 0.3, 0.2), seed=0):
    rng = np.random.default_rng(seed)
    return MEANS[rng.choice(3, size=rows, p=weights)] + rng.normal(size=(rows, 2)) * [1.0, 1.5]


ROWS = drawn(N_ROWS)
ROWS.setflags(write=False)
CHUNK = 125


def chosen(X=ROWS, n_components=(2, 3, 4), **options):
    """By traditional EM, which takes a tenth of the time on so few rows, unless an estimator is given."""
    usual = {"random_state": 0, "estimator": GaussianMixture(algorithm="em")}
    return select_components(X, n_components, **usual | options)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "rows.zarr"
    zarr.create_array(store=path, data=ROWS, chunks=(CHUNK, 2))
    return path


@pytest.fixture(scope="module")
def selection(stored):
    return chosen(str(stored), [2, 3], covariance_types=("diag", "full"))


def values(selection):
    """All but what the clock says, as bytes."""
    tables = [selection.table_, selection.finalists_]
    records = [[vars(record) | {"seconds": 0} for record in table] for table in tables]
    arrays = [getattr(selection.best_estimator_, name) for name in ("weights_", "means_", "covariances_")]
    bounds = selection.best_estimator_.lower_bounds_
    return json.dumps(records), [array.tobytes() for array in arrays], bounds, selection.passes_


def test_the_true_number_and_type_are_found(stored):
    selection = chosen(str(stored), covariance_types=("diag", "full"), estimator=None)
    assert selection.best_n_components_ == 3
    assert selection.best_covariance_type_ == "diag"
    best = selection.best_estimator_
    order = np.argsort(best.weights_)[::-1]
    assert np.allclose(best.means_[order], MEANS, atol=0.2)
    assert best.converged_
    assert best.warm_start is False
    assert best.checkpoint is None
    assert [record.n_components for record in selection.table_] == [2, 3, 4] * 2
    assert repr(selection).startswith("ComponentSelection(3 components, diag, by bic of 6 candidates; ")


def naive_scores(mixture, rows):
    """Log-densities (n,) and entropies of responsibilities (n,), by scipy."""
    parts = zip(mixture.weights_, mixture.means_, mixture.covariances_, strict=True)
    logs = np.stack([np.log(w) + multivariate_normal(m, c).logpdf(rows) for w, m, c in parts], axis=1)
    total = logsumexp(logs, axis=1)
    r = np.exp(logs - total[:, None])
    return total, -np.where(r > 0, r * np.log(np.where(r > 0, r, 1)), 0).sum(axis=1)


def test_records_are_what_a_naive_computation_finds(stored, tmp_path):
    """Of the runs that the folder keeps, on all rows; held out are those whose number is hashed above."""
    found = chosen(str(stored), [2, 3], checkpoint=tmp_path / "c")
    root = json.loads((tmp_path / "c" / "selection.json").read_text())
    inside = hashed_uniforms((root["seeds"][0], 1), np.arange(N_ROWS)) < root["share"]
    assert found.sample_rows_ == inside.sum()
    assert root["share"] == 0.8
    for record in found.table_:
        run = tmp_path / "c" / "candidates" / f"full-{record.n_components}.zarr"
        model = GaussianMixture.resume(run, ROWS[inside])
        assert model.converged_ == record.converged
        logs, entropies = naive_scores(model, ROWS)
        p = 6 * record.n_components - 1
        assert record.parameters == p
        assert record.log_likelihood == pytest.approx(logs.mean(), rel=1e-10)
        assert record.held_out == pytest.approx(logs[~inside].mean(), rel=1e-10)
        bic = -2 * logs.sum() + p * math.log(N_ROWS)
        assert record.bic == pytest.approx(bic, rel=1e-10)
        assert record.bic == pytest.approx(model.to_sklearn().bic(ROWS), rel=1e-10)
        assert record.aic == pytest.approx(model.to_sklearn().aic(ROWS), rel=1e-10)
        assert record.icl == pytest.approx(bic + 2 * entropies.sum(), rel=1e-10)
        assert record.expected_loss == pytest.approx(p * (1 / inside.sum() - 1 / N_ROWS) / 2)
        # The model is the optimum of the sample: scikit-learn's EM, begun there, does not leave it.
        again = SklearnMixture(
            record.n_components,
            weights_init=model.weights_,
            means_init=model.means_,
            precisions_init=model.precisions_,
            tol=1e-10,
            max_iter=2000,
        ).fit(ROWS[inside])
        assert again.score(ROWS[inside]) - model.score(ROWS[inside]) < 1e-4


def naive_observed_scores(mixture, rows):
    """The same of the values that each row has, by their marginal densities; NaN are missing."""
    logs, entropies = np.zeros(len(rows)), np.full(len(rows), entropy(mixture.weights_))
    for has in ([0], [1], [0, 1]):
        these = (np.isfinite(rows) == np.isin([0, 1], has)).all(axis=1)
        marginal = SimpleNamespace(
            weights_=mixture.weights_,
            means_=mixture.means_[:, has],
            covariances_=mixture.covariances_[:, has][:, :, has],
        )
        logs[these], entropies[these] = naive_scores(marginal, rows[these][:, has])
    return logs, entropies


def test_missing_values_are_integrated_over_in_all_criteria(tmp_path):
    rows = np.array(ROWS)
    rows[np.random.default_rng(2).random(rows.shape) < 0.2] = np.nan
    assert np.isnan(rows).all(axis=1).any()
    estimator = GaussianMixture(algorithm="em", missing="marginalise")
    found = chosen(rows, estimator=estimator, checkpoint=tmp_path / "c")
    assert found.best_n_components_ == 3
    for record in found.table_:
        run = tmp_path / "c" / "candidates" / f"full-{record.n_components}.zarr"
        logs, entropies = naive_observed_scores(fitted_to(open_run(run).parameters), rows)
        p = 6 * record.n_components - 1
        bic = -2 * logs.sum() + p * math.log(N_ROWS)
        assert record.bic == pytest.approx(bic, rel=1e-10)
        assert record.aic == pytest.approx(-2 * logs.sum() + 2 * p, rel=1e-10)
        assert record.icl == pytest.approx(bic + 2 * entropies.sum(), rel=1e-10)
    best = found.best_estimator_
    assert best.bic(rows) == pytest.approx(
        -2 * naive_observed_scores(best, rows)[0].sum() + 17 * math.log(N_ROWS), rel=1e-10
    )


def test_a_candidate_below_a_smaller_one_begins_again_at_a_split_of_it(tmp_path):
    """K-means cuts along a wide feature that says nothing; the likelihoods of runs are scikit-learn's."""
    rng = np.random.default_rng(7)
    rows = (MEANS[rng.choice(3, size=1000)] + rng.normal(size=(1000, 2))) * [1.0, 0.7]
    rows = np.column_stack([rows, 30 * rng.normal(size=1000)])
    place = tmp_path / "c"
    found = chosen(rows, random_state=7, checkpoint=place)
    root = json.loads((place / "selection.json").read_text())
    inside = rows[hashed_uniforms((root["seeds"][0], 1), np.arange(1000)) < root["share"]]

    def likelihood(name):
        return GaussianMixture.resume(place / "candidates" / name, inside).to_sklearn().score(inside)

    assert likelihood("full-3.zarr") < likelihood("full-2.zarr") - 1e-3
    kept = [likelihood(f"full-{name}.zarr") for name in ("2", "3-split", "4")]
    assert kept == sorted(kept)
    assert [record.split_from for record in found.table_] == [0, 2, 0]
    assert found.table_[1].note == "split of K=2"
    root |= {"scores": {}, "finalists": {}}
    (place / "selection.json").write_text(json.dumps(root))
    (place / "candidates" / "full-4.zarr" / "zarr.json").unlink()
    assert values(chosen(rows, random_state=7, checkpoint=place)) == values(found)


def test_each_criterion_chooses_by_its_own_column(stored, tmp_path):
    table = chosen(str(stored), checkpoint=tmp_path / "c").table_.to_frame()
    for criterion, column, sign in (("aic", "aic", 1), ("icl", "icl", 1), ("held-out", "held_out", -1)):
        found = chosen(str(stored), criterion=criterion, finalists=1, checkpoint=tmp_path / "c")
        assert found.criterion_ == criterion
        assert found.best_n_components_ == table["n_components"][(sign * table[column]).idxmin()]
        assert [vars(each) | {"seconds": 0} for each in found.table_] == [
            each | {"seconds": 0} for each in table.to_dict("records")
        ]


def test_icl_counts_clusters_where_bic_counts_components():
    """Of a cluster that is two components about one mean, a narrow and a wide one."""
    rng = np.random.default_rng(1)
    wide = rng.choice([1.0, 3.0], size=4000)[:, None]
    X = rng.normal(size=(4000, 2)) * wide + 40 * rng.integers(2, size=4000)[:, None]
    assert chosen(X, [2, 4]).best_n_components_ == 4
    assert chosen(X, [2, 4], criterion="icl").best_n_components_ == 2


def test_every_chunk_is_read_once_for_the_sample_and_once_for_all_scores(stored, monkeypatch):
    """However many candidates there are; the fit to all rows then reads as often as its history says."""
    reads = Reads(LocalStore(stored, read_only=True))
    monkeypatch.setattr("emtau_dask.selection.select.fit_to_all_rows", stopped)
    with pytest.raises(StoppedError):
        chosen(zarr.open_array(reads, mode="r"), [1, 2, 3], covariance_types=("full", "tied"))
    assert Counter(reads.chunks) == dict.fromkeys(range(N_ROWS // CHUNK), 2)


class StoppedError(Exception):
    pass


def stopped(*_):
    raise StoppedError


def test_passes_are_those_that_were_read(stored):
    reads = Reads(LocalStore(stored, read_only=True))
    with dask.config.set({"emtau.cache-bytes": 0}):
        found = chosen(zarr.open_array(reads, mode="r"), [2, 3])
    work = found.best_estimator_.history_.work
    assert (found.passes_.sample, found.passes_.scoring) == (1, 1)
    assert found.passes_.fits == work == found.best_estimator_.n_iter_
    assert Counter(reads.chunks) == dict.fromkeys(range(N_ROWS // CHUNK), 2 + int(work))
    assert found.passes_.total == 2 + work


def test_the_fit_to_all_rows_begins_where_the_samples_ended(stored, tmp_path):
    found = chosen(str(stored), [3], checkpoint=tmp_path / "c")
    start = open_run(tmp_path / "c" / "candidates" / "full-3.zarr").parameters
    bound = naive_scores(fitted_to(start), ROWS)[0].mean()
    assert found.best_estimator_.lower_bounds_[0] == pytest.approx(bound, rel=1e-12)


def fitted_to(parameters):
    names = ("weights", "means", "covariances")
    return SimpleNamespace(**{f"{name}_": getattr(parameters, name) for name in names})


@pytest.mark.parametrize("seed", exhaustive_but({0}, range(3)))
def test_the_true_number_is_found_from_a_sample_much_smaller_than_the_data(seed):
    """N/n is 50, and a component has 2% of the rows: naive and corrected scores both could err here."""
    X = drawn(50_000, (0.6, 0.38, 0.02), seed)
    found = chosen(X, sample_rows=1000, random_state=seed)
    assert 900 < found.sample_rows_ < 1100
    assert found.best_n_components_ == 3


def test_what_a_sample_hides_is_found_by_fits_to_all_rows():
    """Here 28 correlations, each too small for 300 rows to show that it is worth a parameter."""
    rng = np.random.default_rng(3)
    d, mixing = 8, np.eye(8) + np.diag(np.full(7, 0.12), 1)
    X = rng.normal(size=(60_000, d)) @ mixing
    alone = chosen(X, [1], covariance_types=("diag", "full"), sample_rows=300, finalists=1)
    both = chosen(X, [1], covariance_types=("diag", "full"), sample_rows=300)
    exact = {kind: GaussianMixture(1, covariance_type=kind).fit(X).bic(X) for kind in ("diag", "full")}
    assert min(exact, key=exact.get) == "full"
    assert alone.best_covariance_type_ == "diag"
    assert len(alone.finalists_) == 0
    assert both.best_covariance_type_ == "full"
    assert {each.covariance_type: each.bic for each in both.finalists_} == pytest.approx(exact, rel=1e-9)
    assert all(math.isnan(each.held_out) and each.expected_loss == 0 for each in both.finalists_)
    assert both.passes_.scoring == 2
    assert both.passes_.fits == 2 * both.best_estimator_.history_.work


def test_a_candidate_that_collapses_has_its_reason_and_is_never_chosen():
    X = np.repeat([[0.0, 0.0], [5.0, 5.0], [9.0, 0.0]], 50, axis=0)
    X[:100] += np.random.default_rng(0).normal(size=(100, 2))
    estimator = GaussianMixture(reg_covar=0, algorithm="em")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found = chosen(X, [1, 2, 3, 4], estimator=estimator)
    assert found.best_n_components_ < 3
    for record in found.table_[2:]:
        assert "ill-defined empirical covariance" in record.reason
        assert math.isnan(record.bic)
        assert not record.converged
    assert "not fitted" in found._repr_html_()


def test_where_none_can_be_fitted_the_error_says_so():
    with pytest.raises(
        InvalidDataError, match=r"none of 2 candidates could be fitted\. K = 1 \(full\): .*reg_covar"
    ):
        chosen(np.ones((50, 2)), [1, 2], estimator=GaussianMixture(reg_covar=0))


def test_a_sample_of_fewer_rows_than_components_is_refused():
    with pytest.raises(
        InvalidDataError, match=r"n_components goes up to 60, but the sample has \d+ of 1,500"
    ):
        chosen(n_components=[3, 60], sample_rows=40)
    with pytest.raises(InvalidDataError, match="n_samples >= n_components"):
        chosen(n_components=[N_ROWS + 1])


def test_an_unusable_row_is_named_whether_it_is_in_the_sample_or_not(stored):
    for row in (7, 1400):
        X = np.array(ROWS)
        X[row, 1] = np.nan
        for rows in (20, 1200):
            frame = pd.DataFrame(X, columns=["x", "y"])
            with pytest.raises(InvalidDataError, match=rf"row {row} (\(chunk \d+, its row \d+\))?.*'y'"):
                chosen(frame, [1, 2], sample_rows=rows)


KINDS = {
    "numpy": lambda path: ROWS,
    "dask": lambda path: da.from_array(np.array(ROWS), chunks=(CHUNK, 2)),
    "graph": lambda path: da.from_array(np.array(ROWS), chunks=(CHUNK, 1)) * 1.0,
    "zarr": lambda path: zarr.open_array(path, mode="r"),
}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_any_kind_of_rows_gives_the_same_choice(kind, stored, selection):
    found = chosen(KINDS[kind](stored), [2, 3])
    assert found.best_n_components_ == 3
    # The sample is the same one, whatever the chunks.
    expected = {each.n_components: each for each in selection.table_ if each.covariance_type == "full"}
    for record in found.table_:
        assert record.bic == pytest.approx(expected[record.n_components].bic, rel=1e-12)


@pytest.mark.parametrize("scheduler", [("synchronous", 1), ("threads", 3)])
def test_threads_change_no_bit(scheduler, stored, selection):
    name, workers = scheduler
    with dask.config.set(scheduler=name, num_workers=workers):
        found = chosen(str(stored), [2, 3], covariance_types=("diag", "full"))
    assert values(found) == values(selection)


@pytest.mark.cluster
def test_a_cluster_scores_and_changes_no_bit(zygote, tmp_path, stored, selection):
    with processes(zygote, tmp_path / "cluster", 2) as cluster, cluster.client() as client:
        found = chosen(str(stored), [2, 3], covariance_types=("diag", "full"))
        seen = client.run_on_scheduler(
            lambda dask_scheduler: (
                {name.rpartition("-")[0] for name in dask_scheduler.task_prefixes if name.startswith("emtau")}
                | set(dask_scheduler.task_prefixes)
            )
        )
    assert values(found) == values(selection)
    assert any("emtau-score" in name for name in seen)


def test_a_damaged_candidate_is_fitted_again(stored, selection, tmp_path):
    options = {"covariance_types": ("diag", "full"), "checkpoint": tmp_path / "c"}
    chosen(str(stored), [2, 3], **options)
    root = tmp_path / "c" / "selection.json"
    unscored = json.loads(root.read_text()) | {"scores": {}, "finalists": {}}
    (tmp_path / "c" / "candidates" / "full-2.zarr" / "zarr.json").write_text("{}")
    root.write_text(json.dumps(unscored))
    assert values(chosen(str(stored), [2, 3], **options)) == values(selection)
    assert json.loads(root.read_text())["scores"].keys() == {"diag-2", "diag-3", "full-2", "full-3"}


def test_what_says_that_it_is_a_selection_is_refused_by_name_where_it_cannot_be(stored, tmp_path):
    place = tmp_path / "c"
    chosen(str(stored), [1], checkpoint=place)
    whole = json.loads((place / "selection.json").read_text())
    for changes, said in (
        ({"version": 3}, r"'emtau-selection' version 3; .* reads 'emtau-selection' version 5"),
        ({"format": "letters"}, "format 'letters' version 5"),
        ({"seeds": [1]}, r"selection\.json is damaged \(seeds .* Remove all"),
        ({"scores": {"full-1": {}}}, r"selection\.json is damaged \(scores\.full-1"),
        ({"samples": [["X", "", 0, "zz"]]}, r"selection\.json is damaged"),
        ({"settings": {"candidates": [[1]]}}, r"selection\.json is damaged"),
        ({"more": 1}, r"selection\.json is damaged \(more"),
    ):
        (place / "selection.json").write_text(json.dumps(whole | changes))
        with pytest.raises(CheckpointCorruptError, match=said):
            chosen(str(stored), [1], checkpoint=place)
    for text in ("", "[]", "{", "null", "{}"):
        (place / "selection.json").write_text(text)
        with pytest.raises(CheckpointCorruptError, match="is damaged"):
            chosen(str(stored), [1], checkpoint=place)


def test_an_interrupt_says_how_it_goes_on(stored, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("emtau_dask.selection.fits.fit_sample", interrupted)
    for place, said in ((None, "With checkpoint=PATH"), (tmp_path / "c", "The same call continues")):
        with pytest.raises(KeyboardInterrupt) as error:
            chosen(str(stored), [2, 3], checkpoint=place)
        (note,) = error.value.__notes__
        assert said in note


def test_the_best_fit_has_the_settings_that_were_asked_for_also_after_a_resume(stored, tmp_path):
    asked = {"n_init": 2, "tol": 1e-4, "verbose": 0, "reg_covar": 1e-5}
    for _ in range(2):
        found = chosen(str(stored), [3], estimator=GaussianMixture(**asked), checkpoint=tmp_path / "c")
        expected = GaussianMixture(3, **asked, random_state=0)
        assert found.best_estimator_.get_params() == expected.get_params()


def test_the_folder_is_that_of_one_selection(stored, tmp_path):
    place = tmp_path / "c"
    chosen(str(stored), [1, 2], checkpoint=place)
    other = np.array(ROWS)
    other[0] += 1
    for options, named in (
        ({"n_components": [1, 3]}, r"other candidates: not K = 3 \(full\); also K = 2 \(full\)"),
        ({"random_state": 1}, "random_state = 0, not 1"),
        ({"sample_rows": 100}, "sample_rows = None, not 100"),
        ({"estimator": GaussianMixture(reg_covar=1e-3)}, "reg_covar = 1e-06, not 0.001"),
        ({"X": other}, "chunks|holds other values|shape"),
    ):
        given = {"X": str(stored), "n_components": [1, 2]} | options
        with pytest.raises(CheckpointMismatchError, match=named):
            chosen(checkpoint=place, **given)
    # What does not change the fits may be changed.
    assert chosen(str(stored), [1, 2], checkpoint=place, criterion="aic").criterion_ == "aic"
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "letter.txt").write_text("mine")
    with pytest.raises(CheckpointExistsError, match="not a selection"):
        chosen(str(stored), [1, 2], checkpoint=tmp_path / "d")


def test_a_fit_that_reaches_max_iter_warns_and_is_shown(stored):
    estimator = GaussianMixture(algorithm="em", max_iter=2, tol=0)
    with pytest.warns(ConvergenceWarning) as caught:
        found = chosen(str(stored), [2, 3], estimator=estimator)
    assert len(caught) == 1
    assert not found.table_[1].converged
    assert "not converged" in found._repr_html_()
    assert not found.best_estimator_.converged_


def test_columns_and_names_reach_the_best_fit(tmp_path):
    frame = pd.DataFrame(ROWS, columns=["x", "y"]).assign(z=0.0)
    frame.to_parquet(tmp_path / "t.parquet")
    found = chosen(str(tmp_path / "t.parquet"), [2, 3], columns=["y", "x"])
    assert list(found.best_estimator_.feature_names_in_) == ["y", "x"]
    assert len(found.best_estimator_.predict(str(tmp_path / "t.parquet"))) == N_ROWS


def test_settings_that_no_candidate_can_have_are_refused_by_name(stored):
    with pytest.raises(ConfigError, match="tol='statistical' needs"):
        chosen(str(stored), [200], estimator=GaussianMixture(tol="statistical"))
