"""Readers with defects, some of which are how anybody would read at first; the oracle must find each.

Imported only by the process that runs them: it adds them to the kinds there, and makes hangs short.
"""

import contextlib
from dataclasses import replace
from unittest import mock

import numcodecs.pickles
import numpy as np
import pyarrow.parquet as pq
import yaml
import zarr
from numpy.lib import format as npy_format

from emtau_dask.data.opening import as_source, open_source
from reliability.fuzz import commands, npy, oracle, running

oracle.SECONDS = 3


def numpy_with_pickles(case):
    """As `numpy.load` reads, which was told to believe objects."""
    return _done(np.load(case.place, allow_pickle=True))


def room_by_the_header(case):
    """Makes room for what a header says before it looks how long the file is."""
    with case.place.open("rb") as file, contextlib.suppress(ValueError, OSError, EOFError, SyntaxError):
        version = npy_format.read_magic(file)
        read = npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
        shape, _, dtype = read(file)
        return _done(np.ones(shape, dtype if dtype.kind in "fiu" else np.uint8))
    return "refused"


def rows_in_another_order(case):
    """Reads what was altered with its rows shifted by one."""
    if case.place.is_file() and case.place.read_bytes() == case.original.read_bytes():
        return "right"
    kind = type(as_source(open_source(str(case.original)), ndim=2, what="X").ranges)
    read = kind.read

    def shifted(self, start, stop):
        found = read(self, start, stop)
        return found._replace(values=np.roll(found.values, 1, axis=0))

    with mock.patch.object(kind, "read", shifted):
        return npy.target(case)


def zarr_itself(case):
    """As zarr reads, with numcodecs as it was before it refused pickles."""
    with mock.patch.object(numcodecs.pickles, "ALLOW_UNSAFE_PICKLE_DECODE", True, create=True):
        node = zarr.open(case.place, mode="r")
        arrays = [node] if isinstance(node, zarr.Array) else [array for _, array in node.arrays()]
        return _done([array[...] for array in arrays])


def pyarrow_itself(case):
    return _done(pq.read_table(case.place, use_threads=False))


def any_yaml(case):
    """Makes whatever objects a config names, and waits for whoever writes to a pipe."""
    return _done(yaml.unsafe_load(case.place.read_text()))


def commands_without_a_word_of_ours(case):
    """A command meets another library's error where a model is damaged."""
    with mock.patch("emtau_dask.estimator.model_file.InvalidDataError", KeyError):
        return commands.target(case)


def _done(read):
    assert read is not None
    return "right"


def _only(place, originals):
    return lambda folder: [path for path in originals(folder) if path.parent.name == place]


KINDS = running.KINDS
COMMANDS = KINDS["command line"]
running.KINDS |= {
    "numpy with pickles": replace(KINDS["npy"], target=numpy_with_pickles),
    "room by the header": replace(KINDS["npy"], target=room_by_the_header),
    "rows in another order": replace(KINDS["npy"], target=rows_in_another_order),
    "zarr itself": replace(KINDS["zarr 2"], target=zarr_itself),
    "pyarrow itself": replace(KINDS["parquet"], target=pyarrow_itself),
    "any YAML": replace(KINDS["config"], target=any_yaml),
    "commands without a word of ours": replace(
        COMMANDS, target=commands_without_a_word_of_ours, originals=_only("model", COMMANDS.originals)
    ),
}
