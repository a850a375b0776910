"""Cubes in files: netCDF and zarr that xarray opens lazily, and results that it opens again."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise, product
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.storage import LocalStore

from emtau_dask.data.cubes import Cube, by_dimensions, cube_of, dimensions_named
from emtau_dask.data.opening import has_columns
from emtau_dask.errors import EmtauError, InvalidDataError, MissingPackageError
from emtau_dask.storage.errors import read_errors
from emtau_dask.storage.locations import NPY, Place, kind_of, paths_at, place_text
from emtau_dask.storage.urls import Url, UrlStore, is_url, plain_path, suffix_of
from emtau_dask.storage.zarr_check import StrictStore

FILES = ("a netCDF file", "an HDF5 file")
"""Kinds that are read as cubes alone."""
COMPONENT = "component"
"""Name of the dimension of probabilities."""
EXTRA = "install it with: pip install 'emtau_dask[xarray]'"


def is_cube_file(path: str) -> bool:
    """Return whether a path is of a kind that is read as a cube alone."""
    return kind_of(path) in FILES


def open_dataset(path: str) -> Any:
    """Open netCDF or a zarr group as a Dataset of xarray whose values are read when they are asked for.

    Durations stay numbers.

    Raises
    ------
    InvalidDataError
        Nothing is there, or xarray cannot read it.
    MissingPackageError
        xarray, or what it needs to read the file, is not installed.
    """
    try:
        import xarray
    except ImportError as error:
        raise MissingPackageError(f"reading {path} as a cube needs xarray; {EXTRA}") from error
    place: Any = plain_path(path)
    options: dict[str, Any] = {"chunks": None, "cache": False, "decode_timedelta": False}
    if not is_cube_file(path):
        options["engine"] = "zarr"
        local = LocalStore(Path(place).absolute(), read_only=True)
        place = UrlStore(Url.of(path)) if is_url(path) else StrictStore(local)
    elif is_url(path):
        raise InvalidDataError(
            f"{path} is netCDF behind a URL, which is not read; give a local file, or zarr."
        )
    with read_errors(path, remote=is_url(path)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Failed to open Zarr store with consolidated")
        try:
            return xarray.open_dataset(place, **options)
        except KeyError as error:
            raise InvalidDataError(
                f"{path} has arrays without names of dimensions, so xarray did not write it ({error}). Leave "
                "features out, and name the array that holds the rows."
            ) from error
        except ValueError as error:
            if "did not find a match" in str(error):
                raise InvalidDataError(
                    f"{path} is no netCDF or HDF5 file, or is damaged. Check the name, or write it again."
                ) from error
            if "IO backends" not in str(error) and "dependencies" not in str(error):
                raise
            raise MissingPackageError(f"reading {path} needs h5netcdf or netCDF4; {EXTRA}") from error


def open_cube(
    path: str,
    features: Sequence[str] | None,
    array: str | None,
    fitted: Sequence[str] | None = None,
    fitted_array: str | None = None,
) -> Cube | None:
    """Open netCDF or a zarr group as a cube; None if no features are named, and none have the names of a fit.

    Parameters
    ----------
    path : str
    features : sequence of str or None
        Variables, or one dimension of the variable ``array``, or of the only one that has it.
    array : str or None
    fitted : sequence of str or None
        The names of the features in a fit.
    fitted_array : str or None
        The variable that had them, by default the array.

    Raises as `open_dataset` and `cube_of`.
    """
    data = open_dataset(path)
    if features is None and array is None and fitted_array is not None:
        if fitted_array not in data.data_vars:
            raise InvalidDataError(
                f"{path} has no variable {fitted_array!r}, to which the mixture was fitted; it has "
                f"{described(data)}. Name the one meant: --array NAME, in Python "
                "xarray.open_dataset(...)[NAME]."
            )
        array = fitted_array
    if array is not None and array not in data.data_vars:
        raise InvalidDataError(f"{path} has no variable {array!r}; it has {described(data)}.")
    arrays = {name: data[name] for name in ([array] if array is not None else data.data_vars)}
    if features is None:
        if array is None and fitted is not None and set(fitted) <= set(data.data_vars):
            return cube_of(data, list(fitted), fitted)
        found = [(each, dim) for each in arrays.values() for dim in dimensions_named(each, fitted)]
        return cube_of(found[0][0], found[0][1], fitted) if len(found) == 1 else None
    if array is None and not (len(features) == 1 and features[0] in data.dims):
        return cube_of(data, list(features), fitted)
    holding = [name for name, each in arrays.items() if features[0] in each.dims]
    if len(features) > 1 or len(holding) != 1:
        raise InvalidDataError(
            f"{', '.join(features)} must be one dimension of one variable of {path}, which has "
            f"{described(data)}. Name the variable: --array NAME, in Python xarray.open_dataset(...)[NAME]."
        )
    return cube_of(arrays[holding[0]], features[0], fitted)


def cube_at(
    place: Place,
    features: Sequence[str] | None,
    array: str | None,
    fitted: Sequence[str] | None = None,
    fitted_array: str | None = None,
) -> Cube | None:
    """Open data as a cube if its features are named, or if it has those of a fit; None for any other data.

    Arguments are those of `open_cube`.

    Raises
    ------
    InvalidDataError
        There are several paths, or the features of a file that can only be a cube are not named.
    EmtauError
        As `open_cube`.
    """
    paths = paths_at(place)
    alone = any(map(is_cube_file, paths))
    if features is None and not alone:
        if fitted is None or len(paths) != 1 or kind_of(paths[0]) != "a zarr group":
            return None
        try:
            if array is not None or fitted_array is None:
                return open_cube(paths[0], None, array, fitted)
            open_dataset(paths[0])  # If this fails, the group has rows without names.
        except EmtauError:
            return None
    if len(paths) > 1 or has_columns(paths) or any(suffix_of(each) in NPY.endings for each in paths):
        raise InvalidDataError(
            f"features (data.features in a config) are those of one netCDF file or zarr group, but "
            f"{place_text(paths)} is none; leave them out, or join files with xarray and write them as zarr"
        )
    found = open_cube(paths[0], features, array, fitted, fitted_array)
    if found is None:
        raise InvalidDataError(
            f"{paths[0]} has {described(open_dataset(paths[0]))}; say which are the features: --features A,B "
            "(data.features in a config, features=['A', 'B'] in Python), or --features DIMENSION for those "
            "along one, with --array NAME if several variables have it"
        )
    return found


def flags_of_fit(place: Place, fitted: Sequence[str] | None) -> str:
    """Return the flags for each variable that has the features of a fit along a dimension; "" if none has."""
    try:
        data = open_dataset(paths_at(place)[0])
    except EmtauError:
        return ""
    found = ((name, dim) for name in by_dimensions(data) for dim in dimensions_named(data[name], fitted))
    return " or ".join(f"--features {dim} --array {name}" for name, dim in found)


def described(data: Any) -> str:
    """Return the variables of a Dataset with their dimensions."""
    named = (f"{name} ({', '.join(map(str, data[name].dims))})" for name in by_dimensions(data))
    return f"the variables {', '.join(named) or 'none'}"


class CubeWriter:
    """Writes results of rows, chunk by chunk in their order, to a zarr group that xarray opens.

    Parameters
    ----------
    group : zarr.Group
        New; the coordinates of the rows and an array for each result are created in it.
    cube : Cube
    results : sequence of (str, dtype, tuple of int, float or None)
        The name of each, its type, the shape of one row's values, () or (K,), and what stands for no value.

    Raises `InvalidDataError` if a coordinate or a dimension of the cube has such a name.
    """

    def __init__(
        self,
        group: zarr.Group,
        cube: Cube,
        results: Sequence[tuple[str, np.dtype[Any], tuple[int, ...], float | None]],
    ) -> None:
        import xarray

        outline = xarray.Dataset(coords=cube.coords).drop_encoding().load()
        inner = [COMPONENT] if any(row_shape for _, _, row_shape, _ in results) else []
        names = [*(name for name, *_ in results), *inner]
        taken = [name for name in names if name in cube.dims or name in outline.coords]
        if taken:
            raise InvalidDataError(
                f"the rows have a dimension or a coordinate {taken[0]!r}, as what is written of them. Rename "
                f"it, for example with xarray's data.rename({taken[0]}='of_x')."
            )
        sizes, longest = tuple(map(sum, cube.chunks)), tuple(max(each, default=1) for each in cube.chunks)
        for name, dtype, row_shape, fill in results:
            zeros = da.zeros((*sizes, *row_shape), dtype=dtype, chunks=(*longest, *row_shape))
            outline[name] = (*cube.dims, *inner[: len(row_shape)]), zeros
            outline[name].encoding = {} if fill is None else {"_FillValue": fill}
        with _as_xarray_writes():
            outline.to_zarr(group.store, mode="a", compute=False, consolidated=False, zarr_format=3)
        self._group, self._arrays = group, [group[name] for name, *_ in results]
        edges = (list(pairwise(accumulate(sizes, initial=0))) for sizes in cube.chunks)
        self._places = (place for place in product(*edges) if all(stop > start for start, stop in place))

    def append(self, found: Sequence[NDArray[Any]]) -> None:
        """Write what was found for the rows of the next chunk, (n,) or (n, K) each."""
        place = next(self._places)
        shape = tuple(stop - start for start, stop in place)
        for array, values in zip(self._arrays, found, strict=True):
            assert isinstance(array, zarr.Array)
            array[tuple(slice(*each) for each in place)] = values.reshape(*shape, *values.shape[1:])

    def finish(self) -> None:
        """Consolidate the metadata of the group, which xarray expects."""
        with _as_xarray_writes():
            zarr.consolidate_metadata(self._group.store)


@contextmanager
def _as_xarray_writes() -> Iterator[None]:
    """Do not warn of parts of zarr's format 3 that xarray uses, and that are not specified yet."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Zarr (V3|format 3) specification")
        yield
