"""`emtau doctor` says what is there, and what is wrong; each fault is a real one."""

import json
import os
import subprocess
import tomllib
from importlib.util import find_spec
from pathlib import Path

import dask
import numpy as np
import pytest
from commands import emtau
from packaging.requirements import Requirement
from processes import EMTAU

from emtau_dask import GaussianMixture

pytest_plugins = "s3server"

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def examined(*arguments):
    """The exit code, whether all is well, and the findings by name."""
    ended = emtau("doctor", "--json", *arguments)
    found = json.loads(ended.stdout)
    assert (ended.exit_code == 0) == found["ok"]
    return ended.exit_code, found["ok"], by_name(found)


def by_name(found):
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
    ended = emtau("doctor")
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


def test_packages_that_cannot_be_imported_are_wrong(tmp_path):
    for package in ("zarr", "pyarrow"):
        (tmp_path / f"{package}.py").write_text(f"raise ImportError('lib{package}.so is missing')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    surroundings = {**os.environ, "PYTHONPATH": path}
    ended = subprocess.run([*EMTAU, "doctor", "--json"], capture_output=True, text=True, env=surroundings)
    assert ended.returncode == 1
    for package in ("zarr", "pyarrow"):
        found = by_name(json.loads(ended.stdout))[package]
        assert found["status"] == "wrong"
        assert f"lib{package}.so is missing" in found["text"]


def test_a_package_that_is_too_old_is_wrong(tmp_path, monkeypatch):
    folder = tmp_path / "rich-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: rich\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = examined()[2]["rich"]
    assert found["status"] == "wrong"
    assert found["text"].startswith("1.0, but >=13.7 is needed: pip install")


def test_no_room_for_temporary_files_is_wrong(tmp_path):
    (tmp_path / "file").write_text("")
    with dask.config.set({"temporary-directory": str(tmp_path / "file")}):
        assert examined()[2]["temporary files"]["status"] == "wrong"
