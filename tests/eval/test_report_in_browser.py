"""The report in a real browser: hover and keys; no request, no error, no serious
accessibility fault.
"""

import itertools
import json

import pytest
from helpers.browser import CONTRAST, DESKTOP, PHONE, faults, watched
from helpers.results_example import write_folder
from helpers.smaller import UNDRAWN

from kvalign.eval import write_report

pytestmark = pytest.mark.browser
OPENED = "for (const d of document.querySelectorAll('details.part')) d.open = true"


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Of a report with a second text and many labels, without the files of its plots."""
    folder = write_folder(tmp_path_factory.mktemp("browser") / "results")
    document = json.loads((folder / "perplexity.json").read_text())
    document["rows"] = [row | {"num_labels": 300} for row in document["rows"]]
    (folder / "perplexity.json").write_text(json.dumps(document))
    document["settings"]["corpus"] = "text:another.txt"
    (folder / "another.json").write_text(json.dumps(document))
    save = "kvalign.eval.report.page.save"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save, UNDRAWN[save])
        return write_report(folder).as_uri()


@pytest.fixture(scope="module")
def page(browser, address):
    yield from _open(browser.new_context(color_scheme="light", **DESKTOP), address)


@pytest.fixture
def phone(browser, address):
    yield from _open(browser.new_context(**PHONE), address)


def _open(context, address):
    """The page; afterwards: it asked for nothing and complained of nothing."""
    page, requests, complaints = watched(context)
    page.goto(address)
    page.evaluate(OPENED)
    yield page
    assert requests == [address] and complaints == []
    context.close()


def test_hover_shows_the_chunk(page):
    chunk = page.locator(".strip").first.locator(".chunk").nth(1)
    chunk.hover()
    peek = page.locator(".peek").first.inner_text()
    assert peek.startswith("window, 4 sinks, chunk 2, readable") and "island" in peek
    assert page.locator(".piece.seen").count() == 1
    assert page.locator(".piece.seen").get_attribute("id") == "c1-1-2"


def test_keys_walk_the_strips(page):
    strips = page.locator(".strip")
    first = strips.nth(0).locator(".chunk")
    first.nth(0).focus()
    for key, row, column in [
        ("ArrowRight", 0, 1),
        ("ArrowDown", 1, 1),
        ("ArrowLeft", 1, 0),
        ("ArrowUp", 0, 0),
        ("End", 0, first.count() - 1),
        ("ArrowRight", 0, first.count() - 1),
        ("Home", 0, 0),
    ]:
        page.keyboard.press(key)
        chunk = strips.nth(row).locator(".chunk").nth(column)
        assert chunk.evaluate("e => e === document.activeElement"), key
        assert f"chunk {column + 1}," in page.locator(".peek").first.inner_text()
    page.keyboard.press("Tab")  # one stop a strip
    assert page.evaluate("document.activeElement.hash").startswith("#c1-2-")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "c1-2-1"


def test_on_a_phone_a_table_is_a_card_a_method_and_nothing_is_wider(phone):
    phone.evaluate(OPENED.replace(".part", ""))
    assert phone.evaluate("document.documentElement.scrollWidth") == 390
    cards = phone.locator("#s1 .cards").first.locator("tbody tr")
    boxes = [card.bounding_box() for card in cards.all()]
    assert len(boxes) == 3 and all(300 < box["width"] <= 390 for box in boxes)
    assert all(a["y"] + a["height"] < b["y"] for a, b in itertools.pairwise(boxes))
    first = cards.first
    label, value = first.locator("th"), first.locator("td[data-title^=perplexity]")
    assert value.bounding_box()["y"] > label.bounding_box()["y"]
    title = value.evaluate("e => getComputedStyle(e, '::before').content")
    assert title.startswith('"perplexity') and value.inner_text().startswith("10.00")
    for cell in first.locator("td").all():
        assert cell.is_visible() is bool(cell.text_content())
    assert faults(phone) == []


def test_the_first_screen_has_the_pictures_side_by_side(browser, address):
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(address)
    assert page.locator(".first .lead").count() == 1
    boxes = [one.bounding_box() for one in page.locator(".three figure").all()]
    assert len(boxes) == 3 and len({box["y"] for box in boxes}) == 1
    assert all(box["y"] + box["height"] < 900 for box in boxes)
    table = page.locator(".first table").bounding_box()
    passages = page.locator("#passages").bounding_box()
    parts = [one.bounding_box() for one in page.locator("details.part").all()]
    assert max(b["y"] + b["height"] for b in boxes) < table["y"] < passages["y"] < parts[0]["y"]
    assert page.locator("details.part[open]").count() == 0
    page.close()


def test_on_a_phone_a_legend_stands_right_below_its_plot(phone):
    """Inside the pictures of the first screen: these are as wide as it and do not scroll."""
    shown = []
    for figure in phone.locator(".three figure").all():  # bars have their names beside them
        assert figure.evaluate("e => e.scrollWidth <= e.clientWidth")
        shown += [one for one in figure.locator(".plot-legend").all() if one.is_visible()]
    assert shown
    assert all(one.evaluate("e => e.closest('[role=img]') !== null") for one in shown)


def test_ids_are_unique(page):
    """In the pictures, too."""
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids)) > 100


def test_rows_can_be_downloaded(page):
    details = page.locator("#commands details").first
    details.locator("summary").click()
    with page.expect_download() as download:
        details.locator("a[download]").click()
    assert download.value.suggested_filename.endswith(".csv")
    with open(download.value.path()) as file:
        assert file.readline().startswith("method,aligner,cache_size,num_sinks")


def test_no_serious_accessibility_fault(page):
    page.evaluate("for (const d of document.querySelectorAll('details')) d.open = true")
    assert faults(page) == []
    page.emulate_media(color_scheme="dark")
    assert faults(page, rules=CONTRAST) == []
