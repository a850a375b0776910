"""`emtau fit` and `emtau resume`: from a run config, or a checkpoint, to a fit and its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from emtau_dask.config import RunConfig, override_keys, portable, resumed_config
from emtau_dask.errors import CheckpointError, InvalidDataError
from emtau_dask.estimator import (
    GaussianMixture,
    fit_estimator,
    open_saved,
    resume_estimator,
    saved_estimator,
    watching,
)
from emtau_dask.io.objects import check_startable, object_store
from emtau_dask.io.remote import is_url
from emtau_dask.io.sources import is_pattern
from emtau_dask.runs.authority import Demand, as_arguments, demands, require
from emtau_dask.runs.clusters import computing
from emtau_dask.runs.estimator import check_fittable, estimator_of, starting_responsibilities
from emtau_dask.runs.inputs import Inputs, data_path, open_inputs, planned_inputs
from emtau_dask.runs.outputs import RunResult, checked_outputs, write_outputs
from emtau_dask.runs.plan import Plan, check_memory, plan_of


def run_fit(config: RunConfig, *, overwrite: bool, progress: TextIO) -> RunResult:
    """Fit what a config describes, and write what its `output` asks for.

    ``overwrite`` lets it replace the results and the checkpoint of an earlier run. Progress is
    written to ``progress``.

    Raises
    ------
    EmtauError
        Results exist and may not be replaced, or the data or the settings cannot be used.
    """
    check_fittable(config)
    outputs = checked_outputs(config, overwrite=overwrite)
    if config.checkpoint.path is not None:
        check_startable(object_store(config.checkpoint.path), overwrite=overwrite)
    inputs, plan = affordable_inputs(config, overwrite=overwrite, progress=progress)
    with watching(progress) as observer, computing(config, observer, plan.settings):
        model = estimator_of(config)
        run = fit_estimator(
            model,
            inputs.rows,
            inputs.weights,
            starting_responsibilities(config, inputs.rows.shape[0]),
            run_config=portable(config),
            overwrite=overwrite,
            observer=observer,
        )
        return write_outputs(outputs, model, inputs, run=run, progress=progress)


def run_plan(config: RunConfig, *, overwrite: bool) -> Plan:
    """Return what the fit of a config needs, and write nothing; raises as `run_fit` and `planned_inputs`."""
    check_fittable(config)
    return plan_of(config, planned_inputs(config, overwrite=overwrite))


def run_resume(
    run: str,
    overrides: Sequence[str],
    *,
    overwrite: bool,
    confirm: Callable[[Demand], bool] | None,
    progress: TextIO,
) -> RunResult:
    """Resume an interrupted run of the command line, and write what its `output` asks for.

    Parameters
    ----------
    run : str
        The path or URL of its checkpoint.
    overrides : sequence of str
        See `resumed_config`.
    overwrite : bool
        Replace results of other runs.
    confirm : callable or None
        See `require`.
    progress : text stream

    Raises
    ------
    EmtauError
        As for `run_fit`, or there is no run, or a setting is refused.
    """
    saved = open_saved(run)
    content = saved.config.run_config
    if content is None:
        raise CheckpointError(
            f"{run} was begun from Python, so it does not say where its data is; resume it by "
            f"GaussianMixture.resume({run!r}, X)."
        )
    config = resumed_config(content, run, overrides)
    require(demands(config, run, override_keys(overrides)), run, confirm)
    _check_present(config, run)
    outputs = checked_outputs(config, overwrite=overwrite, run=saved.log.run)
    inputs, plan = affordable_inputs(config, overwrite=False, progress=progress)
    with watching(progress) as observer, computing(config, observer, plan.settings):
        model = saved_estimator(
            GaussianMixture,
            saved,
            run,
            max_iter=config.stop.max_iter,
            checkpoint_every=config.checkpoint.every,
        )
        resume_estimator(
            model,
            saved,
            inputs.rows,
            sample_weight=inputs.weights,
            responsibilities_init=starting_responsibilities(config, inputs.rows.shape[0]),
            observer=observer,
        )
        return write_outputs(outputs, model, inputs, run=saved.log.run, progress=progress)


def _check_present(config: RunConfig, run: str) -> None:
    """Raise `InvalidDataError` for local data of a run that are gone."""
    place = data_path(config)
    for path in [place] if isinstance(place, str) else place:
        if not is_url(path) and not is_pattern(path) and not Path(path).exists():
            raise InvalidDataError(
                f"{path}, the data of the run in {run}, does not exist; restore it, or say where it is now: "
                "--set data.path=PATH"
            )


def resume_arguments(config: RunConfig) -> str:
    """Return the arguments by which a later `emtau resume` of this run has consent; "" if it needs none."""
    run = str(config.checkpoint.path)
    return as_arguments(demands(resumed_config(portable(config), run, ()), run, ()))


def affordable_inputs(config: RunConfig, *, overwrite: bool, progress: TextIO) -> tuple[Inputs, Plan]:
    """Open a run's data, and plan it; raises `ConfigError` where the fit would exceed the memory limit."""
    with watching(progress) as observer:
        inputs = open_inputs(config, overwrite=overwrite, observer=observer)
    plan = plan_of(config, inputs)
    check_memory(plan)
    return inputs, plan
