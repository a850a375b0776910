"""Progress: plain lines, and the live display."""

from __future__ import annotations

import errno
import io
import logging
import threading
from dataclasses import replace

import numpy as np
import pytest

from emtau_dask.em.history import FitObserver, IterationRecord
from emtau_dask.mixture.parameters import MixtureParameters
from emtau_dask.progress import (
    LONG_PASS,
    NOTEBOOK_SECONDS,
    Lines,
    NotebookBar,
    Progress,
    TerminalLine,
    observer_for,
)

RECORD = IterationRecord(
    iteration=1,
    lower_bound=-2.5,
    active_rows=1000,
    full_pass=True,
    chunks_processed=4,
    chunks_skipped=0,
    bytes_read=8000,
    seconds=0.25,
    rows=1000,
)
SECOND = replace(
    RECORD,
    iteration=2,
    lower_bound=-2.25,
    active_rows=123,
    full_pass=False,
    chunks_processed=3,
    chunks_skipped=1,
    gap=0.001,
)
ONE = np.ones((1, 1))
PARAMETERS = MixtureParameters("diag", np.ones(1), ONE, ONE, ONE)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def report_two_iterations(observer: FitObserver) -> None:
    observer.part("start 1 of 2")
    observer.stage("k-means 1", 4)
    observer.chunks_done(1)
    observer.stage("iteration 1", 4)
    observer.iteration(RECORD, PARAMETERS)
    observer.stage("iteration 2", 3)
    observer.iteration(SECOND, PARAMETERS)
    observer.note("chunk sizes were unknown")


def test_lines_tell_each_part_of_a_fit_that_was_iterated_once() -> None:
    out, clock = io.StringIO(), Clock()
    observer = Progress(Lines(out), clock)
    observer.part("preparing")
    observer.stage("sample rows", 4)
    report_two_iterations(observer)
    clock.now = 2.6
    observer.part("start 2 of 2")
    observer.iteration(RECORD, PARAMETERS)
    observer.iteration(replace(RECORD, iteration=2, lower_bound=-9.0, accepted=False), PARAMETERS)
    clock.now = 100.0
    observer.close(done=True)
    observer.close(done=True)
    assert out.getvalue().splitlines() == [
        "chunk sizes were unknown",
        "start 1 of 2: log-likelihood per row -2.25, 2 iterations, 3 s",
        "start 2 of 2: log-likelihood per row -2.5, 2 iterations, 0:01:37",
    ]


def compared_starts(out: io.StringIO, *, details: bool) -> list[str]:
    """Return the lines of starts of which the second is the best but one, which collapsed."""
    observer = Progress(Lines(out, details=details), Clock())
    for number, bound in enumerate((-2.75, -2.5, -3.0, 9.0), start=1):
        observer.part(f"start {number} of 4", "best of 4 starts")
        observer.iteration(replace(RECORD, lower_bound=bound), PARAMETERS)
    observer.left_out()
    observer.part("all rows")
    observer.iteration(replace(RECORD, lower_bound=-2.25), PARAMETERS)
    observer.close(done=True)
    return out.getvalue().splitlines()


def test_starts_that_are_compared_have_one_line_and_their_own_with_details() -> None:
    together = "best of 4 starts: log-likelihood per row -2.5, 3 iterations"
    last = "all rows: log-likelihood per row -2.25, 1 iteration"
    assert compared_starts(io.StringIO(), details=False) == [together, last]
    lines = compared_starts(io.StringIO(), details=True)
    assert [line for line in lines if not line.startswith("iteration ")] == [
        "start 1 of 4: log-likelihood per row -2.75, 1 iteration",
        "start 2 of 4: log-likelihood per row -2.5, 1 iteration",
        "start 3 of 4: log-likelihood per row -3, 1 iteration",
        together,
        last,
    ]


def test_lines_with_details_tell_each_pass_and_iteration_too() -> None:
    """Rows scored are in passes over the data, of which an iteration may score more than one."""
    out = io.StringIO()
    observer = Progress(Lines(out, details=True))
    report_two_iterations(observer)
    observer.part("start 2 of 2")
    observer.iteration(replace(RECORD, iteration=3, active_rows=1580), PARAMETERS)
    assert out.getvalue().splitlines()[:4] == [
        "k-means 1: 4 chunks",
        "iteration 1: log-likelihood per row -2.5, rows scored: 1 passes, 4 of 4 chunks, 0.25 s, 4k rows/s",
        "iteration 2: log-likelihood per row -2.25, changed by +2.50e-01, could still gain 1.0e-03, "
        "rows scored: 0.123 passes, 3 of 4 chunks, 0.25 s, 492 rows/s",
        "chunk sizes were unknown",
    ]
    last = out.getvalue().splitlines()[-1]
    assert last.startswith("iteration 3: log-likelihood per row -2.5, rows scored: 1.58 passes, ")


def test_the_live_display_is_one_line_with_all_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "140")
    out = Terminal()
    display = TerminalLine(out)
    observer = Progress(display)
    try:
        report_two_iterations(observer)
        observer.chunks_done(1)
        display._live.refresh()
        drawn = out.getvalue()
    finally:
        observer.close(done=True)
    for part in (
        "start 1 of 2",
        "iteration 2",
        "33% of 3 chunks",
        "0:00:0",
        "log-likelihood per row -2.25",
        "could still gain 1.0e-03",
        "492 rows/s",
    ):
        assert part in drawn
    assert " left" not in drawn  # of a fit nobody knows the number of iterations
    assert "chunk sizes were unknown" in drawn
    assert "\x1b[1A" not in drawn  # it never goes up a line: there is one


def test_the_live_display_counts_chunks_from_many_threads() -> None:
    display = TerminalLine(Terminal())
    observer = Progress(display)
    try:
        observer.stage("iteration 1", 800)
        threads = [
            threading.Thread(target=lambda: [observer.chunks_done(1) for _ in range(100)]) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert "100% of 800 chunks" in display._render().plain
    finally:
        observer.close(done=True)


def test_the_stream_decides_the_display(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")

    def written(verbose: int, out: io.StringIO) -> str:
        observer = observer_for(verbose, out)
        observer.stage("k-means 1", 4)
        observer.close(done=True)
        return out.getvalue()

    assert written(0, io.StringIO()) == written(0, Terminal()) == ""
    assert written(1, io.StringIO()) == "k-means 1: 4 chunks\n"
    assert "0% of 4 chunks" in written(1, Terminal())


def test_progress_goes_to_standard_output_unless_sent_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    elsewhere = io.StringIO()
    observer_for(1, elsewhere).note("elsewhere")
    observer_for(1).note("here")
    assert elsewhere.getvalue() == "elsewhere\n"
    assert capsys.readouterr().out == "here\n"


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_long_pass_has_lines_by_time_not_by_chunks() -> None:
    """10,000 chunks in 100 seconds: a line each `LONG_PASS`, with the time that is left."""
    out, clock = io.StringIO(), Clock()
    observer = Progress(Lines(out), clock)
    observer.stage("labels", 10_000)
    for _ in range(10_000):
        clock.now += 0.01
        observer.chunks_done(1)
    begins, *lines = out.getvalue().splitlines()
    assert begins == "labels: 10,000 chunks"
    assert len(lines) == int(100 / LONG_PASS)
    assert lines[0] == "labels: 0:00:30, 30% of 10,000 chunks, 0:01:10 left"
    observer.part("best start")
    observer.stage("iteration 7", 10_000)
    clock.now += LONG_PASS
    observer.chunks_done(5_000)
    assert out.getvalue().splitlines()[-1] == "best start: 0:02:10, iteration 7, 50% of 10,000 chunks"


class Notebook:
    """IPython's display and its handle: what was drawn."""

    def __init__(self) -> None:
        self.drawn: list[str] = []

    def __call__(self, drawing: dict[str, str], *, raw: bool, display_id: bool) -> Notebook:
        assert display_id
        self.update(drawing, raw=raw)
        return self

    def update(self, drawing: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.drawn.append(drawing["text/html"])


def test_a_notebook_has_one_bar_drawn_by_time_not_by_chunks() -> None:
    notebook, clock = Notebook(), Clock()
    observer = Progress(NotebookBar(notebook), clock)
    observer.stage("iteration 1", 10_000)
    for _ in range(10_000):
        clock.now += 0.0001
        observer.chunks_done(1)
    assert 3 <= len(notebook.drawn) <= 1 + 1.0 / NOTEBOOK_SECONDS
    observer.iteration(RECORD, PARAMETERS)
    observer.note("<b>1</b>")
    observer.close(done=True)
    assert 'value="1.000"' in notebook.drawn[-1]
    assert "log-likelihood per row -2.5" in notebook.drawn[-1]
    assert "&lt;b&gt;1&lt;/b&gt;" in notebook.drawn[-1]
    assert "stopped" not in notebook.drawn[-1]


def test_a_notebooks_bar_says_where_a_fit_stopped_and_is_not_there_before_its_first_pass() -> None:
    """Also where all chunks of the pass were done."""
    notebook = Notebook()
    Progress(NotebookBar(notebook)).close(done=False)
    assert notebook.drawn == []
    observer = Progress(NotebookBar(notebook))
    observer.stage("iteration 1", 1)
    observer.chunks_done(1)
    observer.close(done=False)
    assert "stopped in iteration 1<" in notebook.drawn[-1]
    assert "100% of 1 chunk<" in notebook.drawn[-1]


def test_the_log_has_full_passes_at_info_and_the_rest_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", logger="emtau_dask")
    observer = Progress()
    report_two_iterations(observer)
    observer.iteration(replace(RECORD, iteration=3, accepted=False), PARAMETERS)
    observer.close(done=True)
    said = [(record.levelname, record.getMessage().partition(":")[0]) for record in caplog.records]
    assert ", refused, " in caplog.messages[-2]
    assert said == [
        ("INFO", "k-means 1"),
        ("INFO", "iteration 1"),
        ("DEBUG", "iteration 2"),
        ("INFO", "chunk sizes were unknown"),
        ("DEBUG", "iteration 3"),
        ("INFO", "start 1 of 2"),
    ]


def test_where_the_log_goes_no_display_says_the_same() -> None:
    out, log = io.StringIO(), logging.getLogger("emtau_dask")
    handler, level = logging.StreamHandler(out), log.level
    log.addHandler(handler)
    log.setLevel("INFO")
    try:
        observer_for(1, out).stage("k-means 1", 4)
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    assert out.getvalue() == "k-means 1: 4 chunks\n"
    observer_for(1, out).note("once more")
    assert out.getvalue().endswith("\nonce more\n")


@pytest.mark.parametrize("shown", [False, True])
def test_the_log_is_written_with_a_display_and_without(shown: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="emtau_dask")
    out = io.StringIO()
    report_two_iterations(observer_for(int(shown), out))
    assert len(caplog.messages) == 3
    assert out.getvalue() == "chunk sizes were unknown\n" * shown


class Failing(io.StringIO):
    """A stream to which nothing can be written."""

    def __init__(self, error: int) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise OSError(self.error, "it fails")


def test_a_full_disk_does_not_end_the_fit_but_a_pipe_without_a_reader_does() -> None:
    report_two_iterations(Progress(Lines(Failing(errno.ENOSPC))))
    with pytest.raises(BrokenPipeError):
        report_two_iterations(Progress(Lines(Failing(errno.EPIPE))))
