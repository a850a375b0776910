"""Direct reads: the bytes of the file, none of them in the page cache, where and when they are to be."""

import ctypes
import errno
import os
from pathlib import Path

import dask
import numpy as np
import pytest
import zarr

from emtau_dask import ConfigError, GaussianMixture, InvalidDataError
from emtau_dask.data import npy, zarr_arrays
from emtau_dask.data.opening import open_source
from emtau_dask.data.source import chunk_ranges
from emtau_dask.storage import direct_reads

MIB = 2**20
PAGE = os.sysconf("SC_PAGE_SIZE")


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
    """Whether the file's last page is: its beginning may be for the sake of a header."""
    mapped = np.memmap(path, np.uint8, "r")
    n_pages = -(-len(mapped) // PAGE)
    seen = (ctypes.c_ubyte * n_pages)()
    place, length = ctypes.c_void_p(mapped.ctypes.data), ctypes.c_size_t(len(mapped))
    assert ctypes.CDLL(None, use_errno=True).mincore(place, length, seen) == 0
    return bool(seen[n_pages - 1] & 1)


@pytest.fixture(scope="module")
def possible(tmp_path_factory):
    path = tmp_path_factory.mktemp("possible") / "file"
    written(path, 5000)
    if direct_reads.read_directly(path) is None:
        pytest.skip("this system, or the file system of the temporary folder, has no direct reads")


@pytest.fixture(scope="module")
def seen(possible, tmp_path_factory):
    path = tmp_path_factory.mktemp("seen") / "file"
    written(path, MIB)
    uncached(path)
    if in_page_cache(path):
        pytest.skip("files of the temporary folder are always in memory")


@pytest.mark.parametrize("length", [0, 1, 4095, 4096, 4097, 3 * MIB + 17])
@pytest.mark.parametrize(
    ("begin", "size"),
    [(0, 0), (0, 1), (1, 4095), (1, 4096), (4096, 4096), (128, 10_000), (5000, MIB), (MIB + 3, 5 * MIB)],
)
def test_it_gives_the_bytes_that_are_there(possible, tmp_path, length, begin, size):
    data = written(tmp_path / "file", length)
    found = direct_reads.read_directly(tmp_path / "file", begin, size)
    if begin + size > length:
        assert found is None
    else:
        assert found.tobytes() == data[begin : begin + size]
    assert direct_reads.read_directly(tmp_path / "file").tobytes() == data


def test_it_leaves_nothing_in_the_page_cache(seen, tmp_path):
    path = tmp_path / "file"
    written(path, 4 * MIB)
    uncached(path)
    direct_reads.read_directly(path, 0, 4 * MIB)
    assert not in_page_cache(path)
    path.read_bytes()
    assert in_page_cache(path)


def test_it_sees_what_was_not_yet_written_back(possible, tmp_path):
    path = tmp_path / "file"
    written(path, MIB)
    direct_reads.read_directly(path, 0, MIB)
    newer = written(path, MIB, seed=1)
    assert direct_reads.read_directly(path, 0, MIB).tobytes() == newer


@pytest.mark.parametrize("path", ["/proc/self/status", "none", "."])
def test_what_is_no_file_of_a_disk_is_left_to_ordinary_reads(tmp_path, path):
    assert direct_reads.read_directly(tmp_path / path, 0, 100) is None


@pytest.mark.parametrize(
    ("setting", "expected"), [("auto", [False, True]), ("always", [True] * 2), ("never", [False] * 2)]
)
def test_when(setting, expected, monkeypatch):
    monkeypatch.setattr(direct_reads, "usable_memory", lambda: 1000)
    with dask.config.set({direct_reads.KEY: setting}):
        assert [direct_reads.passes_cache(n_bytes) for n_bytes in (750, 751)] == expected


@pytest.mark.parametrize(
    ("lines", "files", "expected"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": "5000"}, 5000),
        ("0::/a/b\n", {"a/b/memory.max": "3000", "a/memory.max": "5000"}, 3000),
        ("0::/a/b\n", {"a/b/memory.max": "3000", "a/b/memory.high": "2000"}, 2000),
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
    moved = {
        controller: (root.replace("/sys/fs/cgroup", str(tmp_path)), names)
        for controller, (root, names) in direct_reads.CGROUPS.items()
    }
    monkeypatch.setattr(direct_reads, "CGROUPS", moved)
    monkeypatch.setattr(direct_reads, "OWN_CGROUPS", tmp_path / "own")
    assert direct_reads.usable_memory.__wrapped__() == expected


def test_no_more_than_the_machine_has():
    total = next(
        line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal")
    )
    assert 0 < direct_reads.usable_memory() <= 1024 * int(total.split()[1])


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
def test_a_source_gives_the_same_and_leaves_no_pages(seen, make, tmp_path):
    path = make(tmp_path)
    source = open_source(str(path))
    files = [file for file in (path, *path.rglob("*")) if file.is_file() and file.stat().st_size > MIB // 2]
    assert files

    def read(setting):
        for file in files:
            uncached(file)
        with dask.config.set({direct_reads.KEY: setting}):
            loaded = [
                source.reader().load(chunk_range, [])
                for chunk_range in chunk_ranges(source.chunk_rows).values()
            ]
        rows, sizes, *_ = zip(*loaded, strict=True)
        cached = {in_page_cache(file) for file in files if file.stat().st_size > MIB}
        return np.concatenate(rows), sizes, cached

    rows, sizes, cached = read("always")
    assert cached == {False}
    np.testing.assert_array_equal(rows, ROWS)
    rows, plain_sizes, cached = read("never")
    assert cached == {True}
    np.testing.assert_array_equal(rows, ROWS)
    assert sizes == plain_sizes


@pytest.mark.parametrize("make", [as_npy, as_plain, as_zstd])
def test_a_file_that_was_cut_short(make, tmp_path):
    path = make(tmp_path)
    source = open_source(str(path))
    largest = max(
        (file for file in (path, *path.rglob("*")) if file.is_file()), key=lambda file: file.stat().st_size
    )
    os.truncate(largest, largest.stat().st_size - 4096)
    chunk_range = list(chunk_ranges(source.chunk_rows).values())[-1 if make is as_npy else 0]
    with dask.config.set({direct_reads.KEY: "always"}), pytest.raises(InvalidDataError):
        source.reader().load(chunk_range, [])


def reads_of(source, monkeypatch):
    """The files that are read directly for a source's chunks, and its rows."""
    found, read = [], direct_reads.read_directly

    def noted(path, *which, **named):
        values = read(path, *which, **named)
        found.append(path if values is not None else None)
        return values

    for module in (npy, zarr_arrays):
        monkeypatch.setattr(module, "read_directly", noted)
    rows = [
        source.reader().load(chunk_range, [])[0] for chunk_range in chunk_ranges(source.chunk_rows).values()
    ]
    return found, np.concatenate(rows)


@pytest.mark.parametrize(("make", "objects"), [(as_npy, 2), (as_plain, 2), (as_zstd, 2), (as_shards, 2)])
def test_only_what_the_page_cache_could_not_hold(possible, make, objects, tmp_path, monkeypatch):
    """Of that many reads, an object each but of the `.npy` file, it could hold any one but not all."""
    path = make(tmp_path)
    source = open_source(str(path))
    if make is as_npy:
        source = source.aligned((33_000, 1, 37_000))
    stored = sum(file.stat().st_size for file in (path, *path.rglob("*")) if file.stat().st_size > MIB // 2)
    monkeypatch.setattr(direct_reads, "usable_memory", lambda: int(2.0 * stored))
    found, rows = reads_of(source, monkeypatch)
    assert found == []
    np.testing.assert_array_equal(rows, ROWS)
    monkeypatch.setattr(direct_reads, "usable_memory", lambda: int(1.1 * stored))
    found, rows = reads_of(source, monkeypatch)
    assert len(found) == objects
    assert None not in found
    np.testing.assert_array_equal(rows, ROWS)


@pytest.mark.parametrize("make", [as_plain, as_shards])
def test_parts_of_an_object_are_not_read_so(make, tmp_path, monkeypatch):
    """The others will soon be wanted, and are in the page cache then."""
    source = open_source(str(make(tmp_path))).aligned((20_000, 20_000, 30_001))
    with dask.config.set({direct_reads.KEY: "always"}):
        found, rows = reads_of(source, monkeypatch)
    assert len(found) == 1
    np.testing.assert_array_equal(rows, ROWS)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM])
@pytest.mark.parametrize("make", [as_npy, as_plain])
def test_a_source_on_a_file_system_without_such_reads(make, code, tmp_path, monkeypatch):
    """Its refusal is a mock: what other systems answer, the kernel of a test's machine does not."""
    source, opened = open_source(str(make(tmp_path))), os.open

    def refusing(path, flags, *others, **options):
        if flags & getattr(os, "O_DIRECT", 0):
            raise OSError(code, os.strerror(code), str(path))
        return opened(path, flags, *others, **options)

    monkeypatch.setattr(os, "open", refusing)
    with dask.config.set({direct_reads.KEY: "always"}):
        found, rows = reads_of(source, monkeypatch)
    assert set(found) == {None}
    np.testing.assert_array_equal(rows, ROWS)


@pytest.mark.parametrize("make", [as_npy, as_plain])
def test_a_setting_that_is_none(make, tmp_path):
    """Said before anything is read, or where a chunk is read without a fit."""
    path = str(make(tmp_path))
    source = open_source(path)
    with dask.config.set({direct_reads.KEY: "sometimes"}):
        with pytest.raises(ConfigError, match=r"'sometimes'; give 'auto'"):
            GaussianMixture(2).fit(ROWS)
        with pytest.raises(ConfigError, match=r"'sometimes'; give 'auto'"):
            source.reader().load(chunk_ranges(source.chunk_rows)[0], [])
