"""Direct reads: the bytes of the file, none of them in the page cache, where and when they are to be."""

import os
from pathlib import Path

import dask
import numpy as np
import pytest
import zarr
from sklearn.exceptions import ConvergenceWarning

from emtau_dask import ConfigError, FullEM, GaussianMixture, InvalidDataError
from emtau_dask.storage import direct, open_source, places_of

MIB = 2**20


def written(path, size, seed=0):
    data = np.random.default_rng(seed).bytes(size)
    path.write_bytes(data)
    return data


def uncached(path):
    """Write a file back and let the kernel forget its pages."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def in_page_cache(path):
    """Whether the file's end is: its beginning may be for the sake of a header."""
    with path.open("rb") as file:
        try:
            return bool(os.preadv(file.fileno(), [bytearray(1)], path.stat().st_size - 1, os.RWF_NOWAIT))
        except BlockingIOError:
            return False


@pytest.fixture(scope="module", autouse=True)
def possible(tmp_path_factory):
    path = tmp_path_factory.mktemp("direct") / "file"
    written(path, 5000)
    if direct.read_directly(path, 0, 5000) is None:
        pytest.skip("this system, or the file system of the temporary folder, has no direct reads")


@pytest.mark.parametrize("length", [0, 1, 4095, 4096, 4097, 3 * MIB + 17])
@pytest.mark.parametrize(
    ("begin", "size"),
    [(0, 0), (0, 1), (1, 4095), (1, 4096), (4096, 4096), (128, 10_000), (5000, MIB), (MIB + 3, 5 * MIB)],
)
def test_it_gives_the_bytes_that_are_there(tmp_path, length, begin, size):
    data = written(tmp_path / "file", length)
    found = direct.read_directly(tmp_path / "file", begin, size)
    assert found.tobytes() == data[begin : begin + size]


def test_it_leaves_nothing_in_the_page_cache(tmp_path):
    path = tmp_path / "file"
    written(path, 4 * MIB)
    uncached(path)
    direct.read_directly(path, 0, 4 * MIB)
    assert not in_page_cache(path)
    path.read_bytes()
    assert in_page_cache(path)


def test_it_sees_what_was_not_yet_written_back(tmp_path):
    path = tmp_path / "file"
    written(path, MIB)
    direct.read_directly(path, 0, MIB)
    newer = written(path, MIB, seed=1)
    assert direct.read_directly(path, 0, MIB).tobytes() == newer


def test_a_file_system_without_such_reads():
    assert direct.read_directly(Path("/proc/self/status"), 0, 100) is None


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        direct.read_directly(tmp_path / "none", 0, 100)


@pytest.mark.parametrize(("setting", "expected"), [("auto", [False, True]), ("always", [True] * 2)])
def test_when(setting, expected, monkeypatch):
    monkeypatch.setattr(direct, "usable_memory", lambda: 1000)
    with dask.config.set({direct.KEY: setting}):
        assert [direct.passes_cache(n_bytes) for n_bytes in (750, 751)] == expected


def test_never(monkeypatch):
    monkeypatch.setattr(direct, "usable_memory", lambda: 1000)
    with dask.config.set({direct.KEY: "never"}):
        assert not direct.passes_cache(10**15)


@pytest.mark.parametrize(
    ("lines", "files", "expected"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": "5000"}, 5000),
        ("0::/a/b\n", {"a/b/memory.max": "3000", "a/memory.max": "5000"}, 3000),
        ("0::/../other\n", {"memory.max": "7000"}, 7000),
        ("4:memory:/a\n1:cpu:/b\n", {"memory/a/memory.limit_in_bytes": "6000"}, 6000),
        ("4:cpu,memory:/gone\n", {"memory/memory.limit_in_bytes": "8000"}, 8000),
    ],
)
def test_the_least_limit_of_its_cgroups(lines, files, expected, tmp_path, monkeypatch):
    (tmp_path / "own").write_text(lines)
    for name, limit in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(limit + "\n")
    cgroups = {
        "": (str(tmp_path), "memory.max"),
        "memory": (str(tmp_path / "memory"), "memory.limit_in_bytes"),
    }
    monkeypatch.setattr(direct, "CGROUPS", cgroups)
    monkeypatch.setattr(direct, "OWN_CGROUPS", tmp_path / "own")
    assert direct.usable_memory.__wrapped__() == expected


def test_no_more_than_the_machine_has():
    total = next(
        line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal")
    )
    assert 0 < direct.usable_memory() <= 1024 * int(total.split()[1])


ROWS = np.random.default_rng(3).normal(size=(70_001, 4)) + 5.0 * (np.arange(70_001) % 2)[:, np.newaxis]


def as_npy(folder):
    np.save(folder / "X.npy", ROWS)
    return folder / "X.npy"


def as_zarr(folder, **layout):
    array = zarr.create_array(store=folder / "X.zarr", shape=ROWS.shape, dtype="f8", **layout)
    array[:] = ROWS
    return folder / "X.zarr"


def as_plain(folder):
    return as_zarr(folder, chunks=(40_000, 4), compressors=None)


def as_zstd(folder):
    return as_zarr(folder, chunks=(40_000, 4), compressors=zarr.codecs.ZstdCodec(level=1))


def as_shards(folder):
    return as_zarr(folder, chunks=(10_000, 4), shards=(40_000, 4), compressors=None)


@pytest.mark.parametrize("make", [as_npy, as_plain, as_zstd, as_shards])
def test_a_source_gives_the_same_and_leaves_no_pages(make, tmp_path):
    path = make(tmp_path)
    source = open_source(str(path))
    files = [file for file in (path, *path.rglob("*")) if file.is_file() and file.stat().st_size > MIB // 2]
    assert files

    def read(setting):
        for file in files:
            uncached(file)
        with dask.config.set({direct.KEY: setting}):
            loaded = [source.reader().load(place, []) for place in places_of(source.chunk_rows).values()]
        rows, sizes = zip(*loaded, strict=True)
        cached = {in_page_cache(file) for file in files if file.stat().st_size > MIB}
        return np.concatenate(rows), sizes, cached

    rows, sizes, cached = read("always")
    assert cached == {False}
    np.testing.assert_array_equal(rows, ROWS)
    rows, plain_sizes, cached = read("never")
    assert cached == {True}
    np.testing.assert_array_equal(rows, ROWS)
    assert sizes == plain_sizes


@pytest.mark.parametrize("make", [as_npy, as_plain])
def test_a_fit_is_the_same_bit_for_bit(make, tmp_path):
    source = str(make(tmp_path))

    def fitted(setting):
        mixture = GaussianMixture(2, algorithm=FullEM(), random_state=0, max_iter=3, tol=0.0)
        with dask.config.set({direct.KEY: setting}), pytest.warns(ConvergenceWarning):
            return mixture.fit(open_source(source))

    a, b = fitted("always"), fitted("never")
    np.testing.assert_array_equal(a.means_, b.means_)
    np.testing.assert_array_equal(a.covariances_, b.covariances_)
    assert [record.bytes_read for record in a.history_] == [record.bytes_read for record in b.history_]


@pytest.mark.parametrize("make", [as_npy, as_plain, as_zstd])
def test_a_file_that_was_cut_short(make, tmp_path):
    path = make(tmp_path)
    source = open_source(str(path))
    largest = max(
        (file for file in (path, *path.rglob("*")) if file.is_file()), key=lambda file: file.stat().st_size
    )
    os.truncate(largest, largest.stat().st_size - 4096)
    place = list(places_of(source.chunk_rows).values())[-1 if make is as_npy else 0]
    with dask.config.set({direct.KEY: "always"}), pytest.raises(InvalidDataError):
        source.reader().load(place, [])


@pytest.mark.parametrize("make", [as_npy, as_plain])
def test_a_setting_that_is_none(make, tmp_path):
    path = str(make(tmp_path))
    with (
        dask.config.set({direct.KEY: "sometimes"}),
        pytest.raises(ConfigError, match=r"'sometimes'; give 'auto'"),
    ):
        open_source(path)
