"""Lines and documents that the command line prints; tables go to a `console`."""

from __future__ import annotations

import json
from typing import Any

import click

from emtau_dask.messages import one_line


def echo(text: str, *, err: bool = False) -> None:
    """Print a line of what people may be shown, on standard output or error."""
    click.echo(one_line(text), err=err)


def echo_json(values: Any) -> None:
    """Print plain values as one JSON document, for programs."""
    # JSON does not escape DEL, a control character of terminals.
    click.echo(json.dumps(values, indent=2, allow_nan=False).replace("\x7f", "\\u007f"))
