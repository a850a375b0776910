"""The paper's Example 2: MNIST digits 1, 2, 4, 5 and 6, by their first 42 principal components."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emtau_dask.errors import EmtauError, InvalidDataError
from emtau_dask.io.files import check_regular

DIGITS = (1, 2, 4, 5, 6)
FEATURES = 42
TRAINING_ROWS = 60_000
MOST_BYTES = 2**30
"""Twice the size of all images as float64."""
DESCRIPTION = (
    "MNIST training images of the digits 1, 2, 4, 5 and 6: pixels/255, then their first 42 principal "
    "components (Example 2 of the EM-Tau paper); labels: the digit. MNIST: Y. LeCun, C. Cortes, "
    "C. J. C. Burges, CC BY-SA 3.0."
)


def mnist_components(source: str | None) -> tuple[NDArray[np.float64], NDArray[Any]]:
    """Return the principal components (n, 42) of the paper's digits, float64, and the digits (n,).

    ``source`` is an ``.npz`` file with X (images × 784 pixels from 0 to 255) and y (digits); None
    downloads them from openml.org.

    Raises
    ------
    InvalidDataError
        The file holds something else, or there is no network.
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
            size = sum(member.file_size for member in archive.zip.infolist())
            if size > MOST_BYTES:
                raise ValueError(f"its arrays have {size:,} bytes, at most {MOST_BYTES:,} are read")
            arrays = {name: archive[name] for name in ("X", "y") if name in archive}
            names = list(archive)
    except EmtauError:
        raise
    except TypeError:  # np.load gave an array, which is no context
        raise InvalidDataError(f"{source} holds one array; give an .npz file with X and y") from None
    except Exception as error:  # whatever NumPy and zipfile say of damage
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
