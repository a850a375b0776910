"""What a command prints and with which exit code it ends."""

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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import click

from emtau_dask.cli.streams import open_standard_streams
from emtau_dask.errors import ConfigError, EmtauError, one_line, shown
from emtau_dask.interrupts import handler_of_signals

if TYPE_CHECKING:
    from emtau_dask.cli.outputs import RunResult


FAILED, BAD_USAGE, NOT_CONVERGED, INTERRUPTED = 1, 2, 3, 130
STDERR = 2
_DEBUG, _SAID, _CHECKPOINT, _RESUME = "emtau.debug", "emtau.said", "emtau.checkpoint", "emtau.resume"
"""Keys of the outermost context's ``meta``."""
SIGNALS = signal.SIGINT, signal.SIGTERM
SECOND_SECONDS = 1.0
"""A signal so long after the first is a second one; shells and containers may send the first one twice."""
ENDED = b"\0"
"""What is written in place of the number of a signal once the command has ended."""
GRACE_SECONDS = 8.0
"""How long an interrupted command may take to end; `docker stop` kills after 10."""


def echo(text: str, *, err: bool = False) -> None:
    """Print a line of what people may be shown, on standard output or error."""
    click.echo(one_line(text), err=err)


def echo_json(values: Any) -> None:
    """Print plain values as one JSON document, for programs."""
    # JSON does not escape DEL, a control character of terminals.
    click.echo(json.dumps(values, indent=2, allow_nan=False).replace("\x7f", "\\u007f"))


class ExitGroup(click.Group):
    """A group of commands that end with one line and an exit code, not with a traceback."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command as the only work of this process, whoever reads what it prints.

        An interrupted process exits at once, after all has been cleaned up: Python would wait for threads
        that are not the command's own.
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
            warnings.showwarning = _show_warning
            try:
                return super().invoke(ctx)
            except click.ClickException as error:
                error.message = shown(error.message)  # type: ignore[misc]  # It may name files that a shell found.
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
                _fail(ctx, error, f"{_unexplained(error)} (use --debug for the traceback)", FAILED)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning as a line for people; Python would name a line of this program."""
    echo(f"emtau: warning: {message}", err=True)


def _unexplained(error: Exception) -> str:
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


def remember(ctx: click.Context, said: str) -> None:
    """Remember what is said after an interrupt."""
    ctx.find_root().meta[_SAID] = said


def remember_resume(ctx: click.Context, checkpoint: str, arguments: Iterable[str]) -> None:
    """Remember the command that resumes a run; it is shown after an interrupt."""
    command = " ".join(["emtau resume", shlex.quote(checkpoint), *filter(None, arguments)])
    ctx.find_root().meta.update({_CHECKPOINT: checkpoint, _RESUME: command})


def _interrupted(ctx: click.Context) -> str:
    """Return the message after an interrupt: how to resume, where that is possible."""
    meta = ctx.find_root().meta
    if _CHECKPOINT not in meta:
        return str(meta.get(_SAID, "interrupted"))
    from emtau_dask.storage.commits import open_log
    from emtau_dask.storage.stores import object_store

    try:
        open_log(object_store(meta[_CHECKPOINT]))
    except EmtauError:
        return "interrupted before the first commit; there is nothing to resume"
    return f"interrupted; the last commit is intact. Resume with: {meta[_RESUME]}"


@contextmanager
def _terminable(ctx: click.Context) -> Iterator[None]:
    """Let SIGINT and SIGTERM interrupt the block, and end the process for certain.

    Python runs handlers in the main thread, when that comes to its next instruction. A byte is written to a
    pipe at once, whatever that thread does, and a thread that reads it ends the process in time.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard, told = os.pipe()
    os.set_blocking(told, False)
    watch = threading.Thread(target=_end_in_time, args=(heard, ctx), name="emtau-signals", daemon=True)
    watch.start()
    told_before = signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    numbers = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    interrupt = handler_of_signals()

    def heed(*arguments: Any) -> None:
        logging.disable(logging.CRITICAL)  # What is cut off from now on need not be logged.
        interrupt(*arguments)

    before = [signal.signal(number, heed) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
        signal.set_wakeup_fd(told_before)
        os.write(told, ENDED)  # A forked process may hold the pipe open.
        watch.join()
        os.close(told)
        os.close(heard)


# The pipe is this process's own.
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


def _end_in_time(heard: int, ctx: click.Context) -> None:
    """End the process some time after a signal, or at a second one; return if the command ends before."""
    first, left = math.inf, None
    while select.select([heard], [], [], left)[0]:
        number = os.read(heard, 1)
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
        ]:  # Nobody may read it, or the main thread hold Python's stream.
            cursor = "\x1b[?25h\n" if os.isatty(STDERR) else ""  # A live display hides it.
            os.write(STDERR, f"{cursor}emtau: {shown(_cut_off(ctx))}\n".encode())
    finally:
        os._exit(INTERRUPTED)


def _cut_off(ctx: click.Context) -> str:
    """Return the message of a command that does not end; nothing is read for it, which could take long."""
    resume = ctx.find_root().meta.get(_RESUME)
    if resume is None:
        return _interrupted(ctx)
    return (
        "interrupted; it did not end by itself and was cut off. Its last commit, if there is one, is intact. "
        f"Resume with: {resume}"
    )


def show_result(ctx: click.Context, result: RunResult, *, as_json: bool) -> None:
    """Print tables and paths, or one JSON object; end the command where the fit has not converged."""
    from emtau_dask.cli.outputs import result_values

    if as_json:
        echo_json(result_values(result))
    else:
        _print_tables(result)
    if result.model.stop_reason_ == "max-iter":
        echo(f"emtau: {_not_converged(result)}", err=True)
        ctx.exit(NOT_CONVERGED)


def _print_tables(result: RunResult) -> None:
    from emtau_dask.cli.console import console_on
    from emtau_dask.cli.inputs import data_text
    from emtau_dask.cli.inspect import component_table, fit_table

    console = console_on(sys.stdout)
    console.print(component_table(result.model, result.label_counts))
    data = data_text(result.outputs.config, result.inputs)
    console.print(fit_table(result.model, data, result.inputs.rows.shape[0]))
    for what, path in result.outputs.places.items():
        echo(f"{what} saved in {path}")


def _not_converged(result: RunResult) -> str:
    """Return how far a fit is that stopped at max_iter, and how it goes on."""
    stop, run = result.outputs.config.stop, result.outputs.config.checkpoint.path
    change = result.model.history_.last_change
    far = f", after a change of the bound by {change:.2g} nats per row" if math.isfinite(change) else ""
    how = "Raise one of them for a converged fit."
    if run is not None:
        how = f"To go on: emtau resume {shlex.quote(run)} --set stop.max_iter={2 * stop.max_iter}"
    return (
        f"stopped at stop.max_iter = {stop.max_iter} without converging to stop.tol = {stop.tol}{far}; "
        f"the results are written. {how}"
    )
