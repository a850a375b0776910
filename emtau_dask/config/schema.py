"""Run configs: what a YAML file may say, checked before any work starts.

A config has the sections `data`, `model`, `algorithm`, `stop`, `checkpoint`,
`cluster` and `output`. Relative paths are relative to the working directory,
those of `output` to `output.directory`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ValidationError, model_validator

from emtau_dask.config.algorithms import Algorithm, RunEMTau, Section
from emtau_dask.config.data import MAX_SEED, DataSection
from emtau_dask.config.fields import boolean, choice, expected, memory, number, optional, text, whole
from emtau_dask.config.messages import explain
from emtau_dask.config.yaml import apply_override, read_yaml
from emtau_dask.errors import ConfigError
from emtau_dask.fit import MAX_COMPONENTS, MAX_STARTS
from emtau_dask.io.remote import is_url
from emtau_dask.messages import HIDDEN, masked_url, masked_values
from emtau_dask.mixture.covariance import STRUCTURES


class InitSection(Section):
    """A start by given responsibilities, drawn from a flat Dirichlet distribution.

    Attributes
    ----------
    dirichlet_seed : int
        ``numpy.random.default_rng(dirichlet_seed).dirichlet(ones(n_components), rows)``.
    """

    dirichlet_seed: Annotated[int, whole(0, MAX_SEED)]


class ModelSection(Section):
    """The mixture and its start; the names are scikit-learn's."""

    n_components: Annotated[int, whole(1, MAX_COMPONENTS)]
    covariance_type: Annotated[str, choice(*STRUCTURES)] = "full"
    reg_covar: Annotated[float, number(0.0)] = 1e-6
    n_init: Annotated[int, whole(1, MAX_STARTS)] = 1
    init_params: Annotated[
        Literal["kmeans", "k-means++", "random", "random_from_data"],
        choice("kmeans", "k-means++", "random", "random_from_data"),
    ] = "kmeans"
    init: InitSection | None = None
    random_state: Annotated[int, whole(0, 2**32 - 1)] = 0

    @model_validator(mode="after")
    def _one_given_start(self) -> ModelSection:
        if self.init is not None and self.n_init > 1:
            raise expected(f"without n_init={self.n_init} where init gives the start: one start, one fit")
        return self


class StopSection(Section):
    """When a fit stops.

    Attributes
    ----------
    tol : float
        Change of the lower bound, in nats per row; 0 never stops by it.
    max_iter : int
        Iterations at most.
    """

    tol: Annotated[float, number(0.0)] = 1e-5
    max_iter: Annotated[int, whole(1)] = 500


class CheckpointSection(Section):
    """Where a run is committed, and after how many iterations."""

    path: Annotated[str | None, optional(text("a path"))] = None
    every: Annotated[int, whole(1)] = 1


def _scheduler(value: object) -> object:
    if isinstance(value, str) and value.startswith(("tcp://", "tls://")):
        if masked_url(value) != value:
            raise expected("HOST:PORT without user, password and query: a dask scheduler asks for none")
        return value
    return choice("threads", "processes", "tcp://HOST:PORT", "tls://HOST:PORT").func(value)  # type: ignore[call-arg]


class TlsSection(Section):
    """The files of a ``tls://`` cluster; by default those of dask's own configuration.

    Attributes
    ----------
    ca_file, cert, key : str
        Certificate authority; this client's certificate and key.
    """

    ca_file: Annotated[str, text("a path")]
    cert: Annotated[str, text("a path")]
    key: Annotated[str, text("a path")]


class ClusterSection(Section):
    """What computes.

    Attributes
    ----------
    scheduler : str
        ``threads``, ``processes`` (a dask cluster on this machine), or the address of a dask scheduler.
    workers : int or None
        Threads of the scheduler ``threads``; worker processes of ``processes``. None: one for each core.
    threads : int
        Threads in each worker process of ``processes``.
    memory_limit : str or None
        Memory that each process may use, such as ``2GB``; a fit that is predicted to need more is refused.
    tls : TlsSection or None
        For ``tls://``.
    """

    scheduler: Annotated[str, BeforeValidator(_scheduler)] = "threads"
    workers: Annotated[int | None, optional(whole(1))] = None
    threads: Annotated[int, whole(1)] = 1
    memory_limit: Annotated[str | None, optional(memory())] = None
    tls: TlsSection | None = None

    @model_validator(mode="after")
    def _fits_the_scheduler(self) -> ClusterSection:
        remote = self.scheduler not in ("threads", "processes")
        if self.threads != 1 and self.scheduler != "processes":
            raise expected(
                f"without threads = {self.threads} where scheduler is {self.scheduler}: they are the "
                "threads of a "
                "worker process of scheduler: processes"
            )
        if remote and (self.workers is not None or self.memory_limit is not None):
            raise expected(
                f"without workers and memory_limit where scheduler is {self.scheduler}: its workers "
                "have their own"
            )
        if self.tls is not None and not self.scheduler.startswith("tls://"):
            raise expected("without tls unless scheduler is tls://HOST:PORT")
        return self


class OutputSection(Section):
    """What a run leaves behind.

    Attributes
    ----------
    directory : str
        Folder of the results; ``runs/<name of the config>`` unless given.
    model : str or None
        The fitted model.
    labels : str or None
        Zarr group with the array `labels` and what the next two ask for.
    probabilities, scores : bool
        Also write each row's responsibilities; its log-likelihood.
    report : str or None
        A page about the run.
    """

    directory: Annotated[str, text("a folder")]
    model: Annotated[str | None, optional(text("a path"))] = "model.zarr"
    labels: Annotated[str | None, optional(text("a path"))] = "labels.zarr"
    probabilities: Annotated[bool, boolean()] = False
    scores: Annotated[bool, boolean()] = False
    report: Annotated[str | None, optional(text("a path"))] = None

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


def _empty_is_default(value: Any) -> Any:
    return {} if value is None else value


_OrDefault = BeforeValidator(_empty_is_default)


class RunConfig(Section):
    """A whole run config; see the sections for the keys."""

    data: DataSection
    model: ModelSection
    algorithm: Annotated[Algorithm, _OrDefault] = RunEMTau()
    stop: Annotated[StopSection, _OrDefault] = StopSection()
    checkpoint: Annotated[CheckpointSection, _OrDefault] = CheckpointSection()
    cluster: Annotated[ClusterSection, _OrDefault] = ClusterSection()
    output: OutputSection


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read and check a run config.

    Parameters
    ----------
    path : str or Path
        A YAML file.
    overrides : sequence of str
        Settings ``section.key=value`` that win over the file's, values in YAML.

    Returns
    -------
    RunConfig
        The config, frozen.

    Raises
    ------
    ConfigError
        If the file cannot be read, or a key is unknown or missing, or a value has the
        wrong type or cannot be; the message names key, value, limit and nearest valid one.
    """
    path = Path(path)
    content = read_yaml(path)
    for override in overrides:
        content = apply_override(content, override)
    output = content.get("output")
    if output is None or isinstance(output, dict):
        content = {**content, "output": {"directory": f"runs/{path.stem}", **(output or {})}}
    return checked_config(content)


def checked_config(content: dict[str, Any]) -> RunConfig:
    """Return the run config that ``content`` is.

    Raises
    ------
    ConfigError
        As for `load_config`.
    """
    try:
        config = RunConfig.model_validate(content)
    except ValidationError as error:
        raise ConfigError(explain(error, content, RunConfig)) from None
    if config.output.report is not None:
        raise ConfigError(f"output.report = {config.output.report!r} is not available yet: leave it out")
    return config


def portable(config: RunConfig) -> dict[str, Any]:
    """Return the config as it travels in a checkpoint: plain values, paths absolute, URLs without secrets."""
    content = config.model_dump(mode="json", exclude_unset=True)
    content["data"] = {**content["data"], **_absolute(content["data"], "path", "weights", "labels")}
    content["output"] = _absolute({**content["output"], "directory": config.output.directory}, "directory")
    if config.checkpoint.path is not None:
        content["checkpoint"] = _absolute(content["checkpoint"], "path")
    return dict(masked_values(content))


def _absolute(section: dict[str, Any], *keys: str) -> dict[str, Any]:
    """Return ``section`` with the local paths under ``keys`` made absolute; names stay names."""

    def absolute(key: str, value: Any) -> Any:
        named = key in ("weights", "labels") and not (isinstance(value, str) and "/" in value)
        if value is None or named or is_url(value):
            return value
        return str(Path(value).absolute())

    return {key: absolute(key, value) if key in keys else value for key, value in section.items()}


RESUMABLE = ("stop.max_iter", "checkpoint.every", "data.path", "data.weights", "data.labels")
RESUMABLE_SECTIONS = ("cluster.", "output.")


def resumed_config(content: dict[str, Any], run: str, overrides: Sequence[str]) -> RunConfig:
    """Return the config of a checkpointed run with what a resume may set.

    The data is that of the run: a dataset is read, never made. The command line's
    scheduler stands for the whole section `cluster` of the run.

    Parameters
    ----------
    content : dict
        As `portable` returned it.
    run : str
        Where the checkpoint is now.
    overrides : sequence of str
        ``stop.max_iter``, ``checkpoint.every``, ``cluster.*``, ``output.*``, ``data.path``,
        ``data.weights``, ``data.labels``.

    Raises
    ------
    ConfigError
        Another key is set, or a value cannot be.
    """
    keys = override_keys(overrides)
    if "cluster.scheduler" in keys:
        content = {**content, "cluster": {}}
    sealed = checked_config(content)
    data = {key: value for key, value in content["data"].items() if not key.startswith("dataset")}
    data["path"] = sealed.data.path or str(sealed.output.place(f"{sealed.data.dataset}.zarr"))
    checkpoint = {"path": run, "every": sealed.checkpoint.every}
    content = {**content, "data": data, "checkpoint": checkpoint}
    for key, override in zip(keys, overrides, strict=True):
        if key not in RESUMABLE and not key.startswith(RESUMABLE_SECTIONS):
            raise ConfigError(
                f"--set {key} cannot be changed in a run that goes on; what can is "
                f"{', '.join(RESUMABLE)}, cluster.* and output.*"
            )
        if HIDDEN in override and is_url(override):
            raise ConfigError(
                f"--set {override}: {HIDDEN} stands for what a checkpoint does not keep; write it out"
            )
        content = apply_override(content, override)
    return checked_config(content)


def override_keys(overrides: Sequence[str]) -> list[str]:
    """Return the keys that overrides set, in their order."""
    return [override.partition("=")[0].strip() for override in overrides]
