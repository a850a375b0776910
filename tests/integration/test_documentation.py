"""What README and documentation tell people to run does run, word by word and in order."""

import re
import shutil
import sys
from collections import Counter

import documentation
import pytest
from documentation import PAGES, ROOT, STORIES, Reader, blocks_of

from emtau_dask import ConfigError

RUN = {page: [block for block in blocks_of(page) if block.reason is None] for page in PAGES}
CELL = re.compile(r"^```\{code-cell\}\n(?::[^\n]+\n)*(.*?)^```$", re.MULTILINE | re.DOTALL)
"""Of a notebook in text."""
LEFT_OUT = [block for page in PAGES for block in blocks_of(page) if block.reason is not None]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.stories if page in STORIES else pytest.mark.docs)
        for page in PAGES
        if RUN[page]
    ],
    ids=lambda page: page.stem,
)
def test_the_blocks_of_a_page_run_in_order(page, tmp_path, monkeypatch):
    """In a folder that holds no more of a clone than its configs."""
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    monkeypatch.chdir(tmp_path)
    reader = Reader(tmp_path)
    monkeypatch.setitem(sys.modules, reader.module.__name__, reader.module)
    for block in RUN[page]:
        reader.run(block)


@pytest.mark.docs
def test_the_tutorial_comes_to_what_it_says(tmp_path, monkeypatch):
    """Its cells run when the documentation is built, too; here their results are compared with its words."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    cells = CELL.findall((ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8"))
    assert max(len(line) for cell in cells for line in cell.splitlines()) <= 88
    names = {}
    for cell in cells:
        exec(cell, names)
    assert names["found"].best_n_components_ == 3
    assert names["gm"].converged_
    assert (names["again"].means_ == names["gm"].means_).all()
    assert not names["stopped"].converged_
    assert (names["resumed"].means_ == names["whole"].means_).all()
    agreeing = names["pd"].crosstab(names["data"].target, names["labelled"]["component"])
    assert agreeing.max(axis=1).sum() > 170


@pytest.mark.docs
def test_a_block_that_is_not_run_says_why():
    """How many there are is said here too, so that one more is noticed."""
    for block in LEFT_OUT:
        print(f"not run: {block}: {block.reason}")
        assert len(block.reason.split()) >= 3, block
    assert Counter(block.page.name for block in LEFT_OUT) == {
        "README.md": 2, "buckets.md": 2, "cluster.md": 3, "containers.md": 4, "install.md": 1, "paper.md": 1,
        "speed.md": 2,
    }  # fmt: skip


@pytest.mark.docs
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_page_fits_the_page(page):
    too_long = [
        f"{block}: {line}" for block in blocks_of(page) for line in block.code.splitlines() if len(line) > 88
    ]
    assert too_long == []


@pytest.mark.docs
def test_a_block_is_run_unless_the_line_before_it_says_otherwise(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- not run: needs a server -->\n```bash\nfalse\n```\n\n```bash\nfalse\n```\n"
        "<!-- not run: needs a server -->\nMore.\n```python\n1 / 0\n```\n```{note}\nNo code.\n```\n"
    )
    assert [(block.line, block.language, block.reason) for block in blocks_of(page)] == [
        (3, "bash", "needs a server"), (7, "bash", None), (12, "python", None),
    ]  # fmt: skip


FAILING = {
    "```bash\nfalse; true\n```": AssertionError,
    "```python\n1 / 0\n```": ZeroDivisionError,
    "```python\nimport warnings\nwarnings.warn('so')\n```": UserWarning,
    "```yaml\n# a.yaml\nmodel: {}\n```": ConfigError,
    "```yaml\nmodel: {}\n```": AssertionError,
    "```fortran\nend\n```": AttributeError,
}


@pytest.mark.docs
def test_a_block_that_never_ends_is_noticed(tmp_path, monkeypatch):
    """With all that it started: what holds its output open is waited for."""
    monkeypatch.setattr(documentation, "MOST_SECONDS", 1)
    page = tmp_path / "page.md"
    page.write_text("```bash\nsleep 1000 &\nwait\n```\n")
    with pytest.raises(AssertionError, match="still running after 1 s"):
        Reader(tmp_path).run(blocks_of(page)[0])


@pytest.mark.docs
@pytest.mark.parametrize(("block", "error"), FAILING.items())
def test_a_block_that_fails_is_noticed(block, error, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"{block}\n")
    with pytest.raises(error):
        Reader(tmp_path).run(blocks_of(page)[0])
