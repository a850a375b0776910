"""The output of commands, their exit codes, and their interruption."""

from __future__ import annotations

import json
import logging
import math
import os
import select
import shlex
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import click

from emtau_dask.cli.streams import open_standard_streams
from emtau_dask.cli.verbosity import QUIET, verbosity
from emtau_dask.errors import ConfigError, EmtauError, one_line, shown
from emtau_dask.interrupts import handler_of_signals

if TYPE_CHECKING:
    from emtau_dask.cli.outputs import RunResult


FAILED, BAD_USAGE, NOT_CONVERGED, INTERRUPTED = 1, 2, 3, 130
STDERR = 2
_DEBUG, _MESSAGE, _CHECKPOINT, _RESUME = "emtau.debug", "emtau.message", "emtau.checkpoint", "emtau.resume"
_WARNINGS = "emtau.warnings"
"""Keys of the outermost context's ``meta``."""
SIGNALS = signal.SIGINT, signal.SIGTERM
SECOND_SECONDS = 1.0
"""Minimum time after the first signal for a second one (seconds); shells may send the first one twice."""
ENDED = b"\0"
"""The byte that is written, instead of the number of a signal, when the command has ended."""
GRACE_SECONDS = 8.0
"""Maximum time for an interrupted command to end (seconds); `docker stop` kills after 10."""


def echo(text: str, *, err: bool = False) -> None:
    """Print a text without secrets as one line, on standard output or error."""
    click.echo(one_line(text), err=err)


def say(text: str) -> None:
    """Print a line of a summary, unless the command is to be quiet."""
    if verbosity() != QUIET:
        echo(text)


def echo_json(values: Any) -> None:
    """Print values as one JSON document."""
    # JSON does not escape DEL, a control character of terminals.
    click.echo(json.dumps(values, indent=2, allow_nan=False).replace("\x7f", "\\u007f"))


class SummarisedCommand(click.Command):
    """A command whose line in the list of commands is its first sentence, also if that is long."""

    def get_short_help_str(self, limit: int = 0) -> str:
        """Return the first sentence."""
        return super().get_short_help_str(sys.maxsize)


class ExitGroup(click.Group):
    """A group of commands that end with one line and an exit code, not with a traceback."""

    command_class = SummarisedCommand

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command as the only work of this process, even if nobody reads its output.

        After an interrupt and its clean-up the process exits at once: Python would wait for threads of
        libraries.
        """
        open_standard_streams()
        try:
            return self.main(*args, **kwargs)
        except SystemExit as end:
            if end.code != INTERRUPTED:
                raise
            os._exit(INTERRUPTED)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; exit with a message for every error."""
        with _terminable(ctx), warnings.catch_warnings():
            shown_before: set[str] = ctx.meta.setdefault(_WARNINGS, set())
            warnings.showwarning = partial(_show_warning, shown_before)
            try:
                return super().invoke(ctx)
            except click.ClickException as error:
                error.message = shown(error.message)  # type: ignore[misc]  # It may contain names of files.
                if isinstance(error, click.NoSuchOption):
                    _offer_abbreviated(error)
                raise
            except click.exceptions.Exit:
                raise
            except (KeyboardInterrupt, click.Abort) as error:
                _fail(ctx, error, _interrupted(ctx), INTERRUPTED)
            except ConfigError as error:
                _fail(ctx, error, str(error), BAD_USAGE)
            except EmtauError as error:
                _fail(ctx, error, str(error), FAILED)
            except Exception as error:
                _fail(
                    ctx, error, f"{_message_of_foreign_error(error)} (use --debug for the traceback)", FAILED
                )


def _offer_abbreviated(error: click.NoSuchOption) -> None:
    """Let the message of an unknown option name those that it may be the beginning of."""
    options = [] if error.ctx is None else [name for each in error.ctx.command.params for name in each.opts]
    longer = [name for name in options if name.startswith(error.option_name)]
    error.possibilities = longer or error.possibilities  # type: ignore[misc]


def _show_warning(
    shown_before: set[str], message: Warning | str, category: type[Warning], *_: Any, **__: Any
) -> None:
    """Print and remember a warning about data or numbers; warnings about code are for its authors."""
    about_code = issubclass(category, (DeprecationWarning, FutureWarning))  # Some are UserWarnings, too.
    if issubclass(category, (UserWarning, RuntimeWarning)) and not about_code:
        shown_before.add(str(message))
        echo(f"emtau: warning: {message}", err=True)


def _message_of_foreign_error(error: Exception) -> str:
    """Return the message for an error that is not the package's own, such as that of a full disk."""
    if not isinstance(error, OSError):
        return f"{type(error).__name__}: {error}"
    from emtau_dask.storage.errors import reason_of, remedy_of

    return f"{reason_of(error)}. {remedy_of(error, error.filename)}"


def _fail(ctx: click.Context, error: BaseException, message: str, code: int) -> NoReturn:
    if ctx.find_root().meta.get(_DEBUG):
        for line in "".join(traceback.format_exception(error)).splitlines():
            echo(line, err=True)
    echo(f"emtau: {' '.join(message.split())}", err=True)
    ctx.exit(code)


def remember_debug(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    """Remember the option ``--debug``; click's callback for it."""
    if value:
        ctx.find_root().meta[_DEBUG] = True


def remember(ctx: click.Context, message: str) -> None:
    """Remember the message to print after an interrupt."""
    ctx.find_root().meta[_MESSAGE] = message


def remember_resume(ctx: click.Context, checkpoint: str, arguments: Iterable[str]) -> None:
    """Remember the command that resumes a run, to print it after an interrupt."""
    command = " ".join(["emtau resume", shlex.quote(checkpoint), *filter(None, arguments)])
    ctx.find_root().meta.update({_CHECKPOINT: checkpoint, _RESUME: command})


def _interrupted(ctx: click.Context) -> str:
    """Return the message after an interrupt: how to resume, if that is possible."""
    meta = ctx.find_root().meta
    if _CHECKPOINT not in meta:
        return str(meta.get(_MESSAGE, "interrupted"))
    from emtau_dask.storage.commits import open_log
    from emtau_dask.storage.stores import object_store

    try:
        open_log(object_store(meta[_CHECKPOINT]))
    except EmtauError:
        return "interrupted before the first commit; there is nothing to resume"
    return f"interrupted; the last commit is intact. Resume with: {meta[_RESUME]}"


@contextmanager
def _terminable(ctx: click.Context) -> Iterator[None]:
    """Let SIGINT and SIGTERM interrupt the block, and end the process even if the main thread is stuck.

    Python runs handlers in the main thread, at its next instruction. But it writes a byte to a pipe at once,
    whatever that thread does. Another thread reads the pipe and ends the process in time.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    watch = threading.Thread(target=_end_in_time, args=(read_end, ctx), name="emtau-signals", daemon=True)
    watch.start()
    fd_before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    numbers = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    interrupt = handler_of_signals()

    def handle(*arguments: Any) -> None:
        logging.disable(logging.CRITICAL)  # Errors of interrupted work need not be logged.
        interrupt(*arguments)

    before = [signal.signal(number, handle) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
        signal.set_wakeup_fd(fd_before)
        os.write(write_end, ENDED)  # A forked process may hold the pipe open.
        watch.join()
        os.close(write_end)
        os.close(read_end)


# The pipe is this process's own.
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


def _end_in_time(read_end: int, ctx: click.Context) -> None:
    """End the process `GRACE_SECONDS` after a signal, or at a second one, unless the command ends first."""
    first, left = math.inf, None
    while select.select([read_end], [], [], left)[0]:
        number = os.read(read_end, 1)
        if number == ENDED:
            return
        if number[0] in SIGNALS:
            now = time.monotonic()
            if now > first + SECOND_SECONDS:
                break
            first = min(first, now)
            left = max(0.0, first + GRACE_SECONDS - now)
    try:
        if select.select([], [STDERR], [], 0)[
            1
        ]:  # The stream may have no reader, and the main thread may hold the lock of Python's stream.
            cursor = "\x1b[?25h\n" if os.isatty(STDERR) else ""  # A live display hides it.
            os.write(STDERR, f"{cursor}emtau: {shown(_message_of_stuck_command(ctx))}\n".encode())
    finally:
        os._exit(INTERRUPTED)


def _message_of_stuck_command(ctx: click.Context) -> str:
    """Return the message of a command that does not end; it reads no checkpoint, which could take long."""
    resume = ctx.find_root().meta.get(_RESUME)
    if resume is None:
        return _interrupted(ctx)
    return (
        "interrupted; it did not end by itself and was killed. Its last commit, if there is one, is intact. "
        f"Resume with: {resume}"
    )


def show_result(ctx: click.Context, result: RunResult, *, as_json: bool) -> None:
    """Print tables and paths, or one JSON object; exit with `NOT_CONVERGED` if the fit has not converged."""
    from emtau_dask.cli.outputs import result_values

    if as_json:
        echo_json(result_values(result))
    elif verbosity() != QUIET:
        _print_tables(result, ctx.meta[_WARNINGS])
    if result.model.stop_reason_ == "max-iter":
        echo(f"emtau: {_not_converged(result)}", err=True)
        ctx.exit(NOT_CONVERGED)


def _print_tables(result: RunResult, warned: Container[str]) -> None:
    """Print the summary, with the notes that were not printed as warnings, the data and the places."""
    from emtau_dask.cli.console import console_on
    from emtau_dask.cli.inputs import data_text
    from emtau_dask.estimator.fitting import FITTED_TO

    console, summary = console_on(sys.stdout), result.model.summary()
    notes = tuple(note for note in summary.notes if note not in warned and not note.startswith(FITTED_TO))
    console.print(str(replace(summary, notes=notes)))
    console.print(f"data: {data_text(result.outputs.config, result.inputs)}")
    for what, path in result.outputs.places.items():
        echo(f"{what} saved in {path}")
    if "model" in result.outputs.places:
        echo(f"next: {result.outputs.prediction}")


def _not_converged(result: RunResult) -> str:
    """Return the message for a fit that stopped at max_iter: its last change, and how to continue."""
    stop, run = result.outputs.config.stop, result.outputs.config.checkpoint.path
    change = result.model.history_.last_change
    last = f", after the log-likelihood changed by {change:.2g} per row" if math.isfinite(change) else ""
    remedy = "Raise one of them for a converged fit."
    if run is not None:
        remedy = f"To continue: emtau resume {shlex.quote(run)} --set stop.max_iter={2 * stop.max_iter}"
    return (
        f"stopped at stop.max_iter = {stop.max_iter} without converging to stop.tol = {stop.tol}{last}; "
        f"the results are written. {remedy}"
    )
