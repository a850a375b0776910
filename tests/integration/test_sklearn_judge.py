"""scikit-learn as outside judge: its estimator checks, and its own tests of GaussianMixture on ours."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from emtau_dask import GaussianMixture

TESTS = Path(__file__).parents[1]
JUDGE = "sklearn.mixture.tests.test_gaussian_mixture"

PRIVATE = {
    "test_gaussian_mixture_precisions_init": "calls the private _set_parameters and _initialize",
    "test_gaussian_mixture_all_init_does_not_estimate_gaussian_parameters": (
        "counts the calls of the private _estimate_gaussian_parameters, which ours never makes"
    ),
    "test_gaussian_mixture_array_api_compliance": (
        "needs scikit-learn's private array-API namespaces, and arrays on other devices"
    ),
    "test_gaussian_mixture_raises_where_array_api_not_implemented": (
        "scikit-learn's refusals inside its array-API mode"
    ),
}
"""Tests that reach into private functions: test -> why."""

CONFLICTS = {
    "test_gaussian_mixture_setting_best_params": (
        "with reg_covar=0 two components end on a single row each: their variances after one M-step are "
        "below 1e-25000 (60 digits). scikit-learn goes on with 10*eps*mean^2, left over by the 10*eps "
        "that it adds to n_k; the issue wants SingularComponentError for a component on identical rows"
    )
}
"""Tests that contradict a requirement of this project: test -> why."""

FLOAT32 = "float32"
"""Marks scikit-learn's tests of float32 parameters, which are off by default; ours are always float64."""


@parametrize_with_checks([GaussianMixture()])
def test_estimator_checks(estimator, check):
    check(estimator)


SLOW = "test_monotonic_likelihood or (test_init and not duplicated)"
"""They take half of the time; `test_bound.py` and `test_estimator.py` look at the same."""


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    return judged_by_scikit_learn(tmp_path_factory.mktemp("judge"), f"not ({SLOW})")


def judged_by_scikit_learn(folder, chosen):
    """Outcome and message of the chosen tests of the installed test module, by name with parameters."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SKLEARN_", "SCIPY_ARRAY_API", "PYTEST_"))
    }
    environment["PYTHONPATH"] = str(TESTS)
    options = ["-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(folder), "--junitxml=judge.xml"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "sklearn_swap", "-k", chosen, "--pyargs", JUDGE]
    run = subprocess.run(
        [*command, *options], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode in (0, 1), run.stdout + run.stderr
    return {
        case.get("name"): (case[0].tag, case[0].get("message")) if len(case) else ("passed", "")
        for case in ET.parse(folder / "judge.xml").getroot().iter("testcase")
    }


def _function(test):
    return test.partition("[")[0]


def test_scikit_learns_public_tests_pass_with_our_class(verdicts):
    judged = {
        test: verdict
        for test, verdict in verdicts.items()
        if _function(test) not in PRIVATE | CONFLICTS and FLOAT32 not in test
    }
    assert len(judged) >= 40
    assert {test: v for test, v in judged.items() if v[0] != "passed"} == {}


@pytest.mark.exhaustive
def test_so_do_those_that_take_long(tmp_path):
    verdicts = judged_by_scikit_learn(tmp_path, SLOW)
    assert {_function(test) for test in verdicts} == {"test_monotonic_likelihood", "test_init"}
    assert {test: v for test, v in verdicts.items() if v[0] != "passed" and FLOAT32 not in test} == {}


def test_every_test_left_out_exists(verdicts):
    assert {_function(test) for test in verdicts} >= set(PRIVATE | CONFLICTS)


def test_no_test_is_left_out_that_would_pass(verdicts):
    passed = {_function(test) for test, (outcome, _) in verdicts.items() if outcome == "passed"}
    assert passed & set(PRIVATE | CONFLICTS) == set()


@pytest.mark.parametrize("test", CONFLICTS)
def test_a_conflict_is_the_one_that_is_named(verdicts, test):
    assert "SingularComponentError" in verdicts[test][1]
