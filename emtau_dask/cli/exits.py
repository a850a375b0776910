"""The end of a command: an exit code, and one line on standard error for an error."""

from __future__ import annotations

import errno
import logging
import os
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import click

from emtau_dask.cli.printing import echo
from emtau_dask.errors import ConfigError, EmtauError
from emtau_dask.messages import shown

FAILED, BAD_USAGE, NOT_CONVERGED, INTERRUPTED = 1, 2, 3, 130

_DEBUG, _CHECKPOINT, _RESUME = "emtau.debug", "emtau.checkpoint", "emtau.resume"
_AGAIN = "emtau.again"
"""Keys of the outermost context's ``meta``."""


class ExitGroup(click.Group):
    """A group of commands that end with one line and an exit code, not with a traceback."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command as the only work of this process.

        An interrupted process exits at once, after all has been cleaned up: Python would wait forever for a
        pool's thread that had started when the interrupt came, but that its pool did not know yet.
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
        """Run the command; exit with a message for every error."""
        try:
            with _terminable():
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


def _raise_interrupt(number: int, frame: object) -> NoReturn:
    """Interrupt the command, with which its process ends: what is cut off need not be logged from now on."""
    logging.disable(logging.CRITICAL)
    raise KeyboardInterrupt


AGAIN = 0.02
"""Seconds until an interrupt is raised again that Python has dropped."""


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM interrupt the block as Ctrl-C does, and let no interrupt be lost.

    Python drops one that it raises in a finaliser or in a callback of its garbage collector, such as that of
    distributed. It is raised again a little later, by an alarm, which needs no lock that may be held there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    shown_before = sys.unraisablehook

    def dropped(unraisable: sys.UnraisableHookArgs) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, AGAIN)
        else:
            shown_before(unraisable)

    heeded = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
    numbers = [number for number in heeded if signal.getsignal(number) is not signal.SIG_IGN]
    before = [signal.signal(number, _raise_interrupt) for number in numbers]
    sys.unraisablehook = dropped
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.unraisablehook = shown_before
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
