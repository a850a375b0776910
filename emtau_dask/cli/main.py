"""The command `emtau`."""

from __future__ import annotations

import errno
import json
import os
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from emtau_dask.errors import ConfigError, EmtauError
from emtau_dask.messages import shown

if TYPE_CHECKING:
    from rich.console import Console

    from emtau_dask.config import DatasetOptions, RunConfig
    from emtau_dask.runs import Demand, RunResult

FAILED, BAD_USAGE, NOT_CONVERGED, INTERRUPTED = 1, 2, 3, 130

Command = TypeVar("Command", bound=Callable[..., Any])


class _Group(click.Group):
    """Turns errors into one line on standard error and an exit code."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run as all that a process does.

        An interrupt may fall between the start of a pool's thread and the note that its pool takes of it, and
        Python would wait for such a thread forever. What must be left in order is, by then.
        """
        try:
            return self.main(*args, **kwargs)
        except SystemExit as end:
            if end.code != INTERRUPTED:
                raise
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(INTERRUPTED)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _terminable():
                return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit):
            raise
        except (KeyboardInterrupt, click.Abort) as error:
            _fail(ctx, error, _interrupted(ctx), INTERRUPTED)
        except ConfigError as error:
            _fail(ctx, error, str(error), BAD_USAGE)
        except EmtauError as error:
            _fail(ctx, error, str(error), FAILED)
        except Exception as error:
            if isinstance(error, OSError):
                if error.errno == errno.EPIPE:
                    raise
                _fail(ctx, error, _of_the_system(error), FAILED)
            what = f"{type(error).__name__}: {error}"
            _fail(ctx, error, f"{what} (use --debug for the traceback)", FAILED)


def _of_the_system(error: OSError) -> str:
    """Return what to say of an error that nothing nearer to it has explained, such as a full log."""
    from emtau_dask.io.files import reason_of, remedy_of

    return f"{reason_of(error)}. {remedy_of(error, error.filename)} (use --debug for the traceback)"


def _fail(ctx: click.Context, error: BaseException, message: str, code: int) -> NoReturn:
    if ctx.find_root().meta.get("emtau.debug"):
        click.echo(shown("".join(traceback.format_exception(error))), err=True, nl=False)
    click.echo(f"emtau: {shown(' '.join(message.split()))}", err=True)
    ctx.exit(code)


def _interrupted(ctx: click.Context) -> str:
    """Return what to say after an interrupt: how to go on, where that can be done."""
    run = ctx.find_root().meta.get("emtau.checkpoint")
    if run is None:
        return "interrupted"
    from emtau_dask.io.objects import object_store, open_log

    try:
        open_log(object_store(run))
    except EmtauError:
        return "interrupted before the first commit; nothing to go on with"
    words = " ".join(["emtau resume", shlex.quote(run), *ctx.find_root().meta["emtau.words"]])
    return f"interrupted; the last commit is intact. Go on with: {words}"


def _raise_interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end a command as Ctrl-C does, inside the block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _raise_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _remember_debug(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        ctx.find_root().meta["emtau.debug"] = True


_debug = click.option(
    "--debug",
    is_flag=True,
    expose_value=False,
    callback=_remember_debug,
    help="Show the traceback of an error.",
)


def _run_options(command: Command) -> Command:
    """Add the options of commands that run a config."""
    for option in (
        _debug,
        click.option(
            "--workers",
            type=click.IntRange(1),
            help="Threads, or processes of a local cluster; by default one for each core.",
        ),
        click.option(
            "--scheduler",
            help="threads, processes (a local dask cluster), tcp://HOST:PORT or tls://HOST:PORT.",
        ),
        click.option(
            "--set",
            "overrides",
            multiple=True,
            metavar="KEY=VALUE",
            help="Override a key, as in model.n_init=3.",
        ),
    ):
        command = option(command)
    return command


_config_argument = click.argument("config", type=click.Path(path_type=Path))


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="emtau_dask")
@_debug
def main() -> None:
    """Gaussian mixtures fitted by EM with partial E-steps, on data larger than memory.

    Exit codes: 0 done; 1 failed; 2 wrong usage or config; 3 stopped at max_iter
    without converging, results written all the same; 130 interrupted.
    """


@main.command()
@_config_argument
@_run_options
@click.option("--overwrite", is_flag=True, help="Replace the results and the checkpoint of an earlier run.")
@click.option(
    "--plan", is_flag=True, help="Print the memory, bytes and tasks that the fit will need; fit nothing."
)
@click.pass_context
def fit(
    ctx: click.Context,
    config: Path,
    overrides: tuple[str, ...],
    scheduler: str | None,
    workers: int | None,
    overwrite: bool,
    plan: bool,
) -> None:
    """Fit what CONFIG (a YAML file) describes and write what its output asks for."""
    run_config = _load(config, overrides, scheduler, workers)
    from emtau_dask.runs import run_fit, run_plan, words_to_resume

    if plan:
        from emtau_dask.runs import check_memory, plan_table

        found = run_plan(run_config, progress=sys.stderr)
        _console().print(plan_table(found))
        check_memory(found)
        return
    if run_config.checkpoint.path is not None:
        words = [words_to_resume(run_config), *(["--overwrite"] if overwrite else [])]
        _remember_checkpoint(ctx, run_config.checkpoint.path, words)
    result = run_fit(run_config, overwrite=overwrite, progress=sys.stderr)
    _show_result(ctx, run_config, result)


@main.command()
@click.argument("run", metavar="RUN.zarr")
@_run_options
@click.option("--overwrite", is_flag=True, help="Replace results that are not of this run.")
@click.pass_context
def resume(
    ctx: click.Context,
    run: str,
    overrides: tuple[str, ...],
    scheduler: str | None,
    workers: int | None,
    overwrite: bool,
) -> None:
    """Go on with the interrupted run in RUN.zarr (a path or URL) where its last commit is.

    Its config travels inside it; --set may change stop.max_iter,
    checkpoint.every, cluster.*, output.* and data that has moved.
    A scheduler, URLs, and results that go elsewhere than beside RUN.zarr are
    asked for, or given by --set.
    """
    from emtau_dask.runs import run_resume

    given = [*overrides, *_flags(scheduler, workers)]
    words = [f"--set {shlex.quote(override)}" for override in given]
    _remember_checkpoint(ctx, run, words + (["--overwrite"] if overwrite else []))
    run_config, result = run_resume(run, given, overwrite=overwrite, confirm=_asking(), progress=sys.stderr)
    _show_result(ctx, run_config, result)


@main.command()
@click.argument("run", metavar="RUN.zarr")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@_debug
def inspect(run: str, as_json: bool) -> None:
    """Show what the checkpoint RUN.zarr (a path or URL) holds, after verifying all of it."""
    from emtau_dask.runs import history_table, inspect_run, run_table

    described = inspect_run(run)
    if as_json:
        # JSON may hold this one control character as it is.
        click.echo(json.dumps(described, indent=2).replace("\x7f", "\\u007f"))
        return
    console = _console()
    console.print(run_table(described))
    if described["history"]:
        console.print(history_table(described))


def _asking() -> Callable[[Demand], bool] | None:
    """Return what asks the person at the terminal; None where there is none."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return None
    return lambda demand: click.confirm(f"The checkpoint asks for {demand}. Allow it?", err=True)


def _remember_checkpoint(ctx: click.Context, path: str, words: list[str]) -> None:
    """Remember how to go on after an interrupt."""
    ctx.find_root().meta.update({"emtau.checkpoint": path, "emtau.words": [word for word in words if word]})


def _show_result(ctx: click.Context, run_config: RunConfig, result: RunResult) -> None:
    from emtau_dask.runs import component_table, fit_table

    console = _console()
    console.print(component_table(result.model, result.label_counts))
    console.print(fit_table(result.model, result.inputs.rows.shape[0]))
    for what, path in (("model", result.model_path), ("labels", result.labels_path)):
        if path is not None:
            click.echo(shown(f"{what} saved in {path}"))
    if result.model.stop_reason_ == "max-iter":
        click.echo(
            f"emtau: stopped at stop.max_iter = {run_config.stop.max_iter} without converging to stop.tol = "
            f"{run_config.stop.tol:g}; the results are written. Raise one of them for a converged fit.",
            err=True,
        )
        ctx.exit(NOT_CONVERGED)


@main.command()
@_config_argument
@_run_options
def compare(config: Path, overrides: tuple[str, ...], scheduler: str | None, workers: int | None) -> None:
    """Run the algorithms that CONFIG lists on the same data from the same start."""
    run_config = _load(config, overrides, scheduler, workers)
    if not run_config.algorithm.compare:
        raise ConfigError("algorithm.compare = [] must list the algorithms to compare, such as [{name: em}]")
    from emtau_dask.compare import run_compare

    run_compare(run_config, _console())


@main.command()
@click.argument("run_or_model")
@click.argument("data")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--proba", is_flag=True, help="Also write each row's responsibilities.")
@click.option("--scores", is_flag=True, help="Also write each row's log-likelihood, in nats.")
@click.option("--array", help="Member of DATA, where it is a zarr group.")
@click.option("--columns", help="Columns of DATA, separated by commas, where it is parquet.")
@click.option("--workers", type=click.IntRange(1), help="Threads; by default one for each core.")
@click.option("--overwrite", is_flag=True, help="Replace zarr data at OUT.")
@_debug
def predict(
    run_or_model: str,
    data: str,
    out: Path,
    proba: bool,
    scores: bool,
    array: str | None,
    columns: str | None,
    workers: int | None,
    overwrite: bool,
) -> None:
    """Label the rows of DATA with RUN_OR_MODEL, into the zarr group OUT.

    RUN_OR_MODEL is a saved model, the folder of a run that saved one as
    model.zarr, or a checkpoint. DATA is a zarr array or group, an .npy or a parquet file.
    """
    from emtau_dask.runs import run_predict

    counts = run_predict(
        run_or_model,
        data,
        out,
        array=array,
        columns=columns.split(",") if columns else None,
        probabilities=proba,
        scores=scores,
        workers=workers,
        overwrite=overwrite,
        progress=sys.stderr,
    )
    click.echo(f"{counts.sum():,} rows labelled in {shown(out)}")


@main.group()
def dataset() -> None:
    """Write a dataset to a zarr group with the arrays X and labels."""


def _dataset_options(command: Command) -> Command:
    """Add the options of every dataset."""
    for option in (
        _debug,
        click.option("--overwrite", is_flag=True, help="Replace zarr data at OUT."),
        click.option("--chunk-rows", type=click.IntRange(1), help="Rows in a chunk."),
        click.argument("out", type=click.Path(path_type=Path)),
    ):
        command = option(command)
    return command


@dataset.command()
@_dataset_options
def digits(out: Path, chunk_rows: int | None, overwrite: bool) -> None:
    """Handwritten digits that come with scikit-learn (1797 × 64)."""
    from emtau_dask.config import DigitsOptions

    _make(DigitsOptions(chunk_rows=chunk_rows), out, overwrite)


@dataset.command()
@_dataset_options
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
def example1(out: Path, chunk_rows: int | None, overwrite: bool, seed: int) -> None:
    """The EM-Tau paper's Example 1: 1000 points of 0.3 N(-2, 1) + 0.7 N(2, 1)."""
    from emtau_dask.config import Example1Options

    _make(Example1Options(chunk_rows=chunk_rows, seed=seed), out, overwrite)


@dataset.command()
@_dataset_options
@click.option(
    "--source", metavar="FILE.npz", help="MNIST images (X) and digits (y); else they are downloaded."
)
def mnist(out: Path, chunk_rows: int | None, overwrite: bool, source: str | None) -> None:
    """The EM-Tau paper's Example 2: MNIST digits 1, 2, 4, 5 and 6, by 42 principal components."""
    from emtau_dask.config import MnistOptions

    _make(MnistOptions(chunk_rows=chunk_rows, source=source), out, overwrite)


@dataset.command()
@_dataset_options
@click.option("--rows", type=click.IntRange(1), default=1_000_000, show_default=True)
@click.option("--features", type=click.IntRange(1), default=16, show_default=True)
@click.option("--components", type=click.IntRange(1), default=16, show_default=True)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
def mixture(
    out: Path, chunk_rows: int | None, overwrite: bool, rows: int, features: int, components: int, seed: int
) -> None:
    """A synthetic Gaussian mixture of any size, streamed to disk."""
    from emtau_dask.config import MixtureOptions

    options = MixtureOptions(
        chunk_rows=chunk_rows, rows=rows, features=features, components=components, seed=seed
    )
    _make(options, out, overwrite)


def _make(options: DatasetOptions, out: Path, overwrite: bool) -> None:
    from emtau_dask.datasets import make_dataset
    from emtau_dask.estimator import watching

    with watching(sys.stderr) as observer:
        rows, features = make_dataset(options, out, overwrite=overwrite, observer=observer)
    click.echo(f"{rows:,} rows × {features} features written to {shown(out)}")


def _load(config: Path, overrides: tuple[str, ...], scheduler: str | None, workers: int | None) -> RunConfig:
    from emtau_dask.config import load_config

    return load_config(config, [*overrides, *_flags(scheduler, workers)])


def _flags(scheduler: str | None, workers: int | None) -> list[str]:
    """Return the options that are short for keys of a config, as overrides."""
    flags = [f"cluster.scheduler={scheduler}"] if scheduler is not None else []
    return flags + ([f"cluster.workers={workers}"] if workers is not None else [])


def _console() -> Console:
    """Return a console on standard output, wide enough for tables where it is no terminal."""
    from rich.console import Console

    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else 120)
