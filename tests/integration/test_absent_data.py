"""Chunks of zarr data that are not stored are counted and said; what is no whole object is refused.

Counts are those of chunks that were never written; rows are those that zarr reads.
"""

import errno
import os
import warnings

import numpy as np
import pytest
import zarr

from emtau_dask import FullEM, GaussianMixture, InvalidDataError
from emtau_dask.data.opening import open_source
from emtau_dask.data.source import chunk_ranges

pytest_plugins = "s3server"

N, D = 1000, 4
_random = np.random.default_rng(2)
ROWS = _random.normal(size=(N, D)) + 4 * _random.integers(2, size=(N, 1))
LAYOUTS = {
    "plain": {"chunks": (100, D)},
    "uncompressed": {"chunks": (100, D), "compressors": None},
    "format 2": {"chunks": (100, D), "zarr_format": 2},
    "two across, last one short": {"chunks": (150, 3)},
    "shards": {"chunks": (50, 2), "shards": (200, 4)},
    "shards, last one short": {"chunks": (70, 2), "shards": (210, 4)},
    "shards, their index first": {"chunks": (50, D), "shards": (250, D), "index": "start"},
}
WHERE = ["here", "in a bucket"]
REFUSAL = r"rows \d+ to \d+ of the zarr array .*rows\.zarr cannot be read"


def written(path, left_out, chunks, fill_value=0.0, index="end", shards=None, compressors="auto", **options):
    """Write `ROWS` but for some chunks, by their number in C order; return how many there are."""
    if shards is not None:
        codec = zarr.codecs.ShardingCodec(chunk_shape=chunks, index_location=index)
        array = zarr.create(
            store=path, shape=(N, D), chunks=shards, dtype="f8", codecs=[codec], fill_value=fill_value
        )
    else:
        array = zarr.create_array(
            path,
            shape=(N, D),
            chunks=chunks,
            dtype="f8",
            fill_value=fill_value,
            compressors=compressors,
            **options,
        )
    places = [(i, j) for i in range(0, N, chunks[0]) for j in range(0, D, chunks[1])]
    for number, (i, j) in enumerate(places):
        if number not in left_out:
            here = slice(i, i + chunks[0]), slice(j, j + chunks[1])
            array[here] = ROWS[here]
    return len(places)


def opened(path, where, s3):
    return str(path) if where == "here" else s3.upload(path, path.name)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("left_out", [(), (0,), (1, 4, 5), range(8, 16), range(1000)], ids=str)
def test_what_is_not_stored_is_counted_as_it_is_read(layout, left_out, where, s3, tmp_path):
    n_chunks = written(tmp_path / "rows.zarr", left_out, **LAYOUTS[layout])
    source = open_source(opened(tmp_path / "rows.zarr", where, s3))
    missing = len([number for number in left_out if number < n_chunks])
    for rows in (source.chunk_rows, (N,), (33, 250, 417, 300)):
        found = [source.reader().load(each, []) for each in chunk_ranges(rows).values()]
        assert sum(one.unstored.chunks for one in found) == missing
        assert sum(one.unstored.of for one in found) == n_chunks
        read = np.concatenate([one.values for one in found])
        np.testing.assert_array_equal(read, zarr.open_array(tmp_path / "rows.zarr", mode="r")[:])


@pytest.mark.parametrize("layout", ["plain", "shards"])
def test_a_fit_says_how_many_and_warns(layout, tmp_path):
    n_chunks = written(tmp_path / "rows.zarr", (1, 2, 7), **LAYOUTS[layout])
    said = f"3 of {n_chunks} chunks of X are not stored: zarr reads them as 0.0"
    with pytest.warns(UserWarning, match=f"^{said}$"):
        model = GaussianMixture(2, random_state=0, checkpoint=tmp_path / "run.zarr").fit(
            tmp_path / "rows.zarr"
        )
    assert said in model.history_.notes
    assert f"note: {said}" in str(model.summary())
    model.save(tmp_path / "model.zarr")
    assert f"note: {said}" in str(GaussianMixture.load(tmp_path / "model.zarr").summary())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert said in GaussianMixture.resume(tmp_path / "run.zarr", tmp_path / "rows.zarr").history_.notes


def test_a_fit_says_nothing_where_all_are_stored(tmp_path):
    written(tmp_path / "rows.zarr", (), **LAYOUTS["plain"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = GaussianMixture(2, random_state=0).fit(tmp_path / "rows.zarr")
    assert model.history_.notes == ()


def folder(path):
    path.unlink()
    path.mkdir()


def folder_with_a_file(path):
    folder(path)
    (path / "part").write_bytes(b"1")


def parent_is_a_file(path):
    for each in path.parent.iterdir():
        each.unlink()
    path.parent.rmdir()
    path.parent.write_bytes(b"1")


def cut_off(path):
    os.truncate(path, path.stat().st_size // 2)


def cut_to_nothing(path):
    os.truncate(path, 0)


def too_long(path):
    with path.open("ab") as file:
        file.write(bytes(8))


SPOILT = [folder, parent_is_a_file, cut_off, cut_to_nothing]
IN_A_BUCKET = [folder_with_a_file, cut_off, cut_to_nothing]
EACH = pytest.mark.parametrize("layout", ["plain", "uncompressed", "shards"])


def stored(layout, tmp_path):
    """Write all rows; return the object that holds rows 300 to 400."""
    written(tmp_path / "rows.zarr", (), **LAYOUTS[layout])
    return tmp_path / "rows.zarr" / ("c/1/0" if layout == "shards" else "c/3/0")


@EACH
@pytest.mark.parametrize(
    ("spoil", "where"),
    [*((spoil, "here") for spoil in SPOILT), *((spoil, "in a bucket") for spoil in IN_A_BUCKET)],
)
def test_what_is_no_whole_object_is_refused_by_name(layout, spoil, where, s3, tmp_path):
    spoil(stored(layout, tmp_path))
    with pytest.raises(InvalidDataError, match=REFUSAL):
        GaussianMixture(2, random_state=0).fit(opened(tmp_path / "rows.zarr", where, s3))


def test_an_uncompressed_object_that_is_too_long(tmp_path):
    too_long(stored("uncompressed", tmp_path))
    with pytest.raises(InvalidDataError, match=r"rows 300 to 400 of the zarr array .* cannot be read"):
        GaussianMixture(2, random_state=0).fit(tmp_path / "rows.zarr")


def failing(monkeypatch, device):
    """Let the operating system's reads of one file fail, from the first on, as those of a broken disk do."""
    plain = os.preadv

    def preadv(descriptor, buffers, offset, *flags):
        if os.path.samestat(os.fstat(descriptor), device.stat()):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return plain(descriptor, buffers, offset, *flags)

    monkeypatch.setattr(os, "preadv", preadv)


@EACH
def test_a_disk_that_fails_under_zarr(layout, tmp_path, monkeypatch):
    failing(monkeypatch, stored(layout, tmp_path))
    with pytest.raises(InvalidDataError, match=f"{REFUSAL} .*Input/output error.*The device failed"):
        GaussianMixture(2, random_state=0).fit(tmp_path / "rows.zarr")


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_disk_that_fails_under_npy(order, tmp_path, monkeypatch):
    """Through a memory map the process would end by a signal (SIGBUS)."""
    np.save(tmp_path / "rows.npy", np.asarray(ROWS, order=order))
    failing(monkeypatch, tmp_path / "rows.npy")
    with pytest.raises(InvalidDataError, match=r"rows\.npy cannot be read .*The device failed"):
        GaussianMixture(2, random_state=0).fit(tmp_path / "rows.npy")


def gone(path):
    path.unlink()


class Acting(FullEM):
    """EM that does something after its third pass."""

    def schedule(self, summary):
        if summary.iteration == 3:
            self.act()
        return super().schedule(summary)


@EACH
@pytest.mark.parametrize("spoil", [gone, *SPOILT])
def test_in_the_middle_of_a_fit(layout, spoil, tmp_path):
    policy, chunk = Acting(), stored(layout, tmp_path)
    policy.act = lambda: spoil(chunk)
    with pytest.raises(InvalidDataError, match=r"chunk [13] \(rows [23]00 to 400\)|rows [23]00 to 400 of"):
        GaussianMixture(2, algorithm=policy, random_state=0, tol=0, max_iter=6).fit(tmp_path / "rows.zarr")


@pytest.mark.parametrize("what", ["gone", "a folder"])
def test_in_the_middle_of_a_fit_in_a_bucket(what, s3, tmp_path):
    written(tmp_path / "rows.zarr", (), **LAYOUTS["plain"])
    X, policy = s3.upload(tmp_path / "rows.zarr", "rows.zarr"), Acting()

    def act():
        s3.remove("rows.zarr/c/3/0")
        if what == "a folder":
            (tmp_path / "part").write_bytes(b"1")
            s3.upload(tmp_path / "part", "rows.zarr/c/3/0/part")

    policy.act = act
    with pytest.raises(InvalidDataError, match=r"chunk 3 \(rows 300 to 400\)|rows 300 to 400 of"):
        GaussianMixture(2, algorithm=policy, random_state=0, tol=0, max_iter=6).fit(X)
