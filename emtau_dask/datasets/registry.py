"""Datasets that `emtau dataset` writes: a zarr group with `X` (rows × features) and `labels` (rows)."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.storage import MemoryStore

from emtau_dask.config import DatasetOptions, DigitsOptions, Example1Options, MixtureOptions, MnistOptions
from emtau_dask.datasets.mnist import DESCRIPTION, mnist_components
from emtau_dask.datasets.synthetic import mixture_blocks, mixture_parameters
from emtau_dask.em import FitObserver
from emtau_dask.errors import InvalidDataError
from emtau_dask.io.output import RowWriter, new_group
from emtau_dask.io.zarr_format import own_group

Floats = NDArray[np.float64]
Labels = NDArray[np.int32]


@dataclass(frozen=True)
class _Content:
    """A dataset before it is stored: ``blocks`` of rows and labels, and small ``extra`` arrays."""

    rows: int
    features: int
    blocks: Iterator[tuple[Floats, Labels]]
    description: str
    chunk_rows: int
    compressed: bool = True
    extra: dict[str, NDArray[Any]] = field(default_factory=dict)


def make_dataset(
    options: DatasetOptions, path: Path, *, observer: FitObserver, overwrite: bool = False
) -> tuple[int, int]:
    """Write a dataset to a new zarr v3 group, chunk by chunk; return the shape of its `X`.

    With ``overwrite`` it replaces zarr data at ``path``.

    Raises
    ------
    EmtauError
        What is at ``path`` may not be replaced.
    InvalidDataError
        The dataset cannot be made: a source that does not fit, no network, no room on the disk.
    """
    with new_group(path, overwrite=overwrite) as group:
        content = _CONTENTS[options.dataset](options)
        _check_room(content, path)
        stored = {**_stored_options(options), "chunk_rows": content.chunk_rows}
        group.attrs.update(
            {"dataset": options.dataset, "options": stored, "description": content.description}
        )
        _fill(group, content, options.dataset, observer)
    return content.rows, content.features


def outlined_dataset(options: DatasetOptions) -> zarr.Group:
    """Return the group that `make_dataset` would write, in memory and without rows.

    Its arrays have the shapes, types and chunks of the dataset's. No row is made.
    """
    content = _CONTENTS[options.dataset](options)
    group = zarr.create_group(MemoryStore(), zarr_format=3)
    _row_writers(group, content)
    return group


def holds_dataset(options: DatasetOptions, path: Path) -> bool:
    """Return whether the zarr data at `path` is the dataset that `options` describe."""
    group = own_group(path)
    attributes = {} if group is None else group.attributes
    stored = attributes.get("options")
    if attributes.get("dataset") != options.dataset or not isinstance(stored, dict):
        return False
    wanted = _stored_options(options)
    if options.chunk_rows is None:
        wanted["chunk_rows"] = stored.get("chunk_rows")
    return bool(stored == wanted)


def _stored_options(options: DatasetOptions) -> dict[str, Any]:
    return options.model_dump(exclude={"dataset", "source"})


def _fill(group: zarr.Group, content: _Content, name: str, observer: FitObserver) -> None:
    rows, labels = _row_writers(group, content)
    observer.stage(f"dataset {name}", -(-content.rows // content.chunk_rows))
    for block, block_labels in content.blocks:
        labels.append(block_labels)
        observer.chunks_done(rows.append(block))
    labels.flush()
    observer.chunks_done(rows.flush())
    for key, values in content.extra.items():
        group.create_array(key, data=values)


def _row_writers(group: zarr.Group, content: _Content) -> tuple[RowWriter, RowWriter]:
    """Create the arrays `X` and `labels`."""
    n, chunk_rows, compressed = content.rows, content.chunk_rows, content.compressed
    shape, dtype = (n, content.features), np.dtype(np.float64)
    rows = RowWriter(group, "X", shape, dtype, chunk_rows=chunk_rows, compressed=compressed)
    return rows, RowWriter(group, "labels", (n,), np.dtype(np.int32), chunk_rows=chunk_rows)


def _check_room(content: _Content, path: Path) -> None:
    needed = content.rows * (content.features * 8 + 4)
    free = shutil.disk_usage(path.parent).free
    if needed > free:
        raise InvalidDataError(
            f"{content.rows:,} rows of {content.features} features take {needed / 1e9:.3g} GB, but the disk "
            f"of {path.parent} has {free / 1e9:.3g} GB free; ask for fewer rows or choose another place"
        )


def _digits(options: DigitsOptions) -> _Content:
    from sklearn.datasets import load_digits

    pixels, digit = load_digits(return_X_y=True)
    description = (
        "Handwritten digits bundled with scikit-learn (UCI, 8x8 pixels from 0 to 16); labels: the digit."
    )
    return _whole(np.asarray(pixels, dtype=np.float64), digit, options.chunk_rows or 600, description)


def _example1(options: Example1Options) -> _Content:
    rng = np.random.default_rng(options.seed)
    component = (rng.random(1000) >= 0.3).astype(np.int32)
    values = np.where(component == 0, -2.0, 2.0) + rng.standard_normal(1000)
    description = (
        "Example 1 of the EM-Tau paper: 1000 points of 0.3 N(-2, 1) + 0.7 N(2, 1); labels: the component."
    )
    return _whole(values[:, np.newaxis], component, options.chunk_rows or 1000, description)


def _mnist(options: MnistOptions) -> _Content:
    components, digit = mnist_components(options.source)
    return _whole(components, digit, options.chunk_rows or len(components), DESCRIPTION)


def _mixture(options: MixtureOptions) -> _Content:
    truth = mixture_parameters(options.components, options.features, options.seed)
    return _Content(
        rows=options.rows,
        features=options.features,
        blocks=mixture_blocks(truth, options.rows, options.seed),
        description=(
            f"Synthetic Gaussian mixture of {options.components} full-covariance components, drawn from the "
            "parameters in true_weights, true_means and true_covariances; labels: the component."
        ),
        chunk_rows=min(options.rows, options.chunk_rows or 1_000_000),
        compressed=False,
        extra={f"true_{name}": getattr(truth, name) for name in ("weights", "means", "covariances")},
    )


def _whole(rows: Floats, labels: NDArray[Any], chunk_rows: int, description: str) -> _Content:
    """Return a dataset that fits in memory."""
    blocks = iter([(rows, labels.astype(np.int32))])
    return _Content(len(rows), rows.shape[1], blocks, description, chunk_rows=min(len(rows), chunk_rows))


_CONTENTS: Mapping[str, Callable[..., _Content]] = MappingProxyType(
    {"digits": _digits, "example1": _example1, "mnist": _mnist, "mixture": _mixture}
)
