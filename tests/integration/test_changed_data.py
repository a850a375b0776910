"""Data that change under a fit, or between a stop and a resume, are refused by chunk and rows, whole.

Expected results are those of fits whose data stayed as they were.
"""

import os
import re
import shutil
import warnings
from pathlib import Path

import dask
import dask.array as da
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr
from clusters import name_of, seen
from tiers import exhaustive_but

from emtau_dask import EMTau, FullEM, GaussianMixture
from emtau_dask.checkpoint.fingerprints import sampled
from emtau_dask.data.opening import as_source, open_source
from emtau_dask.em import fit as fitting
from emtau_dask.errors import CheckpointMismatchError, InvalidDataError
from emtau_dask.estimator.resuming import open_saved

pytest_plugins = "s3server"

CHUNKS, CHUNK_ROWS = 80, 40
_random = np.random.default_rng(4)
ROWS = _random.normal(size=(CHUNKS * CHUNK_ROWS, 2)) + 5 * _random.integers(2, size=(CHUNKS * CHUNK_ROWS, 1))
CHUNK_OF = np.arange(len(ROWS)) // CHUNK_ROWS
SAMPLED = np.isin(CHUNK_OF, list(sampled(as_source(ROWS, ndim=2, what="X").aligned((CHUNK_ROWS,) * CHUNKS))))
SHIFTED = np.where(SAMPLED[:, None], ROWS, ROWS + 100)
"""Of 64 of 80 chunks; those that a fingerprint reads stay as they are."""


def stored_as_zarr(rows, folder):
    zarr.create_array(folder / "rows.zarr", data=rows, chunks=(CHUNK_ROWS, 2))
    return open_source(str(folder / "rows.zarr"))


def stored_as_npy(rows, folder):
    np.save(folder / "rows.npy", rows)
    return open_source(str(folder / "rows.npy"))


def stored_as_parquet(rows, folder):
    table = pa.table({"a": rows[:, 0], "b": rows[:, 1]})
    pq.write_table(table, folder / "rows.parquet", row_group_size=CHUNK_ROWS)
    return open_source(str(folder / "rows.parquet"))


def in_memory(rows, folder):
    return da.from_array(rows, chunks=(CHUNK_ROWS, 2))


def computed(rows, folder):
    return da.from_array(rows, chunks=(CHUNK_ROWS, 2)).map_blocks(np.asfortranarray)


def as_it_is(rows, folder):
    return rows.copy()


KINDS = [stored_as_zarr, stored_as_npy, stored_as_parquet, in_memory, as_it_is, computed]


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Of a .npy file, as many chunks; tasks one after another."""
    monkeypatch.setattr("emtau_dask.data.source.CHUNK_BYTES", CHUNK_ROWS * 16)
    with warnings.catch_warnings(), dask.config.set(scheduler="synchronous"):
        warnings.simplefilter("ignore")
        yield


def fit(X, checkpoint, algorithm=None, max_iter=4, **data):
    model = GaussianMixture(
        2,
        algorithm=algorithm or FullEM(),
        init_params="random_from_data",
        random_state=0,
        tol=0.0,
        max_iter=max_iter,
        checkpoint=checkpoint,
    )
    return model.fit(X, **data)


def bits(model):
    return [array.tobytes() for array in (model.weights_, model.means_, model.covariances_)]


def folder(path):
    path.mkdir()
    return path


@pytest.mark.parametrize("make", exhaustive_but({stored_as_zarr, computed}, KINDS))
def test_shifted_rows_in_chunks_that_are_not_sampled(make, tmp_path):
    fit(make(ROWS, folder(tmp_path / "then")), tmp_path / "run.zarr")
    now = make(SHIFTED, folder(tmp_path / "now"))
    with pytest.raises(CheckpointMismatchError, match=r"X holds other .*chunk \d+ \(rows \d+ to \d+\)"):
        GaussianMixture.resume(tmp_path / "run.zarr", now, max_iter=6)
    same = make(ROWS, folder(tmp_path / "again"))
    resumed = GaussianMixture.resume(tmp_path / "run.zarr", same, max_iter=6)
    assert bits(resumed) == bits(fit(same, None, max_iter=6))


@pytest.mark.cluster
@pytest.mark.parametrize("make", [stored_as_zarr, computed])
def test_a_worker_of_a_cluster_refuses_them_too(make, two_workers, tmp_path):
    fit(make(ROWS, folder(tmp_path / "then")), tmp_path / "run.zarr")
    now = make(SHIFTED, folder(tmp_path / "now"))
    with (
        dask.config.set(scheduler=None),
        seen(two_workers) as ran,
        pytest.raises(CheckpointMismatchError, match=r"X holds other .*chunk \d+ \("),
    ):
        GaussianMixture.resume(tmp_path / "run.zarr", now, max_iter=6)
    assert "emtau-estep" in {name_of(key) for key, *_ in ran}


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("row", [0, 1234, len(ROWS) - 1])
def test_one_value_of_one_row(make, row, tmp_path):
    fit(make(ROWS, folder(tmp_path / "then")), tmp_path / "run.zarr")
    other = ROWS.copy()
    other[row, 1] = np.nextafter(other[row, 1], np.inf)
    now = make(other, folder(tmp_path / "now"))
    with pytest.raises(
        CheckpointMismatchError, match=r"X holds other .*chunk \d+ \(rows \d+ to \d+\)"
    ) as error:
        GaussianMixture.resume(tmp_path / "run.zarr", now, max_iter=6)
    first, last = map(int, re.search(r"rows (\d+) to (\d+)", str(error.value)).groups())
    assert first <= row < last


@pytest.mark.parametrize(
    ("init_params", "algorithm", "max_iter"),
    [
        ("kmeans", "em-tau", 3),
        pytest.param("kmeans", "auto", 20, marks=pytest.mark.exhaustive),
        pytest.param("k-means++", "em-tau", 3, marks=pytest.mark.exhaustive),
        pytest.param("random", "em-tau", 3, marks=pytest.mark.exhaustive),
        pytest.param("random_from_data", "em-tau", 3, marks=pytest.mark.exhaustive),
        ("random_from_data", "auto", 60),
    ],
)
def test_no_later_start_comes_of_other_rows(init_params, algorithm, max_iter, tmp_path, monkeypatch):
    """It would be committed, and stay when the right rows are back.

    Where the algorithm is "auto", max_iter is that of both starts together.
    """
    settings = {"algorithm": algorithm, "init_params": init_params, "max_iter": max_iter}
    settings |= {"n_init": 2, "random_state": 0, "tol": 0.0}
    X = in_memory(ROWS, tmp_path)
    starts = [fitting._starting_parameters]
    monkeypatch.setattr(fitting, "has_few_rows", lambda *shape: False)  # so that each start is committed

    def first_start(*arguments):
        if not starts:
            raise KeyboardInterrupt
        return starts.pop()(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(fitting, "_starting_parameters", first_start)
        with pytest.raises(KeyboardInterrupt):
            GaussianMixture(2, checkpoint=tmp_path / "run.zarr", **settings).fit(X)
    with pytest.raises(CheckpointMismatchError, match="X holds other values"):
        GaussianMixture.resume(tmp_path / "run.zarr", in_memory(SHIFTED, tmp_path))
    resumed = GaussianMixture.resume(tmp_path / "run.zarr", X)
    assert bits(resumed) == bits(GaussianMixture(2, **settings).fit(X))


def test_other_weights_in_chunks_that_are_not_sampled(tmp_path):
    weights = np.ones(len(ROWS))
    X = in_memory(ROWS, tmp_path)
    fit(X, tmp_path / "run.zarr", sample_weight=weights)
    other = np.where(SAMPLED, weights, 2.0)
    with pytest.raises(CheckpointMismatchError, match=r"sample_weight holds other values.*chunk \d+ \(rows"):
        GaussianMixture.resume(tmp_path / "run.zarr", X, sample_weight=other, max_iter=6)


def test_rows_that_changed_while_nobody_read_them(tmp_path):
    """A chunk without active rows is not read: it is compared when a revisit reads it."""
    algorithm = EMTau(2, revisit=4)
    fit(in_memory(ROWS, tmp_path), tmp_path / "run.zarr", algorithm, max_iter=3)
    now = in_memory(SHIFTED, tmp_path)
    with pytest.raises(CheckpointMismatchError, match=r"X holds other values .*chunk \d+"):
        GaussianMixture.resume(tmp_path / "run.zarr", now, max_iter=8)


class Acting(FullEM):
    """EM that does something once after its third pass."""

    def schedule(self, summary):
        if summary.iteration == 3:
            self.act()
        return super().schedule(summary)


def acting(act):
    policy = Acting()
    policy.act = act
    return policy


def changed_zarr(rows, folder):
    zarr.create_array(folder / "rows.zarr", data=rows, chunks=(CHUNK_ROWS, 2))
    stored = zarr.open_array(folder / "rows.zarr", mode="r+")
    return str(folder / "rows.zarr"), lambda row: stored.__setitem__(row, stored[row] + 1)


def changed_npy(rows, folder):
    stored_as_npy(rows, folder)
    mapped = np.load(folder / "rows.npy", mmap_mode="r+")

    def change(row):
        mapped[row] += 1
        mapped.flush()

    return str(folder / "rows.npy"), change


def changed_parquet(rows, folder):
    stored_as_parquet(rows, folder)

    def change(row):
        other = rows.copy()
        other[row] += 1
        stored_as_parquet(other, folder)

    return str(folder / "rows.parquet"), change


def changed_in_memory(rows, folder):
    mine = rows.copy()
    return mine, lambda row: mine.__setitem__(row, mine[row] + 1)


def changed_graph(rows, folder):
    (folder / "row").write_text("")

    def made(block, block_info=None):
        (begin, end), text = block_info[0]["array-location"][0], (folder / "row").read_text()
        here = text and begin <= int(text) < end
        return block + (np.arange(begin, end) == int(text))[:, None] if here else block + 0

    blocks = da.from_array(rows, chunks=(CHUNK_ROWS, 2)).map_blocks(made, dtype=rows.dtype)
    return blocks, lambda row: (folder / "row").write_text(str(row))


CHANGED = [changed_zarr, changed_npy, changed_parquet, changed_in_memory, changed_graph]


@pytest.mark.parametrize("scheduler", ["synchronous", "threads"])
@pytest.mark.parametrize("make", CHANGED)
def test_one_row_that_changes_in_the_middle_of_a_fit(make, scheduler, tmp_path):
    X, change = make(ROWS, tmp_path)
    with (
        dask.config.set(scheduler=scheduler),
        pytest.raises(
            InvalidDataError, match=r"X holds other values than when this fit first read it"
        ) as error,
    ):
        fit(X, tmp_path / "run.zarr", acting(lambda: change(1234)), max_iter=6)
    first, last = map(int, re.search(r"rows (\d+) to (\d+)", str(error.value)).groups())
    assert first <= 1234 < last
    if make is changed_graph:
        assert f"your graph gave other values for chunk {1234 // CHUNK_ROWS}" in str(error.value)
        (tmp_path / "row").write_text("")
        resumed = GaussianMixture.resume(tmp_path / "run.zarr", X, algorithm=acting(lambda: None), max_iter=6)
        assert bits(resumed) == bits(fit(X, None, max_iter=6))


@pytest.mark.cluster
@pytest.mark.parametrize("make", [changed_zarr, changed_npy, changed_parquet, changed_graph])
@pytest.mark.usefixtures("two_workers")
def test_on_a_cluster_too(make, tmp_path):
    X, change = make(ROWS, tmp_path)
    chunk = rf"chunk {1234 // CHUNK_ROWS} \(rows"
    with dask.config.set(scheduler=None), pytest.raises(InvalidDataError, match=chunk):
        fit(X, None, acting(lambda: change(1234)), max_iter=6)


@pytest.mark.cluster
@pytest.mark.usefixtures("two_workers")
def test_rows_in_memory_are_no_graph_on_a_cluster(tmp_path):
    """They are sent to workers as blocks; what another machine scored must be the same all the same."""
    with dask.config.set(scheduler=None):
        fit(ROWS, tmp_path / "run.zarr", sample_weight=np.ones(len(ROWS)))
    assert open_saved(tmp_path / "run.zarr").digests.keys() == {("X", ""), ("sample_weight", "")}


@pytest.mark.exhaustive
def test_in_a_bucket_too(s3, tmp_path):
    """During the fit, and again between a stop and a resume."""
    _, change = changed_zarr(ROWS, tmp_path)
    X = s3.upload(tmp_path / "rows.zarr", "rows.zarr")

    def act():
        change(1234)
        s3.upload(tmp_path / "rows.zarr", "rows.zarr")

    with pytest.raises(InvalidDataError, match=rf"chunk {1234 // CHUNK_ROWS} \(rows"):
        fit(X, tmp_path / "run.zarr", acting(act), max_iter=6)
    with pytest.raises(CheckpointMismatchError, match=rf"chunk {1234 // CHUNK_ROWS} \(rows"):
        GaussianMixture.resume(tmp_path / "run.zarr", X, algorithm=acting(lambda: None), max_iter=6)


def test_weights_that_change_in_the_middle_of_a_fit(tmp_path):
    weights = np.ones(len(ROWS))
    with pytest.raises(InvalidDataError, match=r"sample_weight holds other values .*chunk 0 "):
        fit(ROWS, None, acting(lambda: weights.__setitem__(7, 2.0)), max_iter=6, sample_weight=weights)


def test_responsibilities_that_change_before_they_are_used(tmp_path, monkeypatch):
    """What is known then is what a fingerprint samples: they are read whole once, for the start."""
    given = np.full((len(ROWS), 2), 0.5)
    given[:, 0] += np.where(np.arange(len(ROWS)) % 2, 0.25, -0.25)
    given[:, 1] = 1 - given[:, 0]
    with monkeypatch.context() as patch:
        patch.setattr(fitting, "_starting_parameters", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fit(ROWS, tmp_path / "run.zarr", responsibilities_init=given)
    other, row = given.copy(), int(np.argmax(SAMPLED))
    other[row] = given[row, ::-1]
    with pytest.raises(CheckpointMismatchError, match="responsibilities_init holds other values"):
        GaussianMixture.resume(tmp_path / "run.zarr", ROWS, responsibilities_init=other)
    resumed = GaussianMixture.resume(tmp_path / "run.zarr", ROWS, responsibilities_init=given)
    assert bits(resumed) == bits(fit(ROWS, None, responsibilities_init=given))


def interrupted(*arguments):
    raise KeyboardInterrupt


def test_a_row_that_changes_between_the_start_and_the_first_pass(tmp_path, monkeypatch):
    rows, started = ROWS.copy(), fitting._starting_parameters

    def start(*arguments):
        found = started(*arguments)
        rows[100] += 1
        return found

    monkeypatch.setattr(fitting, "_starting_parameters", start)
    with pytest.raises(InvalidDataError, match=r"chunk 2 \(rows 80 to 120\)"):
        GaussianMixture(2, algorithm="em", init_params="kmeans", random_state=0).fit(rows)


def test_a_missing_value_that_appears_is_a_change_and_no_bad_row(tmp_path):
    """The row would be refused as such, were it there from the beginning."""
    rows = ROWS.copy()
    with pytest.raises(InvalidDataError, match="X holds other values than when this fit first read it"):
        fit(rows, None, acting(lambda: rows.__setitem__((40, 1), np.nan)), max_iter=6)


class TestWhatWasNotChecked:
    def test_rows_that_a_resume_had_no_need_to_read(self, tmp_path):
        X = in_memory(ROWS, tmp_path)
        fit(X, tmp_path / "run.zarr")
        resumed = GaussianMixture.resume(tmp_path / "run.zarr", X)
        note = f"64 of {CHUNKS} chunks of X were not read again"
        assert [text[: len(note)] for text in resumed.history_.notes] == [note]
        assert note in str(resumed.summary())

    def test_nothing_after_a_pass_over_all_rows(self, tmp_path):
        X = in_memory(ROWS, tmp_path)
        assert fit(X, tmp_path / "run.zarr").history_.notes == ()
        assert GaussianMixture.resume(tmp_path / "run.zarr", X, max_iter=6).history_.notes == ()


@pytest.mark.parametrize(
    "make", exhaustive_but({stored_as_zarr}, [stored_as_zarr, stored_as_npy, stored_as_parquet])
)
def test_a_copy_elsewhere_and_touched_files_are_the_same_data(make, tmp_path):
    then = make(ROWS, folder(tmp_path / "then"))
    whole = bits(fit(then, None, max_iter=6))
    fit(then, tmp_path / "run.zarr")
    shutil.copytree(tmp_path / "run.zarr", tmp_path / "run-2.zarr")
    for file in filter(Path.is_file, (tmp_path / "then").rglob("*")):
        os.utime(file, (0, 0))
    assert bits(GaussianMixture.resume(tmp_path / "run.zarr", then, max_iter=6)) == whole
    shutil.copytree(tmp_path / "then", tmp_path / "elsewhere", copy_function=shutil.copyfile)
    shutil.rmtree(tmp_path / "then")
    (place,) = (tmp_path / "elsewhere").iterdir()
    copy = open_source(str(place))
    assert bits(GaussianMixture.resume(tmp_path / "run-2.zarr", copy, max_iter=6)) == whole
