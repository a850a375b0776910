"""The commands.

Each command imports what it needs when it runs, so that ``--help`` is fast.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from emtau_dask.cli.doctor import doctor
from emtau_dask.cli.options import (
    OPTIONS,
    Command,
    FitOption,
    LocalPath,
    array_option,
    columns_option,
    common_options,
    config_argument,
    config_of,
    features_option,
    fit_options,
    json_option,
    list_option,
    log_option,
    names_in,
    options_given,
    out_argument,
    overwrite_option,
    run_options,
)
from emtau_dask.cli.terminal import (
    NOT_CONVERGED,
    ExitGroup,
    SummarisedCommand,
    echo,
    echo_json,
    remember,
    remember_resume,
    say,
    show_result,
)
from emtau_dask.cli.verbosity import QUIET, verbosity, watching
from emtau_dask.errors import ConfigError, counted
from emtau_dask.settings import DROP, MARGINALISE, RAISE, SPELLINGS

WITHOUT_CHECKPOINT = (
    "interrupted; without a checkpoint nothing of the fit was kept. To be able to resume, fit with "
    "--checkpoint PATH"
)
CRITERIA = ("bic", "aic", "icl", "held-out")
SHARED = (
    "data.columns",
    "data.features",
    "data.array",
    "algorithm.name",
    "stop.tol",
    "stop.max_iter",
    "model.missing",
    "model.random_state",
    "output.directory",
    "checkpoint.path",
)
"""Keys whose options `emtau fit` and `emtau select` share."""


@click.group()
@common_options
def dataset() -> None:
    """Write a dataset to a zarr group with the arrays X and labels."""


def _size_option(name: str, default: int) -> Callable[[Command], Command]:
    return click.option(name, type=click.IntRange(1), default=default, show_default=True)


_chunk_rows = click.option("--chunk-rows", type=click.IntRange(1), help="Rows in a chunk.")
_seed = click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
_source = click.option(
    "--source", metavar="FILE.npz", help="MNIST images (X) and digits (y); else they are downloaded."
)
_sizes = (
    _size_option("--rows", 1_000_000),
    _size_option("--features", 16),
    _size_option("--components", 16),
)
DATASETS: dict[str, tuple[str, Sequence[Callable[[Command], Command]]]] = {
    "digits": ("Handwritten digits that come with scikit-learn (1797 × 64).", ()),
    "example1": ("The EM-Tau paper's Example 1: 1000 points of 0.3 N(-2, 1) + 0.7 N(2, 1).", (_seed,)),
    "mnist": (
        "The EM-Tau paper's Example 2: MNIST digits 1, 2, 4, 5 and 6, by 42 principal components.",
        (_source,),
    ),
    "mixture": ("A synthetic Gaussian mixture of any size, streamed to disk.", (*_sizes, _seed)),
}
"""The datasets: what each one is, and its options."""


def _add_dataset(name: str, summary: str, options: Sequence[Callable[[Command], Command]]) -> None:
    def made(out: Path, overwrite: bool, **parameters: Any) -> None:
        from emtau_dask.datasets import make_dataset

        with watching() as observer:
            rows, features = make_dataset(name, out, overwrite=overwrite, observer=observer, **parameters)
        say(f"{counted(rows, 'row')} × {counted(features, 'feature')} written to {out}")

    command: Command = made
    for option in reversed(options):
        command = option(command)
    command = out_argument(_chunk_rows(overwrite_option()(common_options(command))))
    dataset.command(name, cls=SummarisedCommand, help=summary)(command)


for _name, (_summary, _options) in DATASETS.items():
    _add_dataset(_name, _summary, _options)


@click.command(cls=SummarisedCommand)
@click.argument("run_or_model")
@click.argument("out", metavar="OUT.html", type=LocalPath())
@click.option("--data", metavar="DATA", help="Also show the mixture over these rows (a sample of them).")
@click.option(
    "--recorded-data",
    "recorded",
    is_flag=True,
    help="Also show it over the rows that the run names, if they are local files.",
)
@array_option
@columns_option
@features_option
@overwrite_option("Replace a report at OUT.html.")
@common_options
def report(run_or_model: str, out: Path, **options: Any) -> None:
    """Write a report of a fit: one page with pictures.

    RUN_OR_MODEL is a saved model, a checkpoint, or the folder of a run that holds one of these. The
    page says what was found and how the fit went. It loads nothing; data are read only if asked for.
    """
    from emtau_dask.cli.report import run_report

    run_report(run_or_model, out, **options)
    say(f"report written to {out}")


@click.group(cls=ExitGroup, context_settings={"help_option_names": ["-h", "--help"]})
@common_options
@log_option
def main() -> None:
    """Fit Gaussian mixtures to data of any size.

    Exit codes: 0 done; 1 failed; 2 wrong usage or config; 3 stopped at max_iter
    without converging, results written all the same; 130 interrupted.
    """


main.add_command(dataset)
main.add_command(doctor)
main.add_command(report)


@main.command()
@click.argument("sources", metavar="CONFIG|DATA...", nargs=-1, required=True, type=click.Path(readable=False))
@fit_options
@run_options
@overwrite_option("Replace the results and the checkpoint of an earlier run, and FILE.")
@click.option(
    "--plan", is_flag=True, help="Print the memory, bytes and tasks that the fit will need; run nothing."
)
@click.option(
    "--save-config",
    "saved",
    metavar="FILE",
    type=LocalPath(),
    help="Also write the config (YAML) that the options amount to.",
)
@json_option
@click.pass_context
def fit(
    ctx: click.Context,
    sources: tuple[str, ...],
    given: dict[FitOption, str],
    overrides: list[str],
    overwrite: bool,
    plan: bool,
    saved: Path | None,
    as_json: bool,
) -> None:
    """Fit a mixture to data; write the model and the labels.

    DATA is a zarr array or group, an .npy, parquet, CSV or netCDF file, a URL of one, a pattern in
    quotes such as 'data/*.parquet', or several of these; it needs -k. CONFIG is a YAML file that describes a
    fit, whose name ends in .yaml or .yml; its keys are changed by --set.
    """
    if plan and as_json:
        raise ConfigError("--json is for the result of a fit, and --plan runs none: leave one of them out")
    run_config, values = config_of(sources, given, overrides)
    from emtau_dask.cli.console import console_on
    from emtau_dask.cli.fit import run_fit, run_plan
    from emtau_dask.cli.outputs import save_config
    from emtau_dask.cli.plan import check_memory, plan_table
    from emtau_dask.cli.resuming import resume_arguments

    if saved is not None:
        save_config(values, saved, overwrite=overwrite)
    if plan:
        needed = run_plan(run_config, overwrite=overwrite)
        console_on(sys.stdout).print(plan_table(needed))
        check_memory(needed)
        return
    if run_config.checkpoint.path is None:
        remember(ctx, WITHOUT_CHECKPOINT)
    else:
        again = "--overwrite" if overwrite else ""
        remember_resume(ctx, run_config.checkpoint.path, [resume_arguments(run_config), again])
    show_result(ctx, run_fit(run_config, overwrite=overwrite), as_json=as_json)


@main.command()
@click.argument("run", metavar="RUN.zarr")
@run_options
@overwrite_option("Replace results that are not of this run.")
@json_option
@click.pass_context
def resume(ctx: click.Context, run: str, overrides: list[str], overwrite: bool, as_json: bool) -> None:
    """Resume an interrupted run from its last commit.

    RUN.zarr is its checkpoint, a path or URL, or the folder that holds it. Its config travels inside it;
    --set may change stop.max_iter, checkpoint.every, cluster.*, output.* and data that has moved.
    A scheduler, URLs, and results that go elsewhere than beside RUN.zarr are
    given again.
    """
    from emtau_dask.cli.fit import run_resume

    arguments = [f"--set {shlex.quote(override)}" for override in overrides]
    remember_resume(ctx, run, [*arguments, "--overwrite" if overwrite else ""])
    result = run_resume(run, overrides, overwrite=overwrite)
    show_result(ctx, result, as_json=as_json)


@main.command()
@click.argument("place")
@json_option
@common_options
def inspect(place: str, as_json: bool) -> None:
    """Show what a run or a model holds, after verifying all of it.

    PLACE is a checkpoint or a saved model (a path or URL), or the folder of a run of fit or select: then its
    model is shown, or its checkpoint if the fit has not ended.
    """
    from emtau_dask.cli.inspect import inspect_place

    inspection = inspect_place(place)
    if as_json:
        echo_json(inspection.values)
        return
    from emtau_dask.cli.console import console_on

    console = console_on(sys.stdout)
    for table in inspection.tables:
        console.print(table)


@main.command()
@config_argument
@run_options
def compare(config: Path, overrides: list[str]) -> None:
    """Compare algorithms on the same data from the same start.

    CONFIG lists them under algorithm.compare.
    """
    from emtau_dask.cli.config import load_config

    run_config = load_config(config, overrides)
    if not run_config.algorithm.compare:
        raise ConfigError("algorithm.compare = [] must list the algorithms to compare, such as [{name: em}]")
    from emtau_dask.cli.compare import run_compare
    from emtau_dask.cli.console import console_on

    run_compare(run_config, console_on(sys.stdout))


@main.command()
@click.argument("run_or_model")
@click.argument("data")
@out_argument
@click.option("--proba", "probabilities", is_flag=True, help="Also write each row's responsibilities.")
@click.option("--scores", is_flag=True, help="Also write each row's log-likelihood.")
@click.option(
    "--outliers",
    metavar="SHARE",
    type=float,
    help="Also write -1 for this share of the rows, the least probable ones, and 1 for the others.",
)
@list_option(
    "--keep",
    read=names_in,
    metavar="COLUMN,...",
    help="Columns of DATA, parquet or CSV, of any type, that a table OUT has before the labels.",
)
@array_option
@columns_option
@features_option
@click.option(
    "--missing",
    type=click.Choice([RAISE, DROP, MARGINALISE, *SPELLINGS]),
    help="What NaN means, as for emtau fit; dropped rows get the label -1. By default as in the fit.",
)
@click.option("--workers", type=click.IntRange(1), metavar="N", help="Threads; by default one for each core.")
@overwrite_option("Replace labels that emtau wrote at OUT.")
@json_option
@common_options
def predict(
    run_or_model: str,
    data: str,
    out: Path,
    array: str | None,
    columns: list[str] | None,
    features: list[str] | None,
    workers: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Label rows with a fitted mixture.

    RUN_OR_MODEL is a saved model, a checkpoint, or the folder of a run that holds one of these.
    DATA is a zarr array or group, an .npy, a parquet, a CSV or a netCDF file, or a pattern in quotes, such as
    'data/*.parquet', of which part-9 is read before part-10.
    OUT is a zarr group, or, if its name ends in .parquet, .pq, .csv or .tsv, a table with the column label.
    Its rows are in the order of DATA.
    """
    from emtau_dask.cli.predict import LabelOptions, run_predict

    rows, counts = run_predict(
        run_or_model,
        data,
        out,
        LabelOptions(**options),
        array=array,
        columns=columns,
        features=features,
        workers=workers,
    )
    labelled = int(counts.sum())
    left_out = rows - labelled
    if as_json:
        by_label = counts.tolist()
        echo_json({"labels": str(out), "rows": rows, "left_out": left_out, "rows_by_label": by_label})
    else:
        others = f"; {left_out:,} left out: missing values" if left_out else ""
        say(f"{counted(labelled, 'row')} labelled in {out}{others}")


@main.command()
@click.argument("sources", metavar="DATA...", nargs=-1, required=True, type=click.Path(readable=False))
@list_option(
    "-k",
    "--components",
    required=True,
    metavar="A:B",
    help="Numbers of components: 2:20, 10:100:10 or 2,4,8.",
)
@list_option("--covariance", default=["full"], metavar="TYPES", help="Types to choose from: full,diag.")
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
    overwrite: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Choose the number of components, and fit that mixture.

    All candidates are fitted to one sample of the rows and scored in one pass; the best one is fitted to all
    rows. Its model, its labels and the table are written. The same command continues a selection that was
    killed, from what is kept in FOLDER/selection, or in PATH with --checkpoint.
    """
    from emtau_dask.cli.select import (
        config_of_largest,
        numbers_of,
        run_selection,
        selection_values,
        settings_of,
        summary_lines,
    )

    numbers = numbers_of(options.pop("components"))
    types = [name.strip() for name in options.pop("covariance").split(",")]
    config = config_of_largest(sources, max(numbers), given, overrides)
    settings = settings_of(config, numbers, types, **options)
    place = config.checkpoint.path or config.output.directory
    remember(ctx, f"interrupted; what is done is in {place}. The same command goes on from there")
    result = run_selection(config, settings, overwrite=overwrite)
    if as_json:
        echo_json(selection_values(result))
    elif verbosity() != QUIET:
        for line in summary_lines(result):
            echo(line)
    if not result.selection.best_estimator_.converged_:
        echo("emtau: the fit to all rows stopped at max_iter without converging", err=True)
        ctx.exit(NOT_CONVERGED)
