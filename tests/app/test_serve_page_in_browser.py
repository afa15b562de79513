"""The page of `kvalign serve` in a browser: a chat with its cache, edited in place."""

import json
import re

import httpx
import pytest
from helpers.browser import CONTRAST, faults, watched
from helpers.served import serving

pytestmark = pytest.mark.browser

MODEL = "llama-mini"
SERVED = dict(cache_size=200, method="streaming-llm", memory=400, num_recalled=20, edit=True)
ALL = ("minor", "moderate", "serious", "critical")
HOSTILE = '<img src=x onerror="alert(1)"></div><script>alert(2)</script>\x1b[31m\x07\u202e&lt;b&gt;'


@pytest.fixture
def visit(browser):
    """Opens the page of a server; afterwards: it asked only this server, and complained of nothing
    but of what the server refused.
    """
    visits = []

    def opened(server, width=1280, height=900, scheme="light", query=""):
        how = dict(viewport={"width": width, "height": height}, color_scheme=scheme)
        context = browser.new_context(**how, reduced_motion="reduce")
        tab, requests, complaints = watched(context)
        visits.append((server.address, tab, requests, complaints))
        tab.goto(f"{server.address}/")
        tab.evaluate("localStorage.clear()")
        return tab

    yield opened
    for address, tab, requests, complaints in visits:
        tab.context.close()
        assert all(request.startswith((address, "data:", "blob:")) for request in requests)
        assert [one for one in complaints if "Failed to load resource" not in one] == []


def ask(tab, text, max_tokens="8"):
    tab.locator("summary").evaluate("one => { one.parentNode.open = true; }")
    tab.locator("#max_tokens").fill(max_tokens)
    tab.get_by_label("Message", exact=True).fill(text)
    tab.get_by_role("button", name="Send").click()


def done(tab):
    """What the status says once the answers are there."""
    tab.locator("#status", has_text=re.compile("^(?!Answering)")).wait_for()
    return tab.locator("#status").inner_text()


def said(tab):
    return tab.locator(".answer .said").all_inner_texts()


def test_thirteen_turns_an_edit_a_stop_and_a_restart(visit, loaded, tmp_path):
    """The conversation and its cache go on; what an edit costs is said."""
    how = SERVED | dict(sessions=tmp_path)
    with serving(loaded, **how) as server:
        port, tab = server.port, visit(server)
        tab.reload()
        for number in range(3):
            ask(tab, f"What did the captain say on day {number} ?")
            note = done(tab)
        assert re.search(r"\d+ tokens encoded, \d+ tokens kept; 8 tokens written", note)
        tab.get_by_role("button", name="Edit message 2").click()
        tab.get_by_label("New text of message 2").fill("What did the cook say ?")
        tab.keyboard.press("Control+Enter")
        assert "Answer again" in done(tab)
        tab.get_by_role("button", name="Answer again").click()
        encoded, kept = map(int, re.findall(r"(\d+) tokens? (?:encoded|kept)", done(tab)))
        assert 0 < encoded < 45 < kept
        tab.get_by_role("button", name="Forget message 1 and").click()
        ask(tab, "And then ?", max_tokens="20000")
        stop = tab.get_by_role("button", name="Stop")
        stop.dispatch_event("click")  # a click waits until what grows stands still
        assert "; cut." in done(tab)
        before = said(tab)
        tab.locator("#max_tokens").fill("5")
        tab.get_by_role("button", name="Continue").click()
        assert "5 tokens written" in done(tab)
        assert said(tab)[-1].startswith(before[-1]) and said(tab)[:-1] == before[:-1]
        for number in range(4, 8):
            ask(tab, f"What did the captain say on day {number} ?")
            done(tab)
        texts = said(tab)
    with serving(loaded, port=port, **how) as server:
        tab.reload()
        tab.locator("#status", has_text="7 turns").wait_for()
        assert said(tab) == texts
        for number in range(8, 14):
            ask(tab, f"What did the captain say on day {number} ?")
            note = done(tab)
        assert int(re.search(r"(\d+) tokens kept", note)[1]) > 300
        session = server.service.sessions.known("talk")
        assert len(said(tab)) == 13 and said(tab)[-1].strip() == session.answer.strip()
        facts = tab.locator(".facts").inner_text()
        assert f"{len(session.ids):,} tokens: 180 held of at most 200" in facts
        assert re.search(r" [1-9]\d* taken back for token", facts)
        tab.get_by_label("Tokens: the arrow keys go through them").focus()
        tab.keyboard.press("End")
        assert tab.locator(".at").inner_text().endswith(", new")
        tab.keyboard.press("Home")
        assert "token 0: " in tab.locator(".at").inner_text()
        assert tab.locator(".at").inner_text().endswith(", sink")
        assert faults(tab, ALL) == []


@pytest.mark.parametrize("text", [HOSTILE, "a <b>" * 20_000], ids=["marks", "long"])
def test_a_hostile_message_is_text(text, visit, loaded):
    with serving(loaded, **SERVED) as server:
        tab = visit(server, width=420, height=800)
        tab.reload()
        ask(tab, text)
        note = done(tab)
        if len(text) > 1000:
            assert "for a request are 32768" in note and said(tab) == []
            assert tab.locator("#text").input_value() == text, "nothing is lost"
        else:
            assert tab.locator(".user .said").evaluate("one => one.textContent") == text
        assert tab.locator("img, .said *").count() == 0
        assert tab.evaluate("document.documentElement.scrollWidth") == 420
        ask(tab, "Who ?")
        assert "8 tokens written" in done(tab)


def test_a_key_is_asked_for_and_no_page_is_none(visit, loaded):
    with serving(loaded, api_key="secret", **SERVED) as server:
        tab = visit(server, scheme="dark")
        tab.reload()
        for key, says in (("wrong", "asks for its API key"), ("secret", "Session talk is new")):
            tab.get_by_label("API key").fill(key)
            tab.get_by_role("button", name="Use it").click()
            tab.locator("#status", has_text=says).wait_for()
        ask(tab, "Who ?")
        assert "8 tokens written" in done(tab)
        assert faults(tab, ALL, CONTRAST) == []
    with serving(loaded, no_page=True, cache_size=48) as server:
        reply = httpx.get(f"{server.address}/", headers={"Accept": "text/html"})
        assert reply.headers["content-type"].startswith("text/plain")


def test_a_conversation_is_saved_and_loaded(visit, loaded, tmp_path):
    with serving(loaded, **SERVED) as server:
        tab = visit(server)
        tab.reload()
        ask(tab, "Who lived there ?")
        done(tab)
        with tab.expect_download() as download:
            tab.get_by_role("button", name="Save file").click()
        download.value.save_as(tmp_path / "talk.json")
        texts = said(tab)
        tab.locator("#name").fill("other")
        tab.get_by_role("button", name="Open").click()
        tab.locator("#status", has_text="Session other is new").wait_for()
        assert said(tab) == []
        tab.locator("#file").set_input_files(tmp_path / "talk.json")
        tab.locator("#status", has_text="Session talk: 1 turn").wait_for()
        assert said(tab) == texts
        ask(tab, "Why ?")
        assert "kept" in done(tab)
        (tmp_path / "bad.json").write_text(json.dumps({"turns": [{"text": 1}]}))
        tab.locator("#file").set_input_files(tmp_path / "bad.json")
        tab.locator("#status", has_text="this is no saved conversation").wait_for()


def test_two_methods_answer_the_same_words(visit, loaded):
    """Each as it does alone; a width of 420 has them one below the other."""
    with serving(loaded, beside="discard-half:64", **SERVED) as server:
        tab = visit(server)
        tab.reload()
        ask(tab, "Who lived there ?")
        done(tab)
        tab.get_by_label("beside it: discard-half, cache of 64 entries").check()
        tab.locator("#seed").fill("5")
        for text in ("What did the old captain say to his men on the island ?", "And then ?"):
            ask(tab, text, max_tokens="40")
            done(tab)
        assert tab.locator(".answer").count() == 6 and len([x for x in said(tab) if x]) == 5
        facts = tab.locator(".facts").all_inner_texts()
        assert "at most 200" in facts[0] and "at most 64" in facts[1]
        boxes = [tab.locator(".answer").nth(x).bounding_box() for x in (4, 5)]
        assert boxes[0]["y"] == boxes[1]["y"] and boxes[0]["x"] < boxes[1]["x"]
        texts = said(tab)
        tab.get_by_label("mark chunks of ten tokens").check()
        tab.locator(".answer .good, .answer .bad").nth(4).wait_for()
        assert said(tab) == texts
        wrong = httpx.post(f"{server.address}/v1/readability", json={"text": 1})
        assert wrong.status_code == 400
        assert faults(tab, ALL) == []
        first = server.service.sessions.known("talk")
        assert said(tab)[4].strip() == first.answer.strip()
        tab.set_viewport_size({"width": 420, "height": 800})
        boxes = [tab.locator(".answer").nth(x).bounding_box() for x in (4, 5)]
        assert boxes[0]["y"] < boxes[1]["y"]
        assert tab.evaluate("document.documentElement.scrollWidth") == 420
