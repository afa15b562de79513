"""The page of the cache: what it takes, what is written into it, and the frames that it draws."""

import json

import pytest

from kvalign.app.cli.main import main
from kvalign.app.commands.lanes import NUM_TOKENS, record
from kvalign.methods.registry import METHODS


def test_it_opens_on_kvalign(tmp_path, capsys):
    assert main(["lanes", "--out", str(tmp_path / "cache.html")]) == 0
    source = (tmp_path / "cache.html").read_text()
    data = json.loads(source.split('id="data">')[1].split("</script>")[0])
    first, *others = data["recordings"]
    assert (first["method"], first["family"]) == ("kvalign", "learned")
    assert {one["method"] for one in others} == {*METHODS} - {"kvalign"}


@pytest.mark.parametrize("name", ["window", "streaming-llm", "kvalign", "recompute"])
@pytest.mark.parametrize("num_sinks", [0, 1, 3])
def test_frames_are_what_each_token_finds(name, num_sinks):
    sizes = METHODS[name].sizes_for(7, 0 if name == "window" else num_sinks, 1)
    sinks, frames = sizes.num_sinks, record(name, sizes)
    assert len(frames) == NUM_TOKENS
    for token, one in enumerate(frames):
        window = range(max(sinks, token - 7 + sinks), token + 1)
        tokens = (
            [*range(min(sinks, token)), *window][-8:] if token >= sinks else [*range(token + 1)]
        )
        assert [entry[0] for entry in one["seen"]] == tokens
        assert [entry[2] for entry in one["seen"]] == [*range(len(tokens))]
        assert one["encoded"] == (len(tokens) if name == "recompute" else 1)
        stored = [entry[0] for entry in one["stored"]]
        assert stored == (tokens if len(tokens) < 8 else [*tokens[:sinks], *tokens[sinks + 1 :]])
        if name != "recompute":
            assert set(tokens) == set(one["held"]), "no slot is left behind"


@pytest.mark.parametrize("memory", [3, 100])
def test_a_memory_gives_back_what_the_window_has_lost(memory):
    sizes = METHODS["streaming-llm"].sizes_for(8, 2, memory=memory, num_recalled=2)
    frames = record("streaming-llm", sizes)
    for token, one in enumerate(frames):
        seen = [entry[0] for entry in one["seen"]]
        lost = [*range(2, token - 4)][-memory:] if token > 8 else []
        assert one["lost"] == lost and set(one["back"]) <= set(lost)
        assert len(one["back"]) == (2 if lost else 0) and len(seen) == min(token, 8) + 1
        assert seen[2 + len(one["back"]) :] == [*range(token - 4 if lost else 2, token + 1)]
