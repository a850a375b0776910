"""Datasets that `emtau dataset` writes: digits, example1, mnist, mixture.

A block of `mixture` depends only on the seed, the shape of the parameters and its number, not on the chunks
or the number of all rows.
"""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import zarr
from dask.utils import format_bytes
from numpy.typing import NDArray
from zarr.storage import MemoryStore

from emtau_dask.constraints import NONE, Constraint, either, integer, text
from emtau_dask.em.history import FitObserver
from emtau_dask.errors import EmtauError, InvalidDataError, counted
from emtau_dask.storage.files import check_regular
from emtau_dask.storage.publishing import RowWriter, new_group
from emtau_dask.storage.zarr_check import own_group

DIGITS = (1, 2, 4, 5, 6)
FEATURES = 42
TRAINING_ROWS = 60_000
DESCRIPTION = (
    "MNIST training images of the digits 1, 2, 4, 5 and 6: pixels/255, then their first 42 principal "
    "components (Example 2 of the EM-Tau paper); labels: the digit. MNIST: Y. LeCun, C. Cortes, "
    "C. J. C. Burges, CC BY-SA 3.0."
)
Floats = NDArray[np.float64]
BLOCK_ROWS = 32_768
_PARAMETERS, _ROWS = 0, 1
Labels = NDArray[np.int32]


def mnist_components(source: str | None) -> tuple[NDArray[np.float64], NDArray[Any]]:
    """Return the principal components (n, 42) of the paper's digits, float64, and the digits (n,).

    ``source`` is an ``.npz`` file with X (images × 784 pixels from 0 to 255) and y (digits); None
    downloads them from openml.org.

    Raises
    ------
    InvalidDataError
        The file has other contents, or there is no network.
    """
    from sklearn.decomposition import PCA

    pixels, digit = _fetch() if source is None else _read(Path(source))
    keep = np.isin(digit, DIGITS)
    if (rows := int(keep.sum())) < FEATURES:
        raise InvalidDataError(
            f"{source or 'mnist_784'} holds {rows} images of the digits 1, 2, 4, 5 and 6, but "
            f"{FEATURES} principal components need at least {FEATURES}; give the MNIST images"
        )
    scores = PCA(FEATURES, svd_solver="full").fit_transform(pixels[keep].astype(np.float64) / 255.0)
    return np.ascontiguousarray(scores), digit[keep]


def _read(source: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    try:
        check_regular(source)
        with np.load(source, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in ("X", "y") if name in archive}
            names = list(archive)
    except EmtauError:
        raise
    except TypeError:  # np.load returned an array, which is not a context manager
        raise InvalidDataError(f"{source} holds one array; give an .npz file with X and y") from None
    except Exception as error:  # NumPy and zipfile raise many kinds for damage
        raise InvalidDataError(f"{source} cannot be read as an .npz file with X and y: {error}") from error
    if len(arrays) < 2:
        raise InvalidDataError(f"{source} holds {names}; it must hold X (images × 784 pixels) and y (digits)")
    pixels, digit = arrays["X"], arrays["y"]
    pixels = pixels.reshape(len(pixels), -1)
    if pixels.shape != (len(digit), 784) or pixels.dtype.kind not in "uif":
        raise InvalidDataError(
            f"{source} holds X of shape {arrays['X'].shape} and dtype {pixels.dtype} and y of shape "
            f"{digit.shape}; X must be images × 784 pixels from 0 to 255, with a digit in y for each"
        )
    return pixels, digit


def _fetch() -> tuple[NDArray[Any], NDArray[Any]]:
    from sklearn.datasets import fetch_openml

    try:
        pixels, digit = fetch_openml("mnist_784", version=1, return_X_y=True, as_frame=False)
    except Exception as error:
        raise InvalidDataError(
            f"MNIST cannot be fetched from openml.org ({type(error).__name__}: {error}); connect to the "
            "network, or give the images with --source FILE.npz (arrays X: images × 784 pixels, y: digits)"
        ) from error
    return pixels[:TRAINING_ROWS], digit[:TRAINING_ROWS].astype(np.int32)


@dataclass(frozen=True)
class MixtureTruth:
    """Weights (K,), means (K, d), and a factor L (d, d) of each covariance ``L @ L.T``, (K, d, d)."""

    weights: Floats
    means: Floats
    factors: Floats

    @property
    def covariances(self) -> Floats:
        """Covariances, shape (K, d, d)."""
        return self.factors @ self.factors.transpose(0, 2, 1)


def mixture_parameters(components: int, features: int, seed: int) -> MixtureTruth:
    """Draw the parameters of a mixture whose neighbouring components overlap a little.

    Standard deviations along the principal axes are between 0.5 and 1.5; two means are
    about 5.7 apart, whatever the number of features. The same seed gives the same parameters.
    """
    rng = _generator(seed, _PARAMETERS, 0)
    weights = rng.dirichlet(np.full(components, 10.0))
    means = 4.0 / np.sqrt(features) * rng.standard_normal((components, features))
    rotations, _ = np.linalg.qr(rng.standard_normal((components, features, features)))
    scales = rng.uniform(0.5, 1.5, size=(components, 1, features))
    return MixtureTruth(weights, means, rotations * scales)


def mixture_blocks(truth: MixtureTruth, rows: int, seed: int) -> Iterator[tuple[Floats, NDArray[np.int32]]]:
    """Yield rows (n, d) and the component of each, (n,), `BLOCK_ROWS` at a time.

    The same seed gives the same rows; a longer dataset begins with a shorter one.
    """
    edges = np.cumsum(truth.weights)[:-1]
    for block in range(-(-rows // BLOCK_ROWS)):
        rng = _generator(seed, _ROWS, block)
        labels = np.searchsorted(edges, rng.random(BLOCK_ROWS), side="right").astype(np.int32)
        values = rng.standard_normal((BLOCK_ROWS, truth.means.shape[1]))
        for k, (mean, factor) in enumerate(zip(truth.means, truth.factors, strict=True)):
            members = labels == k
            values[members] = values[members] @ factor.T + mean
        keep = min(BLOCK_ROWS, rows - block * BLOCK_ROWS)
        yield values[:keep], labels[:keep]


def _generator(seed: int, purpose: int, block: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(purpose, block)))


@dataclass(frozen=True)
class Dataset:
    """A dataset before it is stored: ``blocks`` of rows and labels, and small ``extra`` arrays."""

    rows: int
    features: int
    blocks: Iterator[tuple[Floats, Labels]]
    description: str
    chunk_rows: int
    compressed: bool = True
    extra: dict[str, NDArray[Any]] = field(default_factory=dict)


def make_dataset(
    name: str, path: Path, *, observer: FitObserver, overwrite: bool = False, **options: Any
) -> tuple[int, int]:
    """Write a dataset to a new zarr v3 group, chunk by chunk; return the shape of its `X`.

    Parameters
    ----------
    name : str
        A key of `DATASETS`.
    path : Path
    observer : FitObserver
    overwrite : bool
        Replace zarr data at ``path``.
    **options
        Parameters of the function in `DATASETS`, as `CONSTRAINTS` allow them.

    Raises
    ------
    EmtauError
        Existing data at ``path`` may not be replaced.
    InvalidDataError
        The dataset cannot be created: wrong source, no network, no space on the disk.
    """
    with new_group(path, overwrite=overwrite) as group:
        dataset = DATASETS[name](**options)
        _check_disk_space(dataset, path)
        stored = {**_stored_options(name, options), "chunk_rows": dataset.chunk_rows}
        group.attrs.update({"dataset": name, "options": stored, "description": dataset.description})
        _fill(group, dataset, name, observer)
    return dataset.rows, dataset.features


def outlined_dataset(name: str, options: Mapping[str, Any]) -> zarr.Group:
    """Return the group that `make_dataset` would write, in memory and without rows.

    Its arrays have the shapes, types and chunks of the dataset. No rows are computed.
    """
    group = zarr.create_group(MemoryStore(), zarr_format=3)
    _row_writers(group, DATASETS[name](**options))
    return group


def holds_dataset(name: str, options: Mapping[str, Any], path: Path) -> bool:
    """Return whether the zarr data at `path` is the dataset that a name and options describe."""
    group = own_group(path)
    attributes = {} if group is None else group.attributes
    stored = attributes.get("options")
    if attributes.get("dataset") != name or not isinstance(stored, dict):
        return False
    expected = _stored_options(name, options)
    if expected["chunk_rows"] is None:
        expected["chunk_rows"] = stored.get("chunk_rows")
    return bool(stored == expected)


def _stored_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of a dataset that its rows depend on, defaults included."""
    whole = inspect.signature(DATASETS[name]).bind(**options)
    whole.apply_defaults()
    return {key: value for key, value in whole.arguments.items() if key != "source"}


def _fill(group: zarr.Group, dataset: Dataset, name: str, observer: FitObserver) -> None:
    rows, labels = _row_writers(group, dataset)
    observer.stage(f"dataset {name}", -(-dataset.rows // dataset.chunk_rows))
    for block, block_labels in dataset.blocks:
        labels.append(block_labels)
        observer.chunks_done(rows.append(block))
    labels.flush()
    observer.chunks_done(rows.flush())
    for key, values in dataset.extra.items():
        group.create_array(key, data=values)


def _row_writers(group: zarr.Group, dataset: Dataset) -> tuple[RowWriter, RowWriter]:
    """Create the arrays `X` and `labels`."""
    n, chunk_rows, compressed = dataset.rows, dataset.chunk_rows, dataset.compressed
    shape, dtype = (n, dataset.features), np.dtype(np.float64)
    rows = RowWriter(group, "X", shape, dtype, chunk_rows=chunk_rows, compressed=compressed)
    return rows, RowWriter(group, "labels", (n,), np.dtype(np.int32), chunk_rows=chunk_rows)


def _check_disk_space(dataset: Dataset, path: Path) -> None:
    needed = dataset.rows * (dataset.features * 8 + 4)
    free = shutil.disk_usage(path.parent).free
    if needed > free:
        raise InvalidDataError(
            f"{counted(dataset.rows, 'row')} of {counted(dataset.features, 'feature')} take "
            f"{format_bytes(needed)}, but the disk of {path.parent} has {format_bytes(free)} free; ask for "
            "fewer rows or choose another place"
        )


def digits(chunk_rows: int | None = None) -> Dataset:
    """Return handwritten digits.

    Parameters
    ----------
    chunk_rows : int, optional
        Rows in a chunk of the zarr arrays; null: a number that suits the dataset.
    """
    from sklearn.datasets import load_digits

    pixels, digit = load_digits(return_X_y=True)
    description = (
        "Handwritten digits bundled with scikit-learn (UCI, 8x8 pixels from 0 to 16); labels: the digit."
    )
    return _whole(np.asarray(pixels, dtype=np.float64), digit, chunk_rows or 600, description)


def example1(chunk_rows: int | None = None, seed: int = 0) -> Dataset:
    """Return the EM-Tau paper's Example 1.

    Parameters
    ----------
    chunk_rows : int, optional
        See `digits`.
    seed : int
        Seed of the rows.
    """
    rng = np.random.default_rng(seed)
    component = (rng.random(1000) >= 0.3).astype(np.int32)
    values = np.where(component == 0, -2.0, 2.0) + rng.standard_normal(1000)
    description = (
        "Example 1 of the EM-Tau paper: 1000 points of 0.3 N(-2, 1) + 0.7 N(2, 1); labels: the component."
    )
    return _whole(values[:, np.newaxis], component, chunk_rows or 1000, description)


def mnist(chunk_rows: int | None = None, source: str | None = None) -> Dataset:
    """Return the EM-Tau paper's Example 2; without a source it is downloaded.

    Parameters
    ----------
    chunk_rows : int, optional
        See `digits`.
    source : str, optional
        A local ``.npz`` file with the images X and the digits y.
    """
    components, digit = mnist_components(source)
    return _whole(components, digit, chunk_rows or len(components), DESCRIPTION)


def mixture(
    chunk_rows: int | None = None,
    rows: int = 1_000_000,
    features: int = 16,
    components: int = 16,
    seed: int = 0,
) -> Dataset:
    """Return rows drawn from a mixture of Gaussians.

    Parameters
    ----------
    chunk_rows : int, optional
        See `digits`.
    rows : int
        Rows of the data.
    features : int
        Columns of the data.
    components : int
        Components of the mixture that the rows are drawn from.
    seed : int
        Seed of the rows.
    """
    truth = mixture_parameters(components, features, seed)
    return Dataset(
        rows=rows,
        features=features,
        blocks=mixture_blocks(truth, rows, seed),
        description=(
            f"Synthetic Gaussian mixture of {components} full-covariance components, drawn from the "
            "parameters in true_weights, true_means and true_covariances; labels: the component."
        ),
        chunk_rows=min(rows, chunk_rows or 1_000_000),
        compressed=False,
        extra={f"true_{name}": getattr(truth, name) for name in ("weights", "means", "covariances")},
    )


def _whole(rows: Floats, labels: NDArray[Any], chunk_rows: int, description: str) -> Dataset:
    """Return a dataset that fits in memory."""
    blocks = iter([(rows, labels.astype(np.int32))])
    return Dataset(len(rows), rows.shape[1], blocks, description, chunk_rows=min(len(rows), chunk_rows))


DATASETS: Mapping[str, Callable[..., Dataset]] = MappingProxyType(
    {"digits": digits, "example1": example1, "mnist": mnist, "mixture": mixture}
)
CONSTRAINTS: Mapping[str, Constraint] = MappingProxyType(
    {
        "chunk_rows": either(integer(1), NONE),
        "source": either(text("the path of an .npz file"), NONE),
        "rows": integer(1),
        "features": integer(1),
        "components": integer(1),
        "seed": integer(0, 2**64 - 1),
    }
)
"""Constraints on the parameters of `DATASETS`."""
