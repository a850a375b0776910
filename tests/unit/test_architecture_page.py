"""The pages for maintainers say what the code is: the picture, the table of folders, what they name."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PACKAGE = DOCS.parent / "emtau_dask"
PAGES = {
    page: (DOCS / page).read_text(encoding="utf-8")
    for page in ("architecture.md", "glossary.md", "recipes.md")
}
PAGE = PAGES["architecture.md"]
NAMED = re.compile(r"`((?:\w+/)+(?:\w+\.py)?)`")
"""Paths in the page: folders end in a slash, modules in `.py`."""


@pytest.fixture(scope="module")
def draw():
    spec = importlib.util.spec_from_file_location("draw_architecture", DOCS / "draw_architecture.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
    return module


def test_the_picture_is_what_the_script_draws_now(draw):
    drawn = draw.PICTURE.read_text(encoding="utf-8")
    assert drawn == draw.picture(), "run: python docs/draw_architecture.py"


def test_the_table_names_every_folder_and_no_other(draw):
    table = re.findall(r"^\| `([\w/]+)/` \|", PAGE, flags=re.MULTILINE)
    assert sorted(table) == sorted(name.replace(".", "/") for name in draw.folders(PACKAGE))


def test_the_table_goes_from_top_to_bottom(draw):
    names = draw.folders(PACKAGE)
    table = re.findall(r"^\| `([\w/]+)/` \|", PAGE, flags=re.MULTILINE)
    for name, others in draw.imports(PACKAGE, names).items():
        for other in others:
            assert table.index(name.replace(".", "/")) < table.index(other.replace(".", "/")), (name, other)


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_is_there(page):
    named = set(NAMED.findall(PAGES[page]))
    assert named
    missing = {path for path in named if not any((at / path).exists() for at in (PACKAGE, DOCS.parent))}
    assert missing == set()
