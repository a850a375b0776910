"""The pages for maintainers say what the code is: the picture, the table of folders, what they name."""

import re

import pytest
from documentation import DOCS, script

draw = script("draw_architecture")
PACKAGE = DOCS.parent / "emtau_dask"
PAGES = {page: (DOCS / page).read_text(encoding="utf-8") for page in ("architecture.md", "recipes.md")}
PAGE = PAGES["architecture.md"]
NAMED = re.compile(r"`((?:\w+/)+(?:\w+\.py)?)`")
"""Paths in the page: folders end in a slash, modules in `.py`."""


def test_the_picture_is_what_the_script_draws_now():
    drawn = draw.PICTURE.read_text(encoding="utf-8")
    assert drawn == draw.picture(), "run: python docs/draw_architecture.py"


def test_the_table_names_every_folder_and_no_other_from_top_to_bottom():
    names = draw.folders(PACKAGE)
    table = re.findall(r"^\| `([\w/]+)/` \|", PAGE, flags=re.MULTILINE)
    assert sorted(table) == sorted(name.replace(".", "/") for name in names)
    for name, others in draw.imports(PACKAGE, names).items():
        for other in others:
            assert table.index(name.replace(".", "/")) < table.index(other.replace(".", "/")), (name, other)


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_is_there(page):
    named = set(NAMED.findall(PAGES[page]))
    assert named
    missing = {path for path in named if not any((at / path).exists() for at in (PACKAGE, DOCS.parent))}
    assert missing == set()
