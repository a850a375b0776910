"""Where tables are printed: a terminal, or a file or pipe, which gets them narrow and in plain characters."""

from __future__ import annotations

import json
from typing import IO, TYPE_CHECKING, Any, TextIO, cast

import click

if TYPE_CHECKING:
    from rich.console import Console

COLUMNS = 80
"""Of a table that does not go to a terminal."""
HORIZONTAL, VERTICAL = "─━┄┅┈┉╌╍═╴╶╸╺╼╾", "│┃┆┇┊┋╎╏║╵╷╹╻╽╿"
PLAIN = {
    **dict.fromkeys(range(0x2500, 0x2580), "+"),  # all box-drawing characters
    **dict.fromkeys(map(ord, HORIZONTAL), "-"),
    **dict.fromkeys(map(ord, VERTICAL), "|"),
}


class PlainText:
    """A text stream into which lines of tables are written as ``-``, ``|`` and ``+``."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write text, translated."""
        return self._stream.write(text.translate(PLAIN))

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()


def console_on(stream: TextIO) -> Console:
    """Return a console on a stream."""
    from rich.console import Console

    if stream.isatty():
        return Console(file=stream)
    return Console(file=cast("IO[str]", PlainText(stream)), width=COLUMNS)


def echo_json(values: Any) -> None:
    """Print plain values as one JSON document, for programs."""
    # JSON does not escape DEL, a control character of terminals.
    click.echo(json.dumps(values, indent=2, allow_nan=False).replace("\x7f", "\\u007f"))
