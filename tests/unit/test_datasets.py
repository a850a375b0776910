"""Datasets: their content, and how they are stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.datasets
import zarr

from emtau_dask.datasets import BLOCK_ROWS, holds_dataset, make_dataset, mixture_parameters
from emtau_dask.em.history import SilentObserver
from emtau_dask.errors import EmtauError, InvalidDataError


def make(name: str, path: Path, **settings: Any) -> zarr.Group:
    make_dataset(name, path, observer=SilentObserver(), **settings)
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
    group = make("digits", tmp_path / "digits.zarr")
    pixels, digit = sklearn.datasets.load_digits(return_X_y=True)
    np.testing.assert_array_equal(values(group, "X"), pixels)
    np.testing.assert_array_equal(values(group, "labels"), digit)
    assert group.metadata.zarr_format == 3
    assert group.attrs["dataset"] == "digits"


def test_example1_is_the_papers_mixture(tmp_path: Path) -> None:
    group = make("example1", tmp_path / "example1.zarr")
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
    group = make("mnist", tmp_path / "mnist.zarr", source=str(tmp_path / "images.npz"))
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
        make("mnist", tmp_path / "mnist.zarr", source=str(tmp_path / "images.npz"))
    assert part in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images.npz"]


def test_mnist_without_a_network_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(sklearn.datasets, "fetch_openml", unreachable)
    with pytest.raises(InvalidDataError, match=r"no route to host.*--source"):
        make("mnist", tmp_path / "mnist.zarr")


def test_a_mixture_is_the_same_in_any_chunks(tmp_path: Path) -> None:
    rows = BLOCK_ROWS + 1000
    one = make("mixture", tmp_path / "one.zarr", rows=rows, features=3, components=2, chunk_rows=999)
    two = make("mixture", tmp_path / "two.zarr", rows=rows, features=3, components=2)
    np.testing.assert_array_equal(values(one, "X"), values(two, "X"))
    np.testing.assert_array_equal(values(one, "labels"), values(two, "labels"))


def test_a_longer_mixture_begins_with_a_shorter_one(tmp_path: Path) -> None:
    short = make("mixture", tmp_path / "short.zarr", rows=100, features=3, components=2, seed=5)
    long = make("mixture", tmp_path / "long.zarr", rows=BLOCK_ROWS + 10, features=3, components=2, seed=5)
    np.testing.assert_array_equal(values(short, "X"), values(long, "X")[:100])


def test_a_mixture_has_the_parameters_that_it_states(tmp_path: Path) -> None:
    group = make("mixture", tmp_path / "mixture.zarr", rows=60_000, features=4, components=3)
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
    options = {"rows": rows, "features": 1, "components": 1, "chunk_rows": chunk_rows}
    make_dataset("mixture", tmp_path / "mixture.zarr", observer=observer, **options)
    assert observer.done == observer.expected == -(-rows // chunk_rows)


def test_a_mixture_larger_than_the_disk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidDataError, match=r"GiB free|TiB free"):
        make("mixture", tmp_path / "mixture.zarr", rows=10**12)
    assert not list(tmp_path.iterdir())


def test_what_exists_is_kept_unless_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "example1.zarr"
    first = values(make("example1", path, seed=0), "X")
    with pytest.raises(EmtauError, match="--overwrite"):
        make("example1", path, seed=1)
    assert not np.array_equal(values(make("example1", path, seed=1, overwrite=True), "X"), first)


def test_overwrite_spares_a_folder_that_is_not_zarr(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("keep")
    with pytest.raises(EmtauError, match="not written by emtau"):
        make("example1", tmp_path, overwrite=True)
    assert (tmp_path / "precious.txt").exists()


def test_a_stored_dataset_is_recognised_by_its_options(tmp_path: Path) -> None:
    path = tmp_path / "mixture.zarr"
    make("mixture", path, rows=500, features=2, components=2)
    assert holds_dataset("mixture", {"rows": 500, "features": 2, "components": 2}, path)
    assert holds_dataset("mixture", {"rows": 500, "features": 2, "components": 2, "chunk_rows": 500}, path)
    assert not holds_dataset("mixture", {"rows": 501, "features": 2, "components": 2}, path)
    assert not holds_dataset("mixture", {"rows": 500, "features": 2, "components": 2, "chunk_rows": 5}, path)
    assert not holds_dataset("digits", {}, path)
    assert not holds_dataset("digits", {}, tmp_path / "none.zarr")
