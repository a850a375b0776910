"""Checkpoints: damaged, and made up with digests that fit; resumed, inspected, used for labels."""

import json
import shutil

import dask
import numpy as np
import yaml
import zarr

from emtau_dask import CheckpointError, GaussianMixture
from emtau_dask.storage.objects import digested_document
from reliability import damage, scenarios
from reliability.fuzz import configs, documents
from reliability.fuzz.commands import called, judged
from reliability.fuzz.models import check_usable
from reliability.fuzz.oracle import WrongError
from reliability.scenarios import Scenario

SCENARIO = Scenario("em-tau, revisit", max_iter=3, then=5)
INPUT = "input"
"""The folder beside the originals in which inputs lie, and into which the run on the command line writes."""
STRANGERS = {
    **configs.VOCABULARY,
    "scheduler": ["tcp://127.0.0.1:9", "tls://127.0.0.1:9", "ssh://x", 5],
    "path": ["http://127.0.0.1:9/x.zarr", "s3://bucket/x.zarr", "/etc/hostname", "rows.npy"],
    "directory": ["/tmp/elsewhere", "/", ".."],
    "preload": ["os"],
}


def make(folder):
    """Write a run stopped at ``max_iter``, the bits that it goes on to, and one begun on the command line."""
    rows = scenarios.rows_of(SCENARIO)
    with dask.config.set(scheduler="synchronous"):
        for name, max_iter in (("run", SCENARIO.max_iter), ("further", SCENARIO.then)):
            model = SCENARIO.model(folder / name).set_params(max_iter=max_iter).fit(rows)
    (folder / "bits.json").write_text(json.dumps(scenarios.bits_of(model, folder / "further")))
    np.save(folder / "rows.npy", scenarios.ROWS)
    content = {
        "data": {"path": str(folder / "rows.npy")},
        "model": {"n_components": 3},
        "algorithm": {"name": "em-tau"},
        "stop": {"max_iter": 2, "tol": 0},
        "checkpoint": {"path": str(folder / "command")},
        "output": {"directory": str(folder.parent / INPUT / "out")},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    code, _, err = called("fit", folder / "config.yaml")
    assert code == 3, err


def originals(folder):
    """Return what may be mutated."""
    return [folder / "run", folder / "run", folder / "run", folder / "command"]


def mutate(case):
    """Write a mutated copy; return what was done."""
    scenarios.copied(case.original, case.place)
    chance = case.chance
    if case.original.name == "command" and chance.random() < 0.6:
        return _stranger(case)
    case.lies = chance.random() < 0.5
    return chance.choice(damage.LIES if case.lies else damage.DAMAGE)(chance, case.place)


def _stranger(case):
    """Lie about the config that travels inside."""
    case.lies = True
    file = damage.newest_commit(case.place)
    content = damage.manifest_of(file)
    holder = next(
        part for part in (content, *content.values()) if isinstance(part, dict) and "run_config" in part
    )
    sections = holder["run_config"]
    if case.chance.random() < 0.5:
        key = case.chance.choice(["scheduler", "directory", "path"])
        section = {"scheduler": "cluster", "directory": "output", "path": "data"}[key]
        sections.setdefault(section, {})[key] = case.chance.choice(STRANGERS[key])
        what = f"{section}.{key} = {sections[section][key]}"
    else:
        holder["run_config"], what = documents.altered(case.chance, sections, STRANGERS)
    try:
        file.write_bytes(digested_document(content))
    except (RecursionError, ValueError):
        file.write_bytes(b"[" * 10**6)
    return f"run_config: {what}"


def target(case):
    """Resume, inspect or use what is there."""
    if case.original.name == "command":
        how = case.chance.choice([_resumed_by_command, _inspected, _labelled])
        return how(case)
    if case.chance.random() < 0.3:
        return _inspected(case)
    return _resumed(case)


def _resumed(case):
    with dask.config.set(scheduler="synchronous"):
        model = GaussianMixture.resume(case.place, scenarios.rows_of(SCENARIO), max_iter=SCENARIO.then)
        check_usable(model)
        if case.lies:
            return "fitted"
        try:
            bits = scenarios.bits_of(model, case.place)
        except CheckpointError as error:
            raise WrongError(f"its last commit cannot be read: {error}") from error
    expected = json.loads((case.corpus / "bits.json").read_text())
    if parts := scenarios.differences(bits, expected):
        raise WrongError(f"other bits in {', '.join(parts)}")
    return "right"


def _resumed_by_command(case):
    code, out, err = called("resume", case.place, "--set", "stop.max_iter=3")
    return judged(code, out, err)


def _inspected(case):
    code, out, err = called("inspect", case.place, *case.chance.choice([[], ["--json"]]))
    ended = judged(code, out, err)
    if ended == "right" and out.startswith("{"):
        json.loads(out)
    return ended


def _labelled(case):
    out = case.place.parent / "out.zarr"
    shutil.rmtree(out, ignore_errors=True)
    code, printed, err = called("predict", case.place, case.corpus / "rows.npy", out, "--workers", "1")
    ended = judged(code, printed, err)
    if ended == "right" and zarr.open_group(out, mode="r")["labels"].shape != (len(scenarios.ROWS),):
        raise WrongError("not every row has a label")
    return ended
