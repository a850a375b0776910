"""Threads change no bit of a fit that samples and extrapolates; chunks change it by rounding; each is read
hardly more often than all rows are scored.

Where chunkings are compared, the same steps were accepted and as many rows scored in each iteration.
"""

import warnings

import dask
import dask.array as da
import numpy as np
import pytest
import zarr
from accelerated import bits_of, few_rows_suffice, iterations, quiet_fit
from counting import Reads
from oracles import agree, starts
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture as SklearnMixture
from tiers import exhaustive_but
from zarr.storage import LocalStore

from emtau_dask import EMSampled, EMTau
from emtau_dask.em import loop, sampling

N, CHUNK = 6000, 500
ROWS, _ = starts.mixture(N, 3, 2, separation=4.0, seed=5)
WEIGHTS = np.random.default_rng(2).integers(0, 3, N).astype(float)
IN_MEMORY = "auto, starts in memory"
CASES = {
    "auto": {"algorithm": "auto", "max_iter": 60, "n_init": 2},
    IN_MEMORY: {"algorithm": "auto", "max_iter": 60, "n_init": 4},
    "em": {"algorithm": "em", "acceleration": "quasi-newton", "max_iter": 12},
    "em-tau": {"algorithm": EMTau(tau=3), "acceleration": "quasi-newton", "max_iter": 12},
    "em-sampled": {"algorithm": EMSampled(share=0.3, most=3), "max_iter": 12},
}
EVERY = pytest.mark.parametrize("case", CASES)


@pytest.fixture(autouse=True)
def small(request):
    case = getattr(request.node, "callspec", None)
    in_memory = case is not None and case.params.get("case") == IN_MEMORY
    with few_rows_suffice(in_memory=N // 16 if in_memory else 0):
        yield


def settings(case, **more):
    return {"n_components": 3, "tol": 0, "reg_covar": 0, "random_state": 0} | CASES[case] | more


@EVERY
@pytest.mark.parametrize("source", ["dask", "zarr"])
def test_threads_change_no_bit(tmp_path, case, source):
    X = da.from_array(ROWS, chunks=(CHUNK, 2))
    if source == "zarr":
        X = zarr.create_array(tmp_path / "X.zarr", data=ROWS, chunks=(CHUNK, 2))
    one = bits_of(quiet_fit(X, **settings(case)))
    for workers in (1, 2, 4):
        found = bits_of(quiet_fit(X, workers=workers, **settings(case)))
        assert [name for name in one if found[name] != one[name]] == [], workers


@pytest.mark.parametrize("case", exhaustive_but({"auto", "em-tau"}, CASES))
@pytest.mark.exhaustive
def test_what_is_cached_changes_no_bit(tmp_path, case):
    """Rows in memory, in files, and read again each time."""
    X = zarr.create_array(tmp_path / "X.zarr", data=ROWS, chunks=(CHUNK, 2))
    found = []
    for size in (0, 2000, 2**25):
        with dask.config.set({"emtau.cache-bytes": size}):
            found.append(bits_of(quiet_fit(X, **settings(case))))
    for other in found[1:]:
        assert [name for name in other if found[0][name] != other[name]] == []


def decisions(model):
    return [(record.accepted, record.active_rows, record.full_pass) for record in model.history_]


@EVERY
@pytest.mark.parametrize("chunking", ["ragged", "zero-row-chunks", "features-split"])
@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
def test_chunks_change_it_by_rounding(case, chunking, weighted):
    """Few iterations: extrapolation and small samples let a difference grow, as they do distances."""
    more = {"sample_weight": WEIGHTS} if weighted else {}
    options = settings(case, max_iter={"auto": 34, IN_MEMORY: 24}.get(case, 9)) | more
    with iterations() as made:
        whole = quiet_fit(starts.chunked(ROWS, "one-chunk"), **options)
    assert {one.kind for one in made} > {"given", "plain"}
    split = quiet_fit(starts.chunked(ROWS, chunking), **options)
    assert decisions(split) == decisions(whole)
    for name in ("weights_", "means_", "covariances_", "lower_bounds_"):
        assert agree.worst(getattr(split, name), getattr(whole, name)) <= 1e-10, name


@pytest.mark.parametrize("chunking", ["ragged", "zero-row-chunks"])
def test_whole_fits_end_at_the_same_optimum_under_any_chunking(chunking):
    options = settings("auto") | {"tol": "auto", "max_iter": 300}
    whole, split = (quiet_fit(starts.chunked(ROWS, name), **options) for name in ("one-chunk", chunking))
    assert split.stop_reason_ == whole.stop_reason_ == "tol"
    assert split.lower_bound_ == pytest.approx(whole.lower_bound_, abs=3 * max(whole.gap_, split.gap_))


@pytest.fixture
def few_drawn(monkeypatch):
    """Starts draw a few rows, as of large data, and not all that there are."""
    monkeypatch.setattr(sampling, "MIN_SAMPLE_ROWS", 60)
    monkeypatch.setattr(sampling, "MAX_SAMPLE_ROWS", 60)


def counted(path, **options):
    """Fit stored rows; return the model, its iterations, and how often each chunk was read before each."""
    store = Reads(LocalStore(path / "X.zarr"))
    zarr.create_array(store=store, data=ROWS, chunks=(CHUNK, 2))
    store = Reads(LocalStore(path / "X.zarr", read_only=True))
    before, plain = [], loop.advance

    def noted(*arguments):
        before.append(np.bincount(store.chunks, minlength=N // CHUNK))
        return plain(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "advance", noted)
        with iterations() as made:
            model = quiet_fit(zarr.open_array(store=store, mode="r"), **options)
    return model, made, np.array([*before, np.bincount(store.chunks, minlength=N // CHUNK)])


@pytest.mark.parametrize("n_init", [1, 3])
@pytest.mark.parametrize("size", ["1 kiB", "1 MiB"])
def test_chunks_are_read_once_for_samples_and_once_for_each_pass_over_all_rows(
    few_drawn, tmp_path, size, n_init
):
    """Starts, samples and cycles read nothing else, whether rows are cached in memory or in files."""
    with dask.config.set({"emtau.cache-bytes": size}):
        model, made, counts = counted(tmp_path, **settings("auto", n_init=n_init, max_iter=60))
    stages = [one.stage for one in made]
    assert set(stages) >= {"cycle", "all rows"}
    assert any(stage.startswith("sample") for stage in stages)
    full = sum(record.full_pass for record in model.history_)
    assert counts[-1].max() <= full + 2
    for one, reads in zip(made, np.diff(counts, axis=0), strict=True):
        assert set(reads) == {int(one.record.full_pass)}, one.stage
    assert set(counts[0]) == {1}


def test_bytes_of_rows_in_memory_are_not_counted_and_those_in_files_are(few_drawn, tmp_path):
    read = {}
    for size in ("1 kiB", "1 MiB"):
        with dask.config.set({"emtau.cache-bytes": size}):
            (tmp_path / size).mkdir()
            model, made, _ = counted(tmp_path / size, **settings("auto", max_iter=40))
        read[size] = {
            one.record.bytes_read for one in made if not one.record.full_pass and one.record.iteration > 1
        }
        full = [record.bytes_read for record in model.history_ if record.full_pass]
        assert len(set(full)) == 1
    assert read["1 MiB"] == {0}
    assert min(read["1 kiB"]) > 0
    assert max(read["1 kiB"]) < full[0] / 4


def test_samples_that_are_left_make_room_in_memory(few_drawn, tmp_path):
    """Memory that holds the samples alone, or the active rows alone, is enough: nothing goes to files.

    A sixteenth and a 64th of the rows are samples, 469 rows of 18 bytes; a sixteenth are active, and row
    state takes at most a quarter of the limit. All of them together would need 18 kB.
    """
    with dask.config.set({"emtau.cache-bytes": 12_000}):
        model, made, counts = counted(tmp_path, **settings("auto", n_init=3, max_iter=60))
    assert {one.stage for one in made} >= {"contest", "sample 1", "cycle", "all rows"}
    full = [record.full_pass for record in model.history_]
    assert [record.bytes_read > 0 for record in model.history_] == full
    assert set(counts[-1]) == {sum(full) + 1}


@pytest.mark.parametrize("algorithm", ["auto", "em"])
def test_threads_change_no_bit_of_a_gap_that_is_measured(tmp_path, algorithm):
    X = zarr.create_array(tmp_path / "X.zarr", data=ROWS, chunks=(CHUNK, 2))
    options = settings("auto", algorithm=algorithm, tol="statistical", max_iter=200)
    if algorithm == "em":
        options |= {"acceleration": "quasi-newton", "n_init": 1}
    model = quiet_fit(X, **options)
    last = model.history_[-1]
    assert (model.stop_reason_, last.full_pass) == ("tol", True)
    assert last.active_rows > 1.2 * last.rows
    for workers in (2, 4):
        assert bits_of(quiet_fit(X, workers=workers, **options)) == bits_of(model)


@pytest.mark.parametrize("seed", range(3))
def test_the_gap_where_a_fit_stops_is_that_to_scikit_learns_end(seed):
    """From the same parameters, scikit-learn's EM goes on to its limit."""
    options = settings("auto", tol="statistical", max_iter=300, random_state=seed)
    model = quiet_fit(da.from_array(ROWS, chunks=(CHUNK, 2)), **options)
    assert model.stop_reason_ == "tol"
    further = SklearnMixture(
        3,
        reg_covar=0,
        tol=1e-15,
        max_iter=5000,
        weights_init=model.weights_,
        means_init=model.means_,
        precisions_init=model.precisions_,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        further.fit(ROWS)
    gap = further.score(ROWS) - model.lower_bound_
    assert gap / 3 < model.gap_ < 3 * gap
