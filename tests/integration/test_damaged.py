"""Checkpoints that were damaged or made up: resumed to the right bits, or refused.

`benchmarks/soak.py` is the long form.
"""

import pytest
from reliability import damage, scenarios
from reliability.campaigns import Bench
from reliability.scenarios import Scenario

pytestmark = pytest.mark.kills
EACH = 25
BATCHES = 2


@pytest.fixture(scope="module", params=[False, True], ids=["apart", "together"])
def bench(request, forked_fits, tmp_path_factory):
    scenario = Scenario("em-tau, revisit", together=request.param)
    return Bench(forked_fits, scenario, tmp_path_factory.mktemp("damage") / "bench")


@pytest.fixture(scope="module")
def half(bench):
    run = bench.half_done(bench.steps * 4 // 5)
    outcome = bench.zygote.run(scenarios.resume, bench.scenario, scenarios.copied(run, f"{run}-copy"))
    assert not bench.wrong(outcome)
    return run


@pytest.mark.sample
@pytest.mark.parametrize("batch", range(BATCHES))
@pytest.mark.parametrize("lies", [False, True], ids=["damaged", "consistent lies"])
def test_what_was_altered_is_noticed(bench, half, lies, batch):
    """A process that hangs fails by `PATIENCE`; one that allocates without a bound by its address space."""
    seeds = range(EACH * batch, EACH * (batch + 1))
    counts, problems = bench.zygote.run(
        damage.resumes, bench.scenario, half, bench.undisturbed.bits, seeds, lies
    )
    assert not problems, "\n".join(problems)
    assert sum(counts.values()) == EACH
