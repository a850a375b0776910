"""How long an answer of a server may be, for the task that reads it."""

from __future__ import annotations

from contextvars import ContextVar

LISTING_BYTES = 2**26
"""The longest answer where nothing says how long it may be: a listing."""
answer_limit: ContextVar[int] = ContextVar("emtau_answer_limit", default=LISTING_BYTES)
"""Bytes that an answer to the reading task may have. A context variable: fsspec passes no argument on to
the HTTP response, which reads this."""
