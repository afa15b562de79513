"""The default methods of evaluations on a model without an aligner: those that need none, and what
was trained here; methods that are named are taken or refused.
"""

import dataclasses

import pytest
from helpers.methods import tables
from helpers.tiny_models import CONTEXT_LEN

from kvalign.eval.evaluations.latency import LatencySettings
from kvalign.eval.evaluations.latency.models import untrained_aligners
from kvalign.eval.evaluations.perplexity import PerplexitySettings
from kvalign.eval.protocol.grid import make_grid
from kvalign.methods.registry import METHODS
from kvalign.models.architectures import spec_of

DEFAULT = PerplexitySettings.__dataclass_fields__["methods"].default
SIZES = {"cache_sizes": (16, 20), "model": "mine"}


def names(methods):
    return [method.name for method in methods]


def sinks(settings, model):
    """Numbers of sinks by method."""
    methods = make_grid(settings, model)
    found = {name: {m.sizes.num_sinks for m in methods if m.name == name} for name in DEFAULT}
    return {name: numbers for name, numbers in found.items() if numbers}


def test_all_methods_have_equal_sinks(models, caplog):
    """The most that an aligner has, else the most of the methods; `window` is defined by none."""
    from kvalign import load_model

    mini, one = load_model("gpt2-mini").model, {"cache_sizes": (16,)}
    network, table = "kvalign-gpt2-mini-network", "kvalign-gpt2-mini-table"  # with 4, and without
    both = PerplexitySettings(**one, aligner=(table, network))
    for settings, num_sinks in ((PerplexitySettings(**one), 0), (both, 4)):
        assert sinks(settings, mini) == {name: {num_sinks} for name in DEFAULT} | {"window": {0}}
    own = {name: {4} for name in DEFAULT} | {"window": {0}, "recompute": {0}}
    own |= {"kvalign": {0, 4}}
    assert sinks(dataclasses.replace(both, protocol="paper"), mini) == own
    assert not caplog.messages  # of window, whose sinks nobody asked for
    some = PerplexitySettings(**one, methods=("streaming-llm", "recompute"))
    assert sinks(some, models["llama"]) == {"streaming-llm": {4}, "recompute": {4}}
    some = PerplexitySettings(**one, methods=("window", "recompute"))
    assert sinks(some, models["llama"]) == {"window": {0}, "recompute": {0}}
    some = PerplexitySettings(**one, methods=("streaming-llm", "recompute"), num_sinks=(0, 2))
    assert sinks(some, models["llama"]) == {"streaming-llm": {0, 2}, "recompute": {0, 2}}


def test_what_lacks_an_aligner_is_left_out_and_said_once(model, caplog):
    methods = make_grid(PerplexitySettings(**SIZES), model)
    without = [name for name in DEFAULT if not METHODS[name].takes_aligner]
    assert names(methods) == 2 * without
    (said,) = caplog.messages
    spec = spec_of(model.config)
    todo = "kvalign train --model NAME makes one" if spec.family == "learned" else "none here"
    assert (
        said.startswith("kvalign is left out: no aligner ships for this model (") and todo in said
    )


def test_a_size_beyond_the_shipped_aligner_lacks_it_alone(caplog):
    from kvalign import load_model

    model = load_model("gpt2-mini").model
    methods = make_grid(PerplexitySettings(cache_sizes=(64, 300)), model)
    sizes = {method.sizes.cache_size for method in methods if method.name == "kvalign"}
    assert sizes == {64} and len(methods) == 2 * len(DEFAULT) - 1
    (said,) = caplog.messages
    assert "is for at most 255 entries" in said


@pytest.mark.parametrize("asked", [{"methods": ("kvalign", "window")}, {"reference": "kvalign"}])
def test_what_is_asked_for_is_refused(asked, models):
    with pytest.raises(ValueError, match="no aligner ships for this model"):
        make_grid(PerplexitySettings(**SIZES, **asked), models["gpt2"])


def test_what_was_trained_here_is_taken(models, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models["gpt2"].config, "name_or_path", "mine")
    tables(models["gpt2"]).save_pretrained(tmp_path / "kvalign-data/mine/table")
    methods = make_grid(PerplexitySettings(**SIZES, methods=("kvalign",)), models["gpt2"])
    assert names(methods) == ["kvalign", "kvalign"]
    assert "using kvalign-data/mine/table, trained here" in caplog.text
    caplog.clear()
    assert names(make_grid(PerplexitySettings(**SIZES, methods=("window",)), models["gpt2"]))
    given = tables(models["gpt2"], scale=0.1, chunk_len=CONTEXT_LEN)
    (first, *_) = make_grid(
        PerplexitySettings(**SIZES, methods=("kvalign",)), models["gpt2"], [given]
    )
    assert first.aligner is given and not caplog.messages


def test_times_are_of_what_was_trained_here(models, tmp_path, monkeypatch):
    """As in every other evaluation, unless untrained kinds are asked for."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models["gpt2"].config, "name_or_path", "mine")
    tables(models["gpt2"]).save_pretrained(tmp_path / "kvalign-data/mine/table")
    named = LatencySettings(**SIZES, methods=("streaming-llm", "kvalign"))
    assert untrained_aligners(models["gpt2"], named) is None
    asked = LatencySettings(**SIZES, aligner_kinds="network")
    (untrained,) = untrained_aligners(models["gpt2"], asked)
    assert untrained.config.kind == "network"
