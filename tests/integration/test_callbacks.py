"""scikit-learn's own callbacks, where it has them (from 1.9 on)."""

import numpy as np
import pytest
from fits import ROWS, START, assert_same_bits, mixture, quietly
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import GridSearchCV

from emtau_dask import EMTau

callback = pytest.importorskip("sklearn.callback", reason="scikit-learn before 1.9")
SETTINGS = {"tol": 0, "max_iter": 4, **START}


class Recording:
    """A callback that writes down what it is called with."""

    stop = False

    def __init__(self):
        self.events, self.bounds, self.fitted = [], [], []

    def setup(self, estimator, context):
        self.events.append("setup")

    def teardown(self, estimator, context):
        self.events.append("teardown")

    def on_fit_task_begin(self, estimator, context, *, X):
        assert X.shape[1] == 2
        self.events.append(f"begin {context.task_name} {context.task_id}")

    def on_fit_task_end(self, estimator, context, *, fitted_estimator):
        self.events.append(f"end {context.task_name} {context.task_id}")
        self.fitted.append(fitted_estimator)
        return self.stop


def iterations(n):
    return [f"{when} iteration {i}" for i in range(n) for when in ("begin", "end")]


def test_a_fit_is_a_task_and_each_iteration_one_in_it():
    recording = Recording()
    quietly(mixture(**SETTINGS).set_callbacks(recording), ROWS)
    assert recording.events == ["setup", "begin fit 0", *iterations(4), "end fit 0", "teardown"]


def test_a_hook_gets_the_mixture_as_if_the_fit_had_stopped_there():
    recording = Recording()
    quietly(mixture(**SETTINGS).set_callbacks(recording), ROWS)
    for n, found in enumerate(recording.fitted[:4], start=1):
        stopped = quietly(mixture(**{**SETTINGS, "max_iter": n}), ROWS)
        assert_same_bits(found, stopped)
        assert found.score(ROWS) == stopped.score(ROWS)
    assert_same_bits(recording.fitted[4], stopped)


def test_callbacks_change_no_bit_and_go_with_a_clone():
    plain, model = mixture(**SETTINGS), mixture(**SETTINGS).set_callbacks(Recording())
    assert_same_bits(quietly(model, ROWS), quietly(plain, ROWS))
    assert clone(model)._skl_callbacks
    assert not [name for name in vars(model) if name.startswith("_callback")]


def test_what_cannot_stop_a_fit_is_told_so_once():
    recording = Recording()
    recording.stop = True
    with pytest.warns(match="A callback asks to stop") as warned:
        mixture(**SETTINGS).set_callbacks(recording).fit(ROWS)
    assert sum("asks to stop" in str(each.message) for each in warned) == 1


def test_callbacks_are_torn_down_where_a_fit_fails():
    recording = Recording()
    with pytest.raises(ValueError, match="NaN"):
        mixture(**SETTINGS).set_callbacks(recording).fit(np.full((10, 2), np.nan))
    assert recording.events[-1] == "teardown"


def test_warnings_point_at_the_line_of_the_fit():
    with pytest.warns(ConvergenceWarning) as warned:
        mixture(**SETTINGS).set_callbacks(Recording()).fit(ROWS)
    assert [warning.filename for warning in warned] == [__file__]


class TestScikitLearnsOwn:
    def test_progress_bar(self, capsys):
        quietly(mixture(algorithm=EMTau(tau=2), **SETTINGS).set_callbacks(callback.ProgressBar()), ROWS)
        assert "GaussianMixture" in capsys.readouterr().out

    def test_scoring_monitor(self):
        monitor = callback.ScoringMonitor(scoring=lambda fitted, X, y=None: fitted.score(X))
        model = quietly(mixture(**SETTINGS).set_callbacks(monitor), ROWS)
        assert model.n_iter_ == 4

    def test_grid_search_leads_its_bar_to_every_fit(self, capsys):
        search = GridSearchCV(mixture(**SETTINGS), {"max_iter": [2, 3]}, cv=2)
        quietly(search.set_callbacks(callback.ProgressBar()), ROWS)
        assert "GridSearchCV" in capsys.readouterr().out
