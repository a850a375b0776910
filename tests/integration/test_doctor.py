"""`emtau doctor` says what is there, and what is wrong; each fault is a real one."""

import json
import os
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from packaging.requirements import Requirement

from emtau_dask import GaussianMixture
from emtau_dask.cli.main import main

pytest_plugins = "s3server"

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
DOCTOR = [sys.executable, "-c", "from emtau_dask.cli.main import main; main()", "doctor", "--json"]


def examined(*arguments):
    """The exit code, whether all is well, and the findings by name."""
    ended = CliRunner().invoke(main, ["doctor", "--json", *map(str, arguments)])
    found = json.loads(ended.stdout)
    return ended.exit_code, found["ok"], {each["name"].lower(): each for each in found["findings"]}


def examined_in(environment):
    """The same in a process of its own."""
    ended = subprocess.run(DOCTOR, capture_output=True, text=True, env={**os.environ, **environment})
    found = json.loads(ended.stdout)
    assert (ended.returncode == 0) == found["ok"]
    return {each["name"].lower(): each for each in found["findings"]}


def test_all_is_well_here():
    code, well, found = examined()
    assert (code, well) == (0, True)
    for needed in map(Requirement, PROJECT["dependencies"]):
        if needed.name != "numba":
            assert found[needed.name.lower()]["status"] == "ok"
    assert found["numba"]["status"] == ("ok" if find_spec("numba") else "note")
    assert {"python", "emtau_dask", "temporary files"} <= set(found)
    assert found["gcsfs"]["status"] == ("ok" if find_spec("gcsfs") else "note")
    assert not {"pytest", "sphinx", "mypy"} & set(found)


def test_people_read_a_line_for_each():
    ended = CliRunner().invoke(main, ["doctor"])
    assert ended.exit_code == 0
    lines = ended.stdout.splitlines()
    assert len(lines) == len(examined()[2])
    assert {line.split()[0] for line in lines} <= {"ok", "note"}


def test_a_place_for_checkpoints_is_tried_and_left_as_it_was(tmp_path):
    code, _, found = examined(tmp_path / "new" / "folder" / "run.zarr")
    assert code == 0
    assert found["checkpoint"]["text"].endswith("run.zarr can be written and read")
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_there_is_named_and_left_alone(tmp_path):
    rows = np.random.default_rng(0).normal(size=(50, 2))
    GaussianMixture(2, tol=10.0, random_state=0, checkpoint=tmp_path / "run.zarr").fit(rows)
    before = sorted(tmp_path.rglob("*"))
    assert "it holds a run" in examined(tmp_path / "run.zarr")[2]["checkpoint"]["text"]
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("place", ["file/run.zarr", "https://127.0.0.1:1/run.zarr", "nothing://run.zarr"])
def test_a_place_that_cannot_be_used_is_wrong(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    code, well, found = examined(place)
    assert (code, well) == (1, False)
    assert found["checkpoint"]["status"] == "wrong"
    assert "Error:" not in found["checkpoint"]["text"].partition("(")[0]


def test_a_bucket_is_tried(s3):
    assert examined(s3.url("run.zarr"))[2]["checkpoint"]["status"] == "ok"
    assert not s3.files.find(f"{s3.bucket}/run.zarr")
    s3.proxy.fail("403", match=lambda method, path: method == "PUT")
    found = examined(s3.url("run.zarr"))[2]["checkpoint"]
    assert found["status"] == "wrong"
    assert "Access is denied" in found["text"]


@pytest.mark.parametrize("package", ["zarr", "pyarrow"])
def test_a_package_that_cannot_be_imported_is_wrong(package, tmp_path):
    (tmp_path / f"{package}.py").write_text("raise ImportError('libstrange.so is missing')")
    found = examined_in({"PYTHONPATH": str(tmp_path)})[package]
    assert found["status"] == "wrong"
    assert "libstrange.so is missing" in found["text"]


def test_a_package_that_is_too_old_is_wrong(tmp_path):
    folder = tmp_path / "rich-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: rich\nVersion: 1.0\n")
    found = examined_in({"PYTHONPATH": str(tmp_path)})["rich"]
    assert found["status"] == "wrong"
    assert found["text"].startswith("1.0, but >=13.7 is needed: pip install")


def test_no_room_for_temporary_files_is_wrong(tmp_path):
    (tmp_path / "file").write_text("")
    found = examined_in({"DASK_TEMPORARY_DIRECTORY": str(tmp_path / "file")})["temporary files"]
    assert found["status"] == "wrong"
