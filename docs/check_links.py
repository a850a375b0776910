"""Checks the links of the built documentation, and of the Markdown files beside it.

    python docs/check_links.py docs/_build/html

Of a built page every link to another page, an anchor, a picture or a file must lead somewhere. Of README.md
and the like every relative link must lead to a file of the repository, and its anchor to a heading of that
file. External addresses are not asked for: they are listed, and must be https with a host name.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote, urlsplit

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[1]
HOST = re.compile(r"[a-z0-9-]+(\.[a-z0-9-]+)+")
NOT_LINKS = ("data", "javascript", "mailto")


class Page(HTMLParser):
    """The links of a page, and the anchors that it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        """Note what has an id, and what leads elsewhere."""
        found = dict(attrs)
        self.anchors.update(found[name] for name in ("id", "name") if found.get(name))
        self.links.extend(found[name] for name in ("href", "src") if found.get(name))


def slug(heading: str) -> str:
    """Return the anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def markdown(text: str) -> Page:
    """Return the links and anchors of a Markdown file, as it is shown on its own."""
    page = Page("")
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    inline = [token for token in tokens if token.type == "inline"]
    for child in (child for token in inline for child in token.children or ()):
        page.links.extend(filter(None, (child.attrGet("href"), child.attrGet("src"))))
    for opening, content in pairwise(tokens):
        if opening.type == "heading_open":
            parts = (child for child in content.children or () if child.type in ("text", "code_inline"))
            anchor, number = slug("".join(part.content for part in parts)), 0
            while (new := anchor if not number else f"{anchor}-{number}") in page.anchors:
                number += 1
            page.anchors.add(new)
    return page


def broken(places: Iterable[Path], pages: Mapping[Path, Page], top: Path) -> tuple[list[str], set[str]]:
    """Return what is wrong with the links of the pages at ``places``, and their external addresses.

    Links must lead to files below ``top``, and to anchors of ``pages``.
    """
    wrong, external = [], set()
    for place, link in [(path, link) for path in places for link in pages[path].links]:
        parts = urlsplit(link)
        if parts.scheme in NOT_LINKS:
            continue
        if parts.scheme or parts.netloc:
            external.add(link)
            if parts.scheme != "https" or not HOST.fullmatch(parts.hostname or ""):
                wrong.append(f"{place}: {link} is no https address with a host name")
            continue
        target = (place.parent / unquote(parts.path)).resolve() if parts.path else place
        if not target.exists() or not target.is_relative_to(top):
            wrong.append(f"{place}: {link} leads to no file")
        elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
            wrong.append(f"{place}: {link} names no anchor of its page")
    return wrong, external


def built_pages(folder: Path) -> dict[Path, Page]:
    """Return the pages that Sphinx wrote from ours; not the theme's own."""
    paths = (path for path in folder.rglob("*.html") if "_static" not in path.relative_to(folder).parts)
    return {path: Page(path.read_text(encoding="utf-8")) for path in paths}


def markdown_pages(root: Path) -> dict[Path, Page]:
    """Return the Markdown files at the top of the repository, and those that they may lead to."""
    paths = [*root.glob("*.md"), *(root / "docs").rglob("*.md")]
    return {path: markdown(path.read_text(encoding="utf-8")) for path in paths}


def main(folder: Path) -> int:
    """Print the external addresses, then what is broken; 1 if anything is."""
    html, files = built_pages(folder), markdown_pages(ROOT)
    if not html:
        print(f"{folder} has no pages; build them first", file=sys.stderr)
        return 1
    at_the_top = [path for path in files if path.parent == ROOT]
    wrong, external = broken(html, html, folder)
    more, named = broken(at_the_top, files, ROOT)
    print(*sorted(external | named), sep="\n")
    addresses = len(external | named)
    print(f"{len(html)} pages, {len(at_the_top)} files, {addresses} external addresses (not asked for)")
    for line in wrong + more:
        print(line, file=sys.stderr)
    return 1 if wrong or more else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
