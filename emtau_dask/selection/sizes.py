"""How many rows the sample holds that all candidates are fitted to."""

from __future__ import annotations

import math

LEAST_ROWS = 2**17
ROWS_PER_PARAMETER = 10
"""Fewest for each free parameter of the largest candidate; with fewer, fits end in chance optima."""
MOST_ELEMENTS = 2**25
"""Values of the sample, 256 MiB of float64."""
HELD_OUT = 0.2
"""The least share of the rows that the sample leaves out, so that something can be held out."""


def sample_share(rows: int, features: int, parameters: int, asked: int | None) -> float:
    """Return the share of the rows that is drawn, each row on its own by the hash of its number.

    By default ``N / ln N`` rows: then the errors of fits to the sample, ``p N / 2n`` nats on all rows, cost
    no more than BIC's penalty, ``p ln N / 2``. At least 2¹⁷ and 10 for each parameter; no more than
    256 MiB hold (but 10 for each parameter), nor than four fifths of the rows.

    Parameters
    ----------
    rows, features : int
    parameters : int
        The free parameters of the largest candidate.
    asked : int or None
        Rows that are asked for in place of the default.
    """
    least = ROWS_PER_PARAMETER * parameters
    wanted = float(asked) if asked is not None else max(LEAST_ROWS, rows / math.log(max(rows, 3)), least)
    if asked is None:
        wanted = min(wanted, max(MOST_ELEMENTS / features, least))
    return min(wanted / rows, 1.0 - HELD_OUT)
