"""The settings of a fit are written down once; what repeats a name or a default agrees with it."""

import inspect
import subprocess
import sys
from dataclasses import MISSING, FrozenInstanceError, fields
from typing import Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest

import emtau_dask
from emtau_dask import EMTau, GaussianMixture
from emtau_dask.em.starts import STARTS as TABLE_OF_STARTS
from emtau_dask.mixture.covariance_types import STRUCTURES
from emtau_dask.policies.registry import ALGORITHMS
from emtau_dask.settings import CONSTRAINTS, COVARIANCE_TYPES, POLICIES, STARTS, STORED, Settings

GIVEN_APART = {"weights_init", "means_init", "precisions_init", "checkpoint", "verbose"}
"""Arrays of a commit, a place, and what a person sees: all other settings are stored with a fit."""


def test_the_estimator_has_these_settings_with_these_defaults_in_this_order():
    taken = inspect.signature(GaussianMixture).parameters
    assert {name: each.default for name, each in taken.items()} == {
        each.name: each.default for each in fields(Settings)
    }
    assert list(taken) == [each.name for each in fields(Settings)]


TEXTS = {
    "covariance_type": COVARIANCE_TYPES,
    "algorithm": ("auto", *POLICIES),
    "tol": ("auto", "statistical"),
    "n_init": ("auto",),
    "init_params": STARTS,
    "acceleration": ("auto", "quasi-newton"),
    "missing": ("raise", "drop", "marginalise", "marginalize"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_an_editor_sees_the_texts_that_are_allowed(name):
    kind = get_type_hints(GaussianMixture.__init__)[name]
    literals = [each for each in (kind, *get_args(kind)) if get_origin(each) is Literal]
    assert tuple(text for each in literals for text in get_args(each)) == TEXTS[name]
    assert name == "algorithm" or all(map(CONSTRAINTS[name].holds, TEXTS[name]))


def test_the_package_lists_its_public_names():
    assert dir(emtau_dask) == sorted([*emtau_dask.__all__, "__version__"])


def test_every_setting_has_a_default_that_its_constraint_allows():
    assert MISSING not in {each.default for each in fields(Settings)}
    assert [name for name, each in CONSTRAINTS.items() if not each.holds(getattr(Settings(), name))] == []
    Settings().checked()


def test_all_but_arrays_and_places_are_stored():
    assert set(STORED) == {each.name for each in fields(Settings)} - GIVEN_APART


def test_the_names_are_those_of_the_tables():
    assert tuple(STRUCTURES) == COVARIANCE_TYPES
    assert tuple(TABLE_OF_STARTS) == STARTS
    assert tuple(ALGORITHMS) == POLICIES


def test_numbers_and_flags_become_pythons_own():
    settings = {"n_components": np.int64(3), "tol": np.float32(0.5), "reg_covar": 1, "warm_start": np.True_}
    found = Settings.of(GaussianMixture(**settings, random_state=np.uint8(7)))
    values = found.n_components, found.tol, found.reg_covar, found.warm_start, found.random_state
    assert values == (3, 0.5, 1.0, True, 7)
    assert [type(value) for value in values] == [int, float, float, bool, int]


def test_what_is_impossible_stays_as_it_is_and_is_refused():
    policy = EMTau(tau=0)
    found = Settings.of(GaussianMixture(2.5, algorithm=policy, random_state=np.random.default_rng(0)))
    assert (found.n_components, found.algorithm, found.random_state) == (2.5, policy, None)
    with pytest.raises(ValueError, match=r"n_components is 2\.5; it must be an integer"):
        found.checked()


def test_settings_are_frozen():
    with pytest.raises(FrozenInstanceError):
        Settings().tol = 1.0


def test_settings_and_constraints_need_the_standard_library_alone():
    code = "import sys; before = set(sys.modules); import emtau_dask.settings; "
    code += "found = {name.partition('.')[0] for name in set(sys.modules) - before}; "
    code += "print(sorted(found - set(sys.stdlib_module_names)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "['emtau_dask']\n"
