"""`emtau resume` of a checkpoint that a stranger made: it obeys nothing but the fit itself."""

import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import yaml
import zarr
from commands import emtau
from reliability.damage import manifest_of

from emtau_dask import GaussianMixture
from emtau_dask.storage.objects import digested_document

EMTAU = [sys.executable, "-c", "from emtau_dask.cli.main import main; main()"]
MORE = ("--set", "stop.max_iter=4")
FAILED, BAD_USAGE, NOT_CONVERGED = 1, 2, 3


def tree(folder):
    """Every file below a folder, with its contents."""
    return {
        path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A folder with data, and a run of two iterations with its results."""
    folder = tmp_path_factory.mktemp("begun")
    rows = np.random.default_rng(0).normal(size=(200, 2))
    zarr.create_array(store=folder / "rows.zarr", data=rows, chunks=(100, 2))
    np.save(folder / "weights.npy", np.ones(200))
    (folder / "run.yaml").write_text(
        f"data: {{path: {folder / 'rows.zarr'}}}\n"
        "model: {n_components: 2, random_state: 0}\n"
        "algorithm: {name: em}\n"
        "stop: {tol: 0.0, max_iter: 2}\n"
        f"checkpoint: {{path: {folder / 'run.zarr'}}}\n"
        f"output: {{directory: {folder}}}\n"
    )
    result = emtau("fit", folder / "run.yaml")
    assert result.exit_code == NOT_CONVERGED, result.output
    return folder


@pytest.fixture
def made_up(begun, tmp_path):
    """Make what a stranger sends: a run whose config says something else, its digests all right."""

    def make(**changes):
        run = tmp_path / "sent" / "run.zarr"
        shutil.copytree(begun / "run.zarr", run)
        for file in run.glob("commits/*/zarr.json"):
            content = manifest_of(file)
            config = content["run_config"]
            config["output"] = {"directory": str(run.parent)}
            for section, values in changes.items():
                config[section] = {**config.get(section, {}), **values}
            file.write_bytes(digested_document(content))
        return run

    return make


def refused_for(result, *keys):
    """The words that the refusal says would allow it."""
    assert result.exit_code == BAD_USAGE
    line = result.stderr.strip().splitlines()[-1]
    assert line.startswith("emtau: ")
    words = re.search(r"If you want it, add: (--set .*)$", line)[1]
    settings = shlex.split(words)[1::2]
    assert [setting.partition("=")[0] for setting in settings] == list(keys), line
    return shlex.split(words)


@contextmanager
def listening():
    """A port, and the connections that came to it."""
    came = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept():
            while True:
                try:
                    came.append(server.accept()[0])
                except OSError:
                    return

        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1], came
        server.shutdown(socket.SHUT_RDWR)
    for connection in came:
        connection.close()


class TestAScheduler:
    def test_is_not_spoken_to(self, made_up):
        with listening() as (port, came):
            run = made_up(cluster={"scheduler": f"tcp://127.0.0.1:{port}"})
            before = tree(run.parent)
            words = refused_for(emtau("resume", run, *MORE), "cluster.scheduler")
            assert words == ["--set", f"cluster.scheduler=tcp://127.0.0.1:{port}"]
            assert came == []
        assert tree(run.parent) == before

    def test_that_is_given_stands_for_all_that_the_checkpoint_says_of_clusters(self, made_up):
        tls = {"ca_file": "/a", "cert": "/b", "key": "/c"}
        run = made_up(cluster={"scheduler": "tls://192.0.2.1:1", "tls": tls})
        refused_for(
            emtau("resume", run, *MORE),
            "cluster.scheduler", "cluster.tls.ca_file", "cluster.tls.cert", "cluster.tls.key",
        )  # fmt: skip
        result = emtau("resume", run, *MORE, "--scheduler", "threads")
        assert result.exit_code == NOT_CONVERGED, result.stderr


class TestResults:
    @pytest.fixture
    def precious(self, begun, tmp_path):
        """The results of another fit, elsewhere."""
        other = tmp_path / "other"
        config = begun / "run.yaml"
        result = emtau(
            "fit", config, "--set", "checkpoint.path=null", "--set", f"output.directory={other}", *MORE
        )
        assert result.exit_code == NOT_CONVERGED, result.stderr
        return other

    @pytest.mark.parametrize("how", ["directory", "absolute", "climbing", "link", "hidden"])
    def test_elsewhere_are_not_written(self, how, made_up, precious):
        sent = precious.parent / "sent"
        output = {
            "directory": {"directory": str(precious)},
            "absolute": {"model": str(precious / "model.zarr")},
            "climbing": {"labels": "../other/labels.zarr"},
            "link": {"directory": str(sent / "link")},
            "hidden": {"directory": str(sent / ".config")},
        }[how]
        run = made_up(output=output)
        (sent / "link").symlink_to(precious)
        before = tree(precious.parent)
        key = "directory" if how in ("link", "hidden") else next(iter(output))
        words = refused_for(emtau("resume", run, *MORE), f"output.{key}")
        assert tree(precious.parent) == before
        if how != "hidden":
            again = emtau("resume", run, *MORE, *words)
            assert again.exit_code == FAILED
            assert "--overwrite" in again.stderr
            assert tree(precious.parent) == before

    def test_beside_the_checkpoint_are_replaced_on_request_alone_unless_its_own(self, made_up, precious):
        run = made_up()
        shutil.copytree(precious / "model.zarr", run.parent / "model.zarr")
        before = tree(run.parent)
        result = emtau("resume", run, *MORE)
        assert result.exit_code == FAILED
        assert f"{run.parent / 'model.zarr'} already exists; use --overwrite" in result.stderr
        assert tree(run.parent) == before
        result = emtau("resume", run, *MORE, "--overwrite")
        assert result.exit_code == NOT_CONVERGED, result.stderr
        result = emtau("resume", run, "--set", "stop.max_iter=5")
        assert result.exit_code == NOT_CONVERGED, result.stderr
        assert GaussianMixture.load(run.parent / "model.zarr").n_iter_ == 5
        assert (
            zarr.open_group(run.parent / "labels.zarr").attrs["run"]
            == json.loads(emtau("inspect", run, "--json").stdout)["run"]
        )

    def test_that_another_run_wrote_meanwhile_stay(self, begun, tmp_path):
        """The results of a run are its own by its id, not by their place."""
        home = tmp_path / "home"
        shutil.copytree(begun, home)
        where = ("--set", f"output.directory={home}", "--set", f"checkpoint.path={home / 'run.zarr'}")
        result = emtau("fit", begun / "run.yaml", *where, "--overwrite")
        assert result.exit_code == NOT_CONVERGED, result.stderr
        shutil.rmtree(home / "run.zarr")
        shutil.copytree(begun / "run.zarr", home / "run.zarr")
        before = tree(home / "model.zarr")
        result = emtau("resume", home / "run.zarr", *MORE, "--set", f"output.directory={home}")
        assert result.exit_code == FAILED
        assert tree(home / "model.zarr") == before


class TestData:
    def test_behind_urls_is_not_fetched(self, made_up, begun):
        asked = []

        class Server(BaseHTTPRequestHandler):
            def do_GET(self):
                asked.append(self.path)
                self.send_error(404)

            do_HEAD = do_GET  # noqa: N815

            def log_message(self, *_):
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            url = f"http://127.0.0.1:{server.server_port}/rows.npy"
            run = made_up(data={"path": url, "weights": f"simplecache::{url}", "labels": url})
            refused_for(emtau("resume", run, *MORE), "data.path", "data.weights", "data.labels")
            shutil.rmtree(run.parent)
            several = ["rows of mine.npy", url.replace("rows", "*")]
            words = refused_for(emtau("resume", made_up(data={"path": several}), *MORE), "data.path")
            assert yaml.safe_load(words[1].partition("=")[2]) == several
            assert asked == []
            server.shutdown()
        result = emtau(
            "resume", run, *MORE, "--set", f"data.path={begun / 'rows.zarr'}",
            "--set", "data.weights=null", "--set", "data.labels=null",
        )  # fmt: skip
        assert result.exit_code == NOT_CONVERGED, result.stderr

    def test_is_read_and_never_made(self, made_up, tmp_path):
        options = {"dataset": "mixture", "rows": 10**12}
        for path in (str(tmp_path / "made.zarr"), None):
            run = made_up(data={"path": path, "dataset": "mixture", "dataset_options": options})
            before = tree(tmp_path)
            result = emtau("resume", run, *MORE)
            assert result.exit_code == FAILED
            assert "--set data.path=" in result.stderr
            assert tree(tmp_path) == before
            shutil.rmtree(run.parent)


@pytest.mark.kills
def test_ones_own_run_goes_on_with_what_an_interrupt_says(begun, tmp_path):
    """Results that do not lie beside the checkpoint are named in the command that goes on."""
    out = tmp_path / "results" / "with  two spaces: and a colon"
    settings = [
        "--set", "stop.max_iter=1000000",
        "--set", f"checkpoint.path={tmp_path / 'scratch' / 'run.zarr'}",
        "--set", f'output.directory="{out}"',
    ]  # fmt: skip
    command = [*EMTAU, "fit", str(begun / "run.yaml"), "-v", *settings]
    fit = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    for line in fit.stderr:
        if line.startswith("iteration 5:"):
            fit.terminate()
            break
    last = fit.communicate()[1].strip().splitlines()[-1]
    words = shlex.split(re.search(r"Resume with: emtau (resume .*)", last)[1])
    assert emtau(*words[:2], "--set", "stop.max_iter=1").exit_code == BAD_USAGE
    result = emtau(*words, "--set", "stop.max_iter=1")
    assert result.exit_code == NOT_CONVERGED, result.stderr
    assert Path(out, "model.zarr").exists()


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ("stop", "max_iter"),
        ("data", "path"),
        ("model", "n_components"),
        ("algorithm", "name"),
    ],
)
def test_a_config_with_the_tags_of_yaml_is_text(made_up, tmp_path, section, key):
    """The config of a checkpoint is JSON: nothing in it is parsed as YAML."""
    trap = tmp_path / "trap"
    run = made_up(**{section: {key: f"!!python/object/apply:os.system ['touch {trap}']"}})
    for command in (
        ["resume", run],
        ["resume", run, "--set", "stop.tol=0"],
        ["report", run, tmp_path / "a.html"],
    ):
        result = emtau(*command)
        assert result.exit_code in (FAILED, BAD_USAGE), (command, result.output)
        assert result.stderr.splitlines()[-1].startswith("emtau: ")
    assert emtau("inspect", run).exit_code == 0
    assert not trap.exists()
