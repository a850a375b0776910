"""Passwords and signatures of URLs are kept nowhere; escape sequences of files are shown as text."""

import contextlib
import json
import re
import shutil
import threading
import traceback
from base64 import b64encode
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO

import numpy as np
import pytest
from commands import emtau
from reliability.damage import manifest_of

from emtau_dask import EmtauError, GaussianMixture
from emtau_dask.data.opening import open_source
from emtau_dask.storage.objects import digested_document
from emtau_dask.storage.stores import object_store

NOT_CONVERGED = 3
ROWS = np.random.default_rng(0).normal(size=(200, 2))


class Server(BaseHTTPRequestHandler):
    """Gives rows to who has both secrets; others are told in full what they asked for."""

    def do_GET(self):
        stored = BytesIO()
        np.save(stored, ROWS)
        data = stored.getvalue()
        user = f"Basic {b64encode(b'user:SECRET').decode()}"
        if self.headers["Authorization"] != user or "X-Amz-Signature=SECRET" not in self.path:
            self.send_error(403, f"http://user:SECRET@host{self.path}")
            return
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        self.send_response(206 if found else 200)
        piece = data[int(found[1]) : int(found[2]) + 1] if found else data
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(piece)))
        if found:
            self.send_header("Content-Range", f"bytes {found[1]}-{found[2]}/{len(data)}")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(piece)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def host():
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def contents(folder):
    return b"".join(str(p).encode() + p.read_bytes() for p in folder.rglob("*") if p.is_file())


def test_a_fit_from_a_url_keeps_its_secrets_nowhere_and_is_resumed_with_them(host, tmp_path):
    url = f"http://user:SECRET@{host}/rows.npy?X-Amz-Signature=SECRET"
    config = tmp_path / "run.yaml"
    config.write_text(
        "model: {n_components: 2}\nalgorithm: {name: em}\nstop: {tol: 0.0, max_iter: 2}\n"
        f"checkpoint: {{path: {tmp_path / 'out' / 'run.zarr'}}}\noutput: {{directory: {tmp_path / 'out'}}}\n"
    )
    run, said = tmp_path / "out" / "run.zarr", ""
    result = emtau("fit", config, "--set", f"data.path={url}")
    assert result.exit_code == NOT_CONVERGED, result.stderr
    said += result.stdout + result.stderr
    described = emtau("inspect", run, "--json").stdout
    assert json.loads(described)["run_config"]["data"]["path"] == f"http://…@{host}/rows.npy?…"
    said += described + emtau("inspect", run).stdout
    more = ("resume", run, "--set", "stop.max_iter=3")
    refused = emtau(*more)
    assert refused.exit_code == 2
    assert f"--set 'data.path=http://…@{host}/rows.npy?…'" in refused.stderr
    assert "In place of … write the user, password or query" in refused.stderr
    pasted = emtau(*more, "--set", f"data.path=http://…@{host}/rows.npy?…")
    assert pasted.exit_code == 2
    assert "write them out" in pasted.stderr
    resumed = emtau(*more, "--set", f"data.path={url}")
    assert resumed.exit_code == NOT_CONVERGED, resumed.stderr
    for each in (refused, pasted, resumed):
        said += each.stdout + each.stderr
    assert "SECRET" not in said
    assert b"SECRET" not in contents(tmp_path / "out")


def bad_urls(host):
    return [
        f"http://user:SECRET@{host}/rows.npy",
        f"http://{host}/rows.npy?X-Amz-Signature=SECRET",
        f"http://user:SECRET@{host}/rows.zarr?X-Amz-Signature=SECRET",
        f"http://user:SECRET@{host}/rows.parquet?sig=SECRET",
        f"http://user:SECRET@{host}/group?sig=SECRET",
        f"simplecache::http://user:SECRET@{host}/rows.npy?sig=SECRET",
        "http://user:SECRET@127.0.0.1:1/rows.npy?sig=SECRET",
        "nothing://user:SECRET@host/rows.npy?sig=SECRET",
        "sftp://user:SECRET@127.0.0.1:1/rows.npy",
        "webdav://user:SECRET@127.0.0.1:1/rows.npy",
        "smb://user:SECRET@127.0.0.1:1/rows.npy",
        "ftp://user:SECRET@127.0.0.1:1/rows.npy",
        "s3://KEY:SECRET@bucket/rows.npy",
        "s3://KEY:SEC/RET/SECRET@bucket/rows.zarr",
    ]


@pytest.mark.parametrize("number", range(14))
def test_no_error_shows_a_secret(number, host, tmp_path):
    url = bad_urls(host)[number]
    shown = []
    for attempt in (
        lambda: open_source(url),
        lambda: GaussianMixture.load(url),
        lambda: GaussianMixture(2).fit(open_source(url)),
    ):
        with contextlib.suppress(Exception):
            try:
                attempt()
            except EmtauError as error:
                shown.append("".join(traceback.format_exception(error)))
                raise
    assert shown
    for arguments in (
        ("predict", url, url, tmp_path / "labels.zarr"),
        ("predict", tmp_path, url, url),
        ("inspect", url),
        ("resume", url),
    ):
        result = emtau(*arguments, "--debug")
        assert result.exit_code in (1, 2)
        shown.append(result.output)
    assert [line for text in shown for line in text.splitlines() if "SEC" in line] == []


def test_a_scheduler_takes_no_password(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("data: {dataset: example1}\nmodel: {n_components: 2}\n")
    result = emtau("fit", config, "--scheduler", "tcp://user:SECRET@127.0.0.1:8786", "--debug")
    assert result.exit_code == 2
    assert "without user, password and query" in result.stderr
    assert "SECRET" not in result.output


ESCAPES = "\x1b[31m\x1b]0;title\x07\x9b2J\x7f\u202e[link=x]"


def test_what_a_checkpoint_says_is_shown_as_text(tmp_path):
    GaussianMixture(2, checkpoint=tmp_path / "run.zarr", max_iter=2, tol=1.0, algorithm="em").fit(ROWS)
    run = tmp_path / "sent.zarr"
    shutil.copytree(tmp_path / "run.zarr", run)
    for file in run.glob("commits/*/zarr.json"):
        content = manifest_of(file)
        content["environment"] = {ESCAPES: ESCAPES}
        content["written"] = ESCAPES
        content["config"]["algorithm"] = {"name": None, "kind": ESCAPES, "params": {ESCAPES: ESCAPES}}
        content["run_config"] = {"data": {"path": ESCAPES}}
        content["fit"]["notes"] = [f"{ESCAPES} http://user:SECRET@host"]
        file.write_bytes(digested_document(content))
    for arguments in (
        ("inspect", run),
        ("inspect", run, "--json"),
        ("resume", run),
        ("resume", run, "--debug"),
    ):
        result = emtau(*arguments)
        said = result.output.replace("\n", "")
        assert said.isprintable(), [char for char in said if not char.isprintable()]
        assert "SECRET" not in said
    table = emtau("inspect", run).stdout
    assert "\\x1b[31m" in table
    assert "[link=x]" in table
    assert object_store(run).location == str(run)
