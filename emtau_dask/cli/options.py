"""Options of several commands, and those that set keys of a config."""

from __future__ import annotations

import csv
import logging
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import click

from emtau_dask import __version__
from emtau_dask.cli.terminal import remember_debug
from emtau_dask.cli.verbosity import quiet_option, verbose_option
from emtau_dask.errors import ConfigError
from emtau_dask.settings import COVARIANCE_TYPES, POLICIES, Settings

if TYPE_CHECKING:
    from emtau_dask.cli.config import RunConfig


Command = Callable[..., Any]


class LocalPath(click.Path):
    """A local path; a ``~`` that no shell has replaced becomes the home folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path."""
        from emtau_dask.storage.files import with_home

        return Path(with_home(os.fsdecode(super().convert(value, param, ctx))))


config_argument = click.argument("config", type=LocalPath())


def names_in(text: str) -> list[str]:
    """Return names separated by commas; one with a comma is in double quotes."""
    return next(csv.reader([text]), [])


def list_option(*names: str, read: Callable[[str], Any] = str, **settings: Any) -> Callable[[Command], Any]:
    """Return an option for a list, which ``read`` returns from its text; given again, it adds to the list."""

    def joined(_: click.Context, __: click.Parameter, texts: tuple[str, ...]) -> Any:
        return read(",".join(texts)) if texts else None

    return click.option(*names, multiple=True, callback=joined, **settings)


out_argument = click.argument("out", type=LocalPath())
_traceback = "Show the traceback of an error."
_debug_option = click.option(
    "--debug", is_flag=True, expose_value=False, callback=remember_debug, help=_traceback
)
_version_option = click.version_option(__version__, "-V", "--version", prog_name="emtau")


def common_options(command: Command) -> Command:
    """Add the options that every command has."""
    return quiet_option(verbose_option(_debug_option(_version_option(command))))


array_option = click.option("--array", metavar="NAME", help="Member of DATA, if it is a zarr group.")
columns_option = list_option(
    "--columns",
    read=names_in,
    metavar="A,B,C",
    help="Columns of DATA, if it is parquet or CSV; by default those of the fit.",
)
features_option = list_option(
    "--features",
    read=names_in,
    metavar="A,B,C",
    help="Of a cube: its variables that are features, or one dimension; by default by the names of the fit.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, for programs.")
_NOT_IN_NAMES = re.compile(r"\[.*?\]|[^\w.-]+")
"""Parts of a path that are not used in the name of a folder: wildcards and spaces."""


def _log_to_stderr(ctx: click.Context, _: click.Parameter, level: str | None) -> None:
    """Send the package's log to standard error until the command ends, instead of the progress display."""
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


def overwrite_option(what: str = "Replace zarr data at OUT.") -> Callable[[Command], Command]:
    """Return the option ``--overwrite`` with a help text."""
    return click.option("--overwrite", is_flag=True, help=what)


def run_options(command: Command) -> Command:
    """Add the options that change a config; the command gets all of them as ``overrides``."""
    override = "Override a key, as in model.n_init=3."
    scheduler = "threads, processes (workers of a local dask cluster), tcp://HOST:PORT or tls://HOST:PORT."
    workers = "Threads, or worker processes of a local cluster; by default one for each core."

    @click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help=override)
    @click.option("--scheduler", metavar="WHERE", help=scheduler)
    @click.option("--workers", type=click.IntRange(1), metavar="N", help=workers)
    @common_options
    @wraps(command)
    def with_overrides(
        *arguments: Any, overrides: Sequence[str], scheduler: str | None, workers: int | None, **options: Any
    ) -> Any:
        flags = {"cluster.scheduler": scheduler, "cluster.workers": workers}
        given = [f"{key}={value}" for key, value in flags.items() if value is not None]
        return command(*arguments, overrides=[*overrides, *given], **options)

    return with_overrides


@dataclass(frozen=True)
class FitOption:
    """An option that sets a key of a config.

    Attributes
    ----------
    names : tuple of str
    key : str
        The dotted key.
    metavar, help : str
        Texts of the help.
    read : callable or None
        Returns the text or the list of texts that the value is; None for a value in YAML.
    """

    names: tuple[str, ...]
    key: str
    metavar: str
    help: str
    read: Callable[[str], str | list[str]] | None = None

    @property
    def parameter(self) -> str:
        """The name of the parameter that click passes."""
        return self.key.replace(".", "_")

    @property
    def title(self) -> str:
        """The name of the key in errors."""
        return f"{'/'.join(self.names)} ({self.key})"

    def value(self, text: str) -> object:
        """Return the value that a text gives the key; raises `ConfigError` if it is not YAML."""
        from emtau_dask.cli.yaml import parse_yaml

        return parse_yaml(text, self.names[-1]) if self.read is None else self.read(text)

    def setting(self, text: str) -> str:
        """Return the argument of ``--set`` that sets the same value."""
        from emtau_dask.cli.yaml import setting

        return f"{self.key}={text}" if self.read is None else setting(self.key, self.read(text))


COMPONENTS = FitOption(("-k", "--components"), "model.n_components", "K", "Components of the mixture.")
OUTPUT = FitOption(
    ("-o", "--output"),
    "output.directory",
    "FOLDER",
    "Where the results go; by default runs/NAME, or runs/NAME-best of emtau select, for data NAME.",
    str,
)
CHECKPOINT = FitOption(
    ("--checkpoint",),
    "checkpoint.path",
    "PATH",
    "Where what is done is kept (a path or URL), so that it can be continued.",
    str,
)
OPTIONS = (
    COMPONENTS,
    FitOption(
        ("--columns",),
        "data.columns",
        "A,B,C",
        "Columns of parquet or CSV that are features.",
        names_in,
    ),
    FitOption(
        ("--features",),
        "data.features",
        "A,B,C",
        "Variables of netCDF or xarray's zarr that are features, or one dimension; the others are the rows.",
        names_in,
    ),
    FitOption(("--array",), "data.array", "NAME", "Member of a zarr group that holds the rows.", str),
    FitOption(
        ("--covariance",),
        "model.covariance_type",
        "TYPE",
        ", ".join((f"{Settings.covariance_type} (the default)", *COVARIANCE_TYPES[1:])),
        str,
    ),
    FitOption(
        ("--algorithm",),
        "algorithm.name",
        "NAME",
        ", ".join((f"{Settings.algorithm} (the default)", *POLICIES)),
        str,
    ),
    FitOption(
        ("--tol",),
        "stop.tol",
        "TOL",
        "When to stop: a change of the log-likelihood per row, auto (the default), or statistical.",
    ),
    FitOption(("--max-iter",), "stop.max_iter", "N", "Most iterations."),
    FitOption(
        ("--missing",),
        "model.missing",
        "HOW",
        "What NaN means: raise (an error, the default), drop (the row is left out) or marginalise "
        "or marginalize (a missing value, over which the fit integrates).",
        str,
    ),
    FitOption(("--seed",), "model.random_state", "N", "Of all that is random; 0 by default."),
    OUTPUT,
    CHECKPOINT,
)


TITLES = {option.key: option.title for option in OPTIONS}
"""The names in errors of keys that options set."""


def options_given(choice: Sequence[FitOption]) -> Callable[[Command], Command]:
    """Return a decorator that adds options for keys of a config; the command gets them as ``given``."""

    def added(command: Command) -> Command:
        @wraps(command)
        def with_options(*arguments: Any, **options: Any) -> Any:
            texts = {option: options.pop(option.parameter) for option in choice}
            given = {option: text for option, text in texts.items() if text is not None}
            return command(*arguments, given=given, **options)

        for option in reversed(choice):
            kind = list_option if option.read is names_in else click.option
            add = kind(*option.names, option.parameter, metavar=option.metavar, help=option.help)
            with_options = add(with_options)
        return with_options

    return added


fit_options = options_given(OPTIONS)


def config_of(
    sources: Sequence[str], given: Mapping[FitOption, str], overrides: Sequence[str]
) -> tuple[RunConfig, dict[str, Any]]:
    """Return the given config, or the one that data and options describe, and its unchecked values.

    Raises `ConfigError` for a value that is not allowed, and for a config together with data, or with options
    other than that of the checkpoint.
    """
    from emtau_dask.cli.config import checked_config, config_values
    from emtau_dask.cli.yaml import ENDINGS
    from emtau_dask.storage.files import stream_at
    from emtau_dask.storage.urls import suffix_of

    configs = [source for source in sources if suffix_of(source).lower() in ENDINGS]
    stream = stream_at(sources[0]) if len(sources) == 1 and not configs else None
    if stream is None and not configs:
        values = values_of_data(sources, given, overrides)
        return checked_config(values, TITLES), values
    if len(sources) > 1:
        raise ConfigError(f"{configs[0]} is a config, which names its data itself; give only the config")
    if CHECKPOINT in given:
        overrides = [*overrides, CHECKPOINT.setting(given[CHECKPOINT])]
        given = {option: text for option, text in given.items() if option is not CHECKPOINT}
    if given:
        names = ", ".join("/".join(option.names) for option in given)
        sets = " ".join(f"--set {shlex.quote(option.setting(text))}" for option, text in given.items())
        if stream is not None:
            instead = f"with a config, give instead of {names}: {sets}"
            raise ConfigError(f"{sources[0]} is {stream}. Give data in a file; {instead}")
        raise ConfigError(
            f"{names} cannot be given with the config {configs[0]}; instead of options give: {sets}"
        )
    values = config_values(sources[0], overrides)
    return checked_config(values), values


def values_of_data(
    sources: Sequence[str], given: Mapping[FitOption, str], overrides: Sequence[str]
) -> dict[str, Any]:
    """Return the unchecked values of the config that data and options describe; raises `ConfigError`."""
    from emtau_dask.cli.config import complete_values
    from emtau_dask.cli.yaml import ENDINGS

    path = sources[0] if len(sources) == 1 else list(sources)
    content: dict[str, dict[str, object]] = {"data": {"path": path}, "model": {}}
    for option, text in given.items():
        section, _, key = option.key.partition(".")
        content.setdefault(section, {})[key] = option.value(text)
    values = complete_values(content, overrides, name_of(sources[0]))
    if isinstance(values["model"], dict) and "n_components" not in values["model"]:
        raise ConfigError(
            f"{COMPONENTS.title} is missing: {sources[0]} is read as data. Give the number of components, "
            f"as in -k 8; the name of a config ends in {' or '.join(ENDINGS)}"
        )
    return values


def name_of(source: str) -> str:
    """Return a name for the results from a path, pattern or URL: its last part that is not empty."""
    from emtau_dask.storage.urls import is_url

    bare = source.partition("?")[0] if is_url(source) else source
    stems = (PurePosixPath(part).stem for part in reversed(PurePosixPath(bare).parts))
    names = (_NOT_IN_NAMES.sub("-", stem).strip("-.") for stem in stems)
    return next(filter(None, names), "data")
