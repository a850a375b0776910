"""Options that several commands have."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import click

from emtau_dask.cli.exits import remember_debug

Command = Callable[..., Any]

config_argument = click.argument("config", type=click.Path(path_type=Path))
out_argument = click.argument("out", type=click.Path(path_type=Path))
_traceback = "Show the traceback of an error."
debug_option = click.option(
    "--debug", is_flag=True, expose_value=False, callback=remember_debug, help=_traceback
)


def _log_to_stderr(ctx: click.Context, _: click.Parameter, level: str | None) -> None:
    """Send the package's log to standard error until the command ends; displays of progress give way."""
    if level is None:
        return
    log, handler = logging.getLogger("emtau_dask"), logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    before = log.level
    log.setLevel(level.upper())
    log.addHandler(handler)

    def stop() -> None:
        log.removeHandler(handler)
        log.setLevel(before)

    ctx.call_on_close(stop)


log_option = click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning"], case_sensitive=False),
    expose_value=False,
    callback=_log_to_stderr,
    help="Log to standard error, with times, in place of the progress display.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="For programs.")


def overwrite_option(what: str = "Replace zarr data at OUT.") -> Callable[[Command], Command]:
    """Return the option ``--overwrite`` with a help text."""
    return click.option("--overwrite", is_flag=True, help=what)


def run_options(command: Command) -> Command:
    """Add the options that change a config; the command gets them all in its ``overrides``."""
    override = "Override a key, as in model.n_init=3."
    scheduler = "threads, processes (a local dask cluster), tcp://HOST:PORT or tls://HOST:PORT."
    workers = "Threads, or processes of a local cluster; by default one for each core."

    @click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help=override)
    @click.option("--scheduler", help=scheduler)
    @click.option("--workers", type=click.IntRange(1), help=workers)
    @debug_option
    @wraps(command)
    def with_overrides(
        *arguments: Any, overrides: Sequence[str], scheduler: str | None, workers: int | None, **options: Any
    ) -> Any:
        flags = {"cluster.scheduler": scheduler, "cluster.workers": workers}
        given = [f"{key}={value}" for key, value in flags.items() if value is not None]
        return command(*arguments, overrides=[*overrides, *given], **options)

    return with_overrides
