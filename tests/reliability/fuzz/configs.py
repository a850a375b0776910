"""Run configs in YAML."""

import json
import os

import yaml

from emtau_dask.cli.config import load_config
from reliability.fuzz import binaries, documents
from reliability.fuzz.oracle import WrongError

VOCABULARY = {
    "path": ["rows.npy", "", "x\x00y", "\x1b[2J", 5, None, "~", "a" * 5000, ["rows.npy"]],
    "dataset": ["digits", "mixture", "mnist", "example1", "digit", None],
    "dataset_options": [{}, {"rows": 10**30}, {"seed": -1}, {"rows": 100, "features": 0}, {"source": 5}, []],
    "array": ["X", "", "../X", 0],
    "columns": [["a"], [], ["a", "a"], "a", [1], [["a"]], ["a"] * 1000],
    "weights": ["w", "a/b.npy", 5],
    "n_components": [1, 3, 0, -1, 2**31, 2**63, 10**30, 3.0, "3", True, None, 1e6],
    "covariance_type": ["full", "tied", "diag", "spherical", "ful", "FULL", None],
    "reg_covar": [0, 1e-6, "1e-6", -1, 1e400, "x", True],
    "n_init": [1, 3, 0, 10**9, 10**30],
    "init_params": ["kmeans", "random", "k-means+", None],
    "init": [{"dirichlet_seed": 3}, {}, {"dirichlet_seed": -1}, {"seed": 1}, None],
    "random_state": [0, 2**32, 2**64, 2**200, -1, 0.5, None],
    "name": ["em", "em-tau", "em-star", "em-lazy", "emtau", "", 5, None],
    "tau": [1, 20, 0, 2**63, "x"],
    "revisit": ["on-empty", None, 5, 0, "never"],
    "threshold": [0.5, 1, 0, -1, 2, "x"],
    "compare": [[], [{"name": "em"}], [{"name": "em"}] * 2, [{}], "em"],
    "tol": [0, 1e-5, "1e-5", -1, 1e400, "auto"],
    "max_iter": [1, 500, 0, 2**48 + 1, 2**70],
    "every": [1, 3, 0, 2**70],
    "scheduler": ["threads", "processes", "tcp://127.0.0.1:1", "tls://x:1", "ssh://x", "", 5],
    "workers": [1, 2**31, 0, None, "2"],
    "threads": [1, 2, 0],
    "memory_limit": ["1GB", "0", "1e400GB", "9" * 5000, "-1GB", "x", 5, "1 gigabyte"],
    "directory": ["out", "", "/", "..", 5],
    "model": ["model.zarr", None, "", "../m.zarr", {"n_components": 2}],
    "labels": ["labels.zarr", None, ""],
    "probabilities": [True, False, "yes", 1, "on"],
}
VALID = [
    {"data": {"path": "rows.npy"}, "model": {"n_components": 3}},
    {
        "data": {"path": "rows.zarr", "array": "X", "weights": "w.npy", "labels": "labels"},
        "model": {
            "n_components": 4,
            "covariance_type": "diag",
            "reg_covar": 1e-4,
            "n_init": 2,
            "random_state": 7,
        },
        "algorithm": {"name": "em-tau", "tau": 10, "revisit": "on-empty"},
        "stop": {"tol": 1e-7, "max_iter": 50},
        "checkpoint": {"path": "run.zarr", "every": 2},
        "cluster": {"scheduler": "processes", "workers": 2, "threads": 2, "memory_limit": "2GB"},
        "output": {
            "directory": "out",
            "model": "m.zarr",
            "labels": "l.zarr",
            "probabilities": True,
            "scores": False,
        },
    },
    {
        "data": {
            "dataset": "mixture",
            "dataset_options": {"rows": 1000, "features": 3, "components": 2, "seed": 1},
        },
        "model": {"n_components": 2, "init": {"dirichlet_seed": 5}},
        "algorithm": {"name": "em-star"},
        "stop": {"tol": 0},
    },
    {
        "data": {"path": "x.parquet", "columns": ["a", "b"]},
        "model": {"n_components": 2, "init_params": "random_from_data"},
        "algorithm": {"name": "em", "compare": [{"name": "em"}, {"name": "em-lazy", "threshold": 0.9}]},
        "cluster": {"scheduler": "tls://host:8786", "tls": {"ca_file": "a", "cert": "b", "key": "c"}},
    },
]
RAW_VALUES = [
    "!!python/object/apply:os.mkdir [{witness}]", "!!python/object/new:os.system [true]",
    "!!python/name:os.system", "!!python/module:os", "!!python/tuple [1, 2]", "!!binary aGVsbG8=",
    "!!float x", "!!int 3", "!!int ''", "!!timestamp nonsense", "!!bool maybe", "!!set {{a, b}}",
    "!!omap [a: 1]", "!!str 5", "!unknown 5", "!<tag:yaml.org,2002:int> 3", "&a [*a]", "*missing", "&a 3",
    "2024-13-45", "2024-01-01T99:99:99Z", "1:30:00", "1_000", "0b101", "0o17", "017", "0x", ".inf", "-.inf",
    ".nan", "1e6", "1e-6", "1e999", "~", "yes", "|\n    text", ">-\n    folded", "'unended", '"\\x1b[2J"',
    '"\\ud800"', '"\\U0001F600"', "{big}", "-{big}", "{deep}", "{{a: {deep}}}", "[" * 50 + "]" * 50, "@at",
    "`tick", "%percent", "\t5", "{bell}",
]  # fmt: skip


def _texts():
    for number, content in enumerate(VALID):
        yield f"plain-{number}", yaml.safe_dump(content)
        yield f"flow-{number}", yaml.safe_dump(content, default_flow_style=True)
        yield f"json-{number}", json.dumps(content, indent=1)


def make(folder):
    """Write the originals."""
    for name, text in _texts():
        (folder / f"{name}.yaml").write_text(text)


def mutate(case):
    """Write a mutated config; return what was done."""
    chance, how = case.chance, case.chance.random()
    text = case.original.read_text()
    if how < 0.45:
        content, what = documents.altered(chance, yaml.safe_load(text), VOCABULARY)
        if chance.random() < 0.5:
            data, note = documents.text_of(chance, content)
            case.place.write_bytes(data)
            return f"{what} {note}"
        made = yaml.safe_dump(content, default_flow_style=chance.choice([None, True, False]))
        for number, raw in enumerate(documents.RAWS):
            made = made.replace(f"'{documents.RAW.format(number)}'", raw).replace(
                documents.RAW.format(number), raw
            )
        case.place.write_bytes(made.encode("utf-8", "surrogatepass"))
        return what
    if how < 0.75:
        text, what = _with_raw(case, text)
    elif how < 0.87:
        text, what = _structured(chance, text)
    elif how < 0.97:
        data, what = binaries.mutated(chance, text.encode(), headers=range(0, max(1, len(text) - 50), 7))
        case.place.write_bytes(data)
        return what
    else:
        case.place.write_text(text)
        return binaries.strange(chance, case.place)
    case.place.write_bytes(text.encode("utf-8", "surrogatepass"))
    return what


def _with_raw(case, text):
    """Write something raw in the place of a value, or as an item more."""
    chance = case.chance
    witness = str(case.place.parent / binaries.MARKER)
    depth = chance.choice([20, 400, 5000])
    raw = chance.choice(RAW_VALUES).format(
        witness=witness, big="9" * 5000, deep="[" * depth + "]" * depth, bell="\x07"
    )
    content = yaml.safe_load(text)
    marks = [path for path in documents.places(content) if isinstance(path[-1], str)]
    path = chance.choice(marks)
    holder = content
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = "MARK"
    return yaml.safe_dump(content).replace("MARK", raw), f"{'.'.join(map(str, path))}: {raw[:80]!r}"


def _structured(chance, text):
    """Use what YAML has beyond JSON, of the whole document."""
    made = {
        "merge": text.replace("model:", "base: &base {n_components: 2}\nmodel:\n  <<: *base", 1),
        "merge of nothing": text + "\n<<: 5\n",
        "itself": "&self\n" + text + "\nmodel: *self\n",
        "two documents": f"{text}\n---\n{text}",
        "directive": f"%YAML 1.{chance.choice('0129')}\n---\n{text}",
        "tag directive": f"%TAG ! tag:yaml.org,2002:python/\n---\n{text}",
        "list": "- " + text.replace("\n", "\n  "),
        "complex key": f"? [a, b]\n: 1\n{text}",
        "mapping key": f"? {{a: b}}\n: 1\n{text}",
        "null key": f"~: 1\n{text}",
        "number keys": f"1: 1\n1.0: 2\ntrue: 3\n{text}",
        "twice": text + "\n" + text,
        "tabs": text.replace("  ", "\t"),
        "line ends": text.replace("\n", "\r\n"),
        "other line ends": text.replace("\n", "\x85"),
        "escape in a key": f'"\\e[31mdata": 1\n{text}',
        "long key": f"? {'k' * 100_000}\n: 1\n{text}",
        "many keys": "".join(f"k{i}: 1\n" for i in range(3000)) + text,
        "no text": "",
        "a comment": "# " + text.replace("\n", " "),
        "deep blocks": "".join("  " * i + f"k{i}:\n" for i in range(700)) + "  " * 700 + "x\n",
        "deep lists": "- " * 3000 + "x\n",
        "directives cut": text + "\n...\n%",
    }
    how = chance.choice(sorted(made))
    return made[how], how


def target(case):
    """Load, beside PyYAML: whatever was accepted says what the file says."""
    config = load_config(case.place)
    with case.place.open("rb") as file:
        content = yaml.safe_load(file.read().decode("utf-8-sig", "surrogatepass"))
    compare(content, config.model_dump(mode="json"), "")
    return "right"


def compare(given, accepted, where):
    """Raise `WrongError` where a config has another value than its file."""
    if isinstance(given, dict) and isinstance(accepted, dict):
        for key, value in given.items():
            if key not in accepted:
                raise WrongError(f"{where}.{key} is not known, but was accepted")
            if value is not None or accepted[key] is None:
                compare(value, accepted[key], f"{where}.{key}")
    elif isinstance(given, list) and isinstance(accepted, list):
        if len(given) != len(accepted):
            raise WrongError(f"{where}: {len(accepted)} of {len(given)} items")
        for number, pair in enumerate(zip(given, accepted, strict=True)):
            compare(*pair, f"{where}.{number}")
    elif isinstance(accepted, bool) or accepted is None or isinstance(given, bool):
        if given is not accepted:
            raise WrongError(f"{where} = {given!r} was accepted as {accepted!r}")
    elif isinstance(accepted, (int, float)):
        whole = isinstance(given, int) and isinstance(accepted, int)
        if (given if whole else float(given)) != accepted:
            raise WrongError(f"{where} = {given!r} was accepted as {accepted!r}")
    elif str(accepted) not in (str(given), os.path.expanduser(str(given))):  # noqa: PTH111
        raise WrongError(f"{where} = {given!r} was accepted as {accepted!r}"[:300])
