"""Criteria against scikit-learn and scipy, the sample's size, the race, refusals, the table."""

import math
import pickle
import sys

import numpy as np
import pytest
from scipy.stats import multivariate_normal
from sklearn.mixture import GaussianMixture as SklearnMixture

from emtau_dask import ConfigError, GaussianMixture, select_components
from emtau_dask.errors import MissingPackageError
from emtau_dask.selection import CandidateRecord, Score, SelectionTable
from emtau_dask.selection.criteria import (
    CRITERIA,
    challenger,
    checked_settings,
    expected_loss,
    leader,
    sample_share,
    standing,
)
from emtau_dask.selection.fits import fit_sample
from emtau_dask.selection.passes import CountedRows

ROWS = np.random.default_rng(0).normal(size=(400, 2)) + 3 * np.arange(2).repeat(200)[:, None]


def settings(n_components=(1, 2), **changes):
    given = {
        "covariance_types": ("full",),
        "criterion": "bic",
        "random_state": 0,
        "estimator": None,
        "sample_rows": None,
        "finalists": 2,
    }
    return checked_settings(n_components, **given | changes)


def score_of(log_likelihood, parameters, *, rows=10_000, held_out_rows=9_000, entropy=0.0):
    return Score(log_likelihood, entropy, 0.0, rows, held_out_rows, parameters)


@pytest.fixture(scope="module")
def fitted():
    return SklearnMixture(2, random_state=0).fit(ROWS)


def densities(mixture, rows):
    """Weighted, (n, K), by scipy."""
    parts = zip(mixture.weights_, mixture.means_, mixture.covariances_, strict=True)
    return np.stack([w * multivariate_normal(m, c).pdf(rows) for w, m, c in parts], axis=1)


def test_bic_and_aic_are_scikit_learns(fitted):
    score = Score(float(fitted.score(ROWS)) * len(ROWS), 0.0, 0.0, len(ROWS), 0, fitted._n_parameters())
    assert score.bic == pytest.approx(fitted.bic(ROWS), rel=1e-13)
    assert score.aic == pytest.approx(fitted.aic(ROWS), rel=1e-13)


def test_icl_is_bic_of_the_expected_completed_likelihood(fitted):
    """``−2 Σ_nk w_nk ln(w_nk p(x_n)) + p ln N``: Biernacki et al. 2000, with expected labels."""
    joint = densities(fitted, ROWS)
    total = joint.sum(axis=1)
    w = joint / total[:, None]
    completed = math.fsum((w * np.log(joint)).ravel())
    p = fitted._n_parameters()
    entropy = -math.fsum((w * np.log(w)).ravel())
    score = Score(math.fsum(np.log(total)), entropy, 0.0, len(ROWS), 0, p)
    assert score.icl == pytest.approx(-2 * completed + p * math.log(len(ROWS)), rel=1e-12)


def test_the_expected_loss_is_that_of_fits_to_parts_of_the_rows():
    """The mean of a Gaussian is known exactly: its loss is ``d (1/n − 1/N) / 2`` exactly."""
    rng = np.random.default_rng(0)
    n, total, d = 50, 400, 3
    losses = []
    for _ in range(4000):
        x = rng.normal(size=(total, d))
        losses.append(0.5 * ((x[:n].mean(axis=0) - x.mean(axis=0)) ** 2).sum())
    error = np.std(losses) / math.sqrt(len(losses))
    assert abs(np.mean(losses) - expected_loss(d, n, total)) < 4 * error


@pytest.mark.parametrize(
    ("rows", "features", "parameters", "asked", "sampled"),
    [
        (1_000, 2, 50, None, 800),
        (10**6, 2, 50, None, 2**17),
        (10**8, 2, 50, None, 10**8 / math.log(10**8)),
        (10**10, 16, 50, None, 2**21),
        (10**7, 2, 10**5, None, 10**6),
        (10**12, 1000, 10**6, None, 10**7),
        (10**6, 2, 50, 5_000, 5_000),
        (1_000, 2, 50, 5_000, 800),
    ],
)
def test_how_many_rows_the_sample_holds(rows, features, parameters, asked, sampled):
    assert sample_share(rows, features, parameters, asked) * rows == pytest.approx(sampled)


def test_a_default_sample_costs_no_more_than_bic_charges():
    for rows in (10**5, 10**6, 10**7):
        n = rows * sample_share(rows, 2, 50, None)
        assert rows * expected_loss(50, n, rows) <= 50 * math.log(rows) / 2


BIC = CRITERIA["bic"]


def test_the_leader_is_the_first_of_the_best():
    scores = {"a": score_of(-100, 5), "b": score_of(-50, 5), "c": score_of(-50, 5)}
    assert leader(BIC, scores, []) == "b"
    assert leader(BIC, scores, ["b"]) == "c"
    assert leader(BIC, scores, ["a", "b", "c"]) is None


def test_a_candidate_is_fitted_to_all_rows_where_its_expected_loss_would_let_it_overtake():
    """N/n = 10: each parameter is expected to cost 4.5 nats, and BIC charges 4.6 nats for it."""
    charged = math.log(10_000) / 2
    small = score_of(-20_000, 10)
    fitted = {"small": standing(BIC, small, -1.995)}
    assert fitted["small"].loss == pytest.approx(50)
    assert fitted["small"].value == pytest.approx(2 * 19_950 + 20 * charged)
    # With 10 parameters more, 50 + 45 nats are expected to be lost: it overtakes if it lacks less than that.
    lacking = 45 + 50 - 10 * charged
    for log_likelihood, expected in ((-19_950 - lacking + 1, "large"), (-19_950 - lacking - 1, None)):
        scores = {"small": small, "large": score_of(log_likelihood, 20)}
        assert challenger(BIC, scores, fitted, []) == expected


def test_no_candidate_is_fitted_to_all_rows_twice_or_after_it_collapsed():
    scores = {"a": score_of(-20_000, 10), "b": score_of(-19_000, 10)}
    fitted = {"a": standing(BIC, scores["a"], -2.0)}
    assert challenger(BIC, scores, fitted, []) == "b"
    assert challenger(BIC, scores, fitted, ["b"]) is None
    assert challenger(BIC, scores, fitted | {"b": standing(BIC, scores["b"], -1.9)}, []) is None


def test_held_out_rows_judge_the_samples_fits_alone():
    scores = {"a": score_of(-20_000, 10), "b": score_of(-19_000, 10)}
    criterion = CRITERIA["held-out"]
    assert challenger(criterion, scores, {"a": standing(criterion, scores["a"], -2.0)}, []) is None


IMPOSSIBLE = [
    ({"n_components": []}, "n_components is empty"),
    ({"n_components": range(5, 5)}, "n_components is empty"),
    ({"n_components": 5}, r"range\(1, 6\)"),
    ({"n_components": "2:5"}, "n_components is '2:5'"),
    ({"n_components": [0, 1]}, "n_components has 0"),
    ({"n_components": [2.5]}, "n_components has 2.5"),
    ({"n_components": [2, 3, 2]}, "n_components has 2 twice"),
    ({"n_components": iter(int, 1)}, "more than 10,000"),
    ({"n_components": range(1, 6000), "covariance_types": ("full", "diag")}, "11,998 candidates"),
    ({"covariance_types": ()}, "covariance_types is empty"),
    ({"covariance_types": ("full", "round")}, "covariance_types has 'round'"),
    ({"covariance_types": ("full", "dia")}, "the nearest valid value is diag"),
    ({"covariance_types": ("full", "full")}, "covariance_types has 'full' twice"),
    ({"covariance_types": 3}, "covariance_types is 3"),
    ({"criterion": "BIC"}, "criterion is 'BIC'; it must be one of 'bic', 'aic', 'icl', 'held-out'"),
    ({"criterion": None}, "criterion is None"),
    ({"sample_rows": 0}, "sample_rows is 0"),
    ({"finalists": 0}, "finalists is 0"),
    ({"estimator": GaussianMixture(means_init=[[0.0]])}, "estimator has means_init"),
    ({"estimator": GaussianMixture(checkpoint="a.zarr")}, "give checkpoint to select_components"),
    ({"estimator": GaussianMixture(warm_start=True)}, "warm_start"),
    ({"estimator": GaussianMixture(tol=-1)}, "tol is -1"),
    ({"estimator": SklearnMixture()}, "estimator is a GaussianMixture of sklearn"),
]


def test_what_cannot_be_asked_is_refused_before_data_are_touched():
    for changes, named in IMPOSSIBLE:
        given = {"n_components": (1, 2)} | changes
        with pytest.raises(ConfigError, match=named):
            select_components(object(), **given)


def test_candidates_ascend_within_each_type():
    found = settings([4, 2], covariance_types=("diag", "full")).candidates
    assert [str(each) for each in found] == ["K = 2 (diag)", "K = 4 (diag)", "K = 2 (full)", "K = 4 (full)"]
    assert settings(covariance_types="diag").candidates[0].covariance_type == "diag"


def test_an_estimators_settings_are_those_of_all_candidates():
    template = GaussianMixture(7, covariance_type="tied", reg_covar=1e-3, random_state=5)
    made = settings(random_state=None, estimator=template)
    assert made.estimator(made.candidates[1], 9).get_params() == (
        GaussianMixture(2, reg_covar=1e-3, random_state=9).get_params()
    )
    assert made.template.random_state == 5
    assert settings(random_state=3, estimator=template).template.random_state == 3


def fits_of(mixture, rows, monkeypatch):
    """The settings of the fits that `fit_sample` makes: names, starts, iterations, and whether they go on."""
    made = []

    def noted(self, X, sample_weight):
        made.append((self.algorithm, self.n_init, self.tol, self.max_iter, self.warm_start))
        return self

    monkeypatch.setattr(GaussianMixture, "fit", noted)
    fit_sample(mixture, CountedRows(np.zeros((rows, 2)), None))
    return made


def test_a_sample_of_few_rows_per_parameter_gets_several_short_runs_of_which_the_best_goes_on(monkeypatch):
    em = ("em", 8, "statistical")
    auto = ("auto", "auto", "auto", 500, False)
    assert fits_of(GaussianMixture(200), 12_000, monkeypatch) == [(*em, 30, False), (*em, 500, True)]
    assert fits_of(GaussianMixture(200), 5_000, monkeypatch) == [
        ("em", 8, "auto", 30, False),
        ("em", 8, "auto", 500, True),
    ]
    few = GaussianMixture(200, max_iter=5)
    assert fits_of(few, 12_000, monkeypatch) == [(*em, 5, False), (*em, 5, True)]
    assert fits_of(GaussianMixture(3), 4_000, monkeypatch) == [auto]
    assert fits_of(GaussianMixture(3), 2**17, monkeypatch) == [auto]
    assert fits_of(GaussianMixture(1), 4_000, monkeypatch) == [auto]
    asked = GaussianMixture(3, n_init=2)
    assert fits_of(asked, 4_000, monkeypatch) == [("auto", 2, "auto", 500, False)]


RECORD = CandidateRecord(2, "full", 11, -3.5, 700.0, 650.0, 720.0, -3.6, 0.01, True, 0.5)
COLLAPSED = CandidateRecord(3, "full", 17, seconds=0.1, reason="component 2 collapsed")
TABLE = SelectionTable((RECORD, COLLAPSED), "bic", 0)


def test_the_table_is_printed_without_pandas(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    caption, headings, first, second, legend = str(TABLE).splitlines()
    assert caption == repr(TABLE)
    assert headings.split()[:4] == ["K", "type", "p", "log-lik./row"]
    assert first.split() == ["*", "2", "full", "11", "-3.50000", "0.0", "0.0", "0.0", "-3.60000"]
    assert legend.startswith("+BIC, +AIC, +ICL: above the lowest; *: chosen")
    assert second.split() == ["!", "3", "full", "17", "-", "-", "-", "-", "-"]
    with pytest.raises(MissingPackageError, match=r"pip install pandas. Without it print\(table_\)"):
        TABLE.to_frame()


def test_the_table_is_a_sequence_of_records_with_a_short_text():
    assert list(TABLE) == [RECORD, COLLAPSED]
    assert TABLE[-1].reason
    assert TABLE[:1] == (RECORD,)
    assert repr(TABLE) == "SelectionTable(2 candidates, best by bic: K = 2 (full))"
    assert pickle.loads(pickle.dumps(TABLE)) == TABLE
    frame = TABLE.to_frame()
    assert frame["bic"].tolist()[0] == 700.0
    assert frame["reason"].tolist() == ["", "component 2 collapsed"]
    shown = TABLE._repr_html_()
    assert shown.count("<tr>") == 3
    assert "<td>!</td>" in shown
