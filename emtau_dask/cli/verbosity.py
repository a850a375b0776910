"""How much a command prints: the options ``-q`` and ``-v``, and the progress that they ask for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from emtau_dask.em.history import FitObserver

QUIET, USUAL, VERBOSE = range(3)
_VERBOSITY = "emtau.verbosity"
"""Key of the outermost context's ``meta``."""


def _level_option(level: int, *names: str, text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def remember(ctx: click.Context, _: click.Parameter, given: bool) -> None:
        if given and ctx.find_root().meta.setdefault(_VERBOSITY, level) != level:
            raise click.UsageError("-q and -v ask for opposite things; give one of them.")

    return click.option(*names, is_flag=True, expose_value=False, callback=remember, help=text)


quiet_option = _level_option(
    QUIET, "-q", "--quiet", text="No progress and no summary; --json, warnings and errors only."
)
verbose_option = _level_option(VERBOSE, "-v", "--verbose", text="Also a line for every start and iteration.")


def verbosity() -> int:
    """Return `QUIET`, `USUAL` or `VERBOSE`: what the command that runs was given."""
    ctx = click.get_current_context(silent=True)
    level: int = USUAL if ctx is None else ctx.find_root().meta.get(_VERBOSITY, USUAL)
    return level


def watching() -> AbstractContextManager[FitObserver]:
    """Yield an observer that shows progress on standard error until the block ends."""
    from emtau_dask.progress import closed_after, observer_for

    return closed_after(observer_for(verbosity(), sys.stderr))
