"""Fits killed by SIGKILL at steps that change the disk, and at random instants.

`benchmarks/soak.py` is the long form.
"""

import random
from functools import partial

import pytest
from reliability.campaigns import Bench, campaign, spread
from reliability.scenarios import EVERY, SPECIAL
from reliability.zygote import Zygote

pytestmark = pytest.mark.kills
SCENARIOS = EVERY + SPECIAL
SAMPLE = {3, 15, 21}  # an algorithm, weights and row state together with it
NUMBERS = [
    pytest.param(
        number,
        marks=pytest.mark.sample if number in SAMPLE else () if number % 3 == 0 else pytest.mark.soak,
    )
    for number in range(len(SCENARIOS))
]


@pytest.fixture(scope="module")
def zygote():
    with Zygote("reliability.scenarios") as started:
        yield started


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: str(SCENARIOS[number]))
def test_a_killed_fit_is_resumed_to_the_same_bits(zygote, tmp_path, number):
    """Steps are taken at another offset in each scenario, so that together they are of every kind."""
    bench = Bench(zygote, SCENARIOS[number], tmp_path / "bench")
    chance = random.Random(number)
    steps = spread(bench.steps, 3, offset=7 * number)
    cases = [(f"step {step}", partial(bench.killed_at, step)) for step in steps]
    first, second = (chance.random() * bench.seconds for _ in range(2))
    cases.append((f"instants {first}, {second}", partial(bench.killed_after, first, (second,))))
    tally = campaign(cases)
    assert not tally.problems, "\n".join(tally.problems)
    assert tally.counts["resumed"]


def test_a_fit_killed_while_it_replaces_a_finished_run_leaves_one_of_them_or_none_begun(zygote, tmp_path):
    bench = Bench(zygote, SCENARIOS[0], tmp_path / "bench")
    steps = spread(120, 10)
    tally = campaign((f"step {step}", partial(bench.killed_replacing, step)) for step in steps)
    assert not tally.problems, "\n".join(tally.problems)
    assert tally.counts["resumed"]
    assert tally.counts["began anew"]
