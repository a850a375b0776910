"""What dask's `emtau.cache-bytes` may be, and what "auto" stands for."""

import sys
from dataclasses import replace

import dask
import pytest
import zarr

from emtau_dask import ConfigError, EMSampled
from emtau_dask.dask_config import read_settings
from emtau_dask.data.opening import open_source
from emtau_dask.data.row_random import Samples
from emtau_dask.em.memory import FitOutline, automatic_cache, demand
from emtau_dask.em.settings import Acceleration, EmSettings
from emtau_dask.em.state_store import row_fields
from emtau_dask.execution.scheduler import task_processes
from emtau_dask.settings import Settings
from emtau_dask.storage.direct_reads import usable_memory

MiB = 2**20
ROWS, D, CHUNK = 8_000_000, 16, 100_000


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "rows.zarr"
    zarr.create_array(store=path, shape=(ROWS, D), dtype="f8", chunks=(CHUNK, D))
    return {"X": open_source(str(path))}


@pytest.fixture(scope="module")
def outline(sources):
    fields = row_fields(sources["X"], 5, EMSampled(), 100)
    on_a_sample = Acceleration(0, Samples(0, (0.08,)))
    settings = EmSettings(Settings(5), EMSampled(), 0.0, acceleration=on_a_sample, compiled=True)
    return FitOutline(settings, fields, 2, 0, 2**26)


def predicted(sources, outline, cache):
    return demand(sources, replace(outline, cache_limit=cache)).memory


class TestTheSetting:
    def test_is_auto_by_default(self):
        assert read_settings().cache_bytes == "auto"

    @pytest.mark.parametrize(
        ("value", "expected"),
        [("auto", "auto"), (0, 0), ("0", 0), (12345, 12345), ("256 MiB", 256 * MiB), ("1 GB", 10**9)],
    )
    def test_is_auto_or_a_number_of_bytes(self, value, expected):
        with dask.config.set({"emtau.cache-bytes": value}):
            assert read_settings().cache_bytes == expected

    @pytest.mark.parametrize("value", ["AUTO!", "much", -1, True, None, "nan", [1]])
    def test_anything_else_is_refused_with_what_it_may_be(self, value):
        with (
            dask.config.set({"emtau.cache-bytes": value}),
            pytest.raises(ConfigError, match=r"emtau\.cache-bytes .* number of bytes.* or 'auto'"),
        ):
            read_settings()

    def test_only_the_cache_is_automatic(self):
        with (
            dask.config.set({"emtau.read-ahead-bytes": "auto"}),
            pytest.raises(ConfigError, match=r"read-ahead-bytes is 'auto'; .*'256 MiB'\.$"),
        ):
            read_settings()


class TestAuto:
    @pytest.mark.parametrize("memory", [4 * 10**9, 10**10, 10**12])
    def test_is_a_fifth_of_the_memory(self, sources, outline, memory):
        assert automatic_cache(sources, outline, memory) == memory // 5

    def test_is_what_the_fit_leaves_where_that_is_less(self, sources, outline):
        with_32 = predicted(sources, outline, 32 * MiB)
        for more in (0, 1, 20 * MiB):
            memory = with_32 + more
            cache = automatic_cache(sources, outline, memory)
            assert cache == 32 * MiB + more < memory // 5
            assert predicted(sources, outline, cache) == memory

    def test_makes_no_prediction_exceed_memory_in_which_a_mebibyte_has_room(self, sources, outline):
        least = predicted(sources, outline, MiB)
        for memory in range(least, 10 * least, least // 7):
            assert predicted(sources, outline, automatic_cache(sources, outline, memory)) <= memory

    @pytest.mark.parametrize("memory", [1, 10**8])
    def test_is_a_mebibyte_where_nothing_is_left(self, sources, outline, memory):
        assert automatic_cache(sources, outline, memory) == MiB

    def test_does_not_depend_on_the_limit_in_the_outline(self, sources, outline):
        found = {
            automatic_cache(sources, replace(outline, cache_limit=limit), 10**9)
            for limit in (0, MiB, sys.maxsize)
        }
        assert len(found) == 1


def test_without_a_client_tasks_have_the_memory_of_this_process_and_its_threads():
    with dask.config.set(scheduler="threads", num_workers=3):
        assert task_processes(None) == (usable_memory(), 3)
