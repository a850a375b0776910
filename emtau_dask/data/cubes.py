"""Cubes of xarray as rows × features, lazily: all dimensions but that of the features are the rows.

Rows are numbered block by block, in each block in the order of its dimensions, so that a chunk of rows is one
block of the cube. Nothing is loaded but by the tasks of a chunk.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import dask.array as da
import numpy as np
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph
from numpy.typing import NDArray

from emtau_dask.data.source import CHUNK_BYTES, check_dtype
from emtau_dask.errors import InvalidDataError, did_you_mean, short, warn_user

PACKED = {"_FillValue": None, "missing_value": None, "scale_factor": 1, "add_offset": 0}
"""Attributes that say how numbers are decoded, and the value that changes none. xarray moves them to the
encoding when it decodes."""
MOST_BYTES = 2**28
NO_LABEL = -1
"""What integers that are written have in the place of NaN."""
Chunks = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class Cube:
    """Rows × features of a DataArray or a Dataset, and where the rows lie.

    Attributes
    ----------
    rows : dask array of shape (N, d)
        A chunk is a block of the cube.
    names : tuple of str
        Of the features.
    features : tuple of str
        What users call them: variables, or one dimension.
    dims : tuple
        The dimensions of the rows, in the order of the cube.
    chunks : tuple of tuple of int
        Of these dimensions.
    coords : xarray.Coordinates
        Those that do not depend on the feature.
    in_memory : bool
        Whether the values lie in this process's memory.
    axis : tuple of (str, sequence or None)
        The dimension that the features have or would have, and its labels.
    array : str or None
        The name of the DataArray; None for variables.
    """

    rows: da.Array
    names: tuple[str, ...]
    features: tuple[str, ...]
    dims: tuple[Any, ...]
    chunks: Chunks
    coords: Any
    in_memory: bool
    axis: tuple[Any, Any]
    array: str | None

    def selecting(self, fitted: Sequence[str]) -> str:
        """Return how to give the features ``fitted`` of these in their order, as a text."""
        dim, labels = self.axis
        if self.features != (str(dim),) or labels is None or not set(fitted) <= set(self.names):
            return "Give the same ones in the same order."
        wanted = np.asarray(labels)[[self.names.index(name) for name in fitted]].tolist()
        return f"Select them: X.sel({dim}={short(wanted, 400)})."

    def labelled(self, values: da.Array, name: str, inner: str | None, *, may_lack: bool) -> Any:
        """Return what was found for the rows as a lazy DataArray in the dimensions and chunks of the cube.

        Parameters
        ----------
        values : dask array of shape (N,) or (N, k)
        name : str
        inner : str or None
            What the dimension of k is called; None for that of the features, with its labels.
        may_lack : bool
            Whether integers below 0 stand for rows without a value: they become NaN, and the integers
            float64, which are written as integers.
        """
        import xarray

        inner, labels = self.axis if inner is None else (inner, None)
        dims = (*self.dims, inner)[: len(self.dims) + values.ndim - 1]
        if values.ndim > 1 and inner in self.dims:
            raise InvalidDataError(
                f"X has a dimension {inner!r}, as the result would have beside those of the rows. Rename it, "
                f"for example with X.rename({inner}='of_x')."
            )
        encoding = {}
        if may_lack and values.dtype.kind == "i":
            values = da.where(values < 0, np.nan, values)
            encoding = {"dtype": "int32", "_FillValue": NO_LABEL}
        data = in_blocks(values, (*self.chunks, *values.chunks[1:]))
        found = xarray.DataArray(data, coords=self.coords, dims=dims, name=name)
        found.encoding = encoding
        return found if labels is None else found.assign_coords({inner: labels})

    def row_values(self, values: Any, what: str) -> Any:
        """Return one value for each row, (N,), of a DataArray over some or all dimensions of the rows.

        Raises `InvalidDataError` if it has other dimensions or labels, or is none where there are several.
        """
        import xarray

        if not isinstance(values, xarray.DataArray):
            if len(self.dims) == 1:
                return values
            raise InvalidDataError(
                f"{what} is of the type {type(values).__name__}, but the rows of X lie in the dimensions "
                f"{_listed(self.dims)}. Give a DataArray over them, or over some of them."
            )
        sizes = {dim: sum(chunk) for dim, chunk in zip(self.dims, self.chunks, strict=True)}
        wrong = [dim for dim, size in values.sizes.items() if sizes.get(dim) != size]
        if wrong:
            raise InvalidDataError(
                f"{what} has the sizes {dict(values.sizes)}, the rows of X have {sizes}: {_listed(wrong)} "
                "differ. Give a DataArray over these dimensions, or over some of them."
            )
        try:
            xarray.align(xarray.Dataset(coords=self.coords), values, join="exact", copy=False)
        except ValueError as error:
            raise InvalidDataError(
                f"{what} has other labels than X ({error}). Select those of X, for example with "
                f"{what}.reindex_like(X)."
            ) from error
        check_dtype(values.dtype, what)
        kept = {dim: chunk for dim, chunk in zip(self.dims, self.chunks, strict=True) if dim in values.dims}
        lazy = da.asarray(values.transpose(*kept).data).rechunk(tuple(kept.values()))
        spread = lazy[tuple(slice(None) if dim in kept else None for dim in self.dims)]
        whole = da.broadcast_to(spread, tuple(sizes.values()), chunks=self.chunks)
        return in_blocks(whole, (block_sizes(self.chunks),))


def is_labelled(data: Any) -> bool:
    """Return whether data are a DataArray or a Dataset of xarray."""
    xarray = sys.modules.get("xarray")  # Data of it exist only where it has been imported.
    return xarray is not None and isinstance(data, (xarray.DataArray, xarray.Dataset))


def cube_of(data: Any, features: Any, fitted: Sequence[str] | None) -> Cube | None:
    """Return a DataArray or a Dataset as rows × features; None for a matrix without named features.

    Parameters
    ----------
    data : DataArray or Dataset
    features : str, sequence of str, or None
        The dimension of the features, or the variables that they are. A variable that lacks a dimension of
        the others has the same values all along it. By default what has the names ``fitted``.
    fitted : sequence of str or None
        The names of the features in a fit.

    Raises
    ------
    InvalidDataError
        There is no such dimension or variable, or no dimension is left for rows.
    InvalidDtypeError
        The values are no real numbers; nothing has been read.

    Warns
    -----
    UserWarning
        The attributes of an array say that its numbers are not decoded.
    """
    if hasattr(data, "data_vars"):
        names = _variables(data, features, fitted)
        for name in names:
            _warn_if_packed(data[name], f"X[{name!r}]")
        return _of_variables([data[name] for name in names], names, data)
    _warn_if_packed(data, "X")
    if len(set(data.dims)) < data.ndim:
        raise InvalidDataError(
            f"X has a dimension twice: {_listed(data.dims)}. Give each a name of its own, for example with "
            "xarray.DataArray(X.data, dims=[...])."
        )
    dim = _dimension(data, features, fitted)
    return None if dim is None else _of_dimension(data, dim)


def _warn_if_packed(array: Any, what: str) -> None:
    packed = [name for name, idle in PACKED.items() if name in array.attrs and array.attrs[name] != idle]
    if packed:
        warn_user(
            f"{what} has the attributes {_listed(packed)}, which were not applied: its numbers are as "
            "stored. Decode them with xarray.decode_cf(dataset), or open the data without "
            "mask_and_scale=False."
        )


def _listed(names: Any) -> str:
    return ", ".join(repr(name) for name in names) or "none"


def by_dimensions(data: Any) -> list[str]:
    """Return the names of a Dataset's variables, those with the most dimensions first."""
    return sorted(map(str, data.data_vars), key=lambda name: -data[name].ndim)


def _variables(data: Any, features: Any, fitted: Sequence[str] | None) -> list[str]:
    """Return the variables of a Dataset that are the features."""
    had = "; ".join(f"{name} {tuple(array.dims)}" for name, array in data.data_vars.items())
    some = by_dimensions(data)[:2]
    remedy = f"such as features={some}. X has the variables {had or 'none'}."
    if features is None:
        if fitted is None:
            raise InvalidDataError(f"X is a Dataset: say which of its variables are the features, {remedy}")
        features = list(fitted)
    if isinstance(features, str):
        if features in data.dims and features not in data.data_vars:
            one = next(iter(some), "name")
            raise InvalidDataError(
                f"features = {features!r} is a dimension of X, which is a Dataset. Give one of its "
                f"variables, such as X[{one!r}], or name variables, {remedy}"
            )
        features = [features]
    in_order = np.iterable(features) and not isinstance(features, (set, frozenset))
    names = list(features) if in_order else []
    if not names or not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise InvalidDataError(
            f"features = {short(features)} must be a list of different variables, {remedy}"
        )
    if all(name in data.dims for name in names):
        one = next(iter(some), "name")
        raise InvalidDataError(
            f"features = {short(names)} are only dimensions of X. For the places along one as features give "
            f"X[{one!r}] with features={names[0]!r}; else name variables, {remedy}"
        )
    for name in names:
        if name not in data.variables:
            near = did_you_mean(name, data.variables)
            raise InvalidDataError(
                f"X has no variable {name!r}.{near}{_along(data, fitted)} Name others, {remedy}"
            )
    return names


def _along(data: Any, fitted: Sequence[str] | None) -> str:
    """Return how to give the variable and the dimension that have the features of a fit, as a text."""
    for name in by_dimensions(data):
        for dim in dimensions_named(data[name], fitted):
            return f" The fit's features lie along {dim!r}: give X[{name!r}] with features={dim!r}."
    return ""


def _dimension(array: Any, features: Any, fitted: Sequence[str] | None) -> Any:
    """Return the dimension of a DataArray that is that of the features; None for a matrix without any."""
    if features is None:
        found = dimensions_named(array, fitted)
        if len(found) == 1 or array.ndim == 2:
            return found[0] if len(found) == 1 else None
        of_fit = "" if fitted is None else f", none of them with the names of the fit, {short(list(fitted))}"
        last = str(array.dims[-1]) if array.dims else "band"
        raise InvalidDataError(
            f"X is a DataArray with the dimensions {_listed(array.dims)}{of_fit}. Say which one is that of "
            f"the features, such as features={last!r}; the others are the rows."
        )
    if not isinstance(features, str):
        raise InvalidDataError(
            f"features = {short(features)}, but X is a DataArray: give one of its dimensions, "
            f"{_listed(array.dims)}. Several names are variables of a Dataset."
        )
    if features not in array.dims:
        near = did_you_mean(features, array.dims)
        raise InvalidDataError(f"X has no dimension {features!r}; it has {_listed(array.dims)}.{near}")
    return features


def dimensions_named(array: Any, fitted: Sequence[str] | None) -> list[Any]:
    """Return the dimensions of a DataArray whose features are those of a fit, in any order."""
    wanted = set(() if fitted is None else fitted)
    return [
        dim
        for dim, size in array.sizes.items()
        if wanted and size == len(wanted) and set(feature_names(array, dim)) == wanted
    ]


def feature_names(array: Any, dim: Any) -> tuple[str, ...]:
    """Return the labels of a dimension as text, or its name and numbers if they are none, or repeat.

    Whole numbers have the same text as integers and as floats.
    """
    found = array.indexes.get(dim, ())
    labels = tuple(str(label).removesuffix(".0" if isinstance(label, float) else "") for label in found)
    if labels and len(set(labels)) == len(labels):
        return labels
    return tuple(f"{dim}[{number}]" for number in range(array.sizes[dim]))


def _of_dimension(array: Any, dim: Any) -> Cube:
    check_dtype(array.dtype, "X")
    dims = tuple(other for other in array.dims if other != dim)
    _check_rows(dims, f"its features, {dim!r}")
    in_memory = _in_memory(array)
    if array.chunks is None:
        array = array.chunk(_chunks_of(array, array.sizes, {dim: (array.sizes[dim],)}, array.dtype, 1))
    cells = array.transpose(*dims, dim).data.rechunk({len(dims): -1})
    template = array.drop_vars([name for name, each in array.coords.items() if dim in each.dims])
    names = feature_names(array, dim)
    index = array.indexes.get(dim)
    labels = None if index is None or index.nlevels > 1 else array.coords[dim].variable
    called = array.name if isinstance(array.name, str) else None
    return _cube(cells, names, (str(dim),), dims, template.coords, in_memory, (dim, labels), called)


def _of_variables(arrays: Sequence[Any], names: Sequence[str], data: Any) -> Cube:
    for array, name in zip(arrays, names, strict=True):
        check_dtype(array.dtype, f"X[{name!r}]")
    dims = tuple(dict.fromkeys(dim for array in arrays for dim in array.dims))
    _check_rows(dims, f"its features, {_listed(names)}")
    dtype = np.result_type(*(array.dtype for array in arrays))
    in_memory = all(map(_in_memory, arrays))
    unread = [array for array in arrays if array.chunks is None]
    if unread:
        given = {dim: chunk for array in arrays for dim, chunk in array.chunksizes.items()}
        sizes = {dim: data.sizes[dim] for dim in dims}
        largest = max(unread, key=lambda array: array.size)
        chunks = _chunks_of(largest, sizes, given, dtype, len(arrays))
        arrays = [
            array.chunk({dim: chunks[dim] for dim in array.dims}) if array.chunks is None else array
            for array in arrays
        ]
    pairs: list[Any] = []
    for array in arrays:
        own = [dim for dim in dims if dim in array.dims]
        pairs += [da.asarray(array.transpose(*own).data), tuple(map(dims.index, own))]
    axes = tuple(range(len(dims)))
    places = tuple(tuple(slice(None) if dim in array.dims else None for dim in dims) for array in arrays)
    cells = da.blockwise(
        _stacked,
        (*axes, len(dims)),
        *pairs,
        new_axes={len(dims): len(arrays)},
        places=places,
        stacked_as=dtype,
        dtype=dtype,
        meta=np.empty((0,) * (len(dims) + 1), dtype),
    )
    coords, axis = data[list(names)].coords, ("feature", list(names))
    return _cube(cells, tuple(names), tuple(names), dims, coords, in_memory, axis, None)


def _stacked(*blocks: NDArray[Any], places: Sequence[Any], stacked_as: np.dtype[Any]) -> NDArray[Any]:
    """Return blocks of variables side by side along a new last axis."""
    spread = np.broadcast_arrays(*(block[place] for block, place in zip(blocks, places, strict=True)))
    return np.stack(spread, axis=-1, dtype=stacked_as)


def _cube(
    cells: da.Array,
    names: tuple[str, ...],
    features: tuple[str, ...],
    dims: Any,
    coords: Any,
    in_memory: bool,
    axis: tuple[Any, Any],
    array: str | None,
) -> Cube:
    chunks = cells.chunks[:-1]
    if np.isnan(cells.size):
        raise InvalidDataError(
            "X has chunks of unknown sizes. Call compute_chunk_sizes() of its dask arrays, such as "
            "X.data.compute_chunk_sizes(), before."
        )
    rows = in_blocks(cells, (block_sizes(chunks), (len(names),)))
    return Cube(rows, names, features, dims, chunks, coords, in_memory, axis, array)


def _check_rows(dims: Sequence[Any], of_features: str) -> None:
    if not dims:
        raise InvalidDataError(
            f"X has no rows: no other dimensions than those of {of_features}. Give it one, for example with "
            "X.expand_dims('row')."
        )


def _in_memory(array: Any) -> bool:
    """Return whether the values of a DataArray are a NumPy array, not read by a file's backend or dask."""
    return bool(getattr(array.variable, "_in_memory", False)) and array.chunks is None


def _chunks_of(
    array: Any, sizes: Mapping[Any, int], given: Mapping[Any, Any], dtype: np.dtype[Any], features: int
) -> dict[Any, Any]:
    """Return chunks of dimensions of these ``sizes`` for an array that has none, and for others beside it.

    Those that are not ``given`` are those of its file, or several of them next to each other. Blocks of all
    ``features`` take about 16 MiB, or as much as chunks of the file do, but at most 256 MiB.
    """
    stored = array.encoding.get("preferred_chunks") or {}
    chunk = {
        dim: max(given[dim]) if dim in given else min(size, stored.get(dim, 1)) for dim, size in sizes.items()
    }
    taken = features * dtype.itemsize * math.prod(chunk.values())
    for dim in chunk:
        if taken > MOST_BYTES and dim not in given:
            smaller = max(1, chunk[dim] * MOST_BYTES // taken)
            taken, chunk[dim] = taken * smaller // chunk[dim], smaller
    room = CHUNK_BYTES // max(1, taken)
    for dim in reversed([dim for dim in chunk if dim not in given]):
        times = max(1, min(room, -(-sizes[dim] // max(1, chunk[dim]))))
        room, chunk[dim] = room // times, min(sizes[dim], chunk[dim] * times)
    return {**chunk, **given}


def block_sizes(chunks: Chunks) -> tuple[int, ...]:
    """Return how many values each block of an array has, in the order of the blocks."""
    return tuple(math.prod(sizes) for sizes in product(*chunks))


def in_blocks(array: da.Array, chunks: Chunks) -> da.Array:
    """Return the blocks of a dask array in their order, each reshaped to the next block of ``chunks``."""
    if chunks == array.chunks:
        return array
    name = f"emtau-blocks-{tokenize(array.name, chunks)}"
    theirs = product(*map(range, array.numblocks))
    ours = product(*(range(len(sizes)) for sizes in chunks))
    blocks = {
        (name, *here): (np.reshape, (array.name, *there), shape)
        for here, there, shape in zip(ours, theirs, product(*chunks), strict=True)
    }
    graph = HighLevelGraph.from_collections(name, blocks, dependencies=[array])
    return da.Array(graph, name, chunks, dtype=array.dtype)
