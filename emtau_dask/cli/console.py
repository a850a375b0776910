"""Consoles for tables: on a terminal as rich draws them, in a file or pipe narrow and in ASCII.

Only commands that print a table import it, so that the others start without rich.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import IO, Any, TextIO, cast

from rich.console import Console
from rich.table import Table
from rich.text import Text

from emtau_dask.errors import shown

COLUMNS = 80
"""Width of a table that does not go to a terminal (characters)."""
HORIZONTAL, VERTICAL = "─━┄┅┈┉╌╍═╴╶╸╺╼╾", "│┃┆┇┊┋╎╏║╵╷╹╻╽╿"
PLAIN = {
    **dict.fromkeys(range(0x2500, 0x2580), "+"),  # all box-drawing characters
    **dict.fromkeys(map(ord, HORIZONTAL), "-"),
    **dict.fromkeys(map(ord, VERTICAL), "|"),
}


class PlainText:
    """A text stream that writes the lines of tables as ``-``, ``|`` and ``+``."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write text, translated."""
        return self._stream.write(text.translate(PLAIN))

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()


class PlainConsole(Console):
    """A console without markup that shows strings, also those of tables, without secrets (`errors.shown`)."""

    def __init__(self, file: IO[str], width: int | None = None) -> None:
        super().__init__(file=file, width=width, markup=False, emoji=False, highlight=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a string as rich's text."""
        return super().render_str(shown(text), **options)


def console_on(stream: TextIO) -> Console:
    """Return a console on a stream."""
    if stream.isatty():
        return PlainConsole(stream)
    return PlainConsole(cast("IO[str]", PlainText(stream)), COLUMNS)


def text_table(title: str, lines: Mapping[str, str]) -> Table:
    """Return a table of names and texts, for a console without markup."""
    table = Table(title=title, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in lines.items():
        table.add_row(name, text)
    return table
