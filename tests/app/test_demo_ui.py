"""The live page, served by the command and driven in a real browser: streams side by side, stops,
shows text as text, asks nothing of any other machine.
"""

import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from itertools import takewhile
from urllib.parse import urlsplit

import httpx
import pytest
from helpers.browser import DESKTOP, faults, watched
from helpers.patience import PATIENCE_S, until
from helpers.smaller import example

from kvalign.foundation.escape import escape_controls

# Looked for, not imported: that takes seconds in every process of the tests.
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(find_spec("gradio") is None, reason="gradio is not installed"),
]
HOSTILE = "<script>alert(1)</script> <img src=x onerror=alert(2)> ${alert(3)} {{value}} `\"' island"
HOSTILE += " \x07\x1b[31m \u202eright-to-left\u202c \u05e9\u05dc\u05d5\u05dd"
# The command, which also tells of every address but this machine's own that it looks for.
TELLING = """
import sys
def tell(event, args):
    if event in ("socket.connect", "socket.getaddrinfo"):
        host = args[0] if event.endswith("info") else args[1][0] if type(args[1]) is tuple else None
        if host not in (None, "127.0.0.1", "localhost"):
            print(event, host, file=sys.stderr)
sys.addaudithook(tell)
from kvalign.app.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def address():
    """The example of `kvalign demo-ui`, run until Ctrl-C."""
    command = [sys.executable, "-c", TELLING, *example("demo-ui")]
    # A shell in the background hands SIGINT down as ignored.
    heard = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    piped = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    server = subprocess.Popen(command, **piped, preexec_fn=heard)
    try:
        line = server.stdout.readline()
        assert line.startswith("running on http://127.0.0.1:"), server.stderr.read()
        url = line.split()[2]
        until(lambda: httpx.get(url, timeout=PATIENCE_S).status_code == 200)
        yield url
        server.send_signal(signal.SIGINT)
        _, complaints = server.communicate(timeout=PATIENCE_S)
        assert (server.returncode, complaints.strip()) == (0, "")
    finally:
        server.kill()


@pytest.fixture(scope="module")
def opened(browser, address):
    """Opens pages; afterwards: they asked nobody else for anything and complained of nothing."""
    visits = []

    def open_page(stops=True, **context):
        visits.append(watched(browser.new_context(**context)))
        page = visits[-1][0]
        page.goto(address)
        page.locator("#stage .cards").wait_for()  # it opens on texts that are being written
        if stops:
            page.click("#stop")
            page.locator("#start:enabled").wait_for()
        return page

    yield open_page
    for page, requests, complaints in visits:
        page.context.close()
        hosts = {urlsplit(request).hostname for request in requests if request != "about:srcdoc"}
        assert hosts == {"127.0.0.1"} and complaints == []


@pytest.fixture(scope="module")
def page(opened):
    return opened(stops=False, color_scheme="light", **DESKTOP)


@pytest.fixture(scope="module")
def dark(opened):
    return opened(color_scheme="dark", **DESKTOP)


def choose(page, methods=("streaming-llm", "kvalign"), prompt="The island of the king", **sliders):
    sliders = {"Cache size": 16, "Evicted at once": 1, "New tokens": 40} | sliders
    for box in page.locator("#methods input").all():
        box.set_checked(box.get_attribute("name") in methods)
    for label, value in sliders.items():
        page.get_by_label(f"number input for {label}").fill(str(value))
        page.keyboard.press("Tab")
    page.get_by_label("Prompt").fill(prompt)


def pick(page, label, choice):
    """One of the dropdowns, some of which are in the accordion `Model`."""
    box = page.get_by_label(label, exact=True)
    if not box.is_visible():
        page.locator(".label-wrap", has_text="Model").click()
    box.click()
    page.get_by_role("option", name=choice, exact=True).click()


def finish(page):
    page.locator("#start:enabled").wait_for(timeout=180_000)


def run(page, *args, **changes):
    """Choose, start, wait; the texts."""
    choose(page, *args, **changes)
    start(page)
    finish(page)
    return texts(page)


def start(page):
    """Press Start and wait for the cards of this run."""
    page.locator("#stage .cards").evaluate_all("found => found.forEach((e) => e.id = 'old')")
    page.click("#start")
    page.locator("#stage .cards:not(#old)").wait_for()


def texts(page):
    return page.locator(".passage").all_text_contents()


def counts(page):
    """Tokens written, a figure a card; of one moment."""
    return [int(n) for n in page.locator(".figures div:first-child dd").all_text_contents()]


def watch_counts(page):
    """Have the page note `counts` whenever it changes; ask it for `window.seen`."""
    page.locator("#stage").wait_for(state="attached")
    page.evaluate(
        """() => {
          window.seen = [];
          const figures = () => [...document.querySelectorAll(".figures div:first-child dd")];
          window.watching ??= new MutationObserver(
            () => window.seen.push(figures().map((figure) => +figure.textContent)));
          watching.observe(document.querySelector("#stage"), { childList: true, subtree: true });
        }"""
    )


def test_it_opens_on_stale_entries_that_fail(page):
    """The page as it comes: nothing is pressed."""
    from kvalign.app.pages.page import PROMPT  # which imports Gradio

    page.locator(".verdict").wait_for(timeout=180_000)
    finish(page)
    names = page.locator(".card h2").all_inner_texts()
    assert names == ["streaming-llm", "kvalign (table-kl)", "discard-half"]
    figures = page.locator(".figures div:nth-child(4) dd").all_inner_texts()
    stale, aligned, again = map(float, figures)
    assert counts(page) == [600] * 3 and stale > 1.5 * max(aligned, again)
    said = page.locator(".verdict").inner_text()
    assert said.startswith("The text of kvalign (table-kl) surprises the model least")
    assert not any(mark in text for text in texts(page) for mark in ("@-@", "@,@", " ,", "<unk>"))
    assert "seed 3" in page.locator(".legend").inner_text()
    # As the page says: "their texts are equal until the cache is full."
    assert "equal" in page.locator("#about").inner_text()
    alike = takewhile(lambda three: len({*three}) == 1, zip(*texts(page), strict=False))
    assert len([*alike]) > len(PROMPT) + 100
    assert faults(page) == []


def test_methods_stream_side_by_side(page):
    watch_counts(page)
    run(page, **{"New tokens": 60})
    assert page.locator(".card h2").all_inner_texts() == ["streaming-llm", "kvalign (table-kl)"]
    seen = [both for both in page.evaluate("window.seen") if len(both) == 2]
    assert all(len({one[i] for one in seen}) > 3 for i in (0, 1)), seen
    assert all(abs(one - other) <= 4 for one, other in seen), seen
    assert counts(page) == [60, 60]
    for card in page.locator(".card").all():
        assert card.locator(".passage .readable, .passage .unreadable").count() >= 3
        assert card.locator(".tail").inner_text() == ""
        assert card.locator(".prompt").inner_text() == "The island of the king"
        assert float(card.locator(".figures div:nth-child(2) dd").inner_text()) > 0
    assert faults(page) == []


def test_stop_stops_at_once_and_leaves_the_text(page):
    choose(page, **{"New tokens": 2000})
    start(page)
    page.locator(".passage .readable, .passage .unreadable").first.wait_for()
    page.click("#stop")
    finish(page)
    stopped = counts(page), texts(page)
    assert 0 < min(stopped[0]) <= max(stopped[0]) < 2000
    time.sleep(0.5)
    assert (counts(page), texts(page)) == stopped
    run(page, ["window"], **{"New tokens": 10})
    assert counts(page) == [10]


def test_pages_do_not_mix(page, dark):
    asked = (["window"], "The sea of the north"), (["window", "discard-half"], "The king")
    for one, (methods, prompt) in zip((page, dark), asked, strict=True):
        choose(one, methods, prompt)
    start(page)
    start(dark)
    finish(page)
    finish(dark)
    assert faults(dark) == []
    together = texts(page), texts(dark)
    assert together == tuple(run(page, methods, prompt) for methods, prompt in asked)
    assert together[0][0].startswith("The sea of the north")


def test_hostile_text_is_seen_as_text(page):
    run(page, ["window"], HOSTILE, **{"New tokens": 10})
    assert page.locator(".prompt").text_content() == escape_controls(HOSTILE)
    assert page.locator("#stage img, #stage script").count() == 0


def test_lane_follows_the_settings(page):
    choose(page, ["window"], **{"Cache size": 8, "Evicted at once": 2})
    page.get_by_role("tab", name="The cache").click()
    frame = page.frame_locator("#lane iframe")
    page.wait_for_function(  # the last of the changes has come
        "() => document.querySelector('#lane iframe')"
        "?.contentDocument.querySelector('#about')?.textContent.includes('2 evicted at once')"
    )
    about = frame.locator("#about").inner_text()
    assert about.startswith("window ") and "learned positions, a cache of 8 entries" in about
    before = frame.locator("#says").inner_text()
    frame.get_by_role("button", name="Step forward").click()
    assert frame.locator("#says").inner_text() != before
    page.wait_for_function(
        "() => { const f = document.querySelector('#lane iframe');"
        " return f.contentDocument.documentElement.scrollHeight <= f.clientHeight; }"
    )
    page.locator("#cache_size input[type=range]").fill("64")
    page.locator("#lane").get_by_text("8 entries here, in place of 64").wait_for()
    page.get_by_role("tab", name="Side by side").click()


def test_memory_is_switched_on_and_off(page):
    """A card says what it has, or why it has none; the lane shows it."""
    switch = page.locator("#memory input")
    assert not switch.is_checked()
    switch.check()
    run(page, ["streaming-llm", "kvalign", "recompute"], **{"New tokens": 30})
    line = page.locator(".card [role=alert]").inner_text()
    assert line.startswith("memory needs an aligner on gpt2-mini") and "\n" not in line
    refusing, aligned, again = page.locator(".card .note").all_inner_texts()
    assert aligned.endswith("; memory of 100000 tokens, 4 taken back")
    assert "memory of" not in refusing + again
    assert counts(page) == [30, 30]
    choose(page, ["kvalign"], **{"Cache size": 8})
    page.get_by_role("tab", name="The cache").click()
    frame = page.frame_locator("#lane iframe")
    frame.locator("#recalls:visible").wait_for()
    assert frame.locator(".cell.recalled").count() == 2
    switch.uncheck()
    frame.locator("#recalls").wait_for(state="hidden")
    page.get_by_role("tab", name="Side by side").click()
    run(page, ["kvalign"], **{"New tokens": 10})
    assert "memory" not in page.locator(".card .note").inner_text()


def test_another_model_brings_its_aligners(page):
    finish(page)
    pick(page, "Model", "llama-mini")
    page.wait_for_function(
        "() => [...document.querySelectorAll('input')]"
        ".some(input => input.value === 'kvalign-llama-mini-table')"
    )
    pick(page, "Aligner of kvalign", "kvalign-llama-mini-network")
    run(page, ["kvalign"], **{"New tokens": 10})
    assert page.locator(".card h2").inner_text() == "kvalign (network)"
