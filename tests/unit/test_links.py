"""Links: those of README and the like lead somewhere, and `docs/check_links.py` notices those that do not."""

import pytest
from documentation import DOCS, ROOT, script

import emtau_dask

check_links = script("check_links")


def test_the_links_of_the_files_at_the_top_lead_to_files_and_headings():
    files = check_links.markdown_pages(ROOT)
    at_the_top = [path for path in files if path.parent == ROOT]
    assert ROOT / "README.md" in at_the_top
    assert len(files[ROOT / "README.md"].links) > 5
    wrong, _ = check_links.broken(at_the_top, files, ROOT)
    assert wrong == []


def test_every_public_name_is_in_the_reference():
    listed = {line.strip() for line in (DOCS / "api.md").read_text(encoding="utf-8").splitlines()}
    assert {f"emtau_dask.{name}" for name in emtau_dask.__all__} - listed == set()


BROKEN = {
    '<a href="other.html">': "other.html leads to no file",
    '<img src="picture.png">': "picture.png leads to no file",
    '<a href="../outside.html">': "../outside.html leads to no file",
    '<a href="#there">': "#there names no anchor of its page",
    '<a href="next.html#there">': "next.html#there names no anchor of its page",
    '<a href="http://example.org/">': "http://example.org/ is no https address with a host name",
    '<a href="https:///path">': "https:///path is no https address with a host name",
    '<a href="https://ex ample.org/">': "https://ex ample.org/ is no https address with a host name",
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "outside.html").write_text("")
    folder = tmp_path / "built"
    folder.mkdir()
    (folder / "next.html").write_text('<h1 id="here">Next</h1>')
    return folder


@pytest.mark.parametrize(("link", "message"), BROKEN.items())
def test_a_link_that_leads_nowhere_is_noticed(link, message, folder, capsys):
    (folder / "page.html").write_text(link)
    assert check_links.main(folder) == 1
    assert capsys.readouterr().err.strip() == f"{folder / 'page.html'}: {message}"


def test_links_that_lead_somewhere_pass_and_external_ones_are_listed(folder, capsys):
    (folder / "page.html").write_text(
        '<h2 id="top"></h2><a href="#top"><a href="next.html#here"><a href="next.html?q=1">'
        '<a href="mailto:a@b.org">'
        '<a href="https://example.org/a#b"><img src="data:image/png;base64,AAAA">'
    )
    assert check_links.main(folder) == 0
    printed = capsys.readouterr()
    assert printed.err.strip() == ""
    assert "https://example.org/a#b" in printed.out.splitlines()


def test_a_folder_without_pages_is_no_success(tmp_path):
    assert check_links.main(tmp_path) == 1


def test_anchors_of_markdown_are_those_that_github_makes():
    page = check_links.markdown(
        "# What a small τ costs, and `revisits`\n\n## A.B_c\n\n## A.B_c\n\n[x](y.md) ![z](z.svg)\n"
    )
    assert page.anchors == {"what-a-small-τ-costs-and-revisits", "ab_c", "ab_c-1"}
    assert page.links == ["y.md", "z.svg"]
