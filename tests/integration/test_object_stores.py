"""Data behind URLs: the same rows, bytes and fits as from local files, whatever way they are read."""

import os
import pickle
import sys
import threading
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import accumulate, pairwise
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import zarr
from commands import emtau
from distributed import Client
from fits import ROWS, assert_same_bits, mixture, quietly

from emtau_dask import EMTau, GaussianMixture, InvalidDataError
from emtau_dask.data.opening import as_dask, as_source, open_source
from emtau_dask.data.parquet_files import is_parquet

pytest_plugins = "s3server"

N, D = ROWS.shape
WEIGHTS = np.random.default_rng(0).uniform(0.5, 2, size=N).round(1)


def write_parquet(path, rows, row_group_size, **more):
    path.parent.mkdir(exist_ok=True, parents=True)
    columns = {f"f{j}": rows[:, j] for j in range(D)} | more
    pq.write_table(pa.table(columns), path, row_group_size=row_group_size)


def array(path):
    zarr.create_array(store=path, data=ROWS, chunks=(100, D))


def group(path):
    members = zarr.create_group(path)
    members.create_array("X", data=ROWS, chunks=(100, 1))
    members.create_array("weights", data=WEIGHTS, chunks=(70,))


def array_of_format_2(path):
    zarr.create_array(store=path, data=ROWS, chunks=(100, D), zarr_format=2)


def shards(path):
    zarr.create_array(store=path, data=ROWS, chunks=(20, D), shards=(100, D))


def parquet(path):
    write_parquet(path, ROWS, 100)


def parquet_folder(path):
    """In the order of paths: a letter more comes after a folder."""
    write_parquet(path / "b-last.parquet", ROWS[250:], 30)
    write_parquet(path / "b" / "middle.parquet", ROWS[150:250], 100)
    write_parquet(path / "a.parquet", ROWS[:150], 100)


def npy(path):
    np.save(path, ROWS)


def npy_by_column(path):
    np.save(path, np.asfortranarray(ROWS))


KINDS = {
    "rows.zarr": array,
    "group.zarr": group,
    "old.zarr": array_of_format_2,
    "shards.zarr": shards,
    "rows.parquet": parquet,
    "folder": parquet_folder,
    "rows.npy": npy,
    "columns.npy": npy_by_column,
}
SOME = ["rows.zarr", "rows.parquet", "rows.npy"]


@pytest.fixture
def made(tmp_path, request):
    """The local path of rows of the kind that the test is for."""
    path = tmp_path / request.param
    KINDS[request.param](path)
    return path


of_every_kind = pytest.mark.parametrize("made", KINDS, indirect=True)
of_some_kinds = pytest.mark.parametrize("made", SOME, indirect=True)
of_one_kind = pytest.mark.parametrize(
    "made", [SOME[0], *(pytest.param(kind, marks=pytest.mark.soak) for kind in SOME[1:])], indirect=True
)


def upload(s3, path):
    return s3.upload(path, path.name)


def all_reads(source):
    """Rows and bytes of every chunk."""
    return [source.ranges.read(*edges)[:2] for edges in pairwise((0, *accumulate(source.chunk_rows)))]


def assert_same(remote, local):
    assert (remote.shape, remote.dtype, remote.names) == (local.shape, local.dtype, local.names)
    assert remote.chunk_rows == local.chunk_rows
    for (rows, size), (expected, expected_size) in zip(all_reads(remote), all_reads(local), strict=True):
        assert np.array_equal(rows, expected)
        assert size == expected_size


class TestRows:
    @of_every_kind
    def test_they_are_those_of_the_local_files_with_the_bytes_read(self, s3, made):
        assert_same(open_source(upload(s3, made)), open_source(str(made)))

    @of_some_kinds
    def test_any_range_of_rows_can_be_read_after_a_fork_and_a_trip_by_pickle_too(self, s3, made):
        ranges = open_source(upload(s3, made)).ranges
        copy = pickle.loads(pickle.dumps(ranges))
        for start, stop in [(0, N), (37, 38), (99, 201), (N - 1, N), (0, 0)]:
            assert np.array_equal(ranges.read(start, stop)[0], ROWS[start:stop])
        assert np.array_equal(copy.read(5, 15)[0], ROWS[5:15])
        child = os.fork()
        if not child:
            os._exit(not np.array_equal(ranges.read(5, 15)[0], ROWS[5:15]))
        assert os.waitpid(child, 0)[1] == 0

    @of_some_kinds
    def test_several_match_a_pattern(self, s3, made):
        for name in ("part-10", "part-9"):
            s3.upload(made, f"many/{name}{made.suffix}")
        source = open_source(s3.url(f"many/part-*{made.suffix}"))
        assert np.array_equal(as_dask(source).compute(), np.concatenate([ROWS, ROWS]))
        s3.remove("many")

    @of_some_kinds
    def test_file_urls_are_local_paths(self, made):
        assert_same(open_source(f"file://{made}"), open_source(str(made)))
        assert is_parquet(f"file://{made}") is is_parquet(str(made))

    @of_some_kinds
    def test_a_file_system_without_coroutines(self, made):
        files = fsspec.filesystem("memory")
        files.put(str(made), f"/emtau/{made.name}", recursive=True)
        try:
            assert_same(open_source(f"memory://emtau/{made.name}"), open_source(str(made)))
        finally:
            files.rm("/emtau", recursive=True)

    @of_some_kinds
    def test_http(self, s3, made):
        upload(s3, made)
        for name in s3.files.find(s3.bucket):
            s3.files.chmod(name, "public-read")
        assert_same(open_source(f"{s3.endpoint}/{s3.bucket}/{made.name}"), open_source(str(made)))

    def test_chosen_columns_and_members(self, s3, tmp_path):
        parquet(tmp_path / "rows.parquet")
        group(tmp_path / "group.zarr")
        columns = open_source(upload(s3, tmp_path / "rows.parquet"), columns=["f1"])
        member = open_source(upload(s3, tmp_path / "group.zarr"), array="weights")
        assert np.array_equal(columns.ranges.read(0, N)[0], ROWS[:, 1:])
        assert np.array_equal(member.ranges.read(0, N)[0], WEIGHTS)

    def test_chunks_that_were_never_written(self, s3, tmp_path):
        rows = np.zeros((30, 2))
        rows[:10] = 1
        zarr.create_array(store=tmp_path / "x.zarr", data=rows, chunks=(10, 2))
        reads = all_reads(open_source(upload(s3, tmp_path / "x.zarr")))
        assert np.array_equal(np.concatenate([read for read, _ in reads]), rows)
        assert [size for _, size in reads][1:] == [0, 0]

    def test_a_file_that_was_added_to_a_folder_is_seen(self, s3, tmp_path):
        parquet_folder(tmp_path / "folder")
        url = upload(s3, tmp_path / "folder")
        open_source(url)
        write_parquet(tmp_path / "more.parquet", ROWS[:7], 7)
        s3.upload(tmp_path / "more.parquet", "folder/c.parquet")
        assert open_source(url).shape == (N + 7, D)


class TestRequests:
    def test_a_zarr_chunk_is_one_request(self, s3, tmp_path):
        array(tmp_path / "rows.zarr")
        ranges = open_source(upload(s3, tmp_path / "rows.zarr")).ranges
        s3.proxy.requests.clear()
        ranges.read(100, 200)
        assert s3.proxy.requests == [("GET", f"/{s3.bucket}/rows.zarr/c/1/0")]

    def test_a_zarr_array_needs_no_listing_and_no_question_that_may_be_forbidden(self, s3, tmp_path):
        group(tmp_path / "group.zarr")
        url = upload(s3, tmp_path / "group.zarr")
        known = ("zarr.json", "X/c/0/0", "X/c/0/1")
        s3.proxy.fail("403", match=lambda method, path: not path.endswith(known))
        assert np.array_equal(open_source(url).ranges.read(0, 50)[0], ROWS[:50])

    @pytest.mark.parametrize("name", ["rows.npy", "rows.parquet"])
    def test_files_are_read_by_ranges(self, s3, tmp_path, name):
        rows = np.random.default_rng(0).normal(size=(100_000, 2))
        path = tmp_path / name
        np.save(path, rows) if name.endswith(".npy") else write_parquet(path, rows, 1000)
        ranges = open_source(upload(s3, path)).ranges
        s3.proxy.sent = 0
        read, stored = ranges.read(50_000, 51_000)[:2]
        assert np.array_equal(read, rows[50_000:51_000])
        assert stored <= s3.proxy.sent <= stored + 2**16 < path.stat().st_size / 10

    @pytest.mark.parametrize("name", ["a.zarr", "a.npy", "a.parquet", "a.pq", "folder/a.parquet"])
    def test_a_name_that_says_it_all_is_not_looked_up(self, s3, name):
        assert is_parquet(s3.url(name)) is name.endswith(("parquet", "pq"))
        assert s3.proxy.requests == []


class TestFits:
    @of_some_kinds
    @pytest.mark.parametrize("algorithm", ["em", EMTau(tau=3)], ids=str)
    def test_a_url_gives_the_bits_of_the_local_file(self, s3, made, algorithm):
        settings = {"algorithm": algorithm, "tol": 0, "max_iter": 6, "init_params": "k-means++"}
        remote = quietly(mixture(**settings), upload(s3, made))
        local = quietly(mixture(**settings), str(made))
        assert_same_bits(remote, local)
        assert remote.history_ == local.history_ or [r.bytes_read for r in remote.history_] == [
            r.bytes_read for r in local.history_
        ]

    @pytest.mark.cluster
    def test_on_workers_of_a_cluster(self, s3, tmp_path):
        for name in SOME:
            KINDS[name](tmp_path / name)
        settings = {"algorithm": EMTau(tau=3), "tol": 0, "max_iter": 3}
        with Client(n_workers=1, threads_per_worker=2, dashboard_address=None):
            fits = [quietly(mixture(**settings), upload(s3, tmp_path / name)) for name in SOME]
        for fit, name in zip(fits, SOME, strict=True):
            assert_same_bits(fit, quietly(mixture(**settings), str(tmp_path / name)))


CONFIG = """
model: {n_components: 3, random_state: 0}
algorithm: {name: em-tau, tau: 5}
output: {directory: out}
"""


class TestCommandLine:
    @pytest.fixture(autouse=True)
    def workplace(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        Path("run.yaml").write_text(CONFIG, encoding="utf-8")
        group(Path("group.zarr"))
        write_parquet(Path("rows.parquet"), ROWS, 100, w=WEIGHTS)
        write_parquet(Path("plain.parquet"), ROWS, 100)
        np.save("weights.npy", WEIGHTS)
        pq.write_table(pa.table({"w": WEIGHTS}), "weights.parquet")
        names = ["group.zarr", "rows.parquet", "plain.parquet", "weights.npy", "weights.parquet"]
        return [tmp_path / name for name in names]

    def fitted(self, folder, path, weights):
        settings = [f"data={{path: '{path}', weights: '{weights}'}}", f"output.directory={folder}"]
        result = emtau("fit", "run.yaml", *(word for s in settings for word in ("--set", s)))
        assert result.exit_code == 0, result.stderr
        return GaussianMixture.load(f"{folder}/model.zarr")

    @pytest.mark.parametrize(
        ("path", "weights"),
        [
            ("group.zarr", "weights"),
            ("rows.parquet", "w"),
            ("plain.parquet", "{}weights.npy"),
            ("plain.parquet", "{}weights.parquet"),
        ],
    )
    @pytest.mark.parametrize("scheme", ["s3", "file"])
    def test_a_config_may_name_urls(self, s3, workplace, path, weights, scheme):
        for each in workplace:
            upload(s3, each)
        root = s3.url("") if scheme == "s3" else f"file://{workplace[0].parent}/"
        expected = self.fitted("local", path, weights.format("./"))
        assert_same_bits(self.fitted("remote", root + path, weights.format(root)), expected)

    def test_predict_may_read_a_url(self, s3, workplace):
        self.fitted("out", "rows.parquet", "w")
        upload(s3, workplace[1])
        for data, out in ((s3.url("rows.parquet"), "a.zarr"), ("rows.parquet", "b.zarr")):
            result = emtau("predict", "out", data, out)
            assert result.exit_code == 0, result.stderr
        a, b = (np.asarray(zarr.open_group(out, mode="r")["labels"]) for out in ("a.zarr", "b.zarr"))
        assert np.array_equal(a, b)

    def test_results_do_not_replace_what_a_file_url_names(self, workplace):
        self.fitted("out", "rows.parquet", "w")
        result = emtau("predict", "out", f"file://{workplace[0]}", "group.zarr", "--overwrite")
        assert result.exit_code == 1
        assert "which this run reads" in result.stderr

    def test_results_go_to_local_folders(self):
        result = emtau("predict", "out", "rows.parquet", "s3://bucket/labels.zarr")
        assert result.exit_code == 1
        assert "is a URL" in result.stderr

    def test_a_dataset_is_made_in_local_folders(self):
        result = emtau("fit", "run.yaml", "--set", "data={dataset: digits, path: 's3://bucket/d.zarr'}")
        assert result.exit_code == 2
        assert "data.path = 's3://bucket/d.zarr' is a URL" in result.stderr


class TestIdentity:
    @of_every_kind
    def test_it_is_that_of_the_local_files(self, s3, made):
        identity = open_source(upload(s3, made)).ranges.identity()
        assert identity == open_source(str(made)).ranges.identity()
        assert len(identity) < 200

    @of_some_kinds
    @pytest.mark.parametrize("where", ["s3", "local"])
    def test_it_is_another_where_the_data_are(self, s3, made, where):
        place = str(made) if where == "local" else upload(s3, made)
        ranges = open_source(place).ranges
        before = ranges.identity()
        for path in (made, *made.rglob("*")):
            if path.name in ("zarr.json", ".zarray"):
                path.write_text(path.read_text().replace("300", "299"))
            elif path.suffix == ".npy":
                np.save(path, ROWS[1:])
            elif path.suffix == ".parquet":
                write_parquet(path, ROWS[1:], 100)
        if where == "s3":
            upload(s3, made)
        assert ranges.identity() != before

    @of_some_kinds
    @pytest.mark.parametrize("where", ["s3", "local"])
    def test_without_the_data_there_is_none(self, s3, made, where):
        place = str(made) if where == "local" else upload(s3, made)
        ranges = open_source(place).ranges
        if where == "s3":
            s3.remove()
        else:
            made.rename(made.with_name("elsewhere"))
        with pytest.raises(InvalidDataError, match=made.name):
            ranges.identity()

    def test_an_array_in_memory_is_with_its_reader(self):
        ranges = as_source(ROWS, ndim=2, what="X").ranges
        assert ranges.identity() == "memory"
        assert ranges.peak_bytes(0, 10) == ROWS[:10].nbytes


@pytest.fixture
def impatient(monkeypatch):
    """Nothing is tried again."""
    retries = {"mode": "standard", "total_max_attempts": 1}
    monkeypatch.setitem(fsspec.config.conf, "s3", {"config_kwargs": {"retries": retries}})
    monkeypatch.setattr("emtau_dask.storage.urls.FIRST_PAUSE", 0)


FAULTS = {
    "500": "internal error|Internal Server Error.*server failed.*try again",
    "403": "Access is denied: give credentials",
    "drop": "server does not answer: check the network and the endpoint",
    "cut": "try again|check the network",
}


@pytest.mark.usefixtures("impatient")
class TestFaults:
    @of_one_kind
    @pytest.mark.parametrize("mode", FAULTS)
    def test_opening(self, s3, made, mode):
        url = upload(s3, made)
        s3.proxy.fail(mode)
        with pytest.raises(InvalidDataError, match=FAULTS[mode]) as caught:
            open_source(url)
        assert url in str(caught.value)

    @of_one_kind
    @pytest.mark.parametrize("mode", FAULTS)
    def test_reading(self, s3, made, mode):
        url = upload(s3, made)
        ranges = open_source(url).ranges
        s3.proxy.fail(mode)
        with pytest.raises(InvalidDataError, match=FAULTS[mode]) as caught:
            ranges.read(0, 10)
        assert url in str(caught.value)

    @of_one_kind
    @pytest.mark.parametrize("mode", ["500", "cut"])
    def test_in_the_middle_of_a_fit(self, s3, made, mode):
        url = upload(s3, made)
        s3.proxy.fail(mode, after=12)
        with pytest.raises(InvalidDataError, match=FAULTS[mode]) as caught:
            mixture(tol=0, max_iter=20).fit(url)
        assert url in str(caught.value)

    @of_one_kind
    def test_an_endpoint_that_is_not_there(self, s3, made, monkeypatch):
        url = upload(s3, made)
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
        with pytest.raises(InvalidDataError, match=rf"{url}.*server does not answer"):
            open_source(url)

    @of_one_kind
    def test_nothing_there_and_no_such_bucket(self, s3, made):
        for prepare in (lambda: None, s3.remove):
            prepare()
            with pytest.raises(InvalidDataError, match=rf"{s3.url(made.name)}.*(Nothing is there|holds no)"):
                open_source(s3.url(made.name))

    @of_one_kind
    def test_data_that_vanish_after_they_were_opened(self, s3, made):
        ranges = open_source(upload(s3, made)).ranges
        s3.remove()
        with pytest.raises(InvalidDataError, match=rf"{made.name}.*Nothing is there"):
            ranges.read(0, 10)

    def test_a_local_zarr_array_that_vanishes_is_not_taken_for_zeros(self, tmp_path):
        array(tmp_path / "x.zarr")
        ranges = open_source(str(tmp_path / "x.zarr")).ranges
        (tmp_path / "x.zarr").rename(tmp_path / "y.zarr")
        with pytest.raises(InvalidDataError, match=r"x\.zarr.*Nothing is there"):
            ranges.read(0, 10)

    @pytest.mark.parametrize("name", ["x.npy", "x.parquet", "x.zarr/zarr.json"])
    def test_nonsense(self, s3, name):
        s3.files.pipe_file(f"{s3.bucket}/{name}", b"nonsense" * 100)
        with pytest.raises(InvalidDataError, match=s3.url(name.removesuffix("/zarr.json"))):
            open_source(s3.url(name.removesuffix("/zarr.json")))

    @pytest.mark.parametrize("name", ["rows.npy", "rows.parquet"])
    def test_a_file_that_was_replaced_by_a_shorter_one(self, s3, tmp_path, name):
        KINDS[name](tmp_path / name)
        ranges = open_source(upload(s3, tmp_path / name)).ranges
        s3.files.pipe_file(f"{s3.bucket}/{name}", (tmp_path / name).read_bytes()[:500])
        with pytest.raises(InvalidDataError, match=s3.url(name)):
            ranges.read(200, N)

    def test_a_truncated_npy_file(self, s3, tmp_path):
        npy(tmp_path / "x.npy")
        s3.files.pipe_file(f"{s3.bucket}/x.npy", (tmp_path / "x.npy").read_bytes()[:-1])
        with pytest.raises(InvalidDataError, match="it has 4,927 bytes of 4,928"):
            open_source(s3.url("x.npy"))

    def test_a_server_without_ranges(self, tmp_path):
        npy(tmp_path / "x.npy")
        with http_server(tmp_path) as address:
            ranges = open_source(f"{address}/x.npy").ranges
            with pytest.raises(InvalidDataError, match="its server ignores ranges"):
                ranges.read(0, 10)

    @pytest.mark.parametrize("name", ["x.csv", "x.parquet"])
    def test_a_server_that_does_not_say_how_long_a_file_is(self, name, tmp_path):
        table = pa.table({f"f{j}": ROWS[:, j] for j in range(D)})
        (pa.csv.write_csv if name == "x.csv" else pq.write_table)(table, tmp_path / name)
        said = rf"{name}: its server does not say how many bytes .* a local copy"
        with http_server(tmp_path, Lengthless) as address, pytest.raises(InvalidDataError, match=said):
            open_source(f"{address}/{name}")


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


class Lengthless(Quiet):
    """Ends an answer by closing the connection."""

    def send_header(self, keyword, value):
        if keyword != "Content-Length":
            super().send_header(keyword, value)


@contextmanager
def http_server(folder, handler=Quiet):
    """A server of files that knows no ranges."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@of_one_kind
@pytest.mark.parametrize("mode", ["500", "drop", "cut", "slow"])
def test_what_passes_is_waited_for(s3, made, mode):
    url = upload(s3, made)
    s3.proxy.fail(mode, times=2)
    ranges = open_source(url).ranges
    s3.proxy.fail(mode, times=2)
    assert np.array_equal(ranges.read(0, N)[0], ROWS)


class TestMissingPackages:
    @pytest.mark.parametrize(("protocol", "extra", "package"), [("s3", "s3", "s3fs"), ("gs", "gs", "gcsfs")])
    @pytest.mark.parametrize("name", SOME)
    def test_the_extra_is_named(self, monkeypatch, protocol, extra, package, name):
        monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, protocol, raising=False)
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(InvalidDataError, match=rf"pip install 'emtau_dask\[{extra}\]'"):
            open_source(f"{protocol}://bucket/{name}")

    @pytest.mark.parametrize("url", ["nowhere://bucket/x.zarr", "nowhere://x.npy", "s4://x/y.parquet"])
    def test_an_unknown_protocol(self, url):
        with pytest.raises(InvalidDataError, match=r"no kind of URL that fsspec knows\. Give a local path"):
            open_source(url)
