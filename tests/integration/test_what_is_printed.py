"""What a person sees of a command: on a terminal, in a pipe, asked to be quiet, and in its help."""

import json
import os
import pty
import re
import shlex
import struct
import subprocess
import termios
from fcntl import ioctl

import numpy as np
import pytest
import zarr
from commands import emtau
from processes import EMTAU
from rich.cells import cell_len

import emtau_dask
from emtau_dask.cli.main import main
from emtau_dask.errors import counted

COLUMNS = 80
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(20_000, 2)) + 6.0 * RNG.integers(3, size=20_000)[:, None]
ROWS.setflags(write=False)
COMMANDS = [[name] for name in sorted(main.commands)]
COMMANDS += [["dataset", name] for name in sorted(main.commands["dataset"].commands)]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    zarr.create_array(store=tmp_path / "m.zarr", data=ROWS, chunks=(5_000, 2))
    return tmp_path


def piped(*arguments):
    run = subprocess.run([*EMTAU, *arguments], capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    return run


def on_a_terminal(*arguments):
    """All that a process writes to a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color"} | dict.fromkeys(("COLUMNS", "LINES"), "")
    with subprocess.Popen(
        [*EMTAU, *arguments], stdout=theirs, stderr=theirs, stdin=theirs, env=environment
    ) as run:
        os.close(theirs)
        written = b""
        while True:
            try:
                read = os.read(ours, 65536)
            except OSError:  # Linux's end of a terminal whose processes have gone.
                break
            if not read:
                break
            written += read
    os.close(ours)
    assert run.returncode == 0
    return written.decode()


def test_a_piped_fit_has_one_line_for_each_stage():
    lines = piped("fit", "m.zarr", "-k", "3").stderr.splitlines()
    stages = ["best of 4 starts on a sample", "from the best start", "labels"]
    assert [line.partition(":")[0] for line in lines] == stages
    assert max(map(len, lines)) <= COLUMNS


def test_verbose_adds_a_line_for_each_iteration():
    run = emtau("fit", "m.zarr", "-k", "3", "-v", "--json")
    iterations = [line for line in run.stderr.splitlines() if line.startswith("iteration ")]
    assert len(iterations) == json.loads(run.stdout)["iterations"]
    assert all("log-likelihood per row -" in line and "rows scored: " in line for line in iterations)


@pytest.mark.parametrize("command", [["fit", "m.zarr", "-k", "3"], ["select", "m.zarr", "-k", "2:4"]])
def test_no_line_of_a_terminal_is_wider_than_it(command):
    written = on_a_terminal(*command, "-v")
    drawn = [ESCAPE.sub("", line) for line in re.split(r"[\r\n]+", written)]
    assert max(map(cell_len, drawn)) <= COLUMNS
    assert any("log-likelihood per row -" in line for line in drawn)
    assert not any(" left" in line for line in drawn)


def test_quiet_prints_nothing_but_what_is_asked_for():
    for command in (
        ["dataset", "example1", "e.zarr"],
        ["fit", "m.zarr", "-k", "2"],
        ["predict", "runs/m", "m.zarr", "l.zarr"],
        ["select", "m.zarr", "-k", "1:2", "-o", "s"],
    ):
        assert emtau(*command, "-q").output == ""
    assert json.loads(emtau("fit", "m.zarr", "-k", "2", "-o", "j", "-q", "--json").stdout)["rows"] == 20_000
    assert "2 components" in emtau("inspect", "runs/m", "-q").stdout
    refused = emtau("fit", "m.zarr", "-k", "2", "-q")
    assert refused.exit_code == 1
    assert "already exists" in refused.stderr


def test_quiet_and_verbose_are_opposites():
    assert "give one of them" in emtau("-q", "fit", "m.zarr", "-k", "2", "-v").stderr


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_the_common_options(command):
    for option in ("-V", "--version"):
        assert emtau(*command, option).stdout == f"emtau, version {emtau_dask.__version__}\n"
    help_text = emtau(*command, "--help").stdout
    for option in ("-q, --quiet", "-v, --verbose", "-V, --version", "--debug"):
        assert option in help_text


@pytest.mark.parametrize("group", [(), ("dataset",)], ids=["emtau", "dataset"])
def test_summaries_of_commands_end_where_they_end(group):
    _, _, listed = emtau(*group, "--help").stdout.partition("Commands:\n")
    assert listed
    assert "..." not in listed
    assert "…" not in listed


def test_select_says_which_number_is_fitted_and_what_comes_next(place):
    run = emtau("select", "m.zarr", "-k", "2:4")
    lines = run.stderr.splitlines()
    for number, K in enumerate((2, 3, 4), 1):
        assert lines[number - 1].startswith(
            f"K = {K} (full), candidate {number} of 3: log-likelihood per row -"
        )
    assert lines[3].startswith("K = 3 (full), all rows: ")
    *_, last = run.stdout.splitlines()
    assert last == "next: emtau inspect runs/m-best, or emtau predict runs/m-best DATA labels.zarr"
    values = json.loads(emtau("inspect", "runs/m-best", "--json").stdout)
    assert values["n_components"] == 3
    assert [each["n_components"] for each in values["selection"]["candidates"]] == [2, 3, 4]
    assert "candidates of the selection in runs/m-best" in emtau("inspect", "runs/m-best").stdout
    (place / "runs" / "m-best" / "selection.json").write_text("[]")
    refused = emtau("inspect", "runs/m-best")
    assert refused.exit_code == 1
    assert "is not the table of a selection" in refused.stderr


def test_a_fit_ends_with_a_command_that_labels_rows(place):
    run = emtau("fit", "m.zarr", "-k", "2", "-o", "my run's")
    *_, last = run.stdout.splitlines()
    next_, command = last.split(": ")
    assert next_ == "next"
    _, *arguments = shlex.split(command.replace("DATA", "m.zarr"))
    assert emtau(*arguments).exit_code == 0
    labels = zarr.open_group("labels.zarr", mode="r")["labels"][:]
    np.testing.assert_array_equal(labels, zarr.open_group("my run's/labels.zarr", mode="r")["labels"][:])


def test_a_place_above_models_is_refused_with_the_name_of_one():
    assert emtau("fit", "m.zarr", "-k", "2").exit_code == 0
    assert ", such as runs/m/model.zarr." in emtau("predict", "runs", "m.zarr", "l.zarr").stderr


def test_commands_take_the_folder_of_a_run(place):
    """Its model, or the checkpoint of a fit that has no model yet."""
    assert emtau("fit", "m.zarr", "-k", 2, "-o", "out", "--checkpoint", "out/run.zarr").exit_code == 0
    of_model = json.loads(emtau("inspect", "out", "--json").stdout)
    assert of_model == json.loads(emtau("inspect", "out/model.zarr", "--json").stdout)
    (place / "out" / "model.zarr").rename(place / "model.zarr")
    of_run = json.loads(emtau("inspect", "out", "--json").stdout)
    assert of_run == json.loads(emtau("inspect", "out/run.zarr", "--json").stdout)
    assert emtau("predict", "out", "m.zarr", "of_run.zarr").exit_code == 0
    labels = zarr.open_group("of_run.zarr", mode="r")["labels"][:]
    np.testing.assert_array_equal(labels, zarr.open_group("out/labels.zarr", mode="r")["labels"][:])
    assert emtau("report", "out", "out/of_run.html").exit_code == 0
    (place / "empty").mkdir()
    assert emtau("inspect", "empty").exit_code == 1


def test_a_checkpoint_is_an_option_also_beside_a_config(place):
    (place / "c.yaml").write_text("data: {path: m.zarr}\nmodel: {n_components: 2}\n")
    assert emtau("fit", "c.yaml", "--checkpoint", "kept.zarr").exit_code == 0
    assert json.loads(emtau("inspect", "kept.zarr", "--json").stdout)["stage"] == "finished"
    assert emtau("resume", "kept.zarr", "--set", "output.directory=again").exit_code == 0


def test_predict_gives_programs_its_results():
    assert emtau("fit", "m.zarr", "-k", 3).exit_code == 0
    values = json.loads(emtau("predict", "runs/m", "m.zarr", "l.zarr", "--json").stdout)
    labels = zarr.open_group("l.zarr", mode="r")["labels"][:]
    assert values == {
        "labels": "l.zarr",
        "rows": 20_000,
        "left_out": 0,
        "rows_by_label": np.bincount(labels).tolist(),
    }


def test_sizes_have_one_unit():
    shown = emtau("fit", "m.zarr", "-k", 2, "--plan").stdout
    assert re.search(r"\d (KiB|MiB|GiB)", shown)
    assert not re.search(r"\d [kMG]B\b", shown)


def test_one_of_anything_has_no_s():
    assert [counted(number, "row") for number in (0, 1, 2, 12_345)] == [
        "0 rows",
        "1 row",
        "2 rows",
        "12,345 rows",
    ]
    shown = emtau("dataset", "mixture", "one.zarr", "--rows", 1, "--features", 1, "--components", 1)
    assert shown.stdout == "1 row × 1 feature written to one.zarr\n"
