"""The `data` section of a run config: a path, or a dataset that a run may make for itself."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import Field, model_validator

from emtau_dask.checks import choice, integer
from emtau_dask.config.fields import Count, OptionalPaths, Section, Seed, expected, names, optional, text

DatasetName = Literal["digits", "example1", "mnist", "mixture"]
DATASETS: tuple[str, ...] = get_args(DatasetName)


class _Dataset(Section):
    """Options of every dataset.

    Attributes
    ----------
    chunk_rows : int or None
        Rows in a chunk of the zarr arrays; null: a number that suits the dataset.
    """

    chunk_rows: Annotated[int | None, optional(integer(1))] = None


class DigitsOptions(_Dataset):
    """Options of the dataset `digits`."""

    dataset: Literal["digits"] = "digits"


class Example1Options(_Dataset):
    """Options of the dataset `example1`.

    Attributes
    ----------
    seed : int
        Seed of the rows.
    """

    dataset: Literal["example1"] = "example1"
    seed: Seed = 0


class MnistOptions(_Dataset):
    """Options of the dataset `mnist`, which a run does not download.

    Attributes
    ----------
    source : str or None
        A local ``.npz`` file with the images X and the digits y.
    """

    dataset: Literal["mnist"] = "mnist"
    source: Annotated[str | None, optional(text("the path of an .npz file"))] = None


class MixtureOptions(_Dataset):
    """Options of the dataset `mixture`.

    Attributes
    ----------
    rows : int
        Rows of the data.
    features : int
        Columns of the data.
    components : int
        Components of the mixture that the rows are drawn from.
    seed : int
        Seed of the rows.
    """

    dataset: Literal["mixture"] = "mixture"
    rows: Count = 1_000_000
    features: Count = 16
    components: Count = 16
    seed: Seed = 0


DatasetOptions = Annotated[
    DigitsOptions | Example1Options | MnistOptions | MixtureOptions, Field(discriminator="dataset")
]


class DataSection(Section):
    """Where the rows come from.

    Attributes
    ----------
    path : str, tuple of str, or None
        A zarr array or group, an ``.npy`` or CSV file, a parquet file or folder; a local path or an
        fsspec URL; a pattern such as ``data/*.parquet``, whose matches are read in the order of their
        names; or a list of these, read in its order. With `dataset`, where the dataset is kept
        (``<output.directory>/<dataset>.zarr`` if null).
    dataset : str or None
        A dataset that `emtau dataset` knows; made at `path` where that does not exist.
    dataset_options : DatasetOptions or None
        The options of that dataset.
    array : str or None
        Member of a zarr group that holds the rows.
    columns : tuple of str, or None
        Columns of parquet or CSV that are features, in this order; null: all but the index of a DataFrame.
    weights : str or None
        Weights of the rows: a member of the group or a column of the table that `path` names, or a path or
        URL of their own.
    labels : str or None
        Known labels of the rows, for `emtau compare`; named as `weights` are.
    """

    path: OptionalPaths = None
    dataset: Annotated[DatasetName | None, optional(choice(*DATASETS))] = None
    dataset_options: DatasetOptions | None = None
    array: Annotated[str | None, optional(text("the name of an array in the group"))] = None
    columns: Annotated[tuple[str, ...] | None, optional(names("column names"))] = None
    weights: Annotated[str | None, optional(text("a name in the data, or a path"))] = None
    labels: Annotated[str | None, optional(text("a name in the data, or a path"))] = None

    @model_validator(mode="before")
    @classmethod
    def _name_the_options(cls, content: Any) -> Any:
        """Add the dataset's name to its options, by which pydantic finds their model."""
        if not isinstance(content, dict):
            return content
        dataset, options = content.get("dataset"), content.get("dataset_options")
        if dataset is None and options is not None:
            raise expected("given a dataset where dataset_options are set")
        if dataset not in DATASETS:
            return {**content, "dataset_options": None}
        if options is None:
            options = {}
        if not isinstance(options, dict):
            return content
        if options.get("dataset", dataset) != dataset:
            raise expected(f"without dataset_options.dataset, which says {options['dataset']!r}")
        return {**content, "dataset_options": {**options, "dataset": dataset}}

    @model_validator(mode="after")
    def _needs_a_source(self) -> DataSection:
        if self.path is None and self.dataset is None:
            raise expected(f"given a path or a dataset ({', '.join(DATASETS)})")
        if self.dataset is not None and not isinstance(self.path, str | None):
            raise expected("given one path where a dataset is made there, not a list")
        if self.dataset is not None and self.columns is not None:
            raise expected("given without columns, which are those of parquet and CSV; a dataset is zarr")
        return self
