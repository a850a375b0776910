"""The report in a browser: every picture drawn, nothing loaded, readable, narrow, by keyboard, on paper.

`.ci/pages` runs these tests with the extra `pages`, where there is a Chromium.
"""

import io
import os
import re
import shutil

import numpy as np
import pytest

from emtau_dask import GaussianMixture
from emtau_dask.estimator.row_sample import drawn_rows
from emtau_dask.report.content import Subject
from emtau_dask.report.page import report_page

CHROMIUM = os.environ.get("EMTAU_CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
if CHROMIUM is None:
    pytest.skip("no Chromium is installed (Debian: apt-get install chromium)", allow_module_level=True)
api = pytest.importorskip("playwright.sync_api", reason="the extra pages is not installed")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="the extra pages is not installed")

WIDE, NARROW = {"width": 1200, "height": 900}, {"width": 360, "height": 740}
EVIL = ("<script>alert(1)</script>", "\"><img src=x onerror='alert(2)'>", "<svg onload=alert(3)>", "$\\frac{")


def reported(names, **settings):
    """The page of a fit to rows of so many features, whose names may be hostile."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(1500, len(names)))
    X[:700, 0] += 7
    gm = GaussianMixture(3, random_state=0, n_init=1, **settings).fit(X)
    drawn = drawn_rows(gm, X, size=1200, seed=0)
    gm.feature_names_in_ = np.array(names, dtype=object)
    environment = {"python": "3", "a very long name of something": "x" * 200}
    return report_page(
        Subject(
            gm, "a name of a run with spaces", "runs/a/model.zarr", data=f"{'deep/' * 30}rows.zarr",
            drawn=drawn, config="data:\n  path: rows.zarr\n",
            command="emtau fit fit.yaml --set output.directory=runs/again", environment=environment,
            notes=("A note that the page shows as a warning.",),
        )
    )  # fmt: skip


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Addresses of reports: of an ordinary fit, and of one whose features are hostile and many."""
    folder = tmp_path_factory.mktemp("pages")
    hostile = [*EVIL, *(f"feature-with-a-long-name-{i}" for i in range(26))]
    texts = {"few": reported(["a", "b"]), "many": reported(hostile, covariance_type="diag")}
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: (folder / f"{name}.html").as_uri() for name in texts}


@pytest.fixture(scope="module")
def browser():
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def opened(browser, pages):
    """Open a page; whatever it says, asks for or tries to load is an error at the end."""
    contexts, heard = [], []

    def open_page(name, viewport=WIDE, **settings):
        context = browser.new_context(viewport=viewport, **settings)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: heard.append(message.text))
        page.on("pageerror", lambda error: heard.append(str(error)))
        page.on("dialog", lambda dialog: (heard.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: request.url in pages.values() or heard.append(request.url))
        page.goto(pages[name])
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert heard == []


@pytest.mark.parametrize("name", ["few", "many"])
def test_every_picture_is_drawn_and_nothing_runs_or_loads(opened, name):
    from PIL import Image

    page = opened(name)
    pictures = page.locator("figure svg").all()
    assert len(pictures) == 7
    for picture in pictures:
        image = Image.open(io.BytesIO(picture.screenshot())).convert("RGB")
        assert image.width >= 300
        assert len(image.getcolors(2**24)) > 30  # axes, text, and what they measure
        box = picture.bounding_box()
        for text in picture.locator("text").all():
            inner = text.bounding_box()
            assert inner["x"] >= box["x"] - 1
            assert inner["x"] + inner["width"] <= box["x"] + box["width"] + 1
    assert page.locator("body img, body script").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [WIDE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("name", ["few", "many"])
def test_axe_finds_no_fault(opened, name, viewport, scheme):
    """Contrast, landmarks, headings, names of pictures, tables: by WCAG 2.2 AA and good practice."""
    page = opened(name, viewport, color_scheme=scheme)
    page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
    found = axe.Axe().run(page).response
    assert [
        (each["id"], [node["html"][:200] for node in each["nodes"]]) for each in found["violations"]
    ] == []
    passed = {each["id"] for each in found["passes"]}
    scrolls = {"scrollable-region-focusable"} if viewport == NARROW else set()
    assert {"color-contrast", "svg-img-alt", "heading-order"} | scrolls <= passed


@pytest.mark.parametrize("name", ["few", "many"])
def test_a_telephone_shows_the_page_without_scrolling_sideways(opened, name):
    page = opened(name, NARROW)
    page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]
    small = page.evaluate(
        "[...document.querySelectorAll('figure text')].filter(text => {"
        "const box = text.getBoundingClientRect(); return Math.max(box.width, box.height) < 8 })"
        ".map(text => text.outerHTML)"
    )
    assert small == []


def test_everything_is_reached_by_the_keyboard(opened):
    page = opened("many")
    focused = (
        "(() => { const e = document.activeElement; return e.id || e.innerText.slice(0, 40) || e.tagName })()"
    )
    page.keyboard.press("Tab")
    assert page.evaluate(focused) == "Skip to the content"
    assert page.locator(".skip").bounding_box()["x"] >= 0
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.keyboard.press("Tab")
    assert page.evaluate(focused).startswith("component\t")
    page.keyboard.press("Tab")
    assert page.evaluate(focused) == "All features"
    assert not page.locator("details").first.evaluate("each => each.open")
    page.keyboard.press("Enter")
    assert page.locator("details").first.evaluate("each => each.open")
    page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate(
                "document.activeElement.getAttribute('aria-label') || document.activeElement.innerText"
            )
        )
    regions = page.evaluate(
        "[...document.querySelectorAll('[tabindex=\"0\"]')].map(e => e.getAttribute('aria-label'))"
    )
    summaries = page.evaluate("[...document.querySelectorAll('summary')].map(e => e.innerText)")
    assert len(regions) >= 6
    assert set(regions) <= reached
    assert set(summaries) - {"All features"} <= reached


def test_the_links_of_the_page_lead_to_its_parts(opened):
    page = opened("few")
    links = page.locator("nav a").all()
    assert len(links) == 4
    for link in links:
        link.click()
        target = page.evaluate("location.hash.slice(1)")
        assert page.locator(f"#{target}").is_visible()


@pytest.mark.parametrize("name", ["few", "many"])
def test_on_paper_all_is_there(opened, name):
    page = opened(name, {"width": 680, "height": 980})  # A4 without its margins
    page.emulate_media(media="print")
    assert not page.locator("nav").is_visible()
    for each in page.locator("details").all():
        assert each.bounding_box()["height"] > 60, each.inner_text()[:50]
    paper = page.pdf(format="A4")
    assert paper.startswith(b"%PDF")
    assert 3 <= len(re.findall(rb"/Type\s*/Page\b", paper)) <= 12


def test_without_scripts_the_page_is_the_same(opened):
    page = opened("few", java_script_enabled=False)
    assert page.locator("figure svg").count() == 7
    page.get_by_text("All settings").click()
    assert page.get_by_text("reg_covar").first.is_visible()
