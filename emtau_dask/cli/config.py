"""The sections and keys of a YAML config.

Relative paths are relative to the working directory, those of `output` to `output.directory`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)

from emtau_dask.cli.sections import (
    HOME,
    NUMBERS,
    Count,
    FilePath,
    MemoryLimit,
    OptionalPath,
    OptionalPaths,
    Section,
    Seed,
    Switch,
    allowed,
    as_variant,
    expected,
    explain,
    named,
    names,
    optional,
)
from emtau_dask.cli.yaml import apply_override, read_yaml
from emtau_dask.constraints import Constraint, choice, integer, number, text
from emtau_dask.datasets import CONSTRAINTS as DATASET_CONSTRAINTS
from emtau_dask.datasets import DATASETS
from emtau_dask.em.settings import check_missing
from emtau_dask.errors import ConfigError, masked_url
from emtau_dask.estimator.gaussian_mixture import GaussianMixture
from emtau_dask.policies.policy import ActivityPolicy
from emtau_dask.policies.registry import ALGORITHMS
from emtau_dask.settings import AUTO, CONSTRAINTS, SEED, Settings
from emtau_dask.storage.locations import Place
from emtau_dask.storage.urls import is_url, plain_path

_Figure = Annotated[float | None, optional(number(0))]
_Figures = Annotated[tuple[float, ...] | None, optional(NUMBERS)]
_SCHEDULERS = choice("threads", "processes", "tcp://HOST:PORT", "tls://HOST:PORT")
_ADDRESSES = ("tcp://", "tls://")
RESULTS = ("model", "labels", "report")
"""Keys of the section `output` that name the places of results."""


def _setting(name: str) -> BeforeValidator:
    """Return the validator of one of the estimator's settings."""
    return allowed(CONSTRAINTS[name])


class PublishedFigures(Section):
    """Figures that someone published for an algorithm, printed beside the measured ones."""

    iterations: Annotated[int | None, optional(integer(0))] = None
    """Iterations until it stopped."""
    membership_error: _Figure = None
    """Distance of its responsibilities from traditional EM's, as the source defines it."""
    seconds: _Figure = None
    """Running time on the source's machine."""
    classification_error: _Figure = None
    """Fraction of rows whose label is not the most frequent one of their component."""
    weights: _Figures = None
    """Final weights of a mixture in one dimension, by component."""
    means: _Figures = None
    """Its final means."""
    variances: _Figures = None
    """Its final variances."""


class AlgorithmSettings(Section):
    """An algorithm by its name; `algorithm_models` adds the parameters of a policy."""

    name: str
    """The algorithm; its parameters are further keys of this section."""


class ComparedSettings(AlgorithmSettings):
    """An algorithm as a line of a comparison."""

    published: PublishedFigures | None = None
    """Figures that someone published for it, printed beside the measured ones."""


class KMeansSettings(ComparedSettings):
    """Lloyd's k-means, the baseline of a comparison; it fits no mixture."""

    name: Literal["kmeans"] = "kmeans"


def algorithm_models(kind: type[Section]) -> dict[str, Any]:
    """Return, for each policy's name, a model that adds the policy's parameters to those of ``kind``."""
    return {
        name: _model(kind, policy, policy.constraints, name=(Literal[name], name))
        for name, policy in ALGORITHMS.items()
    }


def _model(
    kind: type[Section], function: Callable[..., Any], constraints: Mapping[str, Constraint], **fields: Any
) -> Any:
    """Return a model that adds fields to ``kind``: those given, and the parameters of ``function``."""
    for key, parameter in inspect.signature(function, eval_str=True).parameters.items():
        fields[key] = (Annotated[parameter.annotation, allowed(constraints[key])], parameter.default)
    return create_model(kind.__name__, __base__=kind, **fields)


ComparedSettings.variants = {**algorithm_models(ComparedSettings), "kmeans": KMeansSettings}


class RunSettings(AlgorithmSettings):
    """The algorithm of a run, and those of a comparison."""

    acceleration: Annotated[str | None, _setting("acceleration")] = Settings.acceleration
    """Whether quasi-Newton steps replace EM's own between passes over all rows. ``auto``: with the
    algorithms ``auto`` and ``em-sampled``."""
    compare: tuple[Annotated[SerializeAsAny[ComparedSettings], named(ComparedSettings)], ...] = ()
    """The algorithms that `emtau compare` runs, each with its name and its parameters."""


class AutomaticSettings(RunSettings):
    """The algorithm that the shape of the data decides on."""

    name: Literal["auto"] = "auto"


RunSettings.variants = {AUTO: AutomaticSettings, **algorithm_models(RunSettings)}


def policy_of(settings: AlgorithmSettings) -> ActivityPolicy:
    """Return the activity policy that an entry of the section `algorithm` describes; k-means has none."""
    parameters = settings.model_dump(exclude={"name", "acceleration", "compare", "published"})
    return ALGORITHMS[settings.name](**parameters)


def algorithm_of(settings: AlgorithmSettings) -> Literal["auto"] | ActivityPolicy:
    """Return the estimator's ``algorithm`` for a run's section `algorithm`."""
    return "auto" if settings.name == AUTO else policy_of(settings)


class DatasetOptions(Section):
    """The parameters of a dataset, for `make_dataset`."""


DatasetOptions.variants = {
    name: _model(DatasetOptions, function, DATASET_CONSTRAINTS) for name, function in DATASETS.items()
}


class DataSection(Section):
    """Where the rows come from."""

    path: OptionalPaths = None
    """A zarr array or group, an ``.npy`` or CSV file, a parquet file or folder; a local path or an
    fsspec URL; a pattern such as ``data/*.parquet``, whose matches are read in dask's natural order
    (part-9 before part-10); or a list of these, read in its order. With `dataset`, where the dataset is kept
    (``<output.directory>/<dataset>.zarr`` if null)."""
    dataset: Annotated[str | None, optional(choice(*DATASETS))] = None
    """A dataset that `emtau dataset` knows; it is created at `path` if that does not exist."""
    dataset_options: SerializeAsAny[DatasetOptions] | None = Field(None, validate_default=True)
    """The options of that dataset."""
    array: Annotated[str | None, optional(text("the name of an array in the group"))] = None
    """Member of a zarr group that holds the rows."""
    columns: Annotated[tuple[str, ...] | None, optional(names("column names"))] = None
    """Columns of parquet or CSV that are features, in this order; null: all but the index of a DataFrame."""
    features: Annotated[tuple[str, ...] | None, optional(names("variables, or a dimension"))] = None
    """The variables of netCDF, or of a zarr group that xarray wrote, that are features. Or one dimension of
    the variable `array`, by default of the only one that has it. All other dimensions are the rows."""
    weights: Annotated[str | None, optional(text("a name in the data, or a path"))] = None
    """Weights of the rows: a member of the group or a column of the table that `path` names, or a path or
    URL of their own."""
    labels: Annotated[str | None, optional(text("a name in the data, or a path"))] = None
    """Known labels of the rows, for `emtau compare`; named as `weights` are."""

    @property
    def urls(self) -> list[tuple[str, str | tuple[str, ...]]]:
        """The dotted keys whose values are or contain a URL, with the values."""
        named = {f"data.{name}": getattr(self, name) for name in ("path", "weights", "labels")}
        return [
            (key, value)
            for key, value in named.items()
            if any(is_url(plain_path(each)) for each in ([value] if isinstance(value, str) else value or ()))
        ]

    @field_validator("dataset_options", mode="before")
    @classmethod
    def _options_of_the_dataset(cls, options: Any, info: ValidationInfo) -> Any:
        dataset = info.data.get("dataset")
        if dataset is None:
            if options is not None and "dataset" in info.data:
                raise expected("given with a dataset if dataset_options are set")
            return None
        options = {} if options is None else options
        if not isinstance(options, Mapping):
            return options
        # In configs that an earlier version stored, the options repeat the name of the dataset.
        own = {key: value for key, value in options.items() if (key, value) != ("dataset", dataset)}
        return as_variant(DatasetOptions, dataset, own)

    @model_validator(mode="after")
    def _needs_a_source(self) -> DataSection:
        if self.path is None and self.dataset is None:
            raise expected(f"given a path or a dataset ({', '.join(DATASETS)})")
        if self.dataset is not None and not isinstance(self.path, str | None):
            raise expected("given with one path for a dataset, not a list")
        if self.dataset is not None and self.columns is not None:
            raise expected("given without columns, which are those of parquet and CSV; a dataset is zarr")
        if self.features is not None and (self.dataset, self.columns) != (None, None):
            raise expected("given without dataset and columns if it has features, which are those of xarray")
        return self


class InitSection(Section):
    """A start by given responsibilities, drawn from a flat Dirichlet distribution."""

    dirichlet_seed: Seed
    """They are ``numpy.random.default_rng(dirichlet_seed).dirichlet(ones(n_components), rows)``."""


class ModelSection(Section):
    """The mixture and its start; the names are scikit-learn's."""

    n_components: Annotated[int, _setting("n_components")]
    """Components of the mixture."""
    covariance_type: Annotated[str, _setting("covariance_type")] = Settings.covariance_type
    """The covariances of the components: a full matrix each, one that all share (``tied``),
    only variances (``diag``, or ``tied_diag`` if all share them), or one variance (``spherical``,
    ``tied_spherical``)."""
    reg_covar: Annotated[float, _setting("reg_covar")] = Settings.reg_covar
    """Added to the diagonal of each covariance."""
    n_init: Annotated[int | str, _setting("n_init")] = Settings.n_init
    """Number of starts. By default several are compared on a small sample, or on all rows if these are few,
    and the best continues. ``auto`` is a number that suits the data, and 1 for a named algorithm."""
    init_params: Annotated[str, _setting("init_params")] = Settings.init_params
    """How the starts are computed."""
    init: InitSection | None = None
    """A start by given responsibilities, in place of `init_params`."""
    random_state: Annotated[int, allowed(SEED)] = 0
    """Seed of all random numbers."""
    missing: Annotated[str, _setting("missing")] = Settings.missing
    """What NaN means: ``raise``, an error; ``drop``, a row that is not used and has the label -1; or
    ``marginalise`` (also ``marginalize``), a missing value, over which fits, labels and scores integrate."""

    @model_validator(mode="after")
    def _one_given_start(self) -> ModelSection:
        if self.init is not None and self.n_init not in (1, "auto"):
            raise expected(f"without n_init={self.n_init} if init gives the start, which is only one")
        return self


class StopSection(Section):
    """When a fit stops."""

    tol: Annotated[float | str, _setting("tol")] = Settings.tol
    """A fit stops if the log-likelihood per row changes by less; 0 never stops it. With
    ``statistical`` it stops if what it could still gain is small compared with the sampling error of the
    rows. ``auto`` is ``statistical`` for the algorithm ``auto`` on at least 10 rows for each parameter, else
    1e-5."""
    max_iter: Count = Settings.max_iter
    """Maximum number of iterations."""


class CheckpointSection(Section):
    """Where and when a run is committed."""

    path: OptionalPath = None
    """A path or URL, from which the run can be resumed; null: nothing is kept of an interrupted fit."""
    every: Annotated[int, _setting("checkpoint_every")] = Settings.checkpoint_every
    """Iterations between commits."""


SCHEDULER = Constraint(
    _SCHEDULERS.words,
    lambda value: (isinstance(value, str) and value.startswith(_ADDRESSES)) or _SCHEDULERS.holds(value),
    _SCHEDULERS.nearest,
)


def _without_secrets(value: str) -> str:
    if value.startswith(_ADDRESSES) and masked_url(value) != value:
        raise expected("HOST:PORT without user, password and query: a dask scheduler needs none")
    return value


class TlsSection(Section):
    """Files for TLS."""

    ca_file: FilePath
    """The certificate authority (PEM)."""
    cert: FilePath
    """This client's certificate (PEM)."""
    key: FilePath
    """The key of that certificate (PEM)."""


class ClusterSection(Section):
    """What computes."""

    scheduler: Annotated[str, BeforeValidator(_without_secrets), allowed(SCHEDULER)] = "threads"
    """``threads``, ``processes`` (workers of a dask cluster on this machine, not dask's pool of processes),
    or the address of a dask scheduler."""
    workers: Annotated[int | None, optional(integer(1))] = None
    """Threads of the scheduler ``threads``; worker processes of ``processes``. Null: one for each core."""
    threads: Count = 1
    """Threads in each worker process of ``processes``."""
    memory_limit: MemoryLimit = None
    """Memory that each process may use, such as ``2GiB``; a fit that is predicted to need more is refused."""
    tls: TlsSection | None = None
    """For ``tls://``; by default dask's own configuration."""

    @model_validator(mode="after")
    def _fits_the_scheduler(self) -> ClusterSection:
        remote = self.scheduler not in ("threads", "processes")
        if self.threads != 1 and self.scheduler != "processes":
            raise expected(
                f"without threads = {self.threads} if scheduler is {self.scheduler}: they are the "
                "threads of a worker process of scheduler: processes"
            )
        if remote and (self.workers is not None or self.memory_limit is not None):
            raise expected(
                f"without workers and memory_limit if scheduler is {self.scheduler}: "
                "its workers have their own"
            )
        if self.tls is not None and not self.scheduler.startswith("tls://"):
            raise expected("without tls unless scheduler is tls://HOST:PORT")
        return self


class OutputSection(Section):
    """The results of a run."""

    directory: Annotated[str, allowed(text("a folder")), HOME]
    """Folder of the results; ``runs/<name of the config>`` unless given."""
    model: OptionalPath = "model.zarr"
    """Where the fitted model is written, below `directory`; null: nowhere."""
    labels: OptionalPath = "labels.zarr"
    """Where the labels are written, below `directory`: a zarr group, or a table if the name ends in
    `.parquet`, `.pq`, `.csv` or `.tsv`; null: nowhere."""
    probabilities: Switch = False
    """Whether each row's responsibilities are written, too."""
    scores: Switch = False
    """Whether each row's log-likelihood is written, too."""
    report: OptionalPath = None
    """Where a report of the fit is written, one page of HTML, below `directory`; null: nowhere. It needs
    the extra ``plot``."""

    @model_validator(mode="after")
    def _has_a_place(self) -> OutputSection:
        if self.labels is None and (self.probabilities or self.scores):
            raise expected("given with labels if probabilities or scores are true: they go to the same place")
        return self

    def place(self, name: str) -> Path:
        """Return the path of the result `name`, below `directory` unless absolute."""
        return Path(self.directory) / name

    @property
    def results(self) -> dict[str, str]:
        """The places of the results to write, by name; below `directory` unless absolute."""
        places = {name: getattr(self, name) for name in RESULTS}
        return {name: place for name, place in places.items() if place is not None}

    @property
    def places(self) -> dict[str, Path]:
        """The paths of the results to write."""
        return {name: self.place(place) for name, place in self.results.items()}


class RunConfig(Section):
    """A whole run config; see the sections for the keys."""

    data: DataSection
    model: ModelSection
    algorithm: Annotated[SerializeAsAny[RunSettings], named(RunSettings, AUTO)] = AutomaticSettings()
    stop: StopSection = StopSection()
    checkpoint: CheckpointSection = CheckpointSection()
    cluster: ClusterSection = ClusterSection()
    output: OutputSection

    @property
    def place(self) -> Place:
        """The place of the rows, or of the dataset that the config names."""
        path = self.data.path
        if path is not None and not isinstance(path, str):
            return path
        return plain_path(path or str(self.output.place(f"{self.data.dataset}.zarr")))

    @model_validator(mode="before")
    @classmethod
    def _without_empty_sections(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        keys = cls.model_fields
        return {key: value for key, value in content.items() if value is not None or key not in keys}


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the run config in a YAML file, changed by overrides ``section.key=value``.

    Raises
    ------
    ConfigError
        The file cannot be read, a key is unknown or missing, or a value is not allowed. The message
        names the key, the value, the limit and the nearest valid value.
    """
    return checked_config(config_values(path, overrides))


def config_values(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the unchecked values of the config that `load_config` reads; raises `ConfigError`."""
    path = Path(path)
    return complete_values(read_yaml(path), overrides, path.stem)


def complete_values(content: dict[str, Any], overrides: Sequence[str], name: str) -> dict[str, Any]:
    """Return config values changed by overrides; the default folder of results is ``runs/<name>``."""
    for override in overrides:
        content = apply_override(content, override)
    output = content.get("output")
    if output is None or isinstance(output, dict):
        content = {**content, "output": {"directory": f"runs/{name}", **(output or {})}}
    return content


def checked_config(content: dict[str, Any], names: Mapping[str, str] = MappingProxyType({})) -> RunConfig:
    """Return config values as a checked run config; raises `ConfigError` as `load_config` does.

    ``names`` are names of keys in errors, such as the options that set them; others have their own names.
    """
    try:
        return RunConfig.model_validate(content)
    except ValidationError as error:
        raise ConfigError(explain(error, RunConfig, names)) from None


def estimator_of(config: RunConfig) -> GaussianMixture:
    """Return the estimator of a run; raises `ConfigError` if it cannot fit missing values."""
    settings = {**config.model.model_dump(exclude={"init"}), **config.stop.model_dump()}
    settings["acceleration"] = config.algorithm.acceleration
    estimator = GaussianMixture(
        algorithm=algorithm_of(config.algorithm),
        checkpoint=config.checkpoint.path,
        checkpoint_every=config.checkpoint.every,
        **settings,
    )
    check_missing(Settings.of(estimator), responsibilities=config.model.init is not None)
    return estimator
