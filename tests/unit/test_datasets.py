"""Datasets: their content, and how they are stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.datasets
import zarr

from emtau_dask.config.schema import (
    DatasetOptions,
    DigitsOptions,
    Example1Options,
    MixtureOptions,
    MnistOptions,
)
from emtau_dask.datasets import BLOCK_ROWS, holds_dataset, make_dataset, mixture_parameters
from emtau_dask.em.history import SilentObserver
from emtau_dask.errors import EmtauError, InvalidDataError


def make(options: DatasetOptions, path: Path, **settings: Any) -> zarr.Group:
    make_dataset(options, path, observer=SilentObserver(), **settings)
    return zarr.open_group(str(path), mode="r")


def values(group: zarr.Group, name: str) -> np.ndarray[Any, Any]:
    array = group[name]
    assert isinstance(array, zarr.Array)
    return np.asarray(array[...])


class CountingObserver(SilentObserver):
    def __init__(self) -> None:
        self.expected, self.done = 0, 0

    def stage(self, name: str, chunks: int) -> None:
        self.expected += chunks

    def chunks_done(self, count: int) -> None:
        self.done += count


def test_digits_are_scikit_learns(tmp_path: Path) -> None:
    group = make(DigitsOptions(), tmp_path / "digits.zarr")
    pixels, digit = sklearn.datasets.load_digits(return_X_y=True)
    np.testing.assert_array_equal(values(group, "X"), pixels)
    np.testing.assert_array_equal(values(group, "labels"), digit)
    assert group.metadata.zarr_format == 3
    assert group.attrs["dataset"] == "digits"


def test_example1_is_the_papers_mixture(tmp_path: Path) -> None:
    group = make(Example1Options(), tmp_path / "example1.zarr")
    x, component = values(group, "X")[:, 0], values(group, "labels")
    assert len(x) == 1000
    assert abs((component == 0).mean() - 0.3) < 0.05
    for k, mean in ((0, -2.0), (1, 2.0)):
        assert abs(x[component == k].mean() - mean) < 0.2
        assert abs(x[component == k].std() - 1.0) < 0.15


def test_mnist_is_the_first_principal_components_of_five_digits(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, size=(120, 28, 28), dtype=np.uint8)
    digit = np.arange(120, dtype=np.uint8) % 10
    np.savez(tmp_path / "images.npz", X=pixels, y=digit)
    group = make(MnistOptions(source=str(tmp_path / "images.npz")), tmp_path / "mnist.zarr")
    keep = np.isin(digit, (1, 2, 4, 5, 6))
    np.testing.assert_array_equal(values(group, "labels"), digit[keep])
    scaled = pixels[keep].reshape(60, -1) / 255.0
    centred = scaled - scaled.mean(axis=0)
    singular = np.linalg.svd(centred, compute_uv=False)[:42]
    x = values(group, "X")
    np.testing.assert_allclose(x.T @ x, np.diag(singular**2), atol=1e-9)
    np.testing.assert_allclose(centred @ centred.T @ x, x * singular**2, atol=1e-8)


@pytest.mark.parametrize(
    ("arrays", "part"),
    [
        ({"images": np.zeros((3, 784))}, "must hold X"),
        ({"X": np.zeros((3, 100)), "y": np.arange(3)}, "(3, 100)"),
        ({"X": np.zeros((3, 784)), "y": np.arange(2)}, "(2,)"),
        ({"X": np.zeros((50, 784)), "y": np.zeros(50)}, "0 images"),
    ],
)
def test_a_source_that_is_not_mnist_is_refused(
    tmp_path: Path, arrays: dict[str, np.ndarray[Any, Any]], part: str
) -> None:
    np.savez(tmp_path / "images.npz", **arrays)
    with pytest.raises(InvalidDataError) as caught:
        make(MnistOptions(source=str(tmp_path / "images.npz")), tmp_path / "mnist.zarr")
    assert part in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images.npz"]


def test_mnist_without_a_network_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(sklearn.datasets, "fetch_openml", unreachable)
    with pytest.raises(InvalidDataError, match=r"no route to host.*--source"):
        make(MnistOptions(), tmp_path / "mnist.zarr")


def test_a_mixture_is_the_same_in_any_chunks(tmp_path: Path) -> None:
    rows = BLOCK_ROWS + 1000
    one = make(MixtureOptions(rows=rows, features=3, components=2, chunk_rows=999), tmp_path / "one.zarr")
    two = make(MixtureOptions(rows=rows, features=3, components=2), tmp_path / "two.zarr")
    np.testing.assert_array_equal(values(one, "X"), values(two, "X"))
    np.testing.assert_array_equal(values(one, "labels"), values(two, "labels"))


def test_a_longer_mixture_begins_with_a_shorter_one(tmp_path: Path) -> None:
    short = make(MixtureOptions(rows=100, features=3, components=2, seed=5), tmp_path / "short.zarr")
    long = make(
        MixtureOptions(rows=BLOCK_ROWS + 10, features=3, components=2, seed=5), tmp_path / "long.zarr"
    )
    np.testing.assert_array_equal(values(short, "X"), values(long, "X")[:100])


def test_a_mixture_has_the_parameters_that_it_states(tmp_path: Path) -> None:
    group = make(MixtureOptions(rows=60_000, features=4, components=3), tmp_path / "mixture.zarr")
    x, labels = values(group, "X"), values(group, "labels")
    truth = mixture_parameters(3, 4, 0)
    np.testing.assert_array_equal(values(group, "true_means"), truth.means)
    for k in range(3):
        rows = x[labels == k]
        assert abs(len(rows) / len(x) - values(group, "true_weights")[k]) < 0.01
        np.testing.assert_allclose(rows.mean(axis=0), truth.means[k], atol=0.05)
        np.testing.assert_allclose(np.cov(rows.T), values(group, "true_covariances")[k], atol=0.08)


@pytest.mark.parametrize(
    ("rows", "chunk_rows"),
    [(1, 100), (99, 100), (100, 100), (101, 100), (BLOCK_ROWS, 10_000), (2 * BLOCK_ROWS + 1, 10_000)],
)
def test_every_chunk_of_a_mixture_is_reported(tmp_path: Path, rows: int, chunk_rows: int) -> None:
    observer = CountingObserver()
    options = MixtureOptions(rows=rows, features=1, components=1, chunk_rows=chunk_rows)
    make_dataset(options, tmp_path / "mixture.zarr", observer=observer)
    assert observer.done == observer.expected == -(-rows // chunk_rows)


def test_a_mixture_larger_than_the_disk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidDataError, match=r"GB free"):
        make(MixtureOptions(rows=10**12), tmp_path / "mixture.zarr")
    assert not list(tmp_path.iterdir())


def test_what_exists_is_kept_unless_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "example1.zarr"
    first = values(make(Example1Options(seed=0), path), "X")
    with pytest.raises(EmtauError, match="--overwrite"):
        make(Example1Options(seed=1), path)
    assert not np.array_equal(values(make(Example1Options(seed=1), path, overwrite=True), "X"), first)


def test_overwrite_spares_a_folder_that_is_not_zarr(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("keep")
    with pytest.raises(EmtauError, match="not written by emtau"):
        make(Example1Options(), tmp_path, overwrite=True)
    assert (tmp_path / "precious.txt").exists()


def test_a_stored_dataset_is_recognised_by_its_options(tmp_path: Path) -> None:
    path = tmp_path / "mixture.zarr"
    make(MixtureOptions(rows=500, features=2, components=2), path)
    assert holds_dataset(MixtureOptions(rows=500, features=2, components=2), path)
    assert holds_dataset(MixtureOptions(rows=500, features=2, components=2, chunk_rows=500), path)
    assert not holds_dataset(MixtureOptions(rows=501, features=2, components=2), path)
    assert not holds_dataset(MixtureOptions(rows=500, features=2, components=2, chunk_rows=5), path)
    assert not holds_dataset(DigitsOptions(), path)
    assert not holds_dataset(DigitsOptions(), tmp_path / "none.zarr")
