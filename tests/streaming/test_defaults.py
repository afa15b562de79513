"""What writes text has the same defaults from Python as on the command line; what measures asks."""

import pytest

import kvalign
from kvalign.app.sessions.stream_settings import StreamSettings
from kvalign.foundation.settings import ModelSettings
from kvalign.methods.base import Method
from kvalign.models.loading import precision_of

SIZES = dict(cache_size=16, max_new_tokens=2)
TALK = "talk.safetensors"


def saved_and_loaded(loaded, path):
    kvalign.stream(loaded.model, loaded.tokenizer, "The", **SIZES, compile=False).save(path)
    return kvalign.load_stream(path, loaded.model, loaded.tokenizer)


TEXT = {
    "command line": lambda x, path: StreamSettings(**SIZES).stream(x),
    "stream": lambda x, path: kvalign.stream(x.model, x.tokenizer, "The", **SIZES),
    "chat": lambda x, path: kvalign.chat(x.model, x.tokenizer, **SIZES),
    "load_stream": saved_and_loaded,
    "stream_batch": lambda x, path: [*kvalign.stream_batch(x.model, x.tokenizer, ["a"], **SIZES)],
}
MEASURED = {
    "make_method": lambda x, path: kvalign.make_method("auto", x.model, cache_size=16),
    "make_cache": lambda x, path: kvalign.make_cache(x.model, cache_size=16),
}


@pytest.mark.parametrize("name", [*TEXT, *MEASURED])
def test_steps_that_are_ready_are_taken_by_what_writes_text(name, minis, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(Method, "take_ready_stepper", lambda own: asked.append(own) or own)
    (TEXT | MEASURED)[name](minis["llama-mini"], tmp_path / TALK)
    assert len(asked) == (name in TEXT)


def test_a_model_has_the_weights_of_its_file_unless_a_dtype_is_named():
    ours = StreamSettings()
    at_each_door = precision_of("cpu", None, ours.weights), precision_of("cpu", None, None)
    assert {*at_each_door} == {("float32", "auto")}
    measured = ModelSettings()
    assert precision_of("cpu", None, measured.weights) == ("float32", None)
