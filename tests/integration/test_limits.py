"""Settings at and beyond what a checkpoint can hold: used, or refused before anything is written."""

from fractions import Fraction

import numpy as np
import pytest
from commands import emtau

from emtau_dask import ConfigError, EMLazy, EMStar, EMTau, EmtauError, GaussianMixture

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
ROWS = np.random.default_rng(0).normal(size=(60, 2))

WHOLE = [-1, 0, 1, True, 2**31, 2**32, 10**12, 10**12 + 1, 2**48, 2**48 + 1, 2**63, 2**64, 2**70, 10**400]
WHOLE += [10**5000, -(10**5000), np.int8(3), np.uint64(2**64 - 1), np.bool_(1)]
OTHER = [np.nan, np.inf, -np.inf, 1e308, 1e-320, np.float32(2), Fraction(10**400), Fraction(1, 3), 2.5, 1j]
OTHER += ["x", "", "\ud800", "\x1b[2J", None, [], {}, b"x", np.array([1, 2]), object()]
VALUES = [*WHOLE, *OTHER]

SETTINGS = [
    "n_components", "covariance_type", "tol", "reg_covar", "max_iter", "n_init", "init_params",
    "random_state", "warm_start", "checkpoint_every", "verbose",
]  # fmt: skip
PARAMETERS = {
    "tau": EMTau, "revisit": EMTau, "tail": EMStar, "every": EMStar, "threshold": EMLazy,
    "full_every": EMLazy,
}  # fmt: skip


def fit(place, **settings):
    usual = {"n_components": 2, "algorithm": "em", "tol": 1.0, "max_iter": 2, "random_state": 0}
    usual["init_params"] = "random_from_data"
    return GaussianMixture(checkpoint=place, **(usual | settings)).fit(ROWS)


def fitted_or_refused(place, **settings):
    """Either a fit that can be resumed, or an error of ours that leaves its place, returned, as it was."""
    try:
        fit(place, **settings)
    except EmtauError as error:
        message = str(error)
        assert message.isprintable(), message
        assert not place.exists() or not any(place.rglob("*")), message
        return place
    GaussianMixture.resume(place, ROWS)
    return None


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_of_the_mixture(name, tmp_path, capsys):
    refused = [fitted_or_refused(tmp_path / f"{n}", **{name: value}) for n, value in enumerate(VALUES)]
    fit(next(place for place in refused if place))


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_parameter_of_the_policies(name, tmp_path):
    policies = [PARAMETERS[name](**{name: value}) for value in VALUES]
    refused = [fitted_or_refused(tmp_path / f"{n}", algorithm=each) for n, each in enumerate(policies)]
    fit(next(place for place in refused if place))


class Own(EMTau):
    """A user's policy with a parameter of any kind."""

    def __init__(self, tau=20, revisit="on-empty", extra=None):
        super().__init__(tau, revisit)
        self.extra = extra


def test_a_parameter_of_a_users_own_policy(tmp_path):
    circle = []
    circle.append(circle)
    deep = []
    for _ in range(100_000):
        deep = [deep]
    for number, value in enumerate(
        [np.nan, 2**70, 10**5000, "\ud800", object(), circle, deep, {1: np.inf}, {(1, 2): 3}]
    ):
        place, policy = tmp_path / f"{number}", Own(extra=value)
        try:
            fit(place, algorithm=policy)
        except ConfigError:
            assert not place.exists()
            fit(place, algorithm=Own())
        else:
            GaussianMixture.resume(place, ROWS, algorithm=policy)


@pytest.mark.parametrize("name", ["max_iter", "checkpoint_every"])
def test_a_resume_refuses_as_a_fit_does(name, tmp_path):
    place = tmp_path / "run"
    model = fit(place)
    before = sorted(place.rglob("*"))
    for value in (2**48 + 1, 2**70, -1, np.nan, 10**5000):
        with pytest.raises(ConfigError, match=rf"{name} is .*at most 1,000,000,000,000"):
            GaussianMixture.resume(place, ROWS, **{name: value})
    assert sorted(place.rglob("*")) == before
    assert np.array_equal(GaussianMixture.resume(place, ROWS).means_, model.means_)


def test_what_cannot_be_committed_first_leaves_nothing(tmp_path, monkeypatch):
    """Whatever the first commit fails of."""
    monkeypatch.setattr("emtau_dask.storage.commits.MAX_MANIFEST_BYTES", 100)
    with pytest.raises(EmtauError, match="more than 100"):
        fit(tmp_path / "run")
    monkeypatch.undo()
    assert not any((tmp_path / "run").rglob("*"))
    fit(tmp_path / "run")


@pytest.mark.parametrize(
    ("key", "value", "limit"),
    [
        ("stop.max_iter", 2**48 + 1, "at most 1,000,000,000,000"),
        ("checkpoint.every", 2**70, "at most 1,000,000,000,000"),
        ("algorithm.tau", 2**70, "at most 1,000,000,000,000"),
        ("algorithm.revisit", 2**70, "at most 1,000,000,000,000"),
        ("model.n_init", 10**9, "at most 10,000"),
        ("model.n_components", 2**40, "at most 16,777,216"),
        ("model.random_state", 2**32, "at most 4,294,967,295"),
        ("stop.tol", "." + "inf", "a finite number"),
        ("stop.tol", f"1{'0' * 399}", "a finite number"),
        ("stop.tol", f"1{'0' * 400}", "a finite number"),
        ("cluster.workers", 2**70, "at most 1,000,000,000,000"),
    ],
)
def test_a_config_is_refused_with_the_limit(key, value, limit, tmp_path):
    config, run = tmp_path / "run.yaml", tmp_path / "run.zarr"
    config.write_text(
        "data: {dataset: example1}\nmodel: {n_components: 2}\nalgorithm: {name: em-tau}\n"
        f"checkpoint: {{path: {run}}}\n"
    )
    result = emtau("fit", config, "--set", f"{key}={value}")
    assert result.exit_code == 2
    assert key in result.stderr
    assert limit in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]
