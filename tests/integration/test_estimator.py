"""Fitting: how it goes and stops, from which start, over which data and scheduler, and what is reported."""

import copy
import pickle
import warnings

import dask.array as da
import numpy as np
import pytest
import zarr
from fits import CHUNKS, ROWS, START, assert_close, assert_same_bits, mixture, quietly
from sklearn.exceptions import ConvergenceWarning, NotFittedError

from emtau_dask import EMLazy, EMTau, SingularComponentError
from emtau_dask.policies.policy import NextPass, RowArray, Schedule


class TestStopping:
    def test_tol(self):
        model = mixture(tol=1e-3).fit(ROWS)
        assert (model.stop_reason_, model.converged_) == ("tol", True)

    def test_it_stops_at_the_first_change_below_tol(self):
        changes = np.abs(np.diff(mixture(tol=1e-3).fit(ROWS).lower_bounds_))
        assert changes[-1] < 1e-3 <= changes[:-1].min()

    def test_max_iter_warns(self):
        with pytest.warns(ConvergenceWarning, match="did not converge.*max_iter"):
            model = mixture(max_iter=3, tol=0).fit(ROWS)
        assert (model.stop_reason_, model.converged_, model.n_iter_) == ("max-iter", False, 3)

    def test_no_active_rows_does_not_warn(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model = mixture(algorithm=EMTau(tau=1, revisit=None), tol=0).fit(ROWS)
        assert (model.stop_reason_, model.converged_, model.n_iter_) == ("no-active-rows", False, 1)

    def test_tol_0_never_stops(self):
        stationary = np.repeat([[0.0, 0.0], [1.0, 1.0]], 50, axis=0)
        assert quietly(mixture(n_components=1, tol=0, max_iter=40), stationary).n_iter_ == 40

    def test_max_iter_0_is_the_start_and_does_not_warn(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model = mixture(max_iter=0, **START).fit(ROWS)
        assert np.array_equal(model.means_, START["means_init"])
        assert (model.n_iter_, model.lower_bounds_, model.lower_bound_) == (0, [], -np.inf)

    def test_em_lazy_tests_tol_on_full_passes_only(self):
        model = mixture(algorithm=EMLazy(threshold=0.9, full_every=4), tol=1e-3).fit(ROWS)
        assert model.history_[-1].full_pass
        assert model.n_iter_ % 4 == 1

    def test_em_tau_converges_on_a_full_pass(self):
        model = mixture(algorithm=EMTau(tau=2), tol=1e-4).fit(ROWS)
        assert model.converged_
        assert model.history_[-1].full_pass


@pytest.fixture(scope="module")
def model():
    X = da.from_array(ROWS, chunks=(CHUNKS, 2))
    return quietly(mixture(algorithm=EMTau(tau=3, revisit=None), tol=0, max_iter=10), X)


class TestHistory:
    def test_a_record_an_iteration(self, model):
        assert [record.iteration for record in model.history_] == list(range(1, model.n_iter_ + 1))

    def test_bounds(self, model):
        assert [record.lower_bound for record in model.history_] == model.lower_bounds_
        assert model.lower_bounds_[-1] == model.lower_bound_

    def test_active_rows_fall(self, model):
        counts = [record.active_rows for record in model.history_]
        assert counts[:3] == [300] * 3
        assert counts[3] < 300

    def test_seconds(self, model):
        assert all(record.seconds > 0 for record in model.history_)

    def test_work_is_the_sum_of_active_fractions(self, model):
        assert model.history_.work == pytest.approx(sum(r.active_rows for r in model.history_) / 300)

    def test_rows_of_weight_zero_do_not_count(self):
        weights = np.ones(300)
        weights[:100] = 0
        model = quietly(mixture(max_iter=2), ROWS, sample_weight=weights)
        assert [(r.active_rows, r.full_pass) for r in model.history_] == [(200, True)] * 2

    def test_it_is_a_sequence(self, model):
        assert model.history_[-1] is list(model.history_)[-1]
        assert len(model.history_[1:3]) == 2


class TestStarts:
    def test_n_init_takes_the_run_with_the_best_bound(self):
        X = np.random.default_rng(1).uniform(size=(120, 2))
        state = np.random.RandomState(4)
        runs = [
            quietly(mixture(init_params="random_from_data", max_iter=8, random_state=state), X)
            for _ in range(5)
        ]
        best = max(runs, key=lambda run: run.lower_bound_)
        state = np.random.RandomState(4)
        model = mixture(init_params="random_from_data", max_iter=8, random_state=state, n_init=5)
        assert len({run.lower_bound_ for run in runs}) > 1
        assert_same_bits(quietly(model, X), best)

    def test_a_start_that_collapses_is_left_out_with_a_warning(self):
        """Four rows far away are one and the same: a start with a seed on them collapses."""
        X = np.concatenate([ROWS[:60], np.full((4, 2), 50.0)])
        collapsed = []
        for seed in range(12):
            try:
                quietly(
                    mixture(init_params="random_from_data", reg_covar=0, max_iter=5, random_state=seed), X
                )
            except SingularComponentError:
                collapsed.append(seed)
        assert 0 < len(collapsed) < 12
        state = np.random.RandomState(0)
        model = mixture(
            init_params="random_from_data", reg_covar=0, max_iter=5, random_state=state, n_init=12
        )
        with pytest.warns(UserWarning, match=r"start \d+ of 12 is left out: .*ill-defined"):
            quietly(model, X)
        assert np.isfinite(model.lower_bound_)

    @pytest.mark.parametrize("init", ["kmeans", "k-means++", "random", "random_from_data"])
    def test_a_seed_gives_the_same_start_under_any_chunking(self, init):
        settings = {"init_params": init, "max_iter": 0, "random_state": 5}
        one = mixture(**settings).fit(ROWS)
        for chunks in (CHUNKS, 7):
            assert_close(mixture(**settings).fit(da.from_array(ROWS, chunks=(chunks, 2))), one)

    @pytest.mark.parametrize(
        "make", [int, np.random.RandomState, np.random.default_rng], ids=lambda make: make.__name__
    )
    def test_a_random_state_can_be_repeated(self, make):
        first, second = (
            mixture(init_params="random", max_iter=0, random_state=make(3)).fit(ROWS) for _ in "ab"
        )
        assert_same_bits(first, second)

    def test_another_seed_gives_another_start(self):
        first, second = (mixture(init_params="random", max_iter=0, random_state=s).fit(ROWS) for s in (1, 2))
        assert not np.array_equal(first.means_, second.means_)

    @pytest.mark.parametrize("name", ["weights", "means", "precisions"])
    def test_given_parameters_win_over_the_start(self, name):
        given = START[f"{name}_init"]
        model = mixture(max_iter=0, **{f"{name}_init": given}).fit(ROWS)
        assert np.allclose(getattr(model, f"{name}_"), given, rtol=1e-12)

    def test_responsibilities_win_over_every_start(self):
        responsibilities = np.random.default_rng(0).dirichlet(np.ones(3), size=300)
        model = mixture(max_iter=0, **START).fit(ROWS, responsibilities_init=responsibilities)
        expected = (responsibilities.T @ ROWS) / responsibilities.sum(axis=0)[:, None]
        assert np.allclose(model.means_, expected, rtol=1e-12)

    @pytest.mark.parametrize("wrap", [list, da.from_array, zarr.array], ids=["list", "dask", "zarr"])
    def test_responsibilities_of_any_kind(self, wrap):
        responsibilities = np.random.default_rng(0).dirichlet(np.ones(3), size=300)
        plain = mixture(max_iter=0).fit(ROWS, responsibilities_init=responsibilities)
        X = da.from_array(ROWS, chunks=(CHUNKS, 2))
        assert_close(mixture(max_iter=0).fit(X, responsibilities_init=wrap(responsibilities)), plain)


class TestWarmStart:
    def test_two_fits_are_one_of_twice_the_iterations(self):
        warm = mixture(warm_start=True, tol=0, max_iter=4, **START)
        quietly(quietly(warm, ROWS), ROWS)
        once = quietly(mixture(tol=0, max_iter=8, **START), ROWS)
        assert warm.means_.tobytes() == once.means_.tobytes()
        assert warm.lower_bounds_ == once.lower_bounds_[4:]

    def test_n_init_is_ignored(self):
        warm = mixture(warm_start=True, tol=0, max_iter=2, n_init=3)
        quietly(warm, ROWS)
        bound = warm.lower_bound_
        assert quietly(warm, ROWS).lower_bounds_[0] >= bound

    def test_row_state_starts_afresh(self):
        warm = mixture(warm_start=True, algorithm=EMTau(tau=2, revisit=None), max_iter=4, tol=0)
        quietly(warm, ROWS)
        assert warm.history_[-1].active_rows < 300
        assert quietly(warm, ROWS).history_[0].full_pass

    def test_the_bound_is_compared_with_the_last_fits(self):
        warm = mixture(warm_start=True, tol=1e-3).fit(ROWS)
        assert warm.fit(ROWS).n_iter_ == 1

    def test_without_it_a_fit_starts_anew(self):
        model = mixture()
        assert_same_bits(copy.deepcopy(model.fit(ROWS)), model.fit(ROWS))


class Halves:
    """A user's own policy: rows of even rank rest after each odd iteration; every fourth is full."""

    def row_arrays(self, n_components, max_iter):
        return (RowArray("seen", max_iter),)

    def update(self, state, evidence):
        stays = np.ones(len(evidence.labels), dtype=bool)
        if evidence.iteration % 2:
            stays[::2] = False
        return {"seen": state["seen"] + 1}, stays

    def schedule(self, summary):
        return Schedule(NextPass.ALL if summary.iteration % 4 == 0 else NextPass.ACTIVE, test_tol=False)


class TestOwnPolicy:
    def test_it_decides_the_active_rows(self):
        model = quietly(mixture(algorithm=Halves(), max_iter=9), ROWS)
        assert [record.active_rows for record in model.history_] == [300, 150, 150, 75] * 2 + [300]

    def test_its_bound_never_falls(self):
        bounds = quietly(mixture(algorithm=Halves(), max_iter=9, reg_covar=0), ROWS).lower_bounds_
        assert np.diff(bounds).min() > -1e-12


class TestScikitLearnsManners:
    @pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
    def test_copies_of_a_fitted_model_predict_the_same(self, again):
        model = mixture(tol=1e-2).fit(ROWS)
        assert np.array_equal(again(model).predict_proba(ROWS), model.predict_proba(ROWS))

    @pytest.mark.parametrize(
        "method", ["score_samples", "score", "bic", "aic", "save", "sample", "to_sklearn"]
    )
    def test_nothing_to_give_before_a_fit(self, method):
        """What scikit-learn's own checks do not call."""
        arguments = () if method in ("sample", "to_sklearn") else (ROWS,)
        with pytest.raises(NotFittedError):
            getattr(mixture(), method)(*arguments)

    def test_verbose_prints_starts_or_also_iterations_to_standard_output(self, capsys):
        quietly(mixture(verbose=1, max_iter=2), ROWS)
        (line,) = capsys.readouterr().out.splitlines()
        assert line.startswith("fit: log-likelihood per row ")
        quietly(mixture(verbose=2, max_iter=2), ROWS)
        assert "\niteration 2: " in capsys.readouterr().out

    def test_silence_by_default(self, capsys):
        quietly(mixture(max_iter=2), ROWS)
        assert capsys.readouterr() == ("", "")
