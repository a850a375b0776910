"""The end of a command: an exit code, and one line on standard error for an error."""

from __future__ import annotations

import errno
import logging
import math
import os
import select
import shlex
import signal
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import click

from emtau_dask.cli.printing import echo
from emtau_dask.errors import ConfigError, EmtauError
from emtau_dask.interrupts import handler_of_signals
from emtau_dask.messages import shown

FAILED, BAD_USAGE, NOT_CONVERGED, INTERRUPTED = 1, 2, 3, 130
STDERR = 2

_DEBUG, _CHECKPOINT, _RESUME = "emtau.debug", "emtau.checkpoint", "emtau.resume"
_AGAIN = "emtau.again"
"""Keys of the outermost context's ``meta``."""


class ExitGroup(click.Group):
    """A group of commands that end with one line and an exit code, not with a traceback."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command as the only work of this process.

        An interrupted process exits at once, after all has been cleaned up: Python would wait for threads
        that are not the command's own.
        """
        try:
            return self.main(*args, **kwargs)
        except SystemExit as end:
            if end.code != INTERRUPTED:
                raise
            os._exit(INTERRUPTED)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; exit with a message for every error."""
        with _terminable(ctx):
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
                if isinstance(error, OSError) and error.errno == errno.EPIPE:
                    raise
                _fail(ctx, error, f"{_unexplained(error)} (use --debug for the traceback)", FAILED)


def _unexplained(error: Exception) -> str:
    """Return the message for an error that is not the package's own, such as that of a full disk."""
    if not isinstance(error, OSError):
        return f"{type(error).__name__}: {error}"
    from emtau_dask.io.files import reason_of, remedy_of

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


def remember_no_checkpoint(ctx: click.Context) -> None:
    """Remember that a fit commits nothing; that is said after an interrupt."""
    ctx.find_root().meta[_CHECKPOINT] = None


def remember_resume(ctx: click.Context, checkpoint: str, arguments: Iterable[str]) -> None:
    """Remember the command that resumes a run; it is shown after an interrupt."""
    command = " ".join(["emtau resume", shlex.quote(checkpoint), *filter(None, arguments)])
    ctx.find_root().meta.update({_CHECKPOINT: checkpoint, _RESUME: command})


def remember_again(ctx: click.Context, place: str | None) -> None:
    """Remember that the same command goes on from a path or URL, or begins anew without one."""
    ctx.find_root().meta[_AGAIN] = place


def _interrupted(ctx: click.Context) -> str:
    """Return the message after an interrupt: how to resume, where that is possible."""
    meta = ctx.find_root().meta
    if _AGAIN in meta:
        place = meta[_AGAIN]
        if place is None:
            return "interrupted; without -o FOLDER nothing of what was done is kept"
        return f"interrupted; what is done is in {place}. The same command goes on from there"
    if _CHECKPOINT not in meta:
        return "interrupted"
    if meta[_CHECKPOINT] is None:
        return (
            "interrupted; without a checkpoint nothing of the fit was kept. To be able to resume, fit with "
            "--set checkpoint.path=PATH"
        )
    from emtau_dask.io.objects import object_store, open_log

    try:
        open_log(object_store(meta[_CHECKPOINT]))
    except EmtauError:
        return "interrupted before the first commit; there is nothing to resume"
    return f"interrupted; the last commit is intact. Resume with: {meta[_RESUME]}"


SIGNALS = signal.SIGINT, signal.SIGTERM
SECOND_SECONDS = 1.0
"""A signal so long after the first is a second one; shells and containers may send the first one twice."""
ENDED = b"\0"
"""What is written in place of the number of a signal once the command has ended."""
GRACE_SECONDS = 8.0
"""How long an interrupted command may take to end; `docker stop` kills after 10."""


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
