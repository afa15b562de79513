"""The default methods of evaluations on a model without an aligner: those that need none, and what
was trained here; methods that are named are taken or refused.
"""

import dataclasses

import pytest
from helpers.methods import tables
from helpers.tiny_models import CONTEXT_LEN

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


def test_what_lacks_an_aligner_is_left_out_and_said_once(model, capsys):
    methods = make_grid(PerplexitySettings(**SIZES), model)
    without = [name for name in DEFAULT if not METHODS[name].takes_aligner]
    assert names(methods) == 2 * without
    (said,) = capsys.readouterr().err.splitlines()
    spec = spec_of(model.config)
    todo = "kvalign train --model NAME makes one" if spec.family == "learned" else "none here"
    assert (
        said.startswith("kvalign is left out: no aligner ships for this model (") and todo in said
    )


@pytest.mark.parametrize("asked", [{"methods": ("kvalign", "window")}, {"reference": "kvalign"}])
def test_what_is_asked_for_is_refused(asked, models):
    with pytest.raises(ValueError, match="no aligner ships for this model"):
        make_grid(PerplexitySettings(**SIZES, **asked), models["gpt2"])


def test_what_was_trained_here_is_taken(models, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models["gpt2"].config, "name_or_path", "mine")
    tables(models["gpt2"]).save_pretrained(tmp_path / "kvalign-data/mine/table")
    methods = make_grid(PerplexitySettings(**SIZES, methods=("kvalign",)), models["gpt2"])
    assert names(methods) == ["kvalign", "kvalign"]
    assert "using kvalign-data/mine/table, trained here" in capsys.readouterr().err
    assert names(make_grid(PerplexitySettings(**SIZES, methods=("window",)), models["gpt2"]))
    given = tables(models["gpt2"], scale=0.1, chunk_len=CONTEXT_LEN)
    (first, *_) = make_grid(
        PerplexitySettings(**SIZES, methods=("kvalign",)), models["gpt2"], [given]
    )
    assert first.aligner is given and not capsys.readouterr().err
