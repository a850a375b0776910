"""Stored data that somebody made to do harm, and what a process with little memory does with it."""

import json
import os
from pathlib import Path

import numpy as np
from commands import emtau

from emtau_dask import EmtauError, GaussianMixture
from emtau_dask.data.opening import open_source
from reliability import scenarios

MEGABYTES = 500
"""By how much the address space may grow while something hostile is read."""


def document(shape, chunks, codecs=({"name": "bytes", "configuration": {"endian": "little"}},), **changes):
    """A metadata document of an array of float64, format 3."""
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": "float64",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunks}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0.0,
        "codecs": list(codecs),
        "attributes": {},
        **changes,
    }


def written(folder, content, chunk=None, key="c/0/0"):
    """Write an array's document and one chunk of it."""
    folder.mkdir(parents=True)
    (folder / "zarr.json").write_text(json.dumps(content))
    if chunk is not None:
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).write_bytes(chunk)
    return folder


def ends(function, *arguments):
    """Return the kind of error that a call in bounded memory ends in and its message, or the result."""
    scenarios.limited_memory(MEGABYTES)
    try:
        return "returned", repr(function(*arguments))[:200]
    except EmtauError as error:
        return "refused", str(error)
    except Exception as error:
        return type(error).__name__, str(error)


def first_rows(path):
    """Read the beginning of the first chunk."""
    return open_source(str(path)).ranges.read(0, 1)[0].tolist()


def command(*arguments):
    """Run the command line; return its exit code and what it wrote."""
    result = emtau(*arguments)
    return result.exit_code, result.output


def loaded(path):
    return GaussianMixture.load(path).means_.shape


def pipe(path):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


def huge_integers():
    rows = np.ones((5, 2), dtype=object)
    rows[2, 1] = 10**400
    return rows
