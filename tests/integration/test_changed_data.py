"""A run is resumed only where the data holds what it held, also beside what a fingerprint samples."""

import os
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
from clusters import name_of, processes, seen

from emtau_dask import EMTau, FullEM, GaussianMixture
from emtau_dask.checkpoint.fingerprints import sampled
from emtau_dask.errors import CheckpointMismatchError
from emtau_dask.fit import fitting
from emtau_dask.io.sources.opening import as_source, open_source
from emtau_dask.rows import chunk as chunks

CHUNKS, CHUNK_ROWS = 80, 40
_random = np.random.default_rng(4)
ROWS = _random.normal(size=(CHUNKS * CHUNK_ROWS, 2)) + 5 * _random.integers(2, size=(CHUNKS * CHUNK_ROWS, 1))
CHUNK_OF = np.arange(len(ROWS)) // CHUNK_ROWS
SAMPLED = np.isin(CHUNK_OF, list(sampled(as_source(ROWS, ndim=2, what="X").aligned((CHUNK_ROWS,) * CHUNKS))))
SHIFTED = np.where(SAMPLED[:, None], ROWS, ROWS + 100)
"""Of 64 of 80 chunks; those that a fingerprint reads stay as they are."""
ONE_CHUNK = np.where(
    np.isin(np.arange(len(ROWS)), np.linspace(0, len(ROWS) - 1, 256).astype(int))[:, None], ROWS, ROWS + 100
)
"""All but 256 evenly spaced rows."""


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


KINDS = [stored_as_zarr, stored_as_npy, stored_as_parquet, in_memory, computed]


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Of a .npy file, as many chunks; tasks one after another."""
    monkeypatch.setattr("emtau_dask.io.formats.checks.CHUNK_BYTES", CHUNK_ROWS * 16)
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


@pytest.mark.parametrize("make", KINDS)
def test_shifted_rows_in_chunks_that_are_not_sampled(make, tmp_path):
    fit(make(ROWS, folder(tmp_path / "then")), tmp_path / "run.zarr")
    now = make(SHIFTED, folder(tmp_path / "now"))
    with pytest.raises(CheckpointMismatchError, match=r"X holds other .*chunk \d+ \(rows \d+ to \d+\)"):
        GaussianMixture.resume(tmp_path / "run.zarr", now, max_iter=6)
    same = make(ROWS, folder(tmp_path / "again"))
    resumed = GaussianMixture.resume(tmp_path / "run.zarr", same, max_iter=6)
    assert bits(resumed) == bits(fit(same, None, max_iter=6))


@pytest.mark.parametrize("make", [stored_as_zarr, computed])
def test_a_worker_of_a_cluster_refuses_them_too(make, zygote, tmp_path):
    fit(make(ROWS, folder(tmp_path / "then")), tmp_path / "run.zarr")
    now = make(SHIFTED, folder(tmp_path / "now"))
    with (
        dask.config.set(scheduler=None),
        processes(zygote, tmp_path / "cluster", 2) as cluster,
        cluster.client() as client,
        seen(client) as ran,
        pytest.raises(CheckpointMismatchError, match=r"X holds other .*chunk \d+ \("),
    ):
        GaussianMixture.resume(tmp_path / "run.zarr", now, max_iter=6)
    assert "emtau-estep" in {name_of(key) for key, *_ in ran}


@pytest.mark.parametrize("make", KINDS)
def test_shifted_rows_between_256_in_one_chunk(make, tmp_path, monkeypatch):
    monkeypatch.setattr("emtau_dask.io.formats.checks.CHUNK_BYTES", ROWS.nbytes)
    monkeypatch.setattr(f"{__name__}.CHUNK_ROWS", len(ROWS))
    fit(make(ROWS, folder(tmp_path / "then")), tmp_path / "run.zarr")
    now = make(ONE_CHUNK, folder(tmp_path / "now"))
    with pytest.raises(CheckpointMismatchError, match=rf"X holds other .*chunk 0 \(rows 0 to {len(ROWS)}\)"):
        GaussianMixture.resume(tmp_path / "run.zarr", now, max_iter=6)


@pytest.mark.parametrize(
    ("init_params", "algorithm", "max_iter"),
    [
        *((name, "em-tau", 3) for name in ("kmeans", "k-means++", "random", "random_from_data")),
        *((name, "auto", 60) for name in ("kmeans", "random_from_data")),
    ],
)
def test_no_later_start_comes_of_other_rows(init_params, algorithm, max_iter, tmp_path, monkeypatch):
    """It would be committed, and stay when the right rows are back.

    Where the algorithm is "auto", max_iter is that of both starts together.
    """
    settings = {"algorithm": algorithm, "init_params": init_params, "max_iter": max_iter}
    settings |= {"n_init": 2, "random_state": 0, "tol": 0.0}
    X = in_memory(ROWS, tmp_path)
    starts = [fitting._start]

    def first_start(*arguments):
        if not starts:
            raise KeyboardInterrupt
        return starts.pop()(*arguments)

    monkeypatch.setattr(fitting, "_start", first_start)
    with pytest.raises(KeyboardInterrupt):
        GaussianMixture(2, checkpoint=tmp_path / "run.zarr", **settings).fit(X)
    monkeypatch.undo()
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


def test_each_process_looks_at_a_chunk_once(tmp_path, monkeypatch):
    looked = []
    plain = chunks.chunk_contents

    def counting(rows, weights):
        looked.append(len(rows))
        return plain(rows, weights)

    monkeypatch.setattr(chunks, "chunk_contents", counting)
    X = in_memory(ROWS, tmp_path)
    fit(X, None)
    assert looked == []
    fit(X, tmp_path / "run.zarr")
    assert looked == [CHUNK_ROWS] * CHUNKS
    GaussianMixture.resume(tmp_path / "run.zarr", X, max_iter=7)
    assert looked == [CHUNK_ROWS] * CHUNKS * 2


@pytest.mark.parametrize("make", [stored_as_zarr, stored_as_npy, stored_as_parquet])
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
