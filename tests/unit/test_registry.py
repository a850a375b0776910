"""A covariance type is known to its own modules alone: nobody else asks which one it is."""

import ast
from pathlib import Path

import emtau_dask
from emtau_dask.mixture import covariance_types
from emtau_dask.mixture.covariance_types import STRUCTURES

PACKAGE = Path(emtau_dask.__file__).parent
OWN = [PACKAGE / "mixture" / f"{name}.py" for name in ("covariance", "covariance_types", "variance_types")]
OTHERS = sorted(set(PACKAGE.rglob("*.py")) - set(OWN))
ASKED = {"covariance_type", "_fitted_type"}
CONSTANTS = {name.upper() for name in STRUCTURES}


def asks_for_a_type(node):
    """Whether an operand of a comparison is the name of a covariance type, or what holds one."""
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value in STRUCTURES:
            return True
        if isinstance(part, ast.Name) and part.id in ASKED:
            return True
        if isinstance(part, ast.Attribute) and (part.attr in ASKED or ast.unparse(part) == "structure.name"):
            return True
    return False


def comparisons(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and not isinstance(node.ops[0], (ast.Is, ast.IsNot)):
            operands = (node.left, *node.comparators)
        elif isinstance(node, ast.Match):
            operands = (node.subject, *(case.pattern for case in node.cases))
        else:
            continue
        if any(asks_for_a_type(operand) for operand in operands):
            yield f"line {node.lineno}: {ast.unparse(node)}"


def found_by(search):
    """What a search of the tree of each module finds, with the module's path."""
    return [
        f"{path.relative_to(PACKAGE)}, {found}"
        for path in OTHERS
        for found in search(ast.parse(path.read_text(encoding="utf-8")))
    ]


def test_nothing_is_compared_with_a_covariance_type():
    assert found_by(comparisons) == []


def singled_out(tree):
    """Where one type is imported, or looked up by a name that is written there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == covariance_types.__name__:
            found = any(alias.name in CONSTANTS for alias in node.names)
        elif isinstance(node, ast.Call):
            found = ast.unparse(node.func) == "structure_named" and isinstance(node.args[0], ast.Constant)
        elif isinstance(node, ast.Subscript):
            found = ast.unparse(node.value) == "STRUCTURES" and isinstance(node.slice, ast.Constant)
        else:
            continue
        if found:
            yield f"line {node.lineno}: {ast.unparse(node)}"


def test_no_type_is_singled_out():
    assert found_by(singled_out) == []


COMPARING = [
    'covariance_type == "full"',
    'x.covariance_type in ("full", "tied")',
    '"tied_diag" != x',
    'structure.name == "x"',
    'match x:\n    case "diag":\n        pass',
]
SINGLING_OUT = [
    "from emtau_dask.mixture.covariance_types import FULL",
    'structure_named("full").add_outer',
    'STRUCTURES["tied"]',
]


def test_either_would_be_found():
    assert [len(list(comparisons(ast.parse(code)))) for code in COMPARING] == [1] * len(COMPARING)
    assert [len(list(singled_out(ast.parse(code)))) for code in SINGLING_OUT] == [1] * len(SINGLING_OUT)
