"""The commands `emtau dataset`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from emtau_dask.cli.options import Command, debug_option, out_argument, overwrite_option
from emtau_dask.cli.printing import echo


@click.group()
def dataset() -> None:
    """Write a dataset to a zarr group with the arrays X and labels."""


def _dataset_options(command: Command) -> Command:
    """Add the options of every dataset."""
    chunk_rows = click.option("--chunk-rows", type=click.IntRange(1), help="Rows in a chunk.")
    return out_argument(chunk_rows(overwrite_option()(debug_option(command))))


_seed_option = click.option("--seed", type=click.IntRange(0), default=0, show_default=True)


def _count_option(name: str, default: int) -> Callable[[Command], Command]:
    return click.option(name, type=click.IntRange(1), default=default, show_default=True)


@dataset.command()
@_dataset_options
def digits(out: Path, overwrite: bool, **options: Any) -> None:
    """Handwritten digits that come with scikit-learn (1797 × 64)."""
    _make("digits", options, out, overwrite)


@dataset.command()
@_dataset_options
@_seed_option
def example1(out: Path, overwrite: bool, **options: Any) -> None:
    """The EM-Tau paper's Example 1: 1000 points of 0.3 N(-2, 1) + 0.7 N(2, 1)."""
    _make("example1", options, out, overwrite)


@dataset.command()
@_dataset_options
@click.option(
    "--source", metavar="FILE.npz", help="MNIST images (X) and digits (y); else they are downloaded."
)
def mnist(out: Path, overwrite: bool, **options: Any) -> None:
    """The EM-Tau paper's Example 2: MNIST digits 1, 2, 4, 5 and 6, by 42 principal components."""
    _make("mnist", options, out, overwrite)


@dataset.command()
@_dataset_options
@_count_option("--rows", 1_000_000)
@_count_option("--features", 16)
@_count_option("--components", 16)
@_seed_option
def mixture(out: Path, overwrite: bool, **options: Any) -> None:
    """A synthetic Gaussian mixture of any size, streamed to disk."""
    _make("mixture", options, out, overwrite)


def _make(name: str, options: dict[str, Any], out: Path, overwrite: bool) -> None:
    from emtau_dask.config import DataSection
    from emtau_dask.datasets import make_dataset
    from emtau_dask.estimator import watching

    data = DataSection.model_validate({"dataset": name, "dataset_options": options})
    assert data.dataset_options is not None
    with watching(sys.stderr) as observer:
        rows, features = make_dataset(data.dataset_options, out, overwrite=overwrite, observer=observer)
    echo(f"{rows:,} rows × {features} features written to {out}")
