"""`emtau report`: one page of HTML on a model, a run's folder or a checkpoint."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from emtau_dask.cli.config import RunConfig
from emtau_dask.cli.inputs import Inputs, open_inputs, open_rows_or_cube
from emtau_dask.cli.resuming import portable, resumed_config
from emtau_dask.cli.verbosity import watching
from emtau_dask.cli.yaml import to_yaml
from emtau_dask.data.opening import columns_of_fit
from emtau_dask.data.parquet import comma_separated
from emtau_dask.data.source import Source
from emtau_dask.em.history import FitObserver
from emtau_dask.errors import ConfigError, EmtauError, InvalidDataError, features_named, masked_values
from emtau_dask.estimator.gaussian_mixture import GaussianMixture
from emtau_dask.estimator.resuming import mixture_in, open_saved
from emtau_dask.estimator.row_sample import DrawnRows, drawn_rows
from emtau_dask.plot.drawing import MAX_ROWS, check_matplotlib
from emtau_dask.process import numerical_environment, software
from emtau_dask.report.content import Subject
from emtau_dask.report.page import report_page
from emtau_dask.selection.table import SelectionTable, stored_selection
from emtau_dask.storage.commits import holds_run
from emtau_dask.storage.locations import CHECKPOINT, Place, fit_in, is_pattern, paths_at, place_text
from emtau_dask.storage.publishing import attributes_at, check_writable, refuse_existing_page, write_page
from emtau_dask.storage.stores import object_store
from emtau_dask.storage.urls import is_url, plain_path

MODEL = "model.zarr"
SEED = 0
"""Seed of the sample of the rows that is shown."""
REPEAT_COMMAND = "emtau fit fit.yaml --set output.directory=runs/again"


def run_report(
    place: str,
    out: Path,
    *,
    data: str | None,
    recorded: bool,
    array: str | None,
    columns: Sequence[str] | None,
    features: Sequence[str] | None,
    overwrite: bool,
) -> None:
    """Write the report of a stored fit.

    ``place`` is a saved model, a checkpoint, or the folder of a run that holds one of these; ``data`` are
    rows to show, as for `open_rows_or_cube`. The stored fit is not trusted: data that it names are read only
    if ``recorded``, and never from a URL.
    """
    if data is not None and recorded:
        raise ConfigError("--data and --recorded-data name two sources of rows; give one of them")
    if data is None and any(each is not None for each in (array, columns, features)):
        raise ConfigError("--array, --columns and --features choose from the rows of --data; give that too")
    check_matplotlib()
    if not Path(plain_path(place), MODEL).exists():
        place = fit_in(place, CHECKPOINT)
    read = [*_inputs_at(place), *(paths_at(data) if data is not None else ())]
    refuse_existing_page(out, overwrite, inputs=read)
    check_writable(out)
    subject, config = _subject_at(place)
    with watching() as observer:
        if data is not None:
            names = getattr(subject.model, "feature_names_in_", None)
            chosen = columns_of_fit(data, names) if columns is None else columns
            rows, cube = open_rows_or_cube(
                data,
                array=array,
                columns=chosen,
                fitted=subject.model,
                observer=observer,
                features=features,
            )
            drawn = _drawn(subject.model, rows, None, observer)
            of_cube = cube.features if cube else None
            command = subject.command or _command(subject.model, data, array, chosen, of_cube)
            arguments = subject.arguments or _arguments_of(data, array, chosen, of_cube)
            subject = replace(subject, data=data, drawn=drawn, command=command, arguments=arguments)
            subject = _with_notes(subject)
        elif recorded:
            inputs = open_inputs(_config_with_local_data(place, config), overwrite=False, observer=observer)
            drawn = _drawn(subject.model, inputs.rows, inputs.weights, observer)
            subject = _with_notes(replace(subject, drawn=drawn))
    write_page(out, report_page(subject), overwrite=overwrite)


def report_of_fit(
    config: RunConfig,
    model: GaussianMixture,
    inputs: Inputs,
    *,
    run: str | None,
    selection: SelectionTable | None,
    observer: FitObserver,
) -> str:
    """Return the report of a fit that has just ended, and of the selection that chose it."""
    subject = Subject(
        model,
        name=Path(config.output.directory).name,
        place=config.output.directory,
        data=place_text(paths_at(config.place)),
        arguments=_arguments_in(config, model),
        drawn=_drawn(model, inputs.rows, inputs.weights, observer),
        environment=software() | numerical_environment(),
        config=_repeatable_config(portable(config)),
        command=REPEAT_COMMAND,
        run=run,
        selection=selection,
    )
    return report_page(_with_notes(subject))


def _inputs_at(place: str) -> list[str]:
    """Return the paths that a report reads; for a run's folder its members: the report may go there."""
    folder = Path(plain_path(place))
    if is_url(str(folder)) or not (folder / MODEL).exists():
        return [place]
    return [str(path) for path in folder.iterdir() if path.is_dir()]


def _subject_at(place: str) -> tuple[Subject, RunConfig | None]:
    """Return the subject of a report without data, and the config of its run if known."""
    if holds_run(object_store(place)):
        return _subject_of_checkpoint(place)
    folder = Path(plain_path(place))
    inner = folder / MODEL
    in_folder = not is_url(str(folder)) and inner.exists()
    found = str(inner) if in_folder else place
    stored = stored_selection(folder) if in_folder else None
    table = None if stored is None else stored[1]
    subject = Subject(GaussianMixture.load(found), _name(place), found, selection=table)
    marks = attributes_at(found)
    checkpoint = _checkpoint_of(marks.get("run"), folder) if in_folder else None
    if checkpoint is None:
        return _with_config(subject, marks.get("run_config"))
    of_checkpoint, config = _subject_of_checkpoint(str(checkpoint))
    subject = replace(of_checkpoint, model=subject.model, name=subject.name, place=found, selection=table)
    return subject, config


def _subject_of_checkpoint(place: str) -> tuple[Subject, RunConfig | None]:
    saved = open_saved(place)
    subject = Subject(
        mixture_in(GaussianMixture, place),
        _name(place),
        place,
        finished=saved.state.finished,
        written=saved.manifest.written,
        environment=saved.manifest.environment,
        notes=tuple(saved.passed_over),
        run=saved.manifest.run,
    )
    return _with_config(subject, saved.manifest.run_config)


def _with_config(subject: Subject, content: Any) -> tuple[Subject, RunConfig | None]:
    """Return the subject with its data and its command, and its config, if that was stored."""
    if content is None:
        return subject, None
    config = resumed_config(content, subject.place, ())
    where = place_text(paths_at(config.place))
    repeatable = _repeatable_config(content)
    arguments = _arguments_in(config, subject.model)
    subject = replace(subject, data=where, config=repeatable, command=REPEAT_COMMAND, arguments=arguments)
    return subject, config


def _arguments_in(config: RunConfig, model: GaussianMixture) -> str:
    """Return the arguments of `GaussianMixture.fit` for the data of a run, which are not read."""
    data, columns = config.data, config.data.columns
    if columns is None and data.features is None and {data.weights, data.labels} != {None}:
        columns = getattr(model, "feature_names_in_", None)  # All columns but those of weights and labels.
    weights = () if data.weights is None else ("sample_weight=weights",)
    return ", ".join([_arguments_of(config.place, data.array, columns, data.features), *weights])


def _arguments_of(
    place: Place, array: str | None, columns: Sequence[str] | None, features: Sequence[str] | None
) -> str:
    """Return the arguments of `GaussianMixture.fit` for stored rows, as Python."""
    rows = repr(place if isinstance(place, str) else list(place))
    choice = (("columns", columns), ("features", features))
    given: dict[str, object] = {name: [*map(str, names)] for name, names in choice if names is not None}
    if array is not None and features is not None:
        rows, given["features"] = f"xarray.open_dataset({rows}, chunks={{}})[{array!r}]", features[0]
    elif array is not None:
        rows = f"zarr.open({rows}, mode='r')[{array!r}]"
    return ", ".join([rows, *(f"{name}={value!r}" for name, value in given.items())])


def _repeatable_config(content: Mapping[str, Any]) -> str:
    """Return the config that repeats a run, without its checkpoint, which exists already."""
    sections = {name: values for name, values in content.items() if name != "checkpoint"}
    given = {
        name: {key: value for key, value in values.items() if value is not None}
        if isinstance(values, Mapping)
        else values
        for name, values in sections.items()
    }
    return to_yaml(masked_values(given))


def _checkpoint_of(run: object, folder: Path) -> Path | None:
    """Return the checkpoint of a run in a folder; None if it is not there."""
    if not isinstance(run, str):
        return None
    for path in sorted(folder.iterdir()):
        try:
            if path.is_dir() and holds_run(object_store(str(path))) and open_saved(str(path)).log.run == run:
                return path
        except EmtauError:
            continue
    return None


def _name(place: str) -> str:
    """Return the name of a fit from its place: the last meaningful part of the path."""
    parts = [part for part in plain_path(place).rstrip("/").split("/") if part not in ("", ".", "..")]
    if len(parts) > 1 and parts[-1] in (MODEL, "run.zarr"):
        parts.pop()
    return parts[-1].removesuffix(".zarr") if parts else "fit"


def _config_with_local_data(place: str, config: RunConfig | None) -> RunConfig:
    """Return the config of a run if its data are local and exist; raises `EmtauError` for any other."""
    if config is None:
        raise InvalidDataError(
            f"{place} does not name its data: only models and checkpoints of emtau fit do. Give them: --data "
            "DATA"
        )
    if urls := [f"{key} = {place_text(value)}" for key, value in config.data.urls]:
        raise ConfigError(
            f"{place} names {'; '.join(urls)}. It may come from others, so its URLs are not opened; give "
            "the data yourself: --data URL"
        )
    for path in paths_at(config.place):
        if not is_pattern(path) and not Path(path).exists():
            raise InvalidDataError(f"{path}, the data of {place}, does not exist; give them: --data DATA")
    return config


def _drawn(model: GaussianMixture, rows: Source, weights: Source | None, observer: FitObserver) -> DrawnRows:
    with features_named(getattr(model, "feature_names_in_", None)):
        return drawn_rows(model, rows, size=MAX_ROWS, seed=SEED, sample_weight=weights, observer=observer)


def _with_notes(subject: Subject) -> Subject:
    """Return the subject with notes if its data have missing values, or other rows than the fit."""
    drawn, rows, notes = subject.drawn, subject.rows, list(subject.notes)
    if drawn is not None and rows and drawn.total != rows:
        notes.append(f"The data that are shown have {drawn.total:,} rows; the fit had {rows:,}.")
    if drawn is not None and drawn.imputed:
        notes.append(
            f"{drawn.imputed:.1%} of the values of the rows that are shown were missing. Their expected "
            "values under the mixture are shown instead; these spread less than real values."
        )
    return replace(subject, notes=tuple(notes))


def _command(
    model: GaussianMixture,
    data: str,
    array: str | None,
    columns: Sequence[str] | None,
    features: Sequence[str] | None,
) -> str:
    """Return the command that fits a mixture of the same shape to the given data."""
    given = {
        "-k": str(len(model.weights_)),
        "--covariance": model.parameters_.covariance_type,
        "--array": array,
        "--columns": None if columns is None else comma_separated(columns),
        "--features": None if features is None else comma_separated(features),
        "--tol": str(model.tol),
        "--max-iter": str(model.max_iter),
        "--seed": None if model.random_state is None else str(model.random_state),
        "--set": f"model.reg_covar={model.reg_covar!r}",
        "--missing": None if model.missing == "raise" else model.missing,
    }
    if isinstance(model.algorithm, str):
        given["--algorithm"] = model.algorithm
    arguments = [part for name, value in given.items() if value is not None for part in (name, value)]
    return shlex.join(["emtau", "fit", data, *arguments])
