"""The command line on mutated inputs: exit codes, one line of error, no half results."""

import io
import shutil
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace

import numpy as np
import yaml
import zarr

from emtau_dask import EmtauError, GaussianMixture
from emtau_dask.cli.main import main
from emtau_dask.data.opening import as_source, open_source
from reliability.fuzz import configs, models, npy, parquet, rows, zarrs
from reliability.fuzz.oracle import SLACK, ForeignError, WrongError, unprintable

DATA = {"npy": npy, "zarr": zarrs, "parquet": parquet}
FEW_VALUES = 100_000


def called(*arguments):
    """Run ``emtau`` in this process; return its exit code, output and error output."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = main.main(
                args=[str(argument) for argument in arguments], prog_name="emtau", standalone_mode=True
            )
        except SystemExit as end:
            code = end.code
    return code or 0, out.getvalue(), err.getvalue()


def judged(code, out, err):
    """Return the word for how a command ended; raise `WrongError` where it may not end so."""
    if bad := unprintable((out + err).replace("\t", " ").replace("\r", " ")):
        raise WrongError(f"it printed {bad!r}: {(out + err)[-300:]!r}")
    if code in (0, 3):
        return "right"
    lines = err.strip().splitlines()
    if code not in (1, 2) or not lines or not lines[-1].startswith(("emtau: ", "Error: ")):
        raise WrongError(f"exit {code}: {err[-300:]!r}")
    if "--debug" in lines[-1] or "Traceback" in err:
        raise ForeignError(f"another library's error: {lines[-1][:300]}")
    return f"exit {code}"


def make(folder):
    """Write the originals: data of every kind, configs and a model."""
    for name, kind in DATA.items():
        (folder / name).mkdir()
        (zarrs.make_v3 if kind is zarrs else kind.make)(folder / name)
    (folder / "v2").mkdir()
    zarrs.make_v2(folder / "v2")
    (folder / "config").mkdir()
    configs.make(folder / "config")
    (folder / "model").mkdir()
    models.make(folder / "model")
    random = np.random.default_rng(3)
    for d in (2, 3):
        GaussianMixture(2, max_iter=2, random_state=0).fit(random.normal(size=(50, d))).save(
            folder / f"good-{d}"
        )
    np.save(folder / "rows.npy", random.normal(size=(50, 2)))


def originals(folder):
    """Return what may be mutated."""
    return [
        path
        for kind in ("npy", "zarr", "v2", "parquet", "config", "model")
        for path in (folder / kind).iterdir()
    ]


def mutate(case):
    """Mutate as the kind of the original does."""
    kind = {"npy": npy, "zarr": zarrs, "v2": zarrs, "parquet": parquet, "config": configs, "model": models}
    own = case.original.parent
    return kind[own.name].mutate(replace(case, corpus=own))


def target(case):
    """Call the commands that take such an input."""
    kind = case.original.parent.name
    out = case.place.parent / "out.zarr"
    shutil.rmtree(out, ignore_errors=True)
    if kind == "model":
        if case.chance.random() < 0.3:
            return judged(*called("inspect", case.place))
        return _predicted(case, out, case.place, case.corpus / "rows.npy")
    if kind == "config":
        return _planned(case, case.place)
    if case.chance.random() < 0.5:
        config = case.place.parent / "config.yaml"
        config.write_text(yaml.safe_dump({"data": {"path": str(case.place)}, "model": {"n_components": 2}}))
        return _planned(case, config)
    if not _small(case):
        return "described"
    return _predicted(case, out, case.corpus / f"good-{case.chance.choice([2, 3])}", case.place)


def _planned(case, config):
    """Plan a fit, whose data stay local and are not made."""
    content = config.read_bytes() if config.is_file() else b""
    if b"://" in content or b"::" in content or b"dataset" in content:
        return "not tried"
    return judged(*called("fit", config, "--plan"))


def _small(case):
    """Whether the data are few enough to be labelled here, as far as they can be opened at all."""
    try:
        source = as_source(open_source(str(case.place)), ndim=2, what="X")
        size = np.prod(source.shape, dtype=object)
        peaks = (
            [source.ranges.peak_bytes(*each) for each in rows.ranges_of(source)] if size <= FEW_VALUES else []
        )
    except EmtauError:
        return True
    case.allowed = SLACK + 4 * max(peaks, default=0)
    return size <= FEW_VALUES and max(peaks, default=0) <= rows.READ_BYTES // 2


def _predicted(case, out, model, data):
    code, printed, err = called("predict", model, data, out, "--workers", "2")
    ended = judged(code, printed, err)
    left = sorted(path.name for path in case.place.parent.iterdir() if path.name.startswith(out.name))
    if ended == "right":
        labels = zarr.open_group(out, mode="r")["labels"][...]
        expected = GaussianMixture.load(model).predict(_rows(data))
        if not np.array_equal(labels, expected):
            raise WrongError("labels differ from those of predict")
    elif left:
        raise WrongError(f"it left {left}")
    return ended


def _rows(path):
    source = as_source(open_source(str(path)), ndim=2, what="X")
    parts = [source.ranges.read(*each)[0] for each in rows.ranges_of(source)]
    return np.concatenate([np.empty((0, source.shape[1]), source.dtype), *parts])
