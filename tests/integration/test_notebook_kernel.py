"""What a notebook records of a fit: cells are run in a real kernel of IPython, as nbconvert runs them."""

import re

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

SETUP = """
import os, pathlib, signal, threading, time
import dask.array as da
import numpy as np
from emtau_dask import GaussianMixture
rng = np.random.default_rng(0)
X = da.from_array(rng.normal(size=(4000, 2)) + 6.0 * rng.integers(2, size=(4000, 1)), chunks=(200, 2))
slow = dict(algorithm="em", tol=0, max_iter=60, random_state=0, checkpoint="run.zarr")
"""
CELLS = {
    "setup": SETUP,
    "fit": """
gm = GaussianMixture(2, algorithm="em", random_state=0, verbose=1).fit(X)
""",
    "figures": """
print(gm.n_iter_, f"{gm.lower_bound_:.6g}")
""",
    "silent": """
undisturbed = GaussianMixture(2, **slow | {"checkpoint": None}).fit(X)
""",
    "refused": """
GaussianMixture(2, verbose=1).fit("nowhere.zarr")
""",
    "interrupted": """
def stop():
    while not any(int(each.name) > 8 for each in pathlib.Path("run.zarr/commits").glob("[0-9]*")):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)  # As the button of a notebook does.
threading.Thread(target=stop).start()
GaussianMixture(2, verbose=1, **slow | {"max_iter": 100_000}).fit(X)
""",
    "resumed": """
resumed = GaussianMixture.resume("run.zarr", X, max_iter=60)
print("the same" if (resumed.means_ == undisturbed.means_).all() else "other values", resumed.n_iter_)
""",
    "failed": """
GaussianMixture(2, verbose=1).fit(X * np.nan)
""",
}


class Recording(NotebookClient):
    """Also remembers every message that a front end would get, by the number of the cell."""

    def process_message(self, msg, cell, cell_index):
        self.__dict__.setdefault("messages", {}).setdefault(cell_index, []).append(msg)
        return super().process_message(msg, cell, cell_index)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The cells after a run, and the messages of each, by name."""
    folder = tmp_path_factory.mktemp("notebook")
    notebook = new_notebook(cells=[new_code_cell(source.strip()) for source in CELLS.values()])
    where = {"metadata": {"path": str(folder)}}
    client = Recording(notebook, timeout=300, kernel_name="python3", allow_errors=True, resources=where)
    client.execute()
    nbformat.validate(notebook)
    return {
        name: (cell, client.messages[number])
        for number, (name, cell) in enumerate(zip(CELLS, notebook.cells, strict=True))
    }


def outputs(ran, name, kind):
    return [output for output in ran[name][0].outputs if output.output_type == kind]


def said_on_stderr(ran, name):
    return [output.text for output in outputs(ran, name, "stream") if output.name == "stderr"]


def test_a_fit_has_one_display_which_is_drawn_anew_and_ends_at_the_last_iteration(ran):
    n_iter, bound = outputs(ran, "figures", "stream")[0].text.split()
    (display,) = ran["fit"][0].outputs
    assert display.output_type == "display_data"
    html, plain = display.data["text/html"], display.data["text/plain"]
    assert '<progress max="1" value="1.000">' in html
    for part in (f"iteration {n_iter}", "100% of 20 chunks", f"log-likelihood per row {bound}"):
        assert part in html
        assert part in plain
    assert "left" not in html
    assert "stopped" not in html
    messages = ran["fit"][1]
    first = next(each["content"] for each in messages if each["msg_type"] == "display_data")
    updates = [each["content"] for each in messages if each["msg_type"] == "update_display_data"]
    assert len(updates) >= 1
    assert {each["transient"]["display_id"] for each in [first, *updates]} == {
        first["transient"]["display_id"]
    }
    assert updates[-1]["data"] == display.data != first["data"]


@pytest.mark.parametrize("name", CELLS)
def test_nothing_is_said_on_standard_error(ran, name):
    warned = [text for text in said_on_stderr(ran, name) if "ConvergenceWarning" not in text]
    assert not warned


def test_a_fit_that_is_not_watched_shows_nothing(ran):
    assert not outputs(ran, "silent", "display_data")


def last_line(ran, name):
    (error,) = outputs(ran, name, "error")
    text = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error.traceback))
    return error.ename, text.rstrip().splitlines()[-1]


def test_a_fit_that_was_refused_shows_the_error_and_no_bar(ran):
    assert not outputs(ran, "refused", "display_data")
    assert last_line(ran, "refused")[1].startswith("InvalidDataError: nowhere.zarr")


def test_after_an_interrupt_the_bar_says_so_and_the_last_line_says_how_to_go_on(ran):
    kind, last = last_line(ran, "interrupted")
    assert kind == "KeyboardInterrupt"
    assert "Continue from the last commit, " in last
    assert "GaussianMixture.resume('run.zarr', X)" in last
    (bar,) = outputs(ran, "interrupted", "display_data")
    stopped = re.search(r"stopped in fit, iteration (\d+) .*% of 20 chunks", bar.data["text/plain"])
    assert int(stopped[1]) >= 3
    assert "left" not in bar.data["text/html"]
    assert outputs(ran, "resumed", "stream")[0].text == "the same 60\n"


def test_a_fit_that_fails_leaves_a_bar_and_the_error(ran):
    (bar,) = outputs(ran, "failed", "display_data")
    assert "looking for the first unusable row" in bar.data["text/html"]
    assert last_line(ran, "failed")[1].startswith("UnusableRowError: row 0 of X contains NaN")
