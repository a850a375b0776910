"""Text as people are shown it: without secrets, and without anything that a terminal obeys.

What is read from files, servers and configs may hold passwords in URLs, signatures in
their queries, and escape sequences. Every error of the package, every stored config and
everything that the command line prints goes through here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

HIDDEN = "…"
"""Stands for what was left out."""

# What is searched may be megabytes long and of one word: every search goes over it once, so that
# repetitions are bounded, or begin only where a word does.
_SCHEME = r"[A-Za-z][A-Za-z0-9+.-]{1,63}"
_CHAIN = re.compile(rf"::(?={_SCHEME}(?:://|::))")
_URL = re.compile(rf"({_SCHEME}:/{{1,2}})((?:(?!{_CHAIN.pattern})[^\s\"'<>`])*)")
_WHOLE = re.compile(rf"({_SCHEME}:/{{1,2}})(.*)", re.DOTALL)
"""A Path made of a URL has one slash."""
_QUERY = re.compile(r"\?[\w.~%+\[\]-]+=[^\s\"'<>`]*")
_BEFORE_AT = re.compile(r"(?<![^\s\"'<>`/@])[^\s\"'<>`/@]+@")
_USER = re.compile(r"(?<![^:=(])[^:=(]+:(?=[^@])")
_SETTING = re.compile(
    r"(?<![\w.])(x-(?:amz|goog)-[\w-]{1,63}|sig|signature|(?:access_|auth_)?token|passw(?:or)?d|secret|api_?key)"
    r"=[^\s\"'<>`&;,)]+",
    re.IGNORECASE,
)
_PORT = re.compile(r"(?:[^:]*|\[[0-9A-Fa-f:.%]*\]?)(?::(?:[0-9]*|PORT))?")
_END = ".,;:!)]}"
_LOCAL = ("file:", "local:")


def masked_url(url: str) -> str:
    """Return a URL without user, password, query and fragment; a local path as it is.

    Parameters
    ----------
    url : str
        One URL, or several chained by ``::``.

    Returns
    -------
    str
        With `HIDDEN` in place of what was left out.
    """
    links = []
    for link in _CHAIN.split(url):
        found = _WHOLE.fullmatch(link)
        links.append(link if found is None else f"{found[1]}{_without_secrets(found[1], found[2])}")
    return "::".join(links)


def _without_secrets(scheme: str, rest: str) -> str:
    if scheme.lower().startswith(_LOCAL):
        return rest
    found = re.search("[?#]", rest)
    bare, mark, more = (rest, "", "") if found is None else rest.partition(found[0])
    host, slash, path = bare.partition("/")
    _, at, name = host.rpartition("@")
    if at:
        bare = f"{HIDDEN}@{name}{slash}{path}"
    elif not _PORT.fullmatch(host):
        # A password that holds a slash, or the beginning of a URL that was cut off.
        bare = HIDDEN + "".join(bare.rpartition("@")[1:] if "@" in bare else ())
    return f"{bare}{mark}{HIDDEN}" if more else f"{bare}{mark}"


def masked(text: str) -> str:
    """Return text without the secrets of the URLs in it, and of users and queries that stand alone.

    The same again changes nothing more.
    """
    if ":" not in text and "=" not in text:
        return text
    text = _URL.sub(_masked_match, text)
    text = _BEFORE_AT.sub(_masked_user, text)
    text = _QUERY.sub(f"?{HIDDEN}", text)
    return _SETTING.sub(lambda found: f"{found[1]}={HIDDEN}", text)


def _masked_match(found: re.Match[str]) -> str:
    url = found[2].rstrip(_END)
    return f"{found[1]}{_without_secrets(found[1], url)}{found[2][len(url) :]}"


def _masked_user(found: re.Match[str]) -> str:
    user = _USER.search(found[0])
    return found[0] if user is None else f"{found[0][: user.start()]}{HIDDEN}@"


def masked_values(content: Any) -> Any:
    """Return plain values, nested in mappings and lists, with every URL among them masked."""
    if isinstance(content, str):
        return masked_url(content)
    if isinstance(content, Mapping):
        return {key: masked_values(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [masked_values(value) for value in content]
    return content


def printable(text: str) -> str:
    """Return text with every character that is no glyph, but for the end of a line, written as an escape."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode()
        for char in text
    )


def shown(text: object) -> str:
    """Return what people may be shown of ``text``: neither secrets nor control characters."""
    return printable(masked(str(text)))


def one_line(text: object) -> str:
    """Return what people may be shown of ``text``, with the ends of its lines as escapes."""
    return shown(text).replace("\n", "\\n")


def short(value: object, limit: int = 60) -> str:
    """Return the beginning of a value's representation, whatever the value is.

    Python refuses to write integers of more than a few thousand digits.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 4 * limit:
        return f"{'-' if value < 0 else ''}(an integer of {value.bit_length():,} bits)"
    try:
        text = shown(repr(value))
    except (ValueError, RecursionError):
        return f"(a {type(value).__name__} that cannot be shown)"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def cause_of(error: BaseException) -> BaseException | None:
    """Return ``error`` to be named as a cause; None where its traceback would show what may not be shown."""
    link: BaseException | None = error
    while link is not None:
        if shown(text := str(link)) != text:
            return None
        link = link.__cause__ or link.__context__
    return error


def html_table(caption: str, headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table for a notebook; its texts are escaped."""

    def row(tag: str, cells: Iterable[str]) -> str:
        return f"<tr>{''.join(f'<{tag}>{escape(shown(cell))}</{tag}>' for cell in cells)}</tr>"

    head, body = row("th", headings), "".join(row("td", cells) for cells in rows)
    top = f"<caption>{escape(shown(caption))}</caption><thead>{head}</thead>"
    return f"<table>{top}<tbody>{body}</tbody></table>"
