"""Configs that hold no values, ask for code, or make a terminal obey: refused with exit code 2, as text."""

import os
import resource
import subprocess

import pytest
from commands import emtau
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import EMTAU

from emtau_dask.cli.yaml import in_yaml, parse_yaml
from emtau_dask.errors import ConfigError

GOOD = "data: {dataset: example1}\nmodel: {n_components: 2}\n"


TOO_LARGE = {
    "itself": "model: &m {n_components: *m}",
    "brackets": "model: " + "[" * 100_000,
    "braces": "model: " + "{a: " * 100_000,
    "dashes": "- " * 5_000 + "x",
    "indentation": "".join(" " * n + "a:\n" for n in range(500)),
    "decimal digits": GOOD + f"stop: {{max_iter: {'9' * 5000}}}",
    "hexadecimal digits": GOOD + f"stop: {{max_iter: 0x{'f' * 200_000}}}",
    "base 60": GOOD + f"stop: {{max_iter: {':'.join(['59'] * 5000)}}}",
}
NO_VALUES = {
    "a date": GOOD + "stop: {max_iter: 2001-99-99}",
    "a moment": GOOD + "stop: {max_iter: 2001-01-01 99:99:99}",
    "no integer": GOOD + "stop: {max_iter: !!int x}",
    "an empty integer": GOOD + "stop: {max_iter: !!int ''}",
    "no float": GOOD + "stop: {tol: !!float x}",
    "no boolean": GOOD + "output: {scores: !!bool x}",
    "no binary": GOOD + "output: {model: !!binary é}",
    "a list as a key": GOOD + "? [a]\n: 1",
    "a number as a key": GOOD + "1: 2\n1.5: 3\nnull: 4",
    "an object": GOOD + "stop: !!python/object/apply:os.system [true]",
    "NUL": GOOD + "\0",
    "a huge float": GOOD + "stop: {tol: 1e999999}",
}


def fit_of(text, tmp_path, *arguments):
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8", newline="")
    result = emtau("fit", tmp_path / "run.yaml", *arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    line = result.stderr
    assert line.startswith("emtau: ")
    assert line.rstrip("\n").isprintable()
    return line


@pytest.mark.parametrize("what", TOO_LARGE)
def test_a_config_that_is_nested_without_end_or_has_endless_numbers(what, tmp_path):
    fit_of(TOO_LARGE[what], tmp_path)


@pytest.mark.parametrize("what", NO_VALUES)
def test_a_value_that_is_none(what, tmp_path):
    fit_of(NO_VALUES[what], tmp_path)


TAGS = {
    "a call": "!!python/object/apply:os.system ['touch {trap}']",
    "a call by its whole tag": "!<tag:yaml.org,2002:python/object/apply:os.system> ['touch {trap}']",
    "a call with a state": "!!python/object/apply:subprocess.Popen {{args: [['touch', '{trap}']]}}",
    "a new object": "!!python/object/new:os.system ['touch {trap}']",
    "an object": "!!python/object:pathlib.PosixPath {{}}",
    "a name": "!!python/name:os.system ''",
    "a module": "!!python/module:antigravity ''",
    "a tuple": "!!python/tuple [1, 2]",
    "a tag of one's own": "!run 'touch {trap}'",
}


@pytest.fixture
def trap(tmp_path):
    """A path at which nothing may come to be."""
    yield tmp_path / "trap"
    assert not (tmp_path / "trap").exists()


@pytest.mark.parametrize("what", TAGS)
@pytest.mark.parametrize(
    "text",
    [
        "TAG",
        "- TAG",
        f"{GOOD}? TAG\n: 1",
        f"{GOOD}stop: TAG",
        f"{GOOD}stop: {{max_iter: TAG}}",
        "a: [&a TAG, *a]",
    ],
    ids=["document", "list", "key", "section", "value", "alias"],
)
def test_a_tag_that_asks_for_code_is_refused(what, text, trap, tmp_path):
    line = fit_of(text.replace("TAG", TAGS[what].format(trap=trap)), tmp_path)
    assert "could not determine a constructor for the tag" in line


@pytest.mark.parametrize("what", TAGS)
def test_nor_is_it_obeyed_in_an_override(what, trap, tmp_path):
    tag = TAGS[what].format(trap=trap)
    for key in ("stop.max_iter", "stop", "data.path"):
        assert "could not determine a constructor" in fit_of(GOOD, tmp_path, "--set", f"{key}={tag}")


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 5000], ids=["depth", "digits"])
def test_an_override_is_refused_as_a_file_is(text, tmp_path):
    fit_of(GOOD, tmp_path, "--set", f"stop.max_iter={text}")
    fit_of(GOOD, tmp_path, "--set", f"{'a.' * 10_000}b=1")


@pytest.mark.exhaustive
def test_a_file_without_end_is_not_read_to_it():
    def bounded():
        resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32))

    command = [*EMTAU, "fit", "/dev/zero"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, preexec_fn=bounded)
    assert result.returncode == 2, result.stderr
    assert "/dev/zero is a device" in result.stderr


def test_a_pipe_that_nobody_writes_to_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "run.yaml")
    result = emtau("fit", tmp_path / "run.yaml")
    assert result.exit_code == 2, result.stderr
    assert "a pipe that nobody writes to" in result.stderr


def test_a_pipe_that_somebody_writes_to_is_read():
    """As a shell makes one of `<(…)`."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as file:
        file.write(GOOD + "stop: {max_iter: none}\n")
    result = emtau("fit", f"/dev/fd/{reading}", "--plan")
    os.close(reading)
    assert result.exit_code == 2
    assert "stop.max_iter = 'none'" in result.stderr


LONG = {
    "one word": "x" * 900_000,
    "words and colons": "x:" * 450_000,
    "beginnings of settings": "x-amz-" * 150_000 + "=",
    "beginnings of chains": "a::" * 300_000,
}


@pytest.mark.parametrize("what", LONG)
@pytest.mark.exhaustive
def test_a_long_value_is_shown_in_time(what, tmp_path):
    """What hides secrets in messages went over it once for each of its characters."""
    assert "stop.max_iter" in fit_of(f"{GOOD}stop: {{max_iter: '{LONG[what]}: '}}\n", tmp_path)


@pytest.mark.parametrize("value", ["1e400GB", "1e400", "nanGB"])
def test_an_endless_amount_of_memory_is_refused(value, tmp_path):
    assert "memory_limit" in fit_of(GOOD + f"cluster: {{memory_limit: {value}}}", tmp_path)


def test_anchors_and_merges_stand_for_what_they_name():
    text = "base: &b {tau: 5, name: em-tau}\nlist: [*b, {<<: *b, tau: 7}]"
    base = {"tau": 5, "name": "em-tau"}
    assert parse_yaml(text, "text") == {"base": base, "list": [base, {**base, "tau": 7}]}


ESCAPES = "\x1b[31mred\x1b]0;title\x07\x9b2J\x7f\u202e\u200b"


@pytest.mark.parametrize(
    "text",
    [
        GOOD + 'stop: {max_iter: "%s"}',
        GOOD + '"%s": 1',
        GOOD + 'stop: {"%s": 1}',
        GOOD + 'algorithm: {name: "%s"}',
        GOOD.replace("example1", '"%s"'),
    ],
)
def test_escape_sequences_of_a_config_are_shown_as_text(text, tmp_path):
    assert "\\x1b" in fit_of(text % ESCAPES.encode("unicode_escape").decode(), tmp_path)


@given(st.text())
@settings(max_examples=300)
def test_a_value_in_yaml_is_read_as_itself(value):
    assert parse_yaml(in_yaml(value), "text") == value
    assert in_yaml(value).isprintable()
    assert "  " not in in_yaml(value)


@given(st.text(alphabet="[]{}&*!<>|%@`\"':,-?# \n\tab0159._eE~=\x00\x1b\ud800", max_size=60))
@settings(max_examples=500)
def test_any_text_is_yaml_or_refused(text):
    try:
        parse_yaml(text, "text")
    except ConfigError as error:
        refused = str(error)
    else:
        return
    assert refused.replace("\n", " ").isprintable()
