"""Files, configs, models and checkpoints, altered at random: refused, or read rightly, within bounds.

`benchmarks/soak.py --only fuzz` is the long form. What went wrong is named by its kind and seed, which make
the same input again.
"""

import importlib

import pytest
from reliability.fuzz import running
from reliability.fuzz.oracle import CODE, FOREIGN, HUNG, MEMORY, WRONG
from reliability.zygote import Zygote
from tiers import exhaustive_but

INPUTS = 520
DEEP = 0.1
"""The least share of a kind's inputs that must get past what they meet first, and that must be read."""


@pytest.fixture(scope="module")
def fuzzers():
    with Zygote("reliability.fuzz.running") as zygote:
        yield zygote


@pytest.mark.parametrize("name", exhaustive_but({"zarr 3", "config", "checkpoint"}, running.KINDS))
def test_altered_inputs_are_refused_or_right(fuzzers, name, tmp_path):
    inputs = running.shares(INPUTS)[name]
    totals = running.attempted(fuzzers, name, range(inputs), tmp_path / "fuzz", keep=False)
    assert not totals.problems, "\n".join(totals.problems)
    assert totals.ends.total() == inputs
    assert totals.beyond(running.KINDS[name].first) >= DEEP * inputs, totals.refused_by
    assert min(totals.accepted, totals.refused) >= DEEP * inputs, totals.ends


@pytest.mark.parametrize("name", running.KINDS)
def test_what_an_input_meets_first_is_there(name):
    """Else all inputs would count as past it."""
    for prefix in running.KINDS[name].first:
        module, _, function = prefix.rpartition(".")
        members = vars(importlib.import_module(f"emtau_dask.{module}"))
        assert any(member.startswith(function) for member in members), prefix


def test_there_are_at_least_500():
    assert sum(running.shares(INPUTS).values()) >= 500


PLANTED_INPUTS = 110
"""Enough that each fault is met by an input that is certain to cause it: the first pipe is number 105."""

PLANTED = {
    "numpy with pickles": {CODE, FOREIGN},
    "room by the header": {MEMORY},
    "rows in another order": {WRONG},
    "zarr itself": {CODE, MEMORY, FOREIGN},
    "pyarrow itself": {FOREIGN},
    "any YAML": {CODE, HUNG, FOREIGN},
    "commands without a word of ours": {FOREIGN},
}


@pytest.fixture(scope="module")
def defective():
    with Zygote("reliability.fuzz.planted") as zygote:
        yield zygote


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PLANTED)
def test_planted_defects_are_found(defective, name, tmp_path):
    totals = running.attempted(defective, name, range(PLANTED_INPUTS), tmp_path / "fuzz", keep=False)
    assert PLANTED[name] <= totals.faults.keys(), "\n".join(totals.problems)
    assert all(f"{name}, seed " in problem for problem in totals.problems)
    assert len(totals.problems) == totals.faults.total() > 0


def test_every_fault_has_a_planted_defect():
    assert set.union(*PLANTED.values()) == {WRONG, CODE, HUNG, MEMORY, FOREIGN}
