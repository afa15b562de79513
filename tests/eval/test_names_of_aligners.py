"""Two aligners of one kind, and two settings of one method, are two rows everywhere."""

import json
from dataclasses import replace

import pytest
from helpers.methods import tables
from helpers.tiny_models import tiny_model

import kvalign.eval
from kvalign import load_model
from kvalign.eval.evaluations import EVALUATIONS
from kvalign.eval.protocol import ComparisonSettings
from kvalign.eval.protocol.data import SIZES
from kvalign.eval.protocol.grid import make_grid, sizes_of
from kvalign.eval.protocol.tables import identity_of, label_of, names_of
from kvalign.eval.report import Results
from kvalign.eval.report.contents import panels, sections
from kvalign.eval.report.page import render
from kvalign.models.architectures import spec_of
from kvalign.models.loading import LoadedModel

SHORT = {
    "perplexity": dict(num_tokens=20, reference="recompute"),
    "latency": dict(num_trials=1, trial_len=2, reference="recompute"),
    "frontier": dict(num_tokens=20, num_trials=2, trial_len=2),
    "readability": dict(max_new_tokens=10, no_repeat_ngram_sizes=0, num_prompts=2),
    "streameval": dict(num_lines=4, query_every=2, distances=(0, 2)),
    "recall": dict(num_questions=4),
    "needle": dict(distances=(0, 1), num_needles=2, num_streams=1, gap=10),
    "told": dict(talk=(0, 1), num_conversations=1),
    "edit": dict(
        **dict(methods=("kvalign", "streaming-llm"), kinds="cut", lengths=2, num_edits=2),
        **dict(num_before=8, num_after=3, num_future=3),
    ),
    "attention": dict(cache_sizes=(24, 26), num_texts=2, num_steps=2),
}
MARKED = [pytest.param(n, marks=pytest.mark.slow if n != "perplexity" else ()) for n in SHORT]
NAMES = ["a-table", "b-table"]


@pytest.fixture(scope="module")
def loaded():
    """A tiny model that reads the shipped tokenizer's tokens."""
    model = tiny_model("gpt2", vocab_size=8192)
    return LoadedModel(model, load_model("gpt2-mini").tokenizer, spec_of(model.config, "tiny"))


@pytest.fixture
def folders(loaded, tmp_path, monkeypatch):
    """Two tables with other weights, in folders below the working one."""
    monkeypatch.chdir(tmp_path)
    for scale, name in enumerate(NAMES, 1):
        tables(loaded.model, 0.2 * scale).save_pretrained(tmp_path / name)
    return NAMES


def check_apart(name, document, labels, monkeypatch):
    """Tables, means, plots, passages and the page have a row or a line for each."""
    evaluation, drawn = EVALUATIONS[name], {}
    results = Results({name: document})
    with monkeypatch.context() as patch:
        patch.setattr(
            "kvalign.eval.drawing._draw_line",
            lambda axes, line, *more: drawn.update({line.label: line.style}),
        )
        contents = sections(results)
    if drawn:
        assert set(labels) <= set(drawn) and len(set(drawn.values())) == len(drawn)
        assert len({(marker, dashes) for _, marker, dashes in drawn.values()}) == len(drawn)
    shown = evaluation.tables(document)
    assert shown
    for table in shown:
        lines = [row[0].text for row in table.rows]
        assert all(lines.count(label) >= 1 for label in labels), lines
        if name not in ("streameval", "needle", "told", "edit"):  # rows of one have several
            assert len(set(lines)) == len(lines)
    for panel in panels(results):
        shown = [passage.label for passage in panel.passages]
        assert len({*shown}) == len(shown) and {*labels} <= {*shown}
    page = render(results, contents)
    assert all(page.count(label) > 1 for label in labels)


def test_each_evaluation_is_tried():
    assert set(SHORT) == set(EVALUATIONS)


@pytest.mark.parametrize("name", MARKED)
def test_two_aligners_of_a_kind_are_two_rows(name, loaded, folders, monkeypatch, undrawn):
    if name == "recall":
        loaded = replace(loaded, tokenizer=load_model("recall-gpt2").tokenizer)
    monkeypatch.setattr("kvalign.eval.evaluations.latency.timing._peak_mb", lambda *about: 1.0)
    settings = dict(methods=("kvalign", "recompute"), cache_sizes=(16, 20)) | SHORT[name]
    document = getattr(kvalign.eval, name)(loaded=loaded, aligner=folders, **settings)
    document = json.loads(json.dumps(document, default=float))  # as it is read from a file
    ours = [row for row in document["rows"] if row["method"] == "kvalign"]
    said = {tuple(row[n] for n in SIZES if n.startswith("aligner")) for row in ours}
    assert {facts[:3] for facts in said} == {(one, "table", one) for one in folders}
    revisions = [facts[3] for facts in said]
    assert len(set(revisions)) == 2 and all(len(revision) == 12 for revision in revisions)
    num_each = [sum(row["aligner"] == one for row in ours) for one in folders]
    assert num_each[0] == num_each[1] and sum(num_each) == len(ours)
    labels = [f"kvalign ({one}), 0 sinks" for one in folders]
    check_apart(name, document, labels, monkeypatch)


def test_what_is_asked_for_twice_is_one_row(loaded, folders):
    settings = dict(methods=("kvalign", "kvalign"), cache_sizes=(16, 16), num_evicted=("1", "1"))
    names = ("a-table", "./a-table", f"{folders[0]}/", "a-table")
    methods = make_grid(ComparisonSettings(aligner=names, **settings), loaded.model)
    assert [sizes_of(method)["aligner_path"] for method in methods] == ["a-table"]


def test_shipped_aligners_keep_short_names_as_long_as_they_differ():
    model = load_model("gpt2-mini").model
    shipped = [f"kvalign-gpt2-mini-{end}" for end in ("table", "network", "network-tuned")]
    for names, expected in (
        (shipped[:2], ["table", "network"]),
        (shipped, ["table", *shipped[1:]]),
        (None, ["table-network-context"]),
    ):
        settings = ComparisonSettings(methods="kvalign", aligner=names)
        assert [method.aligner_name for method in make_grid(settings, model)] == expected


def test_names_are_as_short_as_keeps_them_apart(loaded):
    def row(path, label="table", revision="of its own", every=1):
        revision = path if revision == "of its own" else revision
        facts = dict(aligner_label=label, aligner_path=path, aligner_revision=revision)
        return {"method": "kvalign", "aligner": label, "realign_every": every, **facts}

    def names(*rows):
        return names_of(rows)

    assert names(row("x/table"), row("y/table")) == ["x/table", "y/table"]
    assert names(row("/a/x/t"), row("/b/x/t")) == ["a/x/t", "b/x/t"]
    assert names(row("x"), row("x", revision="2")) == ["x@x", "x@2"]
    same = row("x", revision="1"), row("/here/x", revision="1")  # by two paths
    assert len({*map(identity_of, same)}) == len({*names(*same)}) == 1
    assert names(row("x"), row("x", every=8)) == ["x", "x-every-8"]
    assert names(row("x"), row(None, revision=None)) == ["x", "untrained table"]
    assert names(row(None, revision=None)) == ["untrained table"]
    here, shipped = row("kvalign-data/mine/table"), row("kvalign-gpt2-mini-table")
    assert names(here) == names(shipped) == ["table"] and names(row(".")) == ["table"]
    assert names(here, shipped) == ["table", "kvalign-gpt2-mini-table"]
    keys = row("x", "network: keys")
    assert names(keys, row("y", "table: nothing")) == ["x: keys", "y: nothing"]
    of_before = row("x", "network")  # of a document that does not say it
    assert identity_of(of_before) == identity_of(keys)
    old = {"method": "kvalign", "aligner": "table"}
    assert names(old, row("x")) == ["table", "x"]
    assert names(window := {"method": "window", "aligner": None}) == [None]
    sizes = dict(cache_size=8, num_sinks=1, num_evicted=1)
    assert label_of(window | sizes) == "window, 1 sink"
