"""Fits that extrapolate, sample rows and begin on samples, stopped at every stage and resumed: same bits."""

import dask.array as da
import numpy as np
import pytest
from accelerated import bits_of, few_rows_suffice, fit_and_die, interrupted, iterations, quiet_fit, resumed
from oracles import starts
from reliability.zygote import Zygote

from emtau_dask import EMSampled, EMTau
from emtau_dask.checkpoint.reader import read_newest
from emtau_dask.em import fit
from emtau_dask.em import settings as resolving
from emtau_dask.storage.commits import open_log
from emtau_dask.storage.stores import LocalObjects

pytestmark = pytest.mark.kills
ROWS, _ = starts.mixture(2200, 3, 2, separation=2.0, seed=7)
INCOMPLETE = np.where(np.random.default_rng(4).random(ROWS.shape) < 0.1, np.nan, ROWS)
WEIGHTS = np.random.default_rng(2).integers(0, 3, len(ROWS)).astype(float)
CHUNKS = (700, 0, 900, 600)
COMMON = {"n_components": 3, "random_state": 0, "tol": 0, "reg_covar": 0}
CASES = {
    "auto": COMMON | {"algorithm": "auto", "max_iter": 50, "n_init": 2, "random_state": 3},
    "auto, weights": COMMON | {"algorithm": "auto", "max_iter": 40, "n_init": 2, "sample_weight": WEIGHTS},
    "missing values": COMMON | {"algorithm": "auto", "max_iter": 50, "n_init": 2, "missing": "marginalise"},
    "missing values, em-tau": COMMON
    | {"algorithm": EMTau(tau=3), "acceleration": "quasi-newton", "max_iter": 16, "missing": "marginalise"},
    "few rows": COMMON | {"algorithm": "auto", "max_iter": 60, "tol": "statistical"},
    "annealed": COMMON | {"algorithm": "auto", "max_iter": 40, "n_init": 2},
    "measured": COMMON
    | {"algorithm": "auto", "tol": "statistical", "max_iter": 150, "random_state": 3, "n_init": 1},
    "em": COMMON | {"algorithm": "em", "acceleration": "quasi-newton", "max_iter": 14, "n_init": 2},
    "em-tau": COMMON | {"algorithm": EMTau(tau=3), "acceleration": "quasi-newton", "max_iter": 16},
    "em-sampled": COMMON
    | {
        "algorithm": EMSampled(share=0.3, most=3),
        "max_iter": 16,
        "covariance_type": "tied",
        "reg_covar": 1e-3,
        "random_state": 6,
    },
}
EVERY = pytest.mark.parametrize("case", CASES)


def rows(case="auto"):
    values = INCOMPLETE if CASES[case].get("missing") else ROWS
    return da.from_array(values, chunks=(CHUNKS, 2))


def annealed(patch):
    """Samples are too small for anything but annealing."""
    patch.setattr(resolving, "MAX_SAMPLE_SHARE", 0.01)
    patch.setattr(resolving, "MIN_ROWS_WITHOUT_ANNEALING", 10**6)


@pytest.fixture(autouse=True)
def small(request):
    with few_rows_suffice(), pytest.MonkeyPatch.context() as patch:
        if "case" in request.fixturenames and request.getfixturevalue("case") == "annealed":
            annealed(patch)
        if "case" in request.fixturenames and request.getfixturevalue("case") == "few rows":
            patch.setattr(resolving, "MIN_SAMPLE_ROWS", 10**6)
            patch.setattr(fit, "has_few_rows", lambda *shape: True)
        yield


def options_of(case):
    weights = CASES[case].get("sample_weight")
    return {} if weights is None else {"sample_weight": weights}


def committed(folder):
    """Iterations in the newest commit of all starts' records, and its number."""
    log = open_log(LocalObjects(str(folder)))
    return read_newest(log).number


@pytest.fixture(scope="module")
def undisturbed():
    """The bits of each case's fit without a checkpoint, and the stage of each of its iterations."""
    found = {}

    def of(case):
        if case not in found:
            with iterations() as made:
                model = quiet_fit(rows(case), **CASES[case])
            found[case] = bits_of(model), [one.stage for one in made]
        return found[case]

    return of


def stopped(case, folder, iteration):
    """Fit into a folder until an iteration is scored but not saved."""
    with interrupted(iteration), pytest.raises(KeyboardInterrupt):
        quiet_fit(rows(case), checkpoint=folder, **CASES[case])


def test_a_gap_is_measured_twice_in_one_case():
    """Over the rows that are active, in vain, and over all rows; both count as work."""
    with iterations() as made:
        model = quiet_fit(rows(), **CASES["measured"])
    in_vain = [one for one in made if one.state.progress.gap_of_all_rows]
    assert 0 < len(in_vain) < len(made)
    first = in_vain[0].record
    assert first.full_pass
    assert first.rows * 1.1 < first.active_rows < 3 * first.rows
    last = model.history_[-1]
    assert last.full_pass
    assert 5 * last.rows <= last.active_rows < 18 * last.rows


def rounds(expected):
    """Records of a fit's short runs, which process no chunk, before its first iteration."""
    return sum("chunks_processed=0" in record for record in expected["history"])


@pytest.mark.parametrize("case", ["few rows"])
def test_a_case_has_short_runs(case, undisturbed):
    assert rounds(undisturbed(case)[0]) >= 2


def differences(model, expected):
    found = bits_of(model)
    return [name for name in expected if found[name] != expected[name]]


@EVERY
def test_stopped_in_every_iteration_and_resumed_each_time_it_has_the_same_bits(case, undisturbed, tmp_path):
    """Each attempt saves one iteration, and is stopped in the next; short runs are saved together."""
    expected, stages = undisturbed(case)
    stopped(case, tmp_path, rounds(expected) + 1)
    attempts = 1
    while True:
        with interrupted(2):
            try:
                model = resumed(tmp_path, rows(case), **options_of(case))
                break
            except KeyboardInterrupt:
                attempts += 1
        assert attempts <= len(stages) + 1
    assert not differences(model, expected)
    assert attempts >= len(stages) - 1


@EVERY
def test_stopped_once_at_each_stage_and_resumed_it_has_the_same_bits(case, undisturbed, tmp_path):
    """Stopped in the first iteration of a stage, and in the one after a refused step."""
    expected, stages = undisturbed(case)
    firsts = {stages.index(stage) + 1 for stage in stages}
    if "refused" in stages:
        firsts.add(stages.index("refused") + 2)
    before = rounds(expected)
    for iteration in sorted({1} | {before + first for first in firsts}):
        folder = tmp_path / str(iteration)
        stopped(case, folder, iteration)
        model = resumed(folder, rows(case), **options_of(case))
        assert not differences(model, expected), iteration


@EVERY
def test_without_a_commit_after_each_iteration_it_has_the_same_bits(case, undisturbed, tmp_path):
    expected, stages = undisturbed(case)
    for iteration in (len(stages) // 2, len(stages) - 1):
        folder = tmp_path / str(iteration)
        with interrupted(iteration), pytest.raises(KeyboardInterrupt):
            quiet_fit(rows(case), checkpoint=folder, checkpoint_every=4, **CASES[case])
        assert not differences(resumed(folder, rows(case), **options_of(case)), expected), iteration


def test_the_cases_have_every_stage(undisturbed):
    assert set(undisturbed("auto")[1]) >= {"contest", "sample 0", "sample 1", "cycle", "all rows"}
    with pytest.MonkeyPatch.context() as patch:
        annealed(patch)
        assert set(undisturbed("annealed")[1]) >= {"annealed", "contest", "all rows"}
    assert undisturbed("measured")[0]["end"][0] == "tol"
    stages = undisturbed("em-sampled")[1]
    assert set(stages) == {"cycle", "all rows", "refused"}
    assert stages.index("refused") < CASES["em-sampled"]["max_iter"] - 2


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("auto", "contest"),
        ("auto", "sample 1"),
        ("auto", "cycle"),
        ("em-sampled", "refused"),
    ],
)
def test_killed_while_it_makes_an_iteration_and_resumed_it_has_the_same_bits(
    name, stage, undisturbed, tmp_path
):
    expected, stages = undisturbed(name)
    iteration = stages.index(stage) + 2
    with Zygote("accelerated") as zygote:
        assert zygote.run(fit_and_die, rows(name), str(tmp_path), iteration, CASES[name]) is None
    assert committed(tmp_path) > 0
    assert not differences(resumed(tmp_path, rows(name)), expected)


def test_a_fit_that_max_iter_ended_goes_on_with_a_larger_one_on_all_rows(undisturbed, tmp_path):
    """Its bound does not fall, and what it had is kept."""
    settings = CASES["auto"] | {"max_iter": 32}
    short = quiet_fit(rows(), checkpoint=tmp_path, **settings)
    longer = resumed(tmp_path, rows(), max_iter=40)
    assert longer.n_iter_ == 40
    assert [repr(record) for record in longer.history_[:32]] == [repr(record) for record in short.history_]
    assert longer.lower_bound_ >= short.lower_bound_


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("few", [20, 200])
def test_where_hardly_a_row_has_weight_no_sample_is_empty_and_all_can_be_committed(seed, few, tmp_path):
    """Samples are planned by the number of rows; those left too small by weights of 0 are not scored."""
    weights = np.zeros(len(ROWS))
    weights[np.random.default_rng(seed).choice(len(ROWS), few, replace=False)] = 1.0
    settings = COMMON | {"algorithm": "auto", "max_iter": 30, "reg_covar": 1e-2, "n_init": 2}
    settings |= {"sample_weight": weights}
    expected = bits_of(quiet_fit(rows(), **settings))
    with interrupted(9), pytest.raises(KeyboardInterrupt):
        quiet_fit(rows(), checkpoint=tmp_path, **settings)
    model = resumed(tmp_path, rows(), sample_weight=weights)
    assert not differences(model, expected)
    assert all(np.isfinite(record.lower_bound) for record in model.history_)
    assert min(record.active_rows for record in model.history_) > 0
