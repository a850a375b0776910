"""Run configs: what a YAML file may say, checked before any work starts.

Relative paths are relative to the working directory, those of `output` to `output.directory`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import BeforeValidator, ValidationError, model_validator

from emtau_dask.checks import Constraint, choice, integer
from emtau_dask.config.algorithms import DEFAULT, RUN_ALGORITHMS, RunAlgorithm
from emtau_dask.config.data import DataSection
from emtau_dask.config.fields import (
    Count,
    FilePath,
    MemoryLimit,
    OptionalPath,
    Section,
    Seed,
    Switch,
    allowed,
    expected,
    optional,
    text,
)
from emtau_dask.config.messages import explain
from emtau_dask.config.yaml import apply_override, read_yaml
from emtau_dask.errors import ConfigError
from emtau_dask.fit import CONSTRAINTS
from emtau_dask.messages import masked_url


class InitSection(Section):
    """A start by given responsibilities, drawn from a flat Dirichlet distribution.

    Attributes
    ----------
    dirichlet_seed : int
        They are ``numpy.random.default_rng(dirichlet_seed).dirichlet(ones(n_components), rows)``.
    """

    dirichlet_seed: Seed


class ModelSection(Section):
    """The mixture and its start; the names are scikit-learn's.

    Attributes
    ----------
    n_components : int
        Components of the mixture.
    covariance_type : str
        What the components' covariances are: one full matrix each, one that all share (``tied``),
        variances alone (``diag``, or ``tied_diag`` where all share them), or one variance (``spherical``,
        ``tied_spherical``).
    reg_covar : float
        Added to the diagonal of each covariance.
    n_init : int or str
        Starts, of which the best is kept; ``auto`` is 1, but 4, 8 or 16 where a fit begins on a sample.
    init_params : str
        How the starts are made.
    init : InitSection or None
        A start by given responsibilities, in place of `init_params`.
    random_state : int
        Seed of all that is random.
    missing : str
        What NaN means: ``raise``, an error, or ``marginalise``, a missing value, over which fits by the
        algorithm ``em``, labels and scores integrate.
    """

    n_components: Annotated[int, allowed(CONSTRAINTS["n_components"])]
    covariance_type: Annotated[str, allowed(CONSTRAINTS["covariance_type"])] = "full"
    reg_covar: Annotated[float, allowed(CONSTRAINTS["reg_covar"])] = 1e-6
    n_init: Annotated[int | str, allowed(CONSTRAINTS["n_init"])] = "auto"
    init_params: Annotated[str, allowed(CONSTRAINTS["init_params"])] = "kmeans"
    init: InitSection | None = None
    random_state: Annotated[int, allowed(integer(0, 2**32 - 1))] = 0
    missing: Annotated[str, allowed(CONSTRAINTS["missing"])] = "raise"

    @model_validator(mode="after")
    def _one_given_start(self) -> ModelSection:
        if self.init is not None and self.n_init not in (1, "auto"):
            raise expected(f"without n_init={self.n_init} where init gives the start: one start, one fit")
        return self


class StopSection(Section):
    """When a fit stops.

    Attributes
    ----------
    tol : float or str
        A fit stops where the lower bound changes by less, in nats per row; 0 never stops it.
        ``statistical``: where the estimated gap is small beside what the sampling of the rows leaves open.
        ``auto`` is ``statistical`` for the algorithm ``auto`` on at least 10 rows for each parameter, else
        1e-5.
    max_iter : int
        Iterations after which it stops all the same.
    """

    tol: Annotated[float | str, allowed(CONSTRAINTS["tol"])] = "auto"
    max_iter: Count = 500


class CheckpointSection(Section):
    """Where and when a run is committed.

    Attributes
    ----------
    path : str or None
        A path or URL, from which the run can be resumed; null: nothing is kept of an interrupted fit.
    every : int
        Iterations between commits.
    """

    path: OptionalPath = None
    every: Annotated[int, allowed(CONSTRAINTS["checkpoint_every"])] = 1


_SCHEDULERS = choice("threads", "processes", "tcp://HOST:PORT", "tls://HOST:PORT")
_ADDRESSES = ("tcp://", "tls://")
SCHEDULER = Constraint(
    _SCHEDULERS.words,
    lambda value: (isinstance(value, str) and value.startswith(_ADDRESSES)) or _SCHEDULERS.holds(value),
    _SCHEDULERS.nearest,
)


def _without_secrets(value: str) -> str:
    if value.startswith(_ADDRESSES) and masked_url(value) != value:
        raise expected("HOST:PORT without user, password and query: a dask scheduler asks for none")
    return value


class TlsSection(Section):
    """Files for TLS.

    Attributes
    ----------
    ca_file : str
        The certificate authority (PEM).
    cert : str
        This client's certificate (PEM).
    key : str
        The key of that certificate (PEM).
    """

    ca_file: FilePath
    cert: FilePath
    key: FilePath


class ClusterSection(Section):
    """What computes.

    Attributes
    ----------
    scheduler : str
        ``threads``, ``processes`` (a dask cluster on this machine), or the address of a dask scheduler.
    workers : int or None
        Threads of the scheduler ``threads``; worker processes of ``processes``. Null: one for each core.
    threads : int
        Threads in each worker process of ``processes``.
    memory_limit : str or None
        Memory that each process may use, such as ``2GB``; a fit that is predicted to need more is refused.
    tls : TlsSection or None
        For ``tls://``; by default dask's own configuration.
    """

    scheduler: Annotated[str, BeforeValidator(_without_secrets), allowed(SCHEDULER)] = "threads"
    workers: Annotated[int | None, optional(integer(1))] = None
    threads: Count = 1
    memory_limit: MemoryLimit = None
    tls: TlsSection | None = None

    @model_validator(mode="after")
    def _fits_the_scheduler(self) -> ClusterSection:
        remote = self.scheduler not in ("threads", "processes")
        if self.threads != 1 and self.scheduler != "processes":
            raise expected(
                f"without threads = {self.threads} where scheduler is {self.scheduler}: they are the "
                "threads of a worker process of scheduler: processes"
            )
        if remote and (self.workers is not None or self.memory_limit is not None):
            raise expected(
                f"without workers and memory_limit where scheduler is {self.scheduler}: "
                "its workers have their own"
            )
        if self.tls is not None and not self.scheduler.startswith("tls://"):
            raise expected("without tls unless scheduler is tls://HOST:PORT")
        return self


class OutputSection(Section):
    """The results of a run.

    Attributes
    ----------
    directory : str
        Folder of the results; ``runs/<name of the config>`` unless given.
    model : str or None
        Where the fitted model is written, below `directory`; null: nowhere.
    labels : str or None
        Where the zarr group of the labels is written, below `directory`; null: nowhere.
    probabilities : bool
        Whether that group also holds each row's responsibilities.
    scores : bool
        Whether that group also holds each row's log-likelihood, in nats.
    report : str or None
        Where a report of the fit is written, one page of HTML, below `directory`; null: nowhere. It needs
        the extra ``plot``.
    """

    directory: Annotated[str, allowed(text("a folder"))]
    model: OptionalPath = "model.zarr"
    labels: OptionalPath = "labels.zarr"
    probabilities: Switch = False
    scores: Switch = False
    report: OptionalPath = None

    @model_validator(mode="after")
    def _has_a_place(self) -> OutputSection:
        if self.labels is None and (self.probabilities or self.scores):
            raise expected(
                "given labels where probabilities or scores are asked for: they go to the same place"
            )
        return self

    def place(self, name: str) -> Path:
        """Return the path of the result `name`, below `directory` unless absolute."""
        return Path(self.directory) / name


class RunConfig(Section):
    """A whole run config; see the sections for the keys."""

    data: DataSection
    model: ModelSection
    algorithm: RunAlgorithm = RUN_ALGORITHMS[DEFAULT](name=DEFAULT)
    stop: StopSection = StopSection()
    checkpoint: CheckpointSection = CheckpointSection()
    cluster: ClusterSection = ClusterSection()
    output: OutputSection

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
    """Return what `load_config` checks, as plain values; raises `ConfigError` where there are none."""
    path = Path(path)
    return complete_values(read_yaml(path), overrides, path.stem)


def complete_values(content: dict[str, Any], overrides: Sequence[str], name: str) -> dict[str, Any]:
    """Return plain values changed by overrides; the results go to ``runs/<name>`` unless they say where."""
    for override in overrides:
        content = apply_override(content, override)
    output = content.get("output")
    if output is None or isinstance(output, dict):
        content = {**content, "output": {"directory": f"runs/{name}", **(output or {})}}
    return content


def checked_config(content: dict[str, Any], names: Mapping[str, str] = MappingProxyType({})) -> RunConfig:
    """Return plain values as a run config; raises `ConfigError` as `load_config` does.

    ``names`` are what errors call some of the keys, such as the options that set them.
    """
    try:
        return RunConfig.model_validate(content)
    except ValidationError as error:
        raise ConfigError(explain(error, content, RunConfig, names)) from None
