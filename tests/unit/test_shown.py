"""Text as people are shown it: no secrets of URLs, nothing that a terminal obeys."""

import ast
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import emtau_dask
from emtau_dask.errors import (
    CheckpointError,
    EmtauError,
    UnusableRowError,
    cause_of,
    masked,
    masked_url,
    masked_values,
    printable,
    short,
    shown,
)
from emtau_dask.storage.stores import object_store
from emtau_dask.storage.urls import Opener, Url


def place(url):
    return Url(url, url, Opener("s3", {"key": "SECRET"}))


URLS = {
    "http://user:SECRET@host:80/x.npy?X-Amz-Signature=SECRET": "http://…@host:80/x.npy?…",
    "https://SECRET@host/x.npy": "https://…@host/x.npy",
    "https://host/x.npy#SECRET": "https://host/x.npy#…",
    "s3://KEY:SECRET@bucket/x.zarr": "s3://…@bucket/x.zarr",
    "s3://KEY:SEC/RET/SECRET@bucket/x.zarr": "s3://…@bucket/x.zarr",
    "sftp://me:SECRET@host:22/x": "sftp://…@host:22/x",
    "webdav://me:SECRET@host/x": "webdav://…@host/x",
    "smb://workgroup;me:SECRET@host/share/x": "smb://…@host/share/x",
    "ftp://me:SECRET@[::1]:21/x": "ftp://…@[::1]:21/x",
    "tcp://me:SECRET@host:8786": "tcp://…@host:8786",
    "zip://a.npy::https://me:SECRET@host/x.zip?sig=SECRET": "zip://a.npy::https://…@host/x.zip?…",
    "simplecache::s3://KEY:SECRET@bucket/x": "simplecache::s3://…@bucket/x",
    "https:/me:SECRET@host/x": "https:/…@host/x",
}
PLAIN = [
    "s3://bucket/user@home/rows.zarr", "https://host:8080/a@b:c/x.npy", "tcp://127.0.0.1:8786",
    "tls://[::1]:8786", "memory://x", "/data/a?b=c@d:e", "file:///data/a#b?c", "C:/data/x.npy", "gs://bucket",
]  # fmt: skip


def test_urls_are_shown_without_secrets_wherever_they_stand_and_other_places_as_they_are():
    for url, expected in URLS.items():
        assert masked_url(url) == expected
        for text in ("{}", "cannot read {}.", "url='{}' (and {})", '<"{}">'):
            assert masked(text.format(url, url)) == text.format(expected, expected)
            assert masked(masked(text.format(url, url))) == masked(text.format(url, url))
        assert masked_values({"a": [url], "b": 1}) == {"a": [expected], "b": 1}
        assert "SECRET" not in short(url)
        assert "SECRET" not in f"{place(url)} {place(url)!r}"
    assert [masked_url(url) for url in PLAIN] == PLAIN


PIECES = [
    "GET /x?X-Amz-Signature=SECRET&X-Amz-Credential=SECRET", "url was http://me:SECRE", "token=SECRET",
    "bucket?versionId=SECRET", 'bucket name "KEY:SECRET@"', "x-amz-security-token=SECRET, password=SECRET",
]  # fmt: skip
OURS = ["tcp://HOST:PORT, tls://HOST:PORT", "FSSPEC_GS_TOKEN=anon", "at 12:30 a@b", "n_init=3; tol=1"]


def test_pieces_of_urls_are_masked_as_well_and_words_of_ours_stay():
    assert [text for text in PIECES if "SECRE" in masked(text)] == []
    assert [masked(text) for text in OURS] == OURS


@given(st.text())
def test_what_is_shown_is_glyphs(text):
    assert shown(text).replace("\n", "").isprintable()
    assert printable(printable(text)) == printable(text)


def test_any_value_is_shown_in_short():
    for value in (10**5000, -(10**5000), "x" * 1000, "\x1b", [[1] * 100], object()):
        assert len(short(value)) <= 60
        assert short(value).isprintable()


def test_errors_hold_neither_secrets_nor_escapes_nor_lose_what_they_are():
    for url in URLS:
        error = pickle.loads(pickle.dumps(EmtauError(f"no {url}\x1b[2J")))
        assert "SECRET" not in f"{error} {error!r} {error.args}"
        assert "\x1b" not in str(error)
    assert UnusableRowError("bad", 3).row == 3


WAYS_OUT = {
    "click.echo": {"cli/terminal.py"},
    "print": set(),
    "warnings.warn": set(),
    "warnings.warn_explicit": {"errors.py"},
    "Console": {"progress.py"},
    "PlainConsole": {"cli/console.py"},
}
"""Calls by which text gets out, and the modules that make them: they let through what `shown` returns."""


def test_text_gets_out_by_a_few_modules_only():
    package, found = Path(emtau_dask.__file__).parent, {way: set() for way in WAYS_OUT}
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and (way := ast.unparse(node.func)) in WAYS_OUT:
                found[way].add(path.relative_to(package).as_posix())
    assert found == WAYS_OUT


def test_a_cause_that_would_show_a_secret_or_an_escape_is_left_out():
    telling = OSError("not read")
    telling.__cause__ = FileNotFoundError("https://me:SECRET@host/x")
    assert cause_of(telling) is None
    assert cause_of(ValueError("\x1b[2J")) is None
    plain = OSError("not read")
    assert cause_of(plain) is plain


@pytest.mark.parametrize("url", [u for u in URLS if u.startswith(("s3:", "http:", "https://", "ftp"))])
def test_a_checkpoint_names_its_place_without_secrets(url):
    try:
        objects = object_store(url)
    except CheckpointError as error:
        said = str(error)
    else:
        said = f"{objects.location} {objects!r}"
    assert "SECRET" not in said
