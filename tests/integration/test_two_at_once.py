"""Several processes that continue one run, and what a commit refers to meanwhile."""

import warnings
from functools import partial

import dask
import dask.array as da
import numpy as np
import pytest
from reliability.campaigns import Bench, campaign, spread
from reliability.scenarios import Scenario
from reliability.zygote import Zygote

from emtau_dask import EMLazy, EMTau, GaussianMixture
from emtau_dask.checkpoint.reader import read_commit
from emtau_dask.storage.commits import open_log
from emtau_dask.storage.stores import LocalObjects

pytestmark = pytest.mark.kills


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    with Zygote("reliability.scenarios") as zygote:
        yield Bench(zygote, Scenario("em-tau, revisit"), tmp_path_factory.mktemp("two") / "bench")


def assert_as_it_should_be(cases):
    tally = campaign(cases)
    assert not tally.problems, "\n".join(tally.problems)


@pytest.mark.sample
def test_of_two_that_read_the_same_commit_one_finishes(bench):
    half = bench.half_done(bench.steps * 3 // 4)
    assert_as_it_should_be((f"delays {seed}", partial(bench.met, half, seed)) for seed in range(3))


def test_a_resume_while_the_original_runs(bench):
    assert_as_it_should_be((f"delays {seed}", partial(bench.crossed, seed)) for seed in range(3))


def test_one_that_was_stopped_while_another_finished_is_told_so(bench):
    steps = spread(bench.steps, 4, offset=5)
    assert_as_it_should_be((f"step {step}", partial(bench.stopped_at, step)) for step in steps)


def test_one_that_was_stopped_while_another_was_on_its_way(bench):
    steps = spread(bench.steps, 3, offset=11)
    assert_as_it_should_be(
        (f"steps {step}, {step // 3}", partial(bench.stopped_at, step, step // 3)) for step in steps
    )


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_fit_that_was_stopped_while_another_in_its_place_ran_to_its_end(bench, overwrite):
    begin = range(1, 25 if overwrite else 9, 3)
    steps = [*begin, *spread(bench.steps, 3, offset=7)]
    assert_as_it_should_be(
        (f"step {step}", partial(bench.replaced_at, step, overwrite=overwrite)) for step in steps
    )


_random = np.random.default_rng(5)
FAR = _random.normal(100.0, 0.01, (40, 2))
NEAR = np.concatenate([_random.normal(0.0, 1.0, (60, 2)), _random.normal(1.5, 1.0, (60, 2))])
_random.shuffle(NEAR)
ROWS = da.from_array(np.concatenate([FAR, NEAR]), chunks=((40, 60, 60), 2))


SETTLING = EMTau(tau=6, revisit=None)


def fitted(path, algorithm=SETTLING, max_iter=30):
    model = GaussianMixture(
        3, algorithm=algorithm, random_state=0, tol=0.0, max_iter=max_iter, checkpoint=path
    )
    with warnings.catch_warnings(), dask.config.set(scheduler="synchronous"):
        warnings.simplefilter("ignore")
        return model.fit(ROWS)


def test_a_chunk_skipped_for_ten_commits_still_has_its_state(tmp_path, appended):
    path = tmp_path / "run.zarr"
    slots = {}

    def look(log):
        state = read_commit(log, log.last).state
        if state.current is not None and state.current.row_state:
            slots[log.last] = state.current.row_state[0]

    appended.append(look)
    fitted(path, EMLazy(threshold=0.999, full_every=20), max_iter=14)
    last = max(slots)
    since = [number for number in slots if slots[number].object == slots[last].object]
    assert len(since) > 10
    assert not slots[last].read(LocalObjects(str(path)), 40)["active"].any()


def test_nothing_that_a_kept_commit_refers_to_is_removed_and_nothing_else_piles_up(tmp_path, appended):
    path = tmp_path / "run.zarr"
    sizes = []

    def look(log):
        newest = log.numbers()[-2:]
        assert newest == list(range(max(0, log.last - 1), log.last + 1))
        used = set().union(*(read_commit(log, number).references for number in newest))
        there = {key for key in log.objects.list("attempts/") if not key.endswith("/zarr.json")}
        assert there >= used
        sizes.append(len(there - used))

    appended.append(look)
    fitted(path)
    assert max(sizes) == 0


@pytest.mark.sample
def test_row_state_between_commits_does_not_pile_up(tmp_path, appended):
    """With a commit in every fifth iteration, what the other four wrote goes with the next one."""
    path = tmp_path / "run.zarr"
    unused = []

    def look(log):
        used = set().union(*(read_commit(log, number).references for number in log.numbers()[-2:]))
        there = {key for key in log.objects.list("attempts/") if not key.endswith("/zarr.json")}
        unused.append(len(there - used))

    appended.append(look)
    model = fitted(path)
    with warnings.catch_warnings(), dask.config.set(scheduler="synchronous"):
        warnings.simplefilter("ignore")
        GaussianMixture.resume(path, ROWS, max_iter=model.n_iter_ + 12, checkpoint_every=5)
    assert max(unused) == 0
    assert len(open_log(LocalObjects(str(path))).numbers()) == 2
