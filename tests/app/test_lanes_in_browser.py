"""The page of the cache in a browser: it draws what was recorded; it plays, steps and listens."""

import re

import pytest
from helpers.browser import CONTRAST, faults, watched

from kvalign.app.commands.lanes import MAX_CACHE_SIZE, page

pytestmark = pytest.mark.browser

MEMORY = dict(method="streaming-llm", family="rotary", cache_size=8, num_sinks=2, memory=6)
NUMBERS = "found => found.map((one) => one.lastChild.textContent)"


@pytest.fixture
def opened(browser, tmp_path):
    """Opens pages; afterwards: they asked for nothing and complained of nothing."""
    addresses, visits = [], []

    def open_page(*, width=1280, scheme="light", motion="no-preference", **settings):
        path = tmp_path / f"{len(addresses)}.html"
        path.write_text(page(**{"method": "streaming-llm"} | settings), encoding="utf-8")
        context = browser.new_context(
            color_scheme=scheme, reduced_motion=motion, viewport={"width": width, "height": 800}
        )
        visits.append(watched(context))
        addresses.append(path.as_uri())
        visits[-1][0].goto(path.as_uri())
        return visits[-1][0]

    yield open_page
    for tab, _, _ in visits:
        tab.context.close()
    for address, (_, requests, complaints) in zip(addresses, visits, strict=True):
        asked = [request for request in requests if request != "about:srcdoc"]
        assert asked == [address] and complaints == []


def shown(tab):
    """[token, born, now or away] of the cells."""
    return tab.evaluate(
        """[...document.querySelectorAll(".cell:not(.gone, .sinking)")].map((cell) =>
          [".token", ".born b", ".now b, .away b"].map((part) =>
            Number(cell.querySelector(part).lastChild.textContent)))"""
    )


def said(tab):
    return tab.locator("#says").inner_text()


def test_room_made_before_a_step_is_a_cache_of_one_entry_less(opened):
    tab = opened(evicts="before")
    assert [token for token, _, _ in shown(tab)] == [0, 1, 2, 4, 5, 6, 7]
    assert "7 entries, the new token's with them" in tab.locator("#about").inner_text()
    assert "--cache-size 6." in tab.locator("#about").inner_text()
    assert said(tab).endswith("All 7 slots are full: entry 4 must be evicted before token 8 comes.")
    tab.get_by_role("button", name="Step forward").click()
    assert said(tab).startswith("To make room for token 8, entry 4 is evicted; entries 5 to 7 move")
    tab.get_by_role("button", name="GPT-2, 3 sinks, 7 entries").click()
    assert len(shown(tab)) == 8
    tab.get_by_role("button", name="the same, evicting before a step").click()
    assert len(shown(tab)) == 7


def test_methods_and_positions_are_chosen(opened):
    """What moved is called by what corrects it."""
    tab = opened()
    for method, family, state in [
        ("streaming-llm", "learned", "stale"),
        ("window", "rotary", "rotated"),
        ("streaming-llm", "alibi", "by-slot"),
        ("kvalign", "learned", "realigned"),
        ("recompute", "learned", "reencoded"),
    ]:
        tab.locator("#method").select_option(method)
        tab.locator("#family").select_option(family)
        assert tab.locator(f".cell.{state}").count() > 0, method
        assert method in tab.locator("#about").inner_text()
    tab.locator("#method").select_option("dense")
    for _ in range(20):
        tab.keyboard.press("ArrowRight")
    assert said(tab).endswith("The stream stops.")


def test_memory_is_seen(opened):
    tab = opened(**MEMORY)
    back = [int(text) for text in tab.locator(".recalled .token").evaluate_all(NUMBERS)]
    assert [int(text) for text in tab.locator("#lost .back").all_inner_texts()] == back
    assert len(back) == 2 and tab.locator(".cell").count() == 9
    assert "2 of them taken back from the memory: tokens " in said(tab)
    assert tab.locator(".zone").all_inner_texts() == ["sinks", "taken back", "window", "new"]
    (aside,) = tab.locator(".aside .token").evaluate_all(NUMBERS)
    lost = tab.locator("#lost b").all_inner_texts()
    before = lost, said(tab), shown(tab)
    tab.get_by_role("button", name="Step forward").click()
    assert said(tab).startswith(
        f"Entry {aside} goes to the memory. Entries that were taken back stay"
    )
    assert tab.locator("#lost b").all_inner_texts() == [*lost, str(aside)][-6:]
    assert tab.locator(".cell.recalled:not(.sinking)").count() == 0
    tab.get_by_role("button", name="Step back").click()
    assert (tab.locator("#lost b").all_inner_texts(), said(tab), shown(tab)) == before
    assert "queries choose them" in " ".join(tab.locator("#recalls").inner_text().split())
    assert tab.locator("#ring:visible").count() == 0
    tab.locator("#speed").fill("4")
    tab.get_by_role("button", name="Restart").click()
    assert tab.locator("#kept").inner_text() == "nothing has left the window yet."
    for _ in range(90):
        tab.keyboard.press("ArrowRight")
    assert "6 tokens, which is all that fits" in tab.locator("#kept").inner_text()


def test_plays_until_paused(opened):
    tab = opened()
    tab.locator("#speed").fill("4")
    tab.get_by_role("button", name="Play").click()
    assert tab.locator("#says").get_attribute("aria-live") == "off"
    tab.locator("#says", has_text=re.compile(r"Token (9|\d\d+) ")).wait_for()
    tab.get_by_role("button", name="Pause").click()
    text = said(tab)
    tab.wait_for_timeout(600)
    assert said(tab) == text and tab.locator("#says").get_attribute("aria-live") == "polite"


@pytest.mark.parametrize(("cache_size", "memory"), [(1, 0), (MAX_CACHE_SIZE, 100)])
def test_nothing_is_wider_than_a_phone(cache_size, memory, opened):
    tab = opened(width=320, family="rotary", cache_size=cache_size, num_sinks=0, memory=memory)
    tab.evaluate("show(moments.length - 2, false)")
    assert tab.evaluate("document.documentElement.scrollWidth") == 320
    newest = tab.locator(".cell.new").bounding_box()
    assert newest["x"] > 0 and newest["x"] + newest["width"] < 320
    assert newest["width"] > 30


@pytest.mark.parametrize(("scheme", "rules"), [("light", None), ("dark", CONTRAST)])
def test_no_accessibility_fault(scheme, rules, opened):
    tab = opened(scheme=scheme, motion="reduce")
    tab.locator("#family").select_option("alibi")
    assert faults(tab, ("minor", "moderate", "serious", "critical"), rules) == []
    tab.get_by_role("button", name="with a memory").click()
    assert faults(tab, ("minor", "moderate", "serious", "critical"), rules) == []
