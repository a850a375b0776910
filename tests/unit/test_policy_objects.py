"""The activity policies as what users pass: names, parameter objects, and what cannot be."""

import math
import pickle

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV

from emtau_dask import EMLazy, EMSampled, EMStar, EMTau, FullEM, GaussianMixture
from emtau_dask.errors import CheckpointMismatchError, ConfigError
from emtau_dask.estimator.resuming import mixture_in
from emtau_dask.policies.policy import RowArray
from emtau_dask.policies.registry import ALGORITHMS, DescribedPolicy, as_policy, policy_described

IMPOSSIBLE = [
    (EMTau(tau=0), r"tau=0.*at least 1"),
    (EMTau(tau=2.5), r"tau=2\.5.*integer"),
    (EMTau(tau=True), r"tau=True.*integer"),
    (EMTau(tau="3"), r"tau='3'.*integer"),
    (EMTau(revisit=0), r"revisit=0.*at least 1"),
    (EMTau(revisit=-1), r"revisit=-1.*at least 1"),
    (EMTau(revisit="never"), r"revisit='never'.*'on-empty', None, or an integer"),
    (EMTau(revisit=True), r"revisit=True.*integer"),
    (EMStar(tail=0), r"tail=0.*above 0 and at most 1"),
    (EMStar(tail=1.5), r"tail=1\.5.*above 0 and at most 1"),
    (EMStar(tail=math.nan), r"tail=nan.*above 0 and at most 1"),
    (EMStar(tail="roots"), r"tail='roots'.*'leaves' or a number above 0"),
    (EMStar(tail=None), r"tail=None.*number"),
    (EMStar(every=0), r"every=0.*at least 1"),
    (EMLazy(threshold=0), r"threshold=0.*above 0 and at most 1"),
    (EMLazy(threshold=1.01), r"threshold=1\.01.*at most 1"),
    (EMLazy(full_every=0), r"full_every=0.*at least 1"),
]


def test_impossible_parameters_are_refused_with_value_and_limit():
    for policy, message in IMPOSSIBLE:
        with pytest.raises(ConfigError, match=message):
            policy.row_arrays(3, 100)


DEFAULTS = {
    "em": (FullEM, {}),
    "em-tau": (EMTau, {"tau": 20, "revisit": "on-empty"}),
    "em-star": (EMStar, {"tail": "leaves", "every": 1}),
    "em-lazy": (EMLazy, {"threshold": 0.99, "full_every": 5}),
    "em-sampled": (EMSampled, EMSampled().get_params()),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_name_stands_for_defaults_that_keep_their_constraints(name):
    kind, defaults = DEFAULTS[name]
    policy = as_policy(name)
    assert (type(policy), policy.get_params()) == (kind, defaults)
    assert ALGORITHMS[name] is kind
    assert set(policy.constraints) == set(defaults)
    assert all(policy.constraints[each].holds(value) for each, value in defaults.items())


@pytest.mark.parametrize("algorithm", ["EM", "em_tau", None, 3, EMTau, ..., ["em"]], ids=repr)
def test_anything_else_is_refused_with_the_names(algorithm):
    with pytest.raises(ConfigError, match="'em', 'em-tau', 'em-star', 'em-lazy'"):
        as_policy(algorithm)


@pytest.mark.parametrize(
    ("maximum", "dtype"),
    [
        (0, "uint8"),
        (255, "uint8"),
        (256, "uint16"),
        (65_535, "uint16"),
        (65_536, "uint32"),
        (2**32, "uint64"),
    ],
)
def test_a_row_array_has_the_smallest_type_that_holds_its_maximum(maximum, dtype):
    assert RowArray("count", maximum).dtype == dtype


OBJECTS = [FullEM(), EMTau(tau=7, revisit=3), EMStar(tail=0.5, every=2), EMLazy(threshold=0.8, full_every=2)]


@pytest.mark.parametrize("policy", OBJECTS, ids=repr)
def test_clones_and_pickles_keep_the_parameters(policy):
    for copy in (clone(policy), pickle.loads(pickle.dumps(policy))):
        assert copy is not policy
        assert (type(copy), copy.get_params()) == (type(policy), policy.get_params())


@pytest.mark.parametrize("algorithm", ["em-tau", EMTau()], ids=repr)
def test_set_params_reaches_into_the_algorithm(algorithm):
    mixture = GaussianMixture(algorithm=algorithm).set_params(algorithm__tau=7)
    assert mixture.algorithm.get_params() == {"tau": 7, "revisit": "on-empty"}


def test_set_params_reaches_into_an_algorithm_that_it_names():
    mixture = GaussianMixture().set_params(algorithm="em-lazy", algorithm__threshold=0.5)
    assert mixture.algorithm.get_params() == {"threshold": 0.5, "full_every": 5}


def test_set_params_without_the_algorithm_leaves_its_name():
    assert GaussianMixture().set_params(tol=0.1).algorithm == "auto"
    assert GaussianMixture(algorithm="em-tau").set_params(tol=0.1).algorithm == "em-tau"


@pytest.mark.parametrize("algorithm", ["auto", "em-tau", EMTau()], ids=repr)
def test_set_params_refuses_a_parameter_that_the_algorithm_does_not_have(algorithm):
    mixture = GaussianMixture(algorithm=algorithm)
    with pytest.raises(ValueError, match="Invalid parameter 'threshold'"):
        mixture.set_params(algorithm__threshold=0.5)


def test_clones_of_a_mixture_do_not_share_the_algorithm():
    mixture = GaussianMixture(algorithm=EMTau(tau=7))
    clone(mixture).set_params(algorithm__tau=9)
    assert mixture.algorithm.tau == 7


@pytest.mark.parametrize("algorithm", ["em-tau", EMTau(tau=2)], ids=repr)
def test_a_grid_search_goes_over_tau(algorithm):
    X = np.random.default_rng(0).normal(size=(90, 2)) + np.repeat([0, 3, 8], 30)[:, None]
    mixture = GaussianMixture(3, algorithm=algorithm, random_state=0)
    search = GridSearchCV(mixture, {"algorithm__tau": np.array([2, 30])}, cv=2).fit(X)
    assert search.best_estimator_.algorithm.tau == search.best_params_["algorithm__tau"]


def test_stored_parameters_that_a_policy_has_not_are_refused():
    with pytest.raises(ConfigError, match="em-tau has no such parameters"):
        policy_described(DescribedPolicy("em-tau", "EMTau", {"tau__x": 1}))


class Own(FullEM):
    """A user's own policy."""


def test_a_run_of_a_users_own_policy_is_read_without_it_and_resumed_with_it_alone(tmp_path):
    place, X = tmp_path / "run.zarr", np.random.default_rng(0).normal(size=(60, 2))
    fitted = GaussianMixture(2, algorithm=Own(), random_state=0, checkpoint=place).fit(X)
    mixture = mixture_in(GaussianMixture, place)
    assert np.array_equal(mixture.predict(X), fitted.predict(X))
    with pytest.raises(CheckpointMismatchError, match=r"the run uses Own\(\), .*give it again as algorithm"):
        GaussianMixture.resume(place, X)
    with pytest.raises(CheckpointMismatchError, match=r"algorithm is FullEM\(\), .*uses Own\(\)"):
        GaussianMixture.resume(place, X, algorithm="em")
    assert GaussianMixture.resume(place, X, algorithm=Own()).n_iter_ == fitted.n_iter_
