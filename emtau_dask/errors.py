"""The errors of the package, warnings, and texts without credentials.

Texts from files, servers and configs may contain passwords in URLs, signatures in
their queries, and escape sequences. Every error of the package, every stored config and
everything that the command line prints passes through this module.
"""

from __future__ import annotations

import difflib
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from html import escape
from types import FrameType
from typing import Any

HIDDEN = "…"
"""Replaces removed text."""
MAX_LISTED = 5
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


# A text may be one word of megabytes. So that searches take linear time, repetitions are bounded, or
# begin only at the start of a word.
_SCHEME = r"[A-Za-z][A-Za-z0-9+.-]{1,63}"
_CHAIN = re.compile(rf"::(?={_SCHEME}(?:://|::))")
_URL = re.compile(rf"({_SCHEME}:/{{1,2}})((?:(?!{_CHAIN.pattern})[^\s\"'<>`])*)")
_WHOLE = re.compile(rf"({_SCHEME}:/{{1,2}})(.*)", re.DOTALL)
"""Also with one slash, as in a Path made from a URL."""


def masked_url(url: str) -> str:
    """Return a URL without user, password, query and fragment; a local path unchanged.

    Parameters
    ----------
    url : str
        One URL, or several chained by ``::``.

    Returns
    -------
    str
        With `HIDDEN` in place of removed parts.
    """
    links = []
    for link in _CHAIN.split(url):
        match = _WHOLE.fullmatch(link)
        links.append(link if match is None else f"{match[1]}{_without_secrets(match[1], match[2])}")
    return "::".join(links)


def _without_secrets(scheme: str, rest: str) -> str:
    if scheme.lower().startswith(_LOCAL):
        return rest
    match = re.search("[?#]", rest)
    bare, mark, more = (rest, "", "") if match is None else rest.partition(match[0])
    host, slash, path = bare.partition("/")
    _, at, name = host.rpartition("@")
    if at:
        bare = f"{HIDDEN}@{name}{slash}{path}"
    elif not _PORT.fullmatch(host):
        # A password with a slash, or the beginning of a URL that was cut off.
        bare = HIDDEN + "".join(bare.rpartition("@")[1:] if "@" in bare else ())
    return f"{bare}{mark}{HIDDEN}" if more else f"{bare}{mark}"


def masked(text: str) -> str:
    """Return text without the secrets of its URLs, and without passwords and queries outside URLs.

    A second call changes nothing more.
    """
    if ":" not in text and "=" not in text:
        return text
    text = _URL.sub(_masked_match, text)
    text = _BEFORE_AT.sub(_masked_user, text)
    text = _QUERY.sub(f"?{HIDDEN}", text)
    return _SETTING.sub(lambda match: f"{match[1]}={HIDDEN}", text)


def _masked_match(match: re.Match[str]) -> str:
    url = match[2].rstrip(_END)
    return f"{match[1]}{_without_secrets(match[1], url)}{match[2][len(url) :]}"


def _masked_user(match: re.Match[str]) -> str:
    user = _USER.search(match[0])
    return match[0] if user is None else f"{match[0][: user.start()]}{HIDDEN}@"


def masked_values(content: Any) -> Any:
    """Return plain values, nested in mappings and lists, with every URL masked."""
    if isinstance(content, str):
        return masked_url(content)
    if isinstance(content, Mapping):
        return {key: masked_values(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [masked_values(value) for value in content]
    return content


def printable(text: str) -> str:
    """Return text with every non-printable character, except line ends, as an escape."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode()
        for char in text
    )


def shown(text: object) -> str:
    """Return ``text`` for display: without secrets and control characters."""
    return printable(masked(str(text)))


def one_line(text: object) -> str:
    """Return ``text`` for display, with line ends as escapes."""
    return shown(text).replace("\n", "\\n")


def short(value: object, limit: int = 60) -> str:
    """Return the beginning of the representation of any value.

    Python refuses to format integers of more than a few thousand digits.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 4 * limit:
        return f"{'-' if value < 0 else ''}(an integer of {value.bit_length():,} bits)"
    try:
        text = shown(repr(value))
    except (ValueError, RecursionError):
        return f"(a {type(value).__name__} that cannot be shown)"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def cause_of(error: BaseException) -> BaseException | None:
    """Return ``error`` as the cause of another; None if its traceback would show secrets."""
    link: BaseException | None = error
    while link is not None:
        if shown(text := str(link)) != text:
            return None
        link = link.__cause__ or link.__context__
    return error


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as "1 row" or "2,000 rows"; the plural has an s."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def listed(texts: Iterable[str]) -> str:
    """Return at most five texts, and the number of the others."""
    named = [one_line(text) for text in texts]
    more = f" and {len(named) - MAX_LISTED:,} more" if len(named) > MAX_LISTED else ""
    return f"{', '.join(named[:MAX_LISTED])}{more}"


def did_you_mean(name: object, names: Iterable[object]) -> str:
    """Return a sentence, after a space, that names the nearest of the names; "" if none is near."""
    near = difflib.get_close_matches(str(name), [str(each) for each in names], 1)
    return f" Did you mean {near[0]!r}?" if near else ""


def plain_table(
    caption: str, headings: Iterable[str], rows: Iterable[Iterable[str]], space: str = "  "
) -> str:
    """Return a table as lines of text, its columns aligned to the right."""
    lines = [tuple(map(one_line, line)) for line in (headings, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join([caption, *(space.join(map(str.rjust, line, widths)).rstrip() for line in lines)])


def html_table(caption: str, headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return an HTML table for a notebook, with escaped texts."""

    def row(tag: str, cells: Iterable[str]) -> str:
        return f"<tr>{''.join(f'<{tag}>{escape(shown(cell))}</{tag}>' for cell in cells)}</tr>"

    head, body = row("th", headings), "".join(row("td", cells) for cells in rows)
    top = f"<caption>{escape(shown(caption))}</caption><thead>{head}</thead>"
    return f"<table>{top}<tbody>{body}</tbody></table>"


class EmtauError(Exception):
    """Base class of every error that emtau_dask raises on purpose.

    Its message has no secrets of URLs and no control characters.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(shown(value) if isinstance(value, str) else value for value in args))


class InvalidDataError(EmtauError, ValueError):
    """Data, weights, responsibilities or parameters that cannot be used.

    The message names the value, the limit and the remedy; for NaN and infinity
    also the first bad chunk and row.
    """


class UnusableRowError(InvalidDataError):
    """A row has NaN, infinity, or a number too large to be squared.

    Attributes
    ----------
    row : int
        Its number in the data.
    feature : int or None
        The first feature whose value cannot be used; None if it is the row as a whole.
    """

    def __init__(self, message: str, row: int, feature: int | None = None) -> None:
        super().__init__(message, row, feature)
        self.row = row
        self.feature = feature

    def __str__(self) -> str:
        return str(self.args[0])


class AbsentFeatureError(InvalidDataError):
    """Too few rows have a value of some feature."""


@contextmanager
def features_named(names: Sequence[str] | None) -> Iterator[None]:
    """Add names to the numbers of features in errors about data; None if there are no names."""
    if names is None:
        yield
        return

    def named(text: str) -> str:
        return re.sub(
            r"\bfeature (\d+)\b(?!, ')", lambda match: f"{match[0]}, {str(names[int(match[1])])!r}", text
        )

    try:
        yield
    except UnusableRowError as error:
        raise UnusableRowError(named(str(error)), error.row, error.feature) from None
    except SingularComponentError as error:
        reason = named(error.reason)
        raise SingularComponentError(error.component, error.weight, reason, error.advice) from None
    except AbsentFeatureError as error:
        raise AbsentFeatureError(named(str(error))) from None


class InvalidDtypeError(InvalidDataError, TypeError):
    """Data that are not real numbers (complex, object, strings)."""


class ConfigError(EmtauError, ValueError):
    """A run config or setting that cannot be used; names the key."""


class PathTakenError(EmtauError):
    """Something exists at the place of a result, and may not be replaced."""


REGULARISE = "Try to decrease the number of components, increase reg_covar, or scale the input data."


class SingularComponentError(EmtauError, ValueError):
    """A component collapsed: no weight left, or no positive-definite covariance.

    Attributes
    ----------
    component : int
        Index of the component (0-based); for tied covariances, -1.
    weight : float
        Its weight, in (weighted) rows.
    reason, advice : str
        What is wrong with it, and what to do.
    """

    def __init__(self, component: int, weight: float, reason: str, advice: str = REGULARISE) -> None:
        self.component = component
        self.weight = weight
        self.reason = reason
        self.advice = advice
        name = "the shared covariance" if component < 0 else f"component {component}"
        super().__init__(
            "Fitting the mixture model failed because some components have ill-defined empirical "
            f"covariance (for instance caused by singleton or collapsed samples). {advice} "
            f"Here {name} (weight {weight:.6g} rows): {reason}."
        )

    def __reduce__(self) -> tuple[type[SingularComponentError], tuple[int, float, str, str]]:
        return type(self), (self.component, self.weight, self.reason, self.advice)


class StorageError(EmtauError, OSError):
    """A file outside checkpoints cannot be written; names the path, the cause and the remedy."""


class CheckpointError(EmtauError):
    """A checkpoint cannot be written, read or resumed."""


class StoreUnreachableError(CheckpointError):
    """The server of a checkpoint does not answer after several attempts; no more are made."""


class CheckpointExistsError(CheckpointError):
    """The place of a new run already has a run, or something else."""


class CheckpointMismatchError(CheckpointError):
    """A checkpoint has another format version, other data or other settings; names both sides."""


class CheckpointCorruptError(CheckpointError):
    """An object of a checkpoint is missing, truncated or altered; names it."""


class CheckpointTakenError(CheckpointError):
    """Another process has continued this run meanwhile."""


class MissingPackageError(EmtauError, ImportError):
    """An optional package is not installed; names it, and how to install it."""


class ClusterError(EmtauError):
    """A dask cluster cannot be used, or failed during a computation; says what to change."""


class ShutdownError(EmtauError):
    """Python is shutting down, and begins no more threads; data and checkpoint are intact."""


@contextmanager
def shutdown_named() -> Iterator[None]:
    """Raise `ShutdownError` for Python's error if it begins no more threads or tasks."""
    try:
        yield
    except RuntimeError as error:
        if "shutdown" not in str(error) or _begins_threads():
            raise
        raise ShutdownError(
            f"Python is shutting down, and starts no more work in other threads ({error}). Let the main "
            "thread wait for this one before it ends, for example by thread.join(). The last commit of a "
            "checkpoint is intact; GaussianMixture.resume continues from it."
        ) from error


def _begins_threads() -> bool:
    """Return whether Python still begins threads; the error alone may also be from a pool that ended."""
    try:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(int)
    except RuntimeError:
        return False
    return True


def warn_user(message: str, category: type[Warning] = UserWarning, line: FrameType | None = None) -> None:
    """Warn at a line of the user's code: ``line``, or `line_of_user` of this thread."""
    line = line or line_of_user()
    namespace = line.f_globals
    warnings.warn_explicit(
        shown(message),
        category,
        line.f_code.co_filename,
        line.f_lineno,
        str(namespace.get("__name__")),
        namespace.setdefault("__warningregistry__", {}),
    )


def line_of_user() -> FrameType:
    """Return the line outside this package from which this thread entered it."""
    package = f"{__name__.partition('.')[0]}."
    frame: FrameType | None = sys._getframe()
    caller = sys._getframe()
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(package):
            caller = frame.f_back or frame
        frame = frame.f_back
    while caller.f_globals.get("__name__") == "contextlib" and caller.f_back is not None:
        caller = caller.f_back
    return caller
