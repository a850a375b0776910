"""Names in data, models and checkpoints that would make a terminal or a page obey are shown as text."""

import json
import subprocess
import sys
import traceback
import unicodedata
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import zarr
from commands import emtau as run
from reliability.damage import manifest_of
from tiers import exhaustive_but

from emtau_dask import (
    CheckpointCorruptError,
    EmtauError,
    GaussianMixture,
    InvalidDataError,
    MixtureOutlierDetector,
)
from emtau_dask.storage.objects import digested_document

NAMES = ["a\x1b]0;x\x07\x7f", "\x9b2J\u202e", "\u2066z\nb\x85"]
"""C0, DEL, C1, and what changes the direction of text."""
REPORT = ("--set", "output.report=report.html")
ON_ONE_LINE = [name.replace("\n", "") for name in NAMES]
RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(300, 3)) + np.repeat([0.0, 5.0], 150)[:, np.newaxis]


def obeyed(text):
    """The characters of a text that a terminal or a page may obey, by their categories in Unicode."""
    kinds = {"Cc", "Cf", "Cs", "Zl", "Zp"}
    return sorted({char for char in text if unicodedata.category(char) in kinds and char != "\n"})


def frame(names):
    return pd.DataFrame(ROWS, columns=names)


def in_parquet(rows, name="x"):
    rows.to_parquet(f"{name}.parquet")
    return f"{name}.parquet"


def in_csv(rows, name="x"):
    rows.to_csv(f"{name}.csv", index=False)
    return f"{name}.csv"


STORED = {in_parquet: NAMES, in_csv: ON_ONE_LINE}


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def emtau(*arguments, code=0):
    """Run the command line; return what it wrote on both streams, in which nothing is obeyed."""
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert obeyed(result.output) == []
    return result.output


@pytest.mark.parametrize("store", exhaustive_but({in_parquet}, STORED))
def test_the_command_line_shows_no_name_raw(store):
    names = STORED[store]
    data = store(frame(names))
    emtau("fit", data, "-k", "2", "-o", "out")
    emtau("--log-level", "debug", "fit", data, "-k", "2", "-o", "out", "--overwrite", *REPORT)
    assert "\\x1b]0;x\\x07\\x7f" in emtau("inspect", "out/model.zarr")
    assert json.loads(emtau("inspect", "--json", "out/model.zarr"))["feature_names"] == names
    emtau("predict", "out/model.zarr", data, "labels.zarr", "--scores")
    emtau("report", "out", "again.html", "--data", data)
    for page in (Path("out/report.html"), Path("again.html")):
        html = page.read_text(encoding="utf-8")
        assert obeyed(html) == []
        assert "\\x9b2J\\u202e" in html


@pytest.mark.parametrize("store", exhaustive_but({in_parquet}, STORED))
def test_refusals_show_no_name_raw(store):
    names = STORED[store]
    emtau("fit", store(frame(names)), "-k", "2", "-o", "out")
    holes, texts = frame(names), frame(names).astype(object)
    holes.iloc[3, 1] = np.nan
    texts.iloc[:, 1] = "\x1b[2Jtext"
    others = frame([f"{name}2" for name in names])
    for bad in (store(holes, "holes"), store(texts, "texts"), store(others, "others")):
        emtau("predict", "out/model.zarr", bad, "labels.zarr", code=1)
        emtau("--debug", "predict", "out/model.zarr", bad, "labels.zarr", code=1)
    for bad in (store(holes, "holes"), store(texts, "texts")):
        emtau("fit", bad, "-k", "2", "-o", "again", code=1)
    for columns in (names[0], f"{names[0]}x"):
        chosen = ("--columns", f"{columns},{names[1]}")
        emtau("fit", store(texts, "texts"), "-k", "2", "-o", "again", *chosen, code=1)


def test_warnings_show_no_name_raw():
    rows = frame(ON_ONE_LINE)
    rows.to_csv("\x1b]0;x\x07.csv")
    rows.set_index(ON_ONE_LINE[0], drop=True).to_parquet("x.parquet")
    stored = ("\x1b]0;x\x07.csv", "x.parquet")
    code = "import sys; from emtau_dask.cli.main import main\n"
    code += "for data in sys.argv[1:]: main(['fit', data, '-k', '2', '--plan'], standalone_mode=False)"
    command = [sys.executable, "-c", code, *stored]
    said = subprocess.run(command, capture_output=True, timeout=120, check=True).stderr.decode()
    assert said.count("left out") == 2
    assert obeyed(said) == []
    for data in stored:
        with pytest.warns(UserWarning, match="left out") as caught:
            GaussianMixture(2, random_state=0).fit(data)
        assert [obeyed(str(each.message)) for each in caught] == [[]]


def text_in_csv():
    table = frame(["a", "b", "c"]).astype(object)
    table.iloc[3, 1] = NAMES[0]
    GaussianMixture(2).fit(in_csv(table))


def fill_value_in_zarr():
    zarr.create_array(store="x.zarr", data=ROWS)
    document = json.loads(Path("x.zarr/zarr.json").read_text())
    Path("x.zarr/zarr.json").write_text(json.dumps(document | {"fill_value": NAMES[0]}))
    GaussianMixture(2).fit("x.zarr")


def other_names():
    GaussianMixture(2).fit(frame(NAMES)).predict(frame(["a", "b", "c"]))


def a_name_twice():
    GaussianMixture(2).fit(frame([NAMES[0], NAMES[0], "c"]))


@pytest.mark.parametrize("failing", [text_in_csv, fill_value_in_zarr, other_names, a_name_twice])
def test_a_traceback_shows_no_text_of_a_file_raw(failing):
    """Also not as what another package said of it."""
    with pytest.raises(EmtauError) as caught:
        failing()
    said = "".join(traceback.format_exception(caught.value))
    assert "x1b]0;x" in said
    assert obeyed(said) == []


def test_a_traceback_shows_no_header_of_npy_raw():
    """Python shows the line that it cannot parse."""
    np.save("x.npy", ROWS)
    Path("x.npy").write_bytes(Path("x.npy").read_bytes().replace(b"False", b"F\x1b[se"))
    with pytest.raises(InvalidDataError, match="no header") as caught:
        GaussianMixture(2).fit("x.npy")
    assert obeyed("".join(traceback.format_exception(caught.value))) == []


def test_files_that_a_shell_found_are_shown_as_text():
    assert "extra argument" in emtau("predict", "a", "b", "c", "\x1b]0;x\x07", code=2)


@pytest.fixture
def loaded():
    """A fit to a user's own frame, as it is, from its saved model, and from its checkpoint."""
    model = GaussianMixture(2, random_state=0, checkpoint="run.zarr").fit(frame(NAMES))
    model.save("model.zarr")
    return {
        "fitted": model,
        "model": GaussianMixture.load("model.zarr"),
        "checkpoint": GaussianMixture.resume("run.zarr", frame(NAMES)),
    }


@pytest.mark.parametrize("origin", ["fitted", "model", "checkpoint"])
def test_in_python_names_stay_names_and_are_shown_as_text(origin, loaded):
    model, rows = loaded[origin], frame(NAMES)
    assert model.feature_names_in_.tolist() == NAMES
    assert list(model.summary().feature_names) == NAMES
    assert np.array_equal(model.predict(rows), loaded["fitted"].predict(rows))
    model.save("again.zarr")
    assert GaussianMixture.load("again.zarr").feature_names_in_.tolist() == NAMES
    assert model.condition({NAMES[1]: 0.5}).feature_names_in_.tolist() == [NAMES[0], NAMES[2]]
    summary = str(model.summary())
    for text in ("a\\x1b]0;x\\x07\\x7f", "\\x9b2J\\u202e", "\\u2066z\\nb\\x85"):
        assert text in summary
    shown = model.summary()
    for text in (summary, repr(shown), shown._repr_html_(), repr(model), repr(model.history_)):
        assert obeyed(text) == []
    assert obeyed(model._repr_html_().replace("\t", " ")) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for wrong in (
            lambda: model.predict(frame([*NAMES[:2], f"{NAMES[2]}2"])),
            lambda: model.marginal([f"{NAMES[0]}x"]),
            lambda: model.condition({NAMES[0]: np.nan}),
            lambda: model.score(rows.where(rows < 5)),
            lambda: MixtureOutlierDetector(model).fit(rows.where(rows < 5)),
        ):
            with pytest.raises(EmtauError) as caught:
                wrong()
            assert obeyed(str(caught.value)) == []


def test_a_checkpoint_shows_no_name_raw():
    in_parquet(frame(NAMES))
    kept = ("--set", "checkpoint.path=run.zarr", "--max-iter", "1")
    emtau("fit", "x.parquet", "-k", "2", "-o", "out", *kept, code=3)
    emtau("inspect", "run.zarr")
    assert json.loads(emtau("inspect", "--json", "run.zarr"))["config"]["feature_names"] == NAMES
    emtau("report", "run.zarr", "report.html")
    assert obeyed(Path("report.html").read_text(encoding="utf-8")) == []
    emtau("resume", "run.zarr", "--set", "stop.max_iter=100", "--overwrite")
    in_parquet(frame([f"{name}2" for name in NAMES]))
    assert "\\x9b2J" in emtau("resume", "run.zarr", "--overwrite", code=1)


@pytest.mark.parametrize("names", [["a"], ["a", "a", "b"], []], ids=str)
def test_a_checkpoint_whose_names_are_not_one_for_each_feature_is_refused(names):
    rows = frame(["a", "b", "c"])
    GaussianMixture(2, random_state=0, checkpoint="run.zarr").fit(rows)
    for file in Path("run.zarr").glob("commits/*/zarr.json"):
        content = manifest_of(file)
        content["feature_names"] = names
        file.write_bytes(digested_document(content))
    with pytest.raises(CheckpointCorruptError, match=r"feature_names is .* a list of 3 different names"):
        GaussianMixture.resume("run.zarr", rows)
    emtau("predict", "run.zarr", in_parquet(rows), "labels.zarr", code=1)


def test_a_frame_with_a_name_twice_is_refused_lazy_or_not():
    """The names of a model are different ones."""
    lazy = pytest.importorskip("dask.dataframe").from_pandas(
        frame(["a", "\x1b[2J", "\x1b[2J"]), npartitions=2
    )
    for rows in (lazy, frame(["a", "\x1b[2J", "\x1b[2J"])):
        with pytest.raises(InvalidDataError) as caught:
            GaussianMixture(2).fit(rows)
        assert "\\x1b[2J" in str(caught.value)


def test_headings_of_a_summary_do_not_break_a_number():
    names = ["0.5", "-1e-05", "sea_temperature", "PM-2.5 of day"]
    rows = pd.DataFrame(np.random.default_rng(0).normal(size=(60, 4)), columns=names)
    _, _, upper, lower, *_ = str(GaussianMixture(1, random_state=0).fit(rows).summary()).splitlines()
    assert upper.split() == ["sea_", "PM-2.5"]
    assert lower.split()[-5:] == ["0.5", "-1e-05", "temperature", "of", "day"]
