"""Standard streams that outlast their readers: a command finishes even if nobody reads its output."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any, TextIO

STANDARD = range(3)
READER_GONE = {errno.EPIPE, errno.EIO, errno.ECONNRESET}
"""Errors after the reader of a pipe, a terminal or a connection has gone."""


class _LastingFile(io.FileIO):
    """A file to write to. After an error, later output is discarded.

    An error because the reader has gone is ignored; any other error is raised once.
    """

    def write(self, data: Any, /) -> Any:
        """Write, and return the number of bytes written."""
        try:
            return super().write(data)  # None if a pipe that does not block is full.
        except OSError as error:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            if error.errno not in READER_GONE:
                raise
            return memoryview(data).nbytes


def open_standard_streams() -> None:
    """Open all three standard streams, and let standard output and error outlast their readers.

    A closed stream is opened to the null device. Otherwise a file of the fit would get its number, and
    libraries would print into that file.
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
        io.BufferedWriter(_LastingFile(number, "w", closefd=False)),
        encoding=encoding,
        errors=errors,
        line_buffering=number == 2 or os.isatty(number),
        write_through=getattr(stream, "write_through", False),
    )
