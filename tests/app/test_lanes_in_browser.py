"""The page of the cache in a browser: its script does what the cache and the methods do; it plays,
steps and listens.
"""

import json
import re
from itertools import product

import pytest
import torch
from helpers.browser import faults, watched
from helpers.real_frames import ANY, NUM_TOKENS, real_frames
from helpers.tiny_models import KINDS

from kvalign.app.pages.lanes import FAMILIES, MAX_CACHE_SIZE, page
from kvalign.cache.sizes import CacheSizes
from kvalign.cache.streaming_cache import StreamingCache
from kvalign.memory.recall import QueryBatch
from kvalign.memory.recall_places import RecallPlaces
from kvalign.methods import make_method
from kvalign.methods.cached import Cached
from kvalign.methods.registry import METHODS
from kvalign.models.architectures import FAMILIES as FAMILY_OF

pytestmark = pytest.mark.browser

SIZES = [
    (cache_size, num_sinks, num_evicted)
    for cache_size in (1, 2, 3, 7, 12)
    for num_sinks in (0, 1, 3, 4)
    for num_evicted in (1, 2, 3, 5)
    if num_sinks < cache_size and num_evicted <= cache_size - num_sinks
]
SIZE_NAMES = ("cache_size", "num_sinks", "num_evicted")
MEMORIES = [
    dict(cache_size=cache_size, num_sinks=num_sinks, memory=memory, num_recalled=num_recalled)
    for cache_size in (2, 3, 7, 12)
    for num_sinks in (0, 1, 4)
    for memory in (3, 9, 100)
    for num_recalled in (None, 1, 2, 5)
    if num_sinks < cache_size - 1 and (num_recalled or 1) < min(cache_size - num_sinks, memory + 1)
]
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


def test_script_does_what_the_methods_do(opened):
    cases = list(product(METHODS, SIZES))
    keys = ("method", *SIZE_NAMES)
    settings = [dict(zip(keys, (name, *sizes), strict=True)) for name, sizes in cases]
    found = opened().evaluate(
        """([settings, numTokens]) => {
          const plain = (entries) => entries.map(({ index, born, now }) => [index, born, now]);
          return JSON.stringify(settings.map((some) =>
            laneFrames({ family: "learned", ...some }, numTokens)
              .map(({ seen, stored, encoded }) => [plain(seen), plain(stored), encoded])));
        }""",
        [settings, NUM_TOKENS],
    )
    for (name, sizes), frames in zip(cases, json.loads(found), strict=True):
        assert frames == real_frames(name, *sizes), (name, sizes)


def test_room_made_before_a_step_is_a_cache_of_one_entry_less(opened):
    """Its entries are those of the real cache of that size; nothing but the count is another."""
    tab = opened(evicts="before")
    assert [token for token, _, _ in shown(tab)] == [0, 1, 2, 4, 5, 6, 7]
    assert "7 entries, the new token's with them" in tab.locator("#about").inner_text()
    assert "--cache-size 6." in tab.locator("#about").inner_text()
    assert said(tab).endswith("All 7 slots are full: entry 4 must be evicted before token 8 comes.")
    tab.get_by_role("button", name="Step forward").click()
    assert said(tab).startswith("To make room for token 8, entry 4 is evicted; entries 5 to 7 move")
    found = tab.evaluate(
        """(numTokens) => JSON.stringify(
          laneFrames({ method: "streaming-llm", family: "learned", evicts: "before",
                       cache_size: 7, num_sinks: 3, num_evicted: 2 }, numTokens)
            .map(({ seen }) => seen.map(({ index, born, now }) => [index, born, now])))""",
        NUM_TOKENS,
    )
    assert json.loads(found) == [seen for seen, _, _ in real_frames("streaming-llm", 6, 3, 2)]
    tab.get_by_role("button", name="GPT-2, 3 sinks, 7 entries").click()
    assert len(shown(tab)) == 8 and tab.locator("#evicts").input_value() == "after"
    tab.get_by_role("button", name="the same, evicting before a step").click()
    assert len(shown(tab)) == 7 and tab.locator("#evicts").input_value() == "before"
    tab.locator("#cache_size").fill("2")
    assert [tab.locator(f"#{name}").input_value() for name in SIZE_NAMES] == ["2", "0", "1"]


def lost_by_the_cache(sizes, token):
    """The tokens that a memory may give to a token."""
    places = RecallPlaces(sizes, 10**9, by_age=True, is_free=True)
    asking = QueryBatch(places, torch.tensor([[token]]), torch.tensor([token + 1]))
    lost = asking.evicted_slots(num_slots=64)
    tokens = token - lost.ages(torch.arange(64))
    return sorted(tokens[lost.worth.isfinite()].tolist())


def test_script_takes_back_what_the_memory_can_give(opened):
    """Which ones, chance says; how many, of which, and where they stand, the cache's sums."""
    settings = [
        dict(method=method, family=family, num_evicted=1, **sizes)
        for method, family in (("streaming-llm", "rotary"), ("kvalign", "learned"))
        for sizes in MEMORIES
    ]
    found = opened().evaluate(
        """([settings, numTokens]) =>
          JSON.stringify(settings.map((some) => laneFrames(some, numTokens)))""",
        [settings, NUM_TOKENS],
    )
    for some, frames in zip(settings, json.loads(found), strict=True):
        sizes = CacheSizes(**{name: some[name] for name in MEMORIES[0]})
        num_sinks, num_back = sizes.num_sinks, sizes.num_recalled
        by_age = some["family"] == "rotary"
        places = RecallPlaces(sizes, 10**9, by_age=by_age, is_free=by_age)
        before = []
        for token, frame in enumerate(frames):
            seen = [entry["index"] for entry in frame["seen"]]
            assert len(seen) == min(token, sizes.cache_size) + 1
            assert [entry["now"] for entry in frame["seen"]] == list(range(len(seen)))
            assert frame["lost"] == before == lost_by_the_cache(sizes, token)
            if token <= sizes.cache_size:
                assert seen == list(range(token + 1))
            else:
                back = seen[num_sinks : num_sinks + num_back]
                assert set(back) <= set(before) and back == sorted(set(back))
                assert seen[:num_sinks] == list(range(num_sinks))
                rest = range(token - sizes.num_in_sight, token + 1)
                assert seen[num_sinks + num_back :] == list(rest)
                entries = [entry for entry in frame["seen"] if "away" in entry]
                assert [entry["index"] for entry in entries] == back
                ages = torch.tensor([entry["away"] for entry in entries])
                assert ages.tolist() == [token - index for index in back]
                if by_age:
                    assert (places.near + places.beyond(ages)).tolist() == ages.tolist()
                else:
                    now = [entry["now"] for entry in entries]
                    assert places.at(ages, sizes.cache_size).tolist() == now
            before = [*before, *frame["going"]][-sizes.memory :]
            if frame["going"]:
                stored = [(entry["index"], entry["now"]) for entry in frame["stored"]]
                kept = range(token + 1 - sizes.num_in_sight, token + 1)
                at = range(sizes.cache_size - sizes.num_in_sight, sizes.cache_size)
                sinks = [(index, index) for index in range(num_sinks)]
                assert stored == [*sinks, *zip(kept, at, strict=True)]


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
    for _ in range(60):
        tab.keyboard.press("ArrowRight")
    assert "6 tokens, which is all that fits" in tab.locator("#kept").inner_text()


def test_script_writes_where_the_cache_writes(opened):
    found = opened().evaluate(
        """([settings, numTokens]) => JSON.stringify(settings.map((some) =>
          ringFrames(some, laneFrames(some, numTokens)).map(({ held, size }) => [held, size])))""",
        [
            [dict(zip(SIZE_NAMES, sizes, strict=True), method="streaming-llm") for sizes in SIZES],
            NUM_TOKENS,
        ],
    )
    for sizes, frames in zip(SIZES, json.loads(found), strict=True):
        cache = StreamingCache(ANY, CacheSizes(*sizes))
        for token, (held, size) in enumerate(frames):
            cache.update(*2 * [torch.full((1, 1, 1, 1), float(token))], 0)
            ring = cache.layers[0].entries
            assert ring.most == size
            for data in ring.data:
                assert data[0, 0, : len(held), 0].tolist() == held, (sizes, token)


def test_what_moved_is_called_by_what_corrects_it(models, opened):
    sizes, tab = dict(cache_size=7, num_sinks=3, num_evicted=2), opened()
    for name, family in product(METHODS, FAMILIES):
        model, expected = models[next(x for x in KINDS if FAMILY_OF[x] == family)], set()
        if name == "kvalign":
            expected = {"realigned"}
        elif issubclass(METHODS[name], Cached):
            realigner = make_method(name, model, **sizes).cache.realigner
            unmoved = {"stale"} if family == "learned" else {"by-slot"}
            expected = {"rotated"} if realigner.rotation else unmoved
        states = tab.evaluate(
            """(settings) => laneFrames(settings, 40)
              .flatMap((frame) => [...frame.seen, ...frame.stored])
              .filter((entry) => entry.born !== entry.now).map((entry) => entry.state)""",
            dict(method=name, family=family, **sizes),
        )
        assert set(states) == expected, (name, family)


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


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_serious_accessibility_fault(scheme, opened):
    tab = opened(scheme=scheme, motion="reduce")
    tab.locator("#family").select_option("alibi")
    assert faults(tab, impacts=("minor", "moderate", "serious", "critical")) == []
    tab.get_by_role("button", name="with a memory").click()
    assert faults(tab, impacts=("minor", "moderate", "serious", "critical")) == []
