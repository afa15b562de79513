"""The live page, served by the command and driven in a real browser: streams side by side, stops,
shows text as text, asks nothing of any other machine.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from urllib.parse import urlsplit

import pytest
from test_cli import example

from kvalign.cli import main

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("gradio", reason="gradio is not installed")
needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="no Chromium here (CHROMIUM names one)")
pytestmark = [
    # Raised by Playwright's driver when its event loop is collected.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
HOSTILE = "<script>alert(1)</script> <img src=x onerror=alert(2)> ${alert(3)} {{value}} `the island"


@pytest.fixture(scope="module")
def address():
    """The example of `kvalign demo-ui`, run until Ctrl-C."""
    server = subprocess.Popen(
        [sys.executable, "-m", "kvalign", *example("demo-ui")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell in the background hands SIGINT down as ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        line = server.stdout.readline()
        assert line.startswith("running on http://127.0.0.1:"), server.stderr.read()
        yield line.split()[2]
        server.send_signal(signal.SIGINT)
        _, complaints = server.communicate(timeout=30)
        assert (server.returncode, complaints.strip()) == (0, "")
    finally:
        server.kill()


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(params=["light", "dark"])
def themed(request, browser, address):
    context = browser.new_context(
        color_scheme=request.param, viewport={"width": 1280, "height": 900}
    )
    yield from _open(context, address)


@pytest.fixture
def page(browser, address):
    yield from _open(browser.new_context(viewport={"width": 1280, "height": 900}), address)


@pytest.fixture
def phone(browser, address):
    context = browser.new_context(
        viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True
    )
    yield from _open(context, address)


def _open(context, address):
    """The page; afterwards: it asked nobody else for anything and complained of nothing."""
    page = context.new_page()
    hosts, complaints = set(), []
    page.on("request", lambda request: hosts.add(urlsplit(request.url).hostname))
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: complaints.append(dialog.message))
    page.goto(address)
    page.locator("#start:enabled").wait_for()
    yield page
    assert hosts == {"127.0.0.1"} and complaints == []
    context.close()


def choose(page, methods=("streaming-llm", "kvalign"), num_tokens=60, cache_size=16):
    for box in page.locator("#methods input").all():
        box.set_checked(box.get_attribute("name") in methods)
    for label, value in (("New tokens", num_tokens), ("Cache size", cache_size)):
        page.get_by_label(f"number input for {label}").fill(str(value))
        page.keyboard.press("Tab")


def counts(page):
    """Tokens written, a figure a card."""
    return [
        int(text) for text in page.locator(".card .figures div:first-child dd").all_inner_texts()
    ]


def finish(page):
    page.locator("#start:enabled").wait_for(timeout=60_000)


def test_it_is_served_here(address):
    with urllib.request.urlopen(address) as answer:
        assert answer.status == 200 and "KV-Align" in answer.read().decode()


def test_a_port_that_is_taken_is_one_line(address, capfd):
    assert main(["demo-ui", "--port", str(urlsplit(address).port)]) == 2
    error = capfd.readouterr().err
    assert "is taken: name another with --port, or 0" in error and error.count("\n") == 1


def test_missing_gradio_is_named(monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.delitem(sys.modules, "kvalign.demo_ui.page", raising=False)
    assert main(example("demo-ui")) == 2
    assert capfd.readouterr().err.endswith("it needs gradio: pip install 'kvalign[all]'\n")


@needs_chromium
def test_two_methods_stream_side_by_side(themed):
    choose(themed)
    themed.get_by_label("Prompt").fill("The island of the king")
    themed.click("#start")
    themed.locator(".card").nth(1).wait_for()
    assert themed.locator(".card h2").all_inner_texts() == ["streaming-llm", "kvalign (table-kl)"]
    seen = []
    while themed.locator("#stop").is_enabled():
        seen.append(counts(themed))
    assert all(len({one[i] for one in seen}) > 3 for i in (0, 1)), seen
    assert all(abs(one - other) <= 4 for one, other in seen), seen
    assert counts(themed) == [60, 60]
    for card in themed.locator(".card").all():
        pieces = card.locator(".passage .readable, .passage .unreadable")
        assert pieces.count() >= 3 and card.locator(".tail").inner_text() == ""
        assert card.locator(".prompt").inner_text() == "The island of the king"
        assert card.get_by_role("meter").get_attribute("aria-valuenow") == "16"
        assert "cache 16 / 16" in card.inner_text()
    _no_serious_fault(themed)


def _no_serious_fault(page):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    found = axe.Axe().run(page).response["violations"]
    serious = [
        (fault["id"], fault["nodes"][0]["html"][:200])
        for fault in found
        if fault["impact"] in ("serious", "critical")
    ]
    assert serious == []


@needs_chromium
def test_stop_stops_and_leaves_the_text(page):
    choose(page, num_tokens=2000)
    page.click("#start")
    page.locator(".card .readable, .card .unreadable").first.wait_for()
    page.click("#stop")
    finish(page)
    time.sleep(0.3)  # what was on its way
    stopped, texts = counts(page), page.locator(".passage").all_inner_texts()
    assert 0 < min(stopped) <= max(stopped) < 2000
    time.sleep(0.7)
    assert counts(page) == stopped and page.locator(".passage").all_inner_texts() == texts
    choose(page, methods=["window"], num_tokens=10)
    page.click("#start")
    page.locator("#stop:enabled").wait_for()
    finish(page)
    assert counts(page) == [10]


@needs_chromium
def test_hostile_text_is_seen_as_text(page):
    choose(page, methods=["window"], num_tokens=20)
    page.get_by_label("Prompt").fill(HOSTILE)
    page.click("#start")
    page.locator(".card").wait_for()
    finish(page)
    assert page.locator(".prompt").inner_text() == HOSTILE
    assert page.locator("#stage img, #stage script").count() == 0


@needs_chromium
def test_wrong_settings_are_one_line(page):
    for changes, expected in [
        (dict(methods=[]), "no method is chosen: tick at least one"),
        (dict(cache_size=512), "streaming-llm: cache_size must be at most 511 for gpt2-mini"),
    ]:
        choose(page, **changes)
        page.click("#start")
        page.get_by_text(expected).wait_for()
        assert page.locator("#stage [role=alert]").count() == 1
        finish(page)
    choose(page)
    page.get_by_label("Prompt").fill("")
    page.click("#start")
    page.get_by_text("the prompt is empty").wait_for()
    finish(page)


@needs_chromium
def test_another_model_brings_its_aligners(page):
    page.get_by_role("button", name="More settings").click()
    for label, choice in [
        ("Model", "llama-mini"),
        ("Aligner of kvalign", "kvalign-llama-mini-network"),
    ]:
        page.get_by_label(label, exact=True).click()
        page.get_by_role("option", name=choice).click()
    choose(page, methods=["kvalign"], num_tokens=10)
    page.click("#start")
    page.locator(".card").wait_for()
    assert page.locator(".card h2").inner_text() == "kvalign (network)"
    finish(page)


@needs_chromium
def test_phone_has_room(phone):
    choose(phone, num_tokens=20)
    phone.click("#start")
    phone.locator(".card").nth(1).wait_for()
    finish(phone)
    assert phone.evaluate("document.documentElement.scrollWidth") == 390
    lefts = [card.bounding_box()["x"] for card in phone.locator(".card").all()]
    assert lefts[0] == lefts[1]


@needs_chromium
def test_the_cache_is_shown_whole(page):
    page.get_by_role("tab", name="The cache").click()
    frame = page.frame_locator("#lanes")
    before = frame.locator("#says").inner_text()
    frame.get_by_role("button", name="Step forward").click()
    assert frame.locator("#says").inner_text() != before
    page.wait_for_function(
        "() => { const f = document.querySelector('#lanes');"
        " return f.contentDocument.documentElement.scrollHeight <= f.clientHeight; }"
    )
