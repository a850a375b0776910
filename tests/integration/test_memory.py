"""Peak memory of a fit does not grow with the rows (the benchmark, at a small size)."""

import runpy
from pathlib import Path

import pytest
from commands import emtau

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "memory.py"
SIZES = ["300000", "2400000"]
SMALL = ["--chunk-rows", "50000", "--features", "16", "--components", "4", "--iterations", "3"]
SMALL += ["--cache-bytes", "4 MB"]


@pytest.fixture(scope="module")
def peaks(tmp_path_factory):
    """The data are made here: the benchmark would start a process for each size."""
    main = runpy.run_path(str(BENCHMARK))["main"]
    folder = tmp_path_factory.mktemp("memory")
    for rows in SIZES:
        size = ["--rows", rows, *SMALL[:6]]
        assert emtau("dataset", "mixture", folder / f"rows-{rows}.zarr", *size).exit_code == 0
    return main(["--rows", *SIZES, *SMALL, "--init", "random", "--folder", str(folder)])


def test_of_eight_times_the_rows_no_more_is_held(peaks):
    """Peaks of one size differ by 40 MB from run to run; a quarter of the added rows is 67 MB."""
    added = (peaks[1].rows - peaks[0].rows) * 16 * 8 / 1e6
    assert peaks[1].megabytes - peaks[0].megabytes <= added / 4


def test_the_plan_is_an_upper_bound_and_at_most_twice_what_is_needed(peaks):
    for peak in peaks:
        assert peak.megabytes <= peak.predicted <= 2 * peak.megabytes


@pytest.mark.exhaustive
def test_the_rows_take_a_few_chunks_of_memory(peaks, tmp_path_factory, monkeypatch):
    monkeypatch.setenv("DASK_EMTAU__COMPILED", "always")  # as the others were, by their size
    main = runpy.run_path(str(BENCHMARK))["main"]
    folder = tmp_path_factory.mktemp("tiny")
    tiny, _ = main(["--rows", "2000", "2000", *SMALL, "--init", "random", "--folder", str(folder)])
    chunk, data = 50_000 * 16 * 8 / 1e6, 2_400_000 * 16 * 8 / 1e6
    buffers = 2 * 2**23 / 1e6  # of a block in each of two threads
    cached = 4 + 2 * chunk / 2  # what is kept, and half a chunk on its way there in each of two threads
    held = 2 * chunk * (16 * 8 + 16) / (16 * 8)  # a chunk for each thread, with positions and state
    ahead = held + 2 * 2 * chunk  # and, while zarr reads it, its stored bytes and the array it is copied from
    assert peaks[1].megabytes - tiny.megabytes <= 8 * chunk + buffers + cached + ahead < data
