"""How long an answer of a server may be."""

from __future__ import annotations

from contextvars import ContextVar

LISTING_BYTES = 2**26
"""The longest answer to a request without a limit of its own: a listing."""
answer_limit: ContextVar[int] = ContextVar("emtau_answer_limit", default=LISTING_BYTES)
"""Most bytes of an answer. The HTTP response reads this variable, as fsspec passes no argument on to it."""
