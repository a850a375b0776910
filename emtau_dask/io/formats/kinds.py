"""What lies at a path, in words for messages: by its ending, its first bytes, or its zarr document."""

from __future__ import annotations

from pathlib import Path

from zarr.storage import LocalStore

from emtau_dask.errors import InvalidDataError
from emtau_dask.io.files import read_regular, stream_at
from emtau_dask.io.remote import is_url, plain_path, read_errors, suffix_of
from emtau_dask.io.zarr_format import document_at

READABLE = {
    ".npy": "a .npy file",
    ".parquet": "a parquet file",
    ".pq": "a parquet file",
    ".csv": "a CSV table",
    ".tsv": "a table of text",
}
OTHER_ENDINGS = {
    ".npz": "an .npz archive",
    ".feather": "an Arrow file",
    ".arrow": "an Arrow file",
    ".h5": "an HDF5 file",
    ".hdf5": "an HDF5 file",
    ".nc": "a netCDF file",
    ".pkl": "a pickle",
    ".joblib": "a pickle",
    ".json": "a JSON file",
    ".xlsx": "an Excel file",
}
BEGINNINGS = {
    b"\x93NUMPY": "a .npy file",
    b"PAR1": "a parquet file",
    b"PK\x03\x04": "a zip archive",
    b"\x89HDF": "an HDF5 file",
    b"ARROW1": "an Arrow file",
    b"\x1f\x8b": "a gzip file",
}
OWN_GROUPS = {
    "emtau-checkpoint": "the checkpoint of a fit",
    "emtau-model": "a saved model",
    "emtau-labels": "a group of labels",
}
FOLDERS = ("a folder", "a zarr array", "a zarr group", "a dataset")
REMEDIES = {
    "an .npz archive": "Take its array out: numpy.save('rows.npy', numpy.load(path)[name])",
    "a .npy file": "Give it the ending .npy",
    "a parquet file": "Give it the ending .parquet",
}
"""What to do with data that are not read."""


def kind_by_ending(path: str) -> str | None:
    """Return what the ending of a path or URL says, with an article; None where it says nothing."""
    return {**READABLE, **OTHER_ENDINGS}.get(suffix_of(path).lower())


def kind_of(path: str) -> str | None:
    """Return what lies at a path, with an article; None for nothing, plain text, and what is not known.

    Behind a URL the ending decides, and nothing is opened.
    """
    path = plain_path(path)
    if is_url(path):
        return kind_by_ending(path)
    place = Path(path)
    try:
        if place.is_dir():
            return _kind_of_folder(place)
        if not place.is_file():
            return None
        beginning = read_regular(place, 0, max(map(len, BEGINNINGS)), 64).tobytes()
    except (OSError, ValueError):
        return None
    found = (kind for start, kind in BEGINNINGS.items() if beginning.startswith(start))
    return kind_by_ending(path) or next(found, None)


def check_readable(path: str, array: str | None) -> None:
    """Raise `InvalidDataError` where a path holds neither a folder nor a zarr array that may be rows.

    A member of a group that this package wrote must be named by ``array``.
    """
    stream = stream_at(path)
    if stream is not None:
        raise InvalidDataError(f"{path} is no regular file but {stream}; give a file.")
    kind = kind_of(path)
    with read_errors(path, remote=False):
        if kind is None and Path(plain_path(path)).is_file():
            kind = "a file of an unknown kind"
    if kind is None or kind in FOLDERS:
        return
    if kind not in OWN_GROUPS.values():
        remedy = REMEDIES.get(kind, "Give a zarr array or group, a .npy, a parquet or a CSV file")
        raise InvalidDataError(f"{path} is {kind}, which is not read as rows. {remedy}.")
    if array is None:
        raise InvalidDataError(f"{path} is {kind}, not rows. Give the data, or the name of an array in it.")


def _kind_of_folder(folder: Path) -> str:
    """Return what a folder is; raises OSError or ValueError where it cannot be looked at."""
    found = document_at(LocalStore(folder, read_only=True), "")
    if found is None:
        return "a folder"
    if found.kind == "array":
        return "a zarr array"
    attributes = found.document.get("attributes")
    attributes = attributes if isinstance(attributes, dict) else {}
    if "dataset" in attributes:
        return "a dataset"
    return OWN_GROUPS.get(str(attributes.get("format")), "a zarr group")
