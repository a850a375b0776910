"""`emtau fit` and `emtau resume`: the estimator, its data, the fit, the results."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from emtau_dask.cli.cluster import computing
from emtau_dask.cli.config import RunConfig, estimator_of, override_keys, portable, resumed_config
from emtau_dask.cli.inputs import Inputs, open_inputs, planned_inputs, starting_responsibilities
from emtau_dask.cli.outputs import RunResult, checked_outputs, write_outputs
from emtau_dask.cli.plan import Plan, check_memory, plan_of
from emtau_dask.cli.yaml import setting
from emtau_dask.errors import HIDDEN, CheckpointError, ConfigError, InvalidDataError
from emtau_dask.estimator.fitting import fit_estimator
from emtau_dask.estimator.gaussian_mixture import GaussianMixture
from emtau_dask.estimator.resuming import open_saved, resume_estimator, saved_estimator
from emtau_dask.progress import watching
from emtau_dask.storage.commits import check_startable
from emtau_dask.storage.files import followed
from emtau_dask.storage.locations import is_pattern
from emtau_dask.storage.stores import object_store
from emtau_dask.storage.urls import is_url, plain_path


def run_fit(config: RunConfig, *, overwrite: bool) -> RunResult:
    """Fit what a config describes, and write what its `output` asks for.

    ``overwrite`` lets it replace the results and the checkpoint of an earlier run.
    """
    model = estimator_of(config)
    outputs = checked_outputs(config, overwrite=overwrite)
    if config.checkpoint.path is not None:
        check_startable(object_store(config.checkpoint.path), overwrite=overwrite)
    inputs, plan = affordable_inputs(config, overwrite=overwrite)
    with watching(sys.stderr) as observer, computing(config.cluster, observer, plan.settings):
        run = fit_estimator(
            model,
            inputs.rows,
            inputs.weights,
            starting_responsibilities(config, inputs.rows.shape[0]),
            run_config=portable(config),
            overwrite=overwrite,
            observer=observer,
        )
        return write_outputs(outputs, model, inputs, run=run)


def run_plan(config: RunConfig, *, overwrite: bool) -> Plan:
    """Return what the fit of a config needs, and write nothing; raises as `run_fit` and `planned_inputs`."""
    estimator_of(config)
    return plan_of(config, planned_inputs(config, overwrite=overwrite))


def run_resume(run: str, overrides: Sequence[str], *, overwrite: bool) -> RunResult:
    """Resume the interrupted run at a path or URL, and write what its `output` asks for.

    ``overrides`` are as for `resumed_config`; ``overwrite`` lets it replace results of other runs.
    """
    saved = open_saved(run)
    content = saved.config.run_config
    if content is None:
        raise CheckpointError(
            f"{run} was begun from Python, so it does not say where its data is; resume it by "
            f"GaussianMixture.resume({run!r}, X)."
        )
    config = resumed_config(content, run, overrides)
    if repeated := to_repeat(config, run, override_keys(overrides)):
        hidden = _HIDDEN_PARTS if HIDDEN in "".join(repeated) else ""
        raise ConfigError(
            f"the checkpoint {run} asks for {'; '.join(repeated)}. Checkpoints may come from others, so "
            "schedulers, URLs, and places to write that do not lie beside one are given on the command line. "
            f"If you want it, add: {as_arguments(repeated)}{hidden}"
        )
    _check_present(config, run)
    model = saved_estimator(
        GaussianMixture, saved, run, max_iter=config.stop.max_iter, checkpoint_every=config.checkpoint.every
    )
    outputs = checked_outputs(config, overwrite=overwrite, run=saved.log.run)
    inputs, plan = affordable_inputs(config, overwrite=False)
    with watching(sys.stderr) as observer, computing(config.cluster, observer, plan.settings):
        resume_estimator(
            model,
            saved,
            inputs.rows,
            sample_weight=inputs.weights,
            responsibilities_init=starting_responsibilities(config, inputs.rows.shape[0]),
            observer=observer,
        )
        return write_outputs(outputs, model, inputs, run=saved.log.run)


_HIDDEN_PARTS = f" In place of {HIDDEN} write the user, password or query, which a checkpoint does not keep."


def to_repeat(config: RunConfig, run: str, given: Collection[str] = ()) -> list[str]:
    """Return the settings, as ``key=value``, that a resume obeys only where the command line gives them.

    ``config`` is what `resumed_config` returned for the checkpoint ``run``; ``given`` are the keys that the
    command line gives.
    """
    found = (*_server_of(config), *config.data.urls, *_places_elsewhere(config, run))
    return [setting(key, value) for key, value in found if key not in given]


def as_arguments(settings: Sequence[str]) -> str:
    """Return settings as arguments of the command line, quoted for a shell."""
    return " ".join(f"--set {shlex.quote(each)}" for each in settings)


def _server_of(config: RunConfig) -> Iterator[tuple[str, object]]:
    """Yield the scheduler of a cluster elsewhere, whose messages run code here, and how it is reached."""
    cluster = config.cluster
    if cluster.scheduler not in ("threads", "processes"):
        yield "cluster.scheduler", cluster.scheduler
    if cluster.tls is not None:
        for name, value in cluster.tls.model_dump().items():
            yield f"cluster.tls.{name}", value


def _places_elsewhere(config: RunConfig, run: str) -> Iterator[tuple[str, object]]:
    """Yield the places to write that do not lie below the folder of the checkpoint, or in a hidden one there.

    Results that lie in `output.directory` are named by it.
    """
    output, local = config.output, plain_path(run)
    folders = [] if is_url(local) else [followed(Path(local).absolute().parent)]
    wanted = output.wanted
    if not all(Path(place).is_absolute() for place in wanted.values()):
        if not _lies_in(output.place("result"), folders):
            yield "output.directory", output.directory
        folders.append(followed(Path(output.directory)))
    for name, place in wanted.items():
        if not _lies_in(output.place(place), folders):
            yield f"output.{name}", place


def _lies_in(place: Path, folders: Sequence[Path]) -> bool:
    found = followed(place)
    return any(
        found.is_relative_to(folder) and not any(p.startswith(".") for p in found.relative_to(folder).parts)
        for folder in folders
    )


def _check_present(config: RunConfig, run: str) -> None:
    """Raise `InvalidDataError` for local data of a run that are gone."""
    place = config.place
    for path in [place] if isinstance(place, str) else place:
        if not is_url(path) and not is_pattern(path) and not Path(path).exists():
            raise InvalidDataError(
                f"{path}, the data of the run in {run}, does not exist; restore it, or say where it is now: "
                "--set data.path=PATH"
            )


def resume_arguments(config: RunConfig) -> str:
    """Return the arguments that a later `emtau resume` of this run needs; "" if it needs none."""
    run = str(config.checkpoint.path)
    return as_arguments(to_repeat(resumed_config(portable(config), run, ()), run))


def affordable_inputs(config: RunConfig, *, overwrite: bool) -> tuple[Inputs, Plan]:
    """Open a run's data, and plan it; raises `ConfigError` where the fit would exceed the memory limit."""
    with watching(sys.stderr) as observer:
        inputs = open_inputs(config, overwrite=overwrite, observer=observer)
    plan = plan_of(config, inputs)
    check_memory(plan)
    return inputs, plan
