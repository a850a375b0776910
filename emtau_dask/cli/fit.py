"""`emtau fit` and `emtau resume`: the estimator, its data, the fit, the results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from emtau_dask.cli.cluster import computing
from emtau_dask.cli.config import RunConfig, estimator_of
from emtau_dask.cli.inputs import Inputs, open_inputs, planned_inputs, starting_responsibilities
from emtau_dask.cli.outputs import RunResult, checked_outputs, write_outputs
from emtau_dask.cli.plan import Plan, check_memory, plan_of
from emtau_dask.cli.resuming import check_repeated, override_keys, portable, resumed_config
from emtau_dask.cli.verbosity import watching
from emtau_dask.data.opening import check_columns
from emtau_dask.errors import CheckpointError, InvalidDataError
from emtau_dask.estimator.fitting import fit_estimator
from emtau_dask.estimator.gaussian_mixture import GaussianMixture
from emtau_dask.estimator.resuming import open_saved, resume_estimator, saved_estimator
from emtau_dask.storage.commits import check_startable
from emtau_dask.storage.locations import CHECKPOINT, fit_in, is_pattern
from emtau_dask.storage.stores import object_store
from emtau_dask.storage.urls import is_url


def run_fit(config: RunConfig, *, overwrite: bool) -> RunResult:
    """Run the fit of a config, and write the results of its section `output`.

    ``overwrite`` lets it replace the results and the checkpoint of an earlier run.
    """
    model = estimator_of(config)
    if config.data.columns is not None:
        check_columns(config.place, config.data.columns)
    outputs = checked_outputs(config, overwrite=overwrite)
    if config.checkpoint.path is not None:
        check_startable(object_store(config.checkpoint.path), overwrite=overwrite)
    inputs, plan = inputs_within_memory(config, overwrite=overwrite)
    with watching() as observer, computing(config.cluster, observer, plan.settings):
        run = fit_estimator(
            model,
            inputs.data,
            inputs.weights,
            starting_responsibilities(config, inputs.rows.shape[0]),
            run_config=portable(config),
            overwrite=overwrite,
            observer=observer,
        )
        return write_outputs(outputs, model, inputs, run=run)


def run_plan(config: RunConfig, *, overwrite: bool) -> Plan:
    """Return the plan of a config's fit without running it; raises as `run_fit` and `planned_inputs`."""
    estimator_of(config)
    return plan_of(config, planned_inputs(config, overwrite=overwrite))


def run_resume(run: str, overrides: Sequence[str], *, overwrite: bool) -> RunResult:
    """Resume the interrupted run at a path or URL, or in its folder, and write the results of `output`.

    ``overrides`` are as for `resumed_config`; ``overwrite`` lets it replace results of other runs.
    """
    run = fit_in(run, CHECKPOINT)
    saved = open_saved(run)
    content = saved.manifest.run_config
    if content is None:
        raise CheckpointError(
            f"{run} was begun from Python, so it does not name its data; resume it by "
            f"GaussianMixture.resume({run!r}, X)."
        )
    config = resumed_config(content, run, overrides)
    check_repeated(config, run, override_keys(overrides))
    _check_data_exist(config, run)
    model = saved_estimator(
        GaussianMixture, saved, run, max_iter=config.stop.max_iter, checkpoint_every=config.checkpoint.every
    )
    outputs = checked_outputs(config, overwrite=overwrite, run=saved.log.run)
    inputs, plan = inputs_within_memory(config, overwrite=False)
    with watching() as observer, computing(config.cluster, observer, plan.settings):
        resume_estimator(
            model,
            saved,
            inputs.data,
            sample_weight=inputs.weights,
            responsibilities_init=starting_responsibilities(config, inputs.rows.shape[0]),
            observer=observer,
        )
        return write_outputs(outputs, model, inputs, run=saved.log.run)


def _check_data_exist(config: RunConfig, run: str) -> None:
    """Raise `InvalidDataError` if local data of a run no longer exist."""
    place = config.place
    for path in [place] if isinstance(place, str) else place:
        if not is_url(path) and not is_pattern(path) and not Path(path).exists():
            raise InvalidDataError(
                f"{path}, the data of the run in {run}, does not exist; restore it, or give its new path: "
                "--set data.path=PATH"
            )


def inputs_within_memory(config: RunConfig, *, overwrite: bool) -> tuple[Inputs, Plan]:
    """Open a run's data, and plan the fit; raises `ConfigError` if it would exceed the memory limit."""
    with watching() as observer:
        inputs = open_inputs(config, overwrite=overwrite, observer=observer)
    plan = plan_of(config, inputs)
    check_memory(plan)
    return inputs, plan
