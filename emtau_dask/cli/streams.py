"""Standard streams that outlast their readers: a command ends as its work does, whoever listens."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any, TextIO

STANDARD = range(3)
NOBODY_READS = {errno.EPIPE, errno.EIO, errno.ECONNRESET}
"""Errors after the reader of a pipe, a terminal or a connection has gone."""


class _Lasting(io.FileIO):
    """A file to write to. After an error, what is written goes nowhere.

    That nobody reads it any more is none; any other error is raised once.
    """

    def write(self, data: Any, /) -> Any:
        """Write, and return how many bytes were."""
        try:
            return super().write(data)  # None if a pipe that does not block is full.
        except OSError as error:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            if error.errno not in NOBODY_READS:
                raise
            return memoryview(data).nbytes


def open_standard_streams() -> None:
    """Give this process all three standard streams, and let those that it writes to outlast their readers.

    A closed one is opened to nowhere: else a file of the fit would get its number, and what libraries print.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) in STANDARD:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdin = sys.stdin or open(0, encoding="utf-8")  # noqa: SIM115
    sys.stdout, sys.stderr = _lasting(sys.stdout, 1), _lasting(sys.stderr, 2)


def _lasting(stream: TextIO | None, number: int) -> TextIO:
    """Return a stream with the same encoding that writes to a standard one."""
    encoding, errors = ("utf-8", "replace") if stream is None else (stream.encoding, stream.errors)
    if stream is not None:
        stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Lasting(number, "w", closefd=False)),
        encoding=encoding,
        errors=errors,
        line_buffering=number == 2 or os.isatty(number),
        write_through=getattr(stream, "write_through", False),
    )
