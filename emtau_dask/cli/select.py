"""The command `emtau select`."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from emtau_dask.cli.options import (
    COMPONENTS,
    OPTIONS,
    FitOption,
    json_option,
    options_given,
    overwrite_option,
    run_options,
    values_of_data,
)
from emtau_dask.cli.terminal import NOT_CONVERGED, echo, echo_json, remember_again
from emtau_dask.errors import ConfigError, short

if TYPE_CHECKING:
    from emtau_dask.config.schema import RunConfig
    from emtau_dask.runs.select import SelectionRequest, SelectionResult


CRITERIA = ("bic", "aic", "icl", "held-out")
SHARED = ("data.columns", "data.array", "algorithm.name", "stop.tol", "stop.max_iter", "model.random_state")
"""Keys whose options are those of `emtau fit`."""
REFUSED = {
    "model.n_components": "give --components",
    "model.covariance_type": "give --covariance",
    "model.init": "candidates start by themselves",
    "output.directory": "give -o",
}
"""Keys that ``--set`` may not change, and why."""
MOST = 10_000
_RANGE = re.compile(r"(\d{1,9}):(\d{1,9})(?::(\d{1,9}))?")


def numbers_of(text: str) -> list[int]:
    """Return the numbers of ``2:20``, of ``2:20:3`` and of ``2,4,8``; both ends of a range are meant.

    Raises
    ------
    ConfigError
        It is neither, or nothing.
    """
    found: list[int] = []
    for part in text.split(","):
        within = _RANGE.fullmatch(part.strip())
        if within is not None:
            first, last, step = (int(number or 1) for number in within.groups())
            if step == 0 or last < first:
                raise ConfigError(
                    f"--components {short(text)}: {part} is empty; give the smaller number first"
                )
            if (last - first) // step >= MOST:
                raise ConfigError(f"--components {short(text)} are more than {MOST:,} numbers; give fewer")
            found += range(first, last + 1, step)
        elif re.fullmatch(r"\d{1,9}", part.strip()):
            found.append(int(part))
        else:
            raise ConfigError(
                f"--components is {short(text)}; give a range with both ends, such as 2:20 or 10:100:10, or "
                "numbers, such as 2,4,8"
            )
    return found


@click.command()
@click.argument("sources", metavar="DATA...", nargs=-1, required=True, type=click.Path(readable=False))
@click.option(
    "-k",
    "--components",
    required=True,
    metavar="A:B",
    help="Numbers of components: 2:20, 10:100:10 or 2,4,8.",
)
@click.option("--covariance", default="full", metavar="TYPES", help="Types to choose from: full,diag.")
@click.option("--criterion", type=click.Choice(CRITERIA), default="bic", help="What chooses; bic by default.")
@click.option(
    "--sample-rows", type=click.IntRange(1), metavar="N", help="Rows that candidates are fitted to."
)
@click.option(
    "--finalists",
    type=click.IntRange(1),
    default=2,
    metavar="N",
    help="Most candidates that are fitted to all rows; 2 by default.",
)
@click.option(
    "-o", "--output", "directory", metavar="FOLDER", help="Where the results go, and what is done is kept."
)
@options_given([option for option in OPTIONS if option.key in SHARED])
@run_options
@overwrite_option("Begin anew, and replace the results that are in FOLDER.")
@json_option
@click.pass_context
def select(
    ctx: click.Context,
    /,
    sources: tuple[str, ...],
    given: dict[FitOption, str],
    overrides: list[str],
    directory: str | None,
    overwrite: bool,
    as_json: bool,
    **asked: Any,
) -> None:
    """Choose the number of components of a mixture of the rows of DATA.

    All candidates are fitted to one sample of the rows and scored in one pass; the best one is fitted to all
    rows. With -o the model, the labels and the table are written, and a command that was killed goes on
    when it is given again. What is done is kept in FOLDER/selection, or where --set checkpoint.path=PLACE
    says: a path or URL.
    """
    from emtau_dask.runs.select import SelectionRequest, run_selection, selection_values

    request = SelectionRequest(
        n_components=numbers_of(asked.pop("components")),
        covariance_types=[name.strip() for name in asked.pop("covariance").split(",")],
        written=directory is not None,
        **asked,
    )
    config = _config(sources, request, given, overrides, directory)
    remember_again(ctx, config.checkpoint.path or directory)
    result = run_selection(config, request, overwrite=overwrite, progress=sys.stderr)
    if as_json:
        echo_json(selection_values(result))
    else:
        _print(result)
    if not result.selection.best_estimator_.converged_:
        echo("emtau: the fit to all rows stopped at max_iter without converging", err=True)
        ctx.exit(NOT_CONVERGED)


def _config(
    sources: Sequence[str],
    request: SelectionRequest,
    given: dict[FitOption, str],
    overrides: Sequence[str],
    directory: str | None,
) -> RunConfig:
    """Return the config of a fit of the largest candidate, whose other settings are those of all."""
    from emtau_dask.config.schema import checked_config, override_keys
    from emtau_dask.config.yaml import ENDINGS
    from emtau_dask.storage.urls import suffix_of

    for source in sources:
        if suffix_of(source).lower() in ENDINGS:
            raise ConfigError(f"{source} is a config by its name; emtau select takes data")
    for key in override_keys(overrides):
        for refused, why in REFUSED.items():
            if key == refused or key.startswith(f"{refused}."):
                raise ConfigError(f"--set {key} cannot be given to emtau select: {why}")
    values = values_of_data(sources, given | {COMPONENTS: str(max(request.n_components))}, overrides)
    if directory is not None:
        values["output"] = {**values["output"], "directory": directory}
    return checked_config(values, {option.key: option.title for option in OPTIONS})


def _print(result: SelectionResult) -> None:
    from emtau_dask.cli.console import console_on
    from emtau_dask.runs.select import selection_lines, selection_table

    console, found = console_on(sys.stdout), result.selection
    console.print(selection_table(found.table_, f"fits to a sample of {found.sample_rows_:,} rows"))
    if found.finalists_:
        console.print(selection_table(found.finalists_, "fits to all rows"))
    for line in selection_lines(found):
        echo(line)
    if result.run is None:
        echo("no results are written without -o FOLDER")
        return
    places = {"model": result.run.outputs.model, "labels": result.run.outputs.labels, "table": result.place}
    for what, place in places.items():
        if place is not None:
            echo(f"{what} saved in {place}")
