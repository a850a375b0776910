"""From a run config to its fit and its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import numpy as np
from numpy.typing import NDArray

from emtau_dask.config import override_keys, policy_of, portable, resumed_config
from emtau_dask.errors import CheckpointError, ConfigError, InvalidDataError
from emtau_dask.estimator import (
    GaussianMixture,
    fit_estimator,
    mixture_in,
    open_saved,
    progress_to,
    resume_estimator,
    watching,
)
from emtau_dask.io.objects import check_startable, holds_run, object_store
from emtau_dask.io.output import check_writable, mark_as_of, refuse_existing, replacing, run_that_wrote
from emtau_dask.io.remote import is_url
from emtau_dask.io.sources import is_parquet
from emtau_dask.runs.authority import Demand, demands, require, settings_in_words
from emtau_dask.runs.clusters import computing
from emtau_dask.runs.inputs import Inputs, data_path, open_inputs, open_rows
from emtau_dask.runs.labelling import write_labels
from emtau_dask.runs.plan import Plan, check_memory, plan_of

if TYPE_CHECKING:
    from emtau_dask.config import RunConfig

MAX_START_BYTES = 2**30


@dataclass(frozen=True, eq=False)
class RunResult:
    """What a run leaves.

    Attributes
    ----------
    model : GaussianMixture
        Fitted.
    inputs : Inputs
        What it was fitted to.
    label_counts : ndarray of shape (K,) or None
        Rows of each label, where labels were written.
    model_path, labels_path : Path or None
        Where they are saved.
    """

    model: GaussianMixture
    inputs: Inputs
    label_counts: NDArray[np.int64] | None
    model_path: Path | None
    labels_path: Path | None


def estimator_of(config: RunConfig) -> GaussianMixture:
    """Return the estimator of a run, not fitted.

    Parameters
    ----------
    config : RunConfig

    Returns
    -------
    GaussianMixture
    """
    model, stop = config.model, config.stop
    return GaussianMixture(
        model.n_components,
        covariance_type=model.covariance_type,
        algorithm=policy_of(config.algorithm),
        tol=stop.tol,
        reg_covar=model.reg_covar,
        max_iter=stop.max_iter,
        n_init=model.n_init,
        init_params=model.init_params,
        random_state=model.random_state,
        checkpoint=config.checkpoint.path,
        checkpoint_every=config.checkpoint.every,
        verbose=1,
    )


def starting_responsibilities(config: RunConfig, rows: int) -> NDArray[np.float64] | None:
    """Return the responsibilities that `model.init` starts from, shape (rows, K), or None.

    Raises
    ------
    ConfigError
        If they would take more than 1 GiB.
    """
    if config.model.init is None:
        return None
    k, seed = config.model.n_components, config.model.init.dirichlet_seed
    if rows * k * 8 > MAX_START_BYTES:
        raise ConfigError(
            f"model.init.dirichlet_seed = {seed} needs {rows:,} × {k} responsibilities in memory, more than "
            f"{MAX_START_BYTES // 2**30} GiB; use model.init_params for data of this size"
        )
    return np.random.default_rng(seed).dirichlet(np.ones(k), rows)


@dataclass(frozen=True)
class _Outputs:
    """Where a run's results go, None where they are not wanted.

    Attributes
    ----------
    model, labels : Path or None
    overwrite : bool
        Replace what emtau wrote there.
    """

    model: Path | None
    labels: Path | None
    overwrite: bool

    @classmethod
    def checked(cls, config: RunConfig, *, overwrite: bool, run: str | None = None) -> _Outputs:
        """Return them; raises `EmtauError` where one may not or cannot be written.

        What the run of the id ``run`` wrote itself may be replaced in any case.
        """
        output = config.output
        model = output.place(output.model) if output.model else None
        labels = output.place(output.labels) if output.labels else None
        read = [
            name
            for name in (data_path(config), config.data.weights, config.data.labels, config.checkpoint.path)
            if name
        ]
        outputs = cls(model, labels, overwrite)
        for path in (model, labels):
            if path is not None:
                refuse_existing(path, outputs._replaceable(path, run), inputs=read)
                check_writable(path)
        if model is not None and labels is not None:
            refuse_existing(labels, outputs._replaceable(labels, run), inputs=[model])
        return outputs

    def _replaceable(self, path: Path, run: str | None) -> bool:
        return self.overwrite or (run is not None and run_that_wrote(path) == run)

    def write(
        self,
        config: RunConfig,
        model: GaussianMixture,
        inputs: Inputs,
        *,
        run: str | None,
        progress: TextIO,
    ) -> RunResult:
        """Write what is wanted, marked as the results of ``run``, the id of a checkpointed run."""
        if self.model is not None:
            with replacing(self.model, overwrite=self._replaceable(self.model, run)) as private:
                model.save(str(private))
                mark_as_of(private, run)
        counts = None
        if self.labels is not None:
            with watching(progress) as observer:
                counts = write_labels(
                    model,
                    inputs.rows,
                    self.labels,
                    observer=observer,
                    probabilities=config.output.probabilities,
                    scores=config.output.scores,
                    workers=config.cluster.workers,
                    run=run,
                    overwrite=self._replaceable(self.labels, run),
                )
        return RunResult(model, inputs, counts, self.model, self.labels)


def run_fit(config: RunConfig, *, overwrite: bool, progress: TextIO) -> RunResult:
    """Fit what a config describes, and write what its `output` asks for.

    Parameters
    ----------
    config : RunConfig
    overwrite : bool
        Replace results and the checkpoint of an earlier run.
    progress : text stream
        Where progress is shown.

    Returns
    -------
    RunResult
        Also where the fit stopped at `stop.max_iter`; its model says so.

    Raises
    ------
    EmtauError
        If results exist and may not be replaced, or the data or the settings cannot be used.
    """
    outputs = _Outputs.checked(config, overwrite=overwrite)
    if config.checkpoint.path is not None:
        check_startable(object_store(config.checkpoint.path), overwrite=overwrite)
    with watching(progress) as observer:
        inputs = open_inputs(config, overwrite=overwrite, observer=observer)
    check_memory(plan_of(config, inputs))
    with computing(config), progress_to(progress):
        model = estimator_of(config)
        run = fit_estimator(
            model,
            inputs.rows,
            inputs.weights,
            starting_responsibilities(config, inputs.rows.shape[0]),
            run_config=portable(config),
            overwrite=overwrite,
        )
    return outputs.write(config, model, inputs, run=run, progress=progress)


def words_to_resume(config: RunConfig) -> str:
    """Return what a resume of a config's run must be given beside its checkpoint; "" for nothing."""
    run = str(config.checkpoint.path)
    found = demands(resumed_config(portable(config), run, ()), run, ())
    return settings_in_words((demand.key, demand.value) for demand in found)


def run_plan(config: RunConfig, *, progress: TextIO) -> Plan:
    """Return what the fit of a config needs; makes its dataset where that is missing, and fits nothing.

    Raises
    ------
    EmtauError
        The data or the settings cannot be used.
    """
    with watching(progress) as observer:
        return plan_of(config, open_inputs(config, overwrite=False, observer=observer))


def run_resume(
    run: str,
    overrides: Sequence[str],
    *,
    overwrite: bool,
    confirm: Callable[[Demand], bool] | None,
    progress: TextIO,
) -> tuple[RunConfig, RunResult]:
    """Go on with an interrupted run of the command line, and write what its `output` asks for.

    Parameters
    ----------
    run : str
        The path or URL of its checkpoint.
    overrides : sequence of str
        Settings that a resume may change; see `resumed_config`.
    overwrite : bool
        Replace results that are not this run's own.
    confirm : callable or None
        Asks a person whether a setting of the checkpoint is obeyed that is not among ``overrides``;
        None where there is nobody to ask.
    progress : text stream

    Returns
    -------
    RunConfig
        The run's, with the overrides.
    RunResult

    Raises
    ------
    EmtauError
    """
    saved = open_saved(run)
    content = saved.config.run_config
    if content is None:
        raise CheckpointError(
            f"{run} was begun from Python, so it does not say where its data is; go on with it by "
            f"GaussianMixture.resume({run!r}, X)."
        )
    config = resumed_config(content, run, overrides)
    require(demands(config, run, override_keys(overrides)), run, confirm)
    marker = saved.log.run
    outputs = _Outputs.checked(config, overwrite=overwrite, run=marker)
    path = data_path(config)
    if not is_url(path) and not Path(path).exists():
        raise InvalidDataError(
            f"{path}, the data of the run in {run}, does not exist; restore it, or say where it is now: "
            "--set data.path=PATH"
        )
    with watching(progress) as observer:
        inputs = open_inputs(config, overwrite=False, observer=observer)
    check_memory(plan_of(config, inputs))
    with computing(config), progress_to(progress):
        model = resume_estimator(
            GaussianMixture,
            run,
            inputs.rows,
            sample_weight=inputs.weights,
            responsibilities_init=starting_responsibilities(config, inputs.rows.shape[0]),
            algorithm=None,
            max_iter=config.stop.max_iter,
            checkpoint_every=config.checkpoint.every,
            verbose=1,
            saved=saved,
        )
    return config, outputs.write(config, model, inputs, run=marker, progress=progress)


def _model_in(place: str) -> GaussianMixture:
    """Return the model at a place: a saved one, a run's folder, or the last commit of a checkpoint."""
    if holds_run(object_store(place)):
        return mixture_in(GaussianMixture, place)
    inner = Path(place, "model.zarr")
    return GaussianMixture.load(str(inner) if inner.exists() else place)


def run_predict(
    model: str,
    data: str,
    out: Path,
    *,
    array: str | None,
    columns: Sequence[str] | None,
    probabilities: bool,
    scores: bool,
    workers: int | None,
    overwrite: bool,
    progress: TextIO,
) -> NDArray[np.int64]:
    """Label stored rows with a saved model.

    Parameters
    ----------
    model : str
        A saved model, the folder of a run that holds ``model.zarr``, or a checkpoint.
    data : str
        A zarr array or group, an ``.npy`` file, a parquet file or folder.
    out : Path
        The zarr group to write; see `write_labels` for this and the other parameters.
    array, columns : str, sequence of str, or None
        Member of a zarr group; columns of a parquet source.
    progress : text stream
        Where progress is shown.

    Returns
    -------
    ndarray of shape (K,)
        Rows of each label.

    Raises
    ------
    EmtauError
        If the model or the data cannot be read or do not fit, or `out` may not be replaced.
    """
    refuse_existing(out, overwrite, inputs=[model, data])
    check_writable(out)
    fitted = _model_in(model)
    names = getattr(fitted, "feature_names_in_", None)
    if columns is None and names is not None and is_parquet(data):
        columns = [str(name) for name in names]
    rows = open_rows(data, array=array, columns=columns)
    with watching(progress) as observer:
        return write_labels(
            fitted,
            rows,
            out,
            observer=observer,
            probabilities=probabilities,
            scores=scores,
            workers=workers,
            overwrite=overwrite,
        )
