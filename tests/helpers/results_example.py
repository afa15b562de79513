"""A folder of results as the evaluations write them, with text that would be more than text."""

import json

from kvalign.eval.judging import RULES
from kvalign.eval.judging.chunks import judged

HOSTILE = "<script>alert(1)</script> \"quotes' & <b>bold</b> {{ 7*7 }} $x^$ \x00\x07\x1b[31m"
HOSTILE += " \u202eright-to-left"
HEBREW = "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd"
WORDS = frozenset(
    ["the", "island", "was", "settled", "by", "people", "who", "came", "from", "land", "and", "sea"]
)
PASSAGE = "the island was settled by people who came from the sea . " * 4 + "Zq qX Zw " * 8
SIZES = {"num_sinks": 4, "num_evicted": 1}
ENDS = (("", 0.0), ("_low", -0.1), ("_high", 0.1))
ENVIRONMENT = {"kvalign": "0", "commit": HOSTILE, "device": HOSTILE, "cores": 2}


def documents():
    """One document of each evaluation, by name."""
    methods = [("window", None), ("kvalign", "table"), ("recompute", None)]
    rows = [
        {"method": m, "aligner": a, "cache_size": c, **SIZES} for c in (16, 32) for m, a in methods
    ]
    sliced = dict(num_labels=5, perplexity=9.0, low=8.0, high=None)
    sliced |= dict(ratio=1.2, ratio_low=0.0, ratio_high=None)
    ends = [{"from": a, "to": b} for a, b in ((0.75, 1.0), (1.0, 2.0), (2.0, None), (None, None))]
    scored = [
        row
        | dict(num_labels=9, nll_nats=1.0, perplexity=10.0 + i, low=9.0, high=30.0, ratio=1.0 + i)
        | dict(ratio_low=0.9, ratio_high=9.0, drift=1.0, seconds=2.0 + i)
        | dict(tenths=[dict(perplexity=9.0, ratio=1.0)])
        | dict(segments=[dict(start=0, end=1, perplexity=9.0, ratio=1.0 + i)] * 2)
        | {name: [sliced | one for one in ends] for name in ("bigrams", "tokens")}
        for i, row in enumerate(rows)
    ]
    times = dict(num_steps=4, mean_ms=6.0, median_ms=5.0, p90_ms=7.0, p99_ms=8.0, max_ms=9.0)
    times |= dict(ratio=1.0, bare_mean_ratio=1.2, bare_ratio=1.1, ttft_ms=9.0, peak_mb=2.5)
    floor = {"method": "bare", "aligner": None, "num_sinks": 0, "num_evicted": 1}
    floor |= times | dict(mean_ms=1.0, bare_mean_ratio=1.0)
    timed = [
        row | dict(batch_size=batch_size, tokens_per_s=batch_size * 1e3 / row["mean_ms"])
        for cache_size in (16, 32)
        for batch_size in (1, 4)
        for row in [
            {**floor, "cache_size": cache_size},
            *(row | times for row in rows if row["cache_size"] == cache_size),
        ]
    ]
    against = [
        row
        | dict(
            mean_ms=5.0 + i,
            ms_low=4.0,
            ms_high=20.0,
            median_ms=5.0,
            ratio_high=None,
            frontier="perhaps",
        )
        for i, row in enumerate(scored)
    ]
    texts = [PASSAGE, f"{HOSTILE} {HEBREW} {PASSAGE}", ""]
    passages = [
        row
        | dict(no_repeat_ngram_size=0, prompt=0, num_tokens=7, dense_perplexity=3.0)
        | judged(text, WORDS, RULES["paper"])
        for row, text in zip(rows[:3], texts, strict=True)
    ]
    asked = [
        row
        | dict(distance_lines=d, distance_tokens=9.0 * d, in_cache=1.0, num_questions=4)
        | {f"accuracy{end}": 0.5 + x for end, x in ENDS}
        | dict(answer_nll_nats=1.0 + d, seconds=1.0)
        for row in rows
        for d in (0, 5)
    ]
    looked = [
        row
        | {
            f"{part}_{phase}{end}": 5.0 + i
            for part in ("first", "four", "latest")
            for phase in ("before", "after")
            for end in ("", "_low", "_high")
        }
        | {x: dict(by_entry=[[1.0] * 24] * 4, by_head=[[4.0] * 2] * 4) for x in ("before", "after")}
        for i, row in enumerate(rows)
    ]
    parts = ("accuracy", "newest", "second", "third", "oldest", "beyond")
    recalled = [
        row
        | {f"{part}{end}": 0.5 + x for part in parts for end, x in ENDS}
        | dict(num_questions=9, seconds=1.0)
        for row in rows
    ]
    found = [
        row
        | {f"accuracy{end}": 0.5 + x for end, x in ENDS}
        | dict(kind=kind, distance=distance, num_questions=9, distance_tokens=9, seconds=1.0)
        for row in rows
        for kind in ("single", "multi-key")
        for distance in (4, 16)
    ]
    told = [
        row
        | {f"{name}{end}": 0.5 + x for name in ("accuracy", "exact") for end, x in ENDS}
        | dict(talk=talk, num_questions=9, num_tokens=9.5, seconds=1.0)
        for row in rows
        for talk in (4, 16)
    ]
    edits = [
        row
        | {"kind": kind, "length": 16, "way": way, "perplexity": 9.5, "agreement": 0.5}
        | {f"ratio{end}": 1.5 + x for end, x in ENDS}
        | dict(encoded=16, edit_ms=1.5, num_edits=9, seconds=1.0)
        for row in rows
        for kind in ("cut", "insert")
        for way in ("encoded anew", "edited", "edited, 16 encoded again")
    ]
    judged_by = {
        "rule": RULES["paper"].described,
        "word_list": {"name": HOSTILE, "num_words": len(WORDS), "sha256": "0"},
    }
    corpus = {"corpus": HOSTILE, "reference": "recompute", "stepwise": False}
    texts = {"corpus": HOSTILE, "num_texts": 2, "num_steps": 3}
    return {
        "perplexity": _document("perplexity", scored, corpus),
        "total-time": _document("perplexity", scored, corpus | {"stepwise": True}),
        "latency": _document("latency", timed),
        "frontier": _document("frontier", against, {"corpus": HOSTILE}),
        "readability": _document("readability", passages) | {"prompts": [HOSTILE], **judged_by},
        "streameval": _document("streameval", asked),
        "recall": _document("recall", recalled, {"relative_to_cache": False}),
        "needle": _document("needle", found, {"corpus": HOSTILE}),
        "told": _document("told", told, {"corpus": HOSTILE}),
        "edit": _document("edit", edits, {"corpus": HOSTILE}),
        "attention": _document("attention", looked, texts),
    }


def write_folder(folder):
    folder.mkdir(parents=True)
    for name, document in documents().items():
        (folder / f"{name}.json").write_text(json.dumps(document))
    return folder


def _document(kind, rows, more=None):
    settings = {"model": HOSTILE, "device": "cpu", **(more or {})}
    command = f"kvalign eval {kind} --model '{HOSTILE}'"
    about = dict(settings=settings, environment=ENVIRONMENT, rows=rows, seconds=1.0)
    return {"kind": f"eval {kind}", "command": command, **about}
