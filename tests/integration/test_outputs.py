"""Results of the command line beside other processes' and other people's: nothing of theirs is lost."""

from pathlib import Path

import numpy as np
import pytest
import zarr
from commands import emtau

from emtau_dask.cli import predict as command
from emtau_dask.em import predict

CONFIG = """
data: {dataset: example1, path: data.zarr}
model: {n_components: 2, random_state: 0}
output: {directory: out, model: model.zarr, labels: labels.zarr}
"""


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(CONFIG, encoding="utf-8")
    assert emtau("dataset", "example1", "data.zarr").exit_code == 0
    assert emtau("fit", "run.yaml").exit_code == 0
    return tmp_path


def labels_in(path):
    return np.asarray(zarr.open_group(path, mode="r")["labels"][...])


PREDICT = ("predict", "out/model.zarr", "data.zarr", "q.zarr")
COMMANDS = {
    "out/model.zarr": ("fit", "run.yaml", "--overwrite"),
    "out/labels.zarr": ("fit", "run.yaml", "--overwrite"),
    "q.zarr": PREDICT,
    "d.zarr": ("dataset", "example1", "d.zarr"),
}


@pytest.mark.parametrize("out", COMMANDS)
def test_arrays_with_the_name_of_a_partial_result_stay(workplace, out):
    theirs = zarr.create_group(f"{out}.partial", zarr_format=3)
    theirs.create_array("X", data=np.arange(5.0))
    result = emtau(*COMMANDS[out])
    assert result.exit_code == 0, result.stderr
    assert Path(out).is_dir()
    np.testing.assert_array_equal(zarr.open_group(f"{out}.partial", mode="r")["X"][...], np.arange(5.0))


@pytest.fixture
def meanwhile(monkeypatch):
    """Let something be done once, after the next predict has begun to write."""
    calls = []
    plain = predict.score_rows

    def score_rows(*arguments, **options):
        while calls:
            calls.pop()()
        return plain(*arguments, **options)

    monkeypatch.setattr(command, "score_rows", score_rows)
    return calls


def test_of_two_predictions_at_once_one_is_written_and_the_other_is_told(workplace, meanwhile):
    others = []
    meanwhile.append(lambda: others.append(emtau(*PREDICT, "--scores")))
    late = emtau(*PREDICT)
    assert others[0].exit_code == 0
    assert late.exit_code == 1
    assert "emtau: " in late.stderr
    assert "q.zarr already exists" in late.stderr
    assert set(zarr.open_group("q.zarr", mode="r")) == {"labels", "scores"}
    np.testing.assert_array_equal(labels_in("q.zarr"), labels_in("out/labels.zarr"))
    assert {path.name for path in workplace.iterdir()} == {"run.yaml", "data.zarr", "out", "q.zarr"}


def test_of_two_that_overwrite_the_last_one_stays(workplace, meanwhile):
    assert emtau(*PREDICT).exit_code == 0
    others = []
    meanwhile.append(lambda: others.append(emtau(*PREDICT, "--scores", "--overwrite")))
    late = emtau(*PREDICT, "--overwrite")
    assert (others[0].exit_code, late.exit_code) == (0, 0)
    assert set(zarr.open_group("q.zarr", mode="r")) == {"labels"}
    assert {path.name for path in workplace.iterdir()} == {"run.yaml", "data.zarr", "out", "q.zarr"}


def test_overwriting_spares_what_another_program_put_there_meanwhile(workplace, meanwhile):
    def put():
        zarr.create_group("q.zarr", zarr_format=3).create_array("X", data=np.arange(5.0))

    meanwhile.append(put)
    late = emtau(*PREDICT, "--overwrite")
    assert late.exit_code == 1
    assert "q.zarr already exists" in late.stderr
    np.testing.assert_array_equal(zarr.open_group("q.zarr", mode="r")["X"][...], np.arange(5.0))
