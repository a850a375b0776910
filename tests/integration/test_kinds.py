"""What is given in place of a config, a checkpoint, rows or a result is named for what it is."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import zarr
from commands import emtau

from emtau_dask import CheckpointExistsError, CheckpointMismatchError, GaussianMixture, InvalidDataError

ROWS = np.random.default_rng(0).normal(size=(60, 2))
TABLE = pd.DataFrame(ROWS, columns=["x", "y"])


def times(path):
    """Lines that YAML would read as 2000 keys."""
    path.write_text("".join(f"2024-01-01 {i}: {i}\n" for i in range(2000)))


def archive(path):
    np.savez(path, rows=ROWS)


def array(path):
    zarr.create_array(store=path, data=ROWS)


def dataset(path):
    emtau("dataset", "mixture", path, "--rows", "50", "--features", "2")


def model(path):
    GaussianMixture(2, random_state=0, tol=1e-2, algorithm="em").fit(TABLE).save(path)


def checkpoint(path):
    GaussianMixture(2, random_state=0, tol=1e-2, algorithm="em", checkpoint=path).fit(ROWS)


KINDS = {
    "a.csv": (lambda path: TABLE.to_csv(path), "a CSV table"),
    "times.csv": (times, "a CSV table"),
    "a.tsv": (lambda path: TABLE.to_csv(path, sep="\t"), "a table of text"),
    "a.npz": (archive, "an .npz archive"),
    "a.npy": (lambda path: np.save(path, ROWS), "a .npy file"),
    "a.parquet": (TABLE.to_parquet, "a parquet file"),
    "parquet": (lambda path: TABLE.to_parquet(path), "a parquet file"),
    "array.zarr": (array, "a zarr array"),
    "dataset.zarr": (dataset, "a dataset"),
    "model.zarr": (model, "a saved model"),
    "run.zarr": (checkpoint, "the checkpoint of a fit"),
    "folder": (lambda path: path.mkdir(), "a folder"),
}


def refusal(*arguments, code):
    result = emtau(*arguments)
    assert result.exit_code == code, result.output
    (line,) = result.stderr.splitlines()
    assert len(line) < 400
    return line


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(params=KINDS)
def given(request, place):
    """A name in the current folder, and what is there."""
    make, kind = KINDS[request.param]
    make(place / request.param)
    return request.param, kind


def test_what_is_no_config_is_named(given):
    name, kind = given
    line = refusal("compare", name, code=2)
    assert line.startswith(f"emtau: {name} is {kind}, not a run config (YAML)")
    assert "data.path" in line


def test_data_without_a_number_of_components_are_not_read_as_a_config(given):
    name, _ = given
    line = refusal("fit", name, code=2)
    assert f"-k/--components (model.n_components) is missing: {name} is read as data" in line
    assert "the name of a config ends in .yaml or .yml" in line


@pytest.mark.parametrize("given", ["model.zarr", "run.zarr"], indirect=True)
def test_what_a_fit_wrote_is_not_fitted_by_mistake(given):
    name, kind = given
    assert f"{name} is {kind}, not rows" in refusal("fit", name, "-k", "2", code=1)


def test_a_config_of_unknown_keys_is_refused_in_few_words(place):
    times(place / "run.yaml")
    line = emtau("fit", "run.yaml").stderr
    assert "2024-01-01 0 is not a known key" in line
    assert "and 1,99" in line
    assert len(line) < 2000


@pytest.mark.parametrize("given", sorted(KINDS.keys() - {"run.zarr", "model.zarr"}), indirect=True)
def test_what_is_no_run_and_no_model_is_named_by_inspect(given):
    name, kind = given
    assert f"{name} is {kind}, not a checkpoint or a model" in refusal("inspect", name, code=1)


class TestInspectOfAModel:
    @pytest.fixture
    def saved(self, place):
        model(place / "model.zarr")
        return GaussianMixture.load("model.zarr")

    def test_shows_its_components(self, saved):
        result = emtau("inspect", "model.zarr")
        assert result.exit_code == 0, result.output
        for text in ("model in", "2 components", f"{saved.weights_[0]:.4f}", "converged"):
            assert text in result.stdout

    def test_has_json_for_programs(self, saved):
        described = json.loads(emtau("inspect", "model.zarr", "--json").stdout)
        assert described["format"] == "emtau-model"
        assert described["feature_names"] == ["x", "y"]
        assert described["weights"] == saved.weights_.tolist()
        assert described["means"] == saved.means_.tolist()
        assert described["lower_bound"] == saved.lower_bound_
        assert len(described["history"]) == saved.n_iter_

    def test_that_is_damaged_says_so(self, saved, place):
        (place / "model.zarr" / "means" / "zarr.json").unlink()
        assert "incomplete or damaged" in refusal("inspect", "model.zarr", code=1)


OTHERS = ["out.npy", "OUT.NPZ", "out.h5", "out.json", "out.feather", "out.csv.gz"]


@pytest.mark.parametrize(
    ("command", "name"),
    [
        *(("dataset", name) for name in ("out.csv", "out.parquet", *OTHERS)),
        *((command, name) for command in ("predict", "fit") for name in OTHERS),
    ],
)
def test_a_result_is_not_named_as_another_format(place, command, name):
    model(place / "model.zarr")
    np.save("a.npy", ROWS)
    (place / "run.yaml").write_text(
        "data: {path: a.npy}\nmodel: {n_components: 2}\n"
        f"output: {{directory: ., model: null, labels: {name}}}\n"
    )
    arguments = {
        "predict": ["model.zarr", "a.npy", name],
        "dataset": ["digits", name],
        "fit": ["run.yaml"],
    }
    line = refusal(command, *arguments[command], code=1)
    assert f"{name} is the name of " in line
    assert f"{Path(name).stem}.zarr" in line
    assert not (place / name).exists()


def test_an_archive_is_refused_with_a_way_to_take_its_array_out(place):
    archive(place / "a.npz")
    with pytest.raises(InvalidDataError, match=r"a\.npz is an \.npz archive, which is not read.*numpy\.save"):
        GaussianMixture(2).fit("a.npz")


def test_data_in_no_known_format_are_named_for_what_they_are(place):
    model(place / "model.zarr")
    (place / "a.dat").write_bytes(b"\x89HDF\r\n")
    with pytest.raises(InvalidDataError, match=r"a\.dat is no netCDF or HDF5 file, or is damaged"):
        GaussianMixture(2).fit("a.dat")
    with pytest.raises(InvalidDataError, match=r"model\.zarr is a saved model, not rows"):
        GaussianMixture(2).fit("model.zarr")


@pytest.mark.parametrize("given", [name for name in KINDS if name != "model.zarr"], indirect=True)
def test_what_is_no_model_is_named_by_load_and_predict(place, given):
    name, kind = given
    with pytest.raises(InvalidDataError) as refused:
        GaussianMixture.load(name)
    assert str(refused.value).startswith(f"{name} is {kind}, not a saved model. ")
    if name == "run.zarr":  # `emtau predict` takes it.
        assert "GaussianMixture.resume('run.zarr', X)" in str(refused.value)
        return
    array(place / "rows.zarr")
    assert f"{name} is {kind}, not a saved model" in refusal("predict", name, "rows.zarr", "out.zarr", code=1)


def test_a_model_that_is_not_there_and_one_in_plain_text(place):
    with pytest.raises(InvalidDataError, match=r"^nowhere does not exist\. Give the path of a saved model"):
        GaussianMixture.load("nowhere")
    (place / "notes.txt").write_text("mine")
    with pytest.raises(InvalidDataError, match=r"^notes\.txt holds no model: .*GaussianMixture\.save"):
        GaussianMixture.load("notes.txt")


def test_other_zarr_data_are_not_resumed_as_if_they_were_damaged(place):
    model(place / "model.zarr")
    zarr.open_group("group.zarr", mode="w").create_array("X", data=ROWS)
    for path, kind in {
        "model.zarr": "a saved model",
        "group.zarr": "a zarr group",
        "group.zarr/X": "a zarr array",
    }.items():
        with pytest.raises(CheckpointMismatchError, match=rf"{path} is {kind}, not the checkpoint"):
            GaussianMixture.resume(path, ROWS)


def test_a_second_run_at_a_checkpoint_says_how_in_python_and_on_the_command_line(place):
    checkpoint(place / "run.zarr")
    with pytest.raises(CheckpointExistsError, match=r"GaussianMixture\.resume, emtau resume"):
        GaussianMixture(2, checkpoint="run.zarr").fit(ROWS)


def test_plain_text_is_refused_as_rows(place):
    (place / "notes.txt").write_text("mine")
    with pytest.raises(InvalidDataError, match=r"notes\.txt is a file of an unknown kind, .*Give a zarr"):
        GaussianMixture(2).fit("notes.txt")


def test_text_in_a_column_says_how_others_are_chosen(place):
    TABLE.assign(name="x").to_parquet("text.parquet")
    TABLE.assign(name="x").to_csv("text.csv", index=False)
    for name in ("text.parquet", "text.csv"):
        with pytest.raises(InvalidDataError, match=r"'name' .*numeric columns: --columns x,y, columns="):
            GaussianMixture(2).fit(name)
