"""A covariance type is known to its own folder alone: nobody else asks which one it is."""

import ast
from pathlib import Path

import pytest

import emtau_dask
from emtau_dask.mixture import covariance
from emtau_dask.mixture.covariance import STRUCTURES

PACKAGE = Path(emtau_dask.__file__).parent
OWN = PACKAGE / "mixture" / "covariance"
OTHERS = sorted(path for path in PACKAGE.rglob("*.py") if OWN not in path.parents)
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


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_nothing_is_compared_with_a_covariance_type(path):
    assert list(comparisons(ast.parse(path.read_text(encoding="utf-8")))) == []


@pytest.mark.parametrize(
    "code",
    [
        'covariance_type == "full"',
        'x.covariance_type in ("full", "tied")',
        '"tied_diag" != x',
        'structure.name == "x"',
        'match x:\n    case "diag":\n        pass',
    ],
)
def test_such_a_comparison_would_be_found(code):
    assert len(list(comparisons(ast.parse(code)))) == 1


def test_the_constants_of_the_types_are_not_for_others():
    assert not CONSTANTS & set(covariance.__all__)
    used = {
        f"{path.name}: {node.attr}"
        for path in OTHERS
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("covariance.")
        if node.attr in CONSTANTS
    }
    assert used == set()


def test_a_type_is_a_file_and_a_line():
    files = {path.stem for path in OWN.glob("*.py")}
    assert set(STRUCTURES) <= files
