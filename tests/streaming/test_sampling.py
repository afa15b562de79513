"""How a token is chosen: transformers' processors by their names, greedy in three ways, a seed that
repeats a stream.
"""

from dataclasses import fields

import pytest
import torch
import transformers
from transformers import GenerationConfig

import kvalign
from kvalign.app.sessions.stream_settings import StreamSettings
from kvalign.foundation.errors import UserError
from kvalign.streaming.processors import RecentPenalty
from kvalign.streaming.sampling import OF_MODEL, Sampling

PROMPT = "The history of the island"
SIZES = dict(cache_size=24, max_new_tokens=40)


def ids_of(loaded, **options):
    stream = kvalign.stream(loaded.model, loaded.tokenizer, PROMPT, **(SIZES | options))
    "".join(stream)
    return stream.token_ids


def test_a_stream_draws_what_generate_draws(loaded):
    """Nothing evicted, the same seed of torch."""
    how = dict(temperature=0.8, top_k=30, top_p=0.9, min_p=0.02, repetition_penalty=1.2)
    how |= dict(no_repeat_ngram_size=3)
    inputs = loaded.tokenizer(PROMPT, return_tensors="pt")
    torch.manual_seed(5)
    ids = loaded.model.generate(
        **inputs, do_sample=True, max_new_tokens=40, eos_token_id=None, **how
    )
    new = ids[0, inputs.input_ids.shape[1] :].tolist()
    assert ids_of(loaded, method="dense", seed=5, **how) == new


def test_a_window_holds_what_was_generated_last():
    rng = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 300, (1, 90), generator=rng)
    earlier = ids[:, 5:25], ids[:, 30:50]  # read: 0 to 5, 25 to 30, 50 to 60
    newest_first = [one[0].tolist() for one in reversed(earlier)]
    ours = RecentPenalty(1.7, 32, 60, newest_first)
    theirs = transformers.RepetitionPenaltyLogitsProcessor(1.7)
    for end in range(60, 90):
        generated = torch.cat([*earlier, ids[:, 60:end]], 1)[:, -32:]
        logits = torch.randn(1, 300, generator=rng)
        expected = theirs(generated, logits.clone())
        assert torch.equal(ours(ids[:, :end], logits), expected)
        anew = RecentPenalty(1.7, 32, 60, newest_first)  # as after a restart
        assert torch.equal(anew(ids[:, :end], logits), expected)
    logits = torch.randn(1, 300, generator=rng)
    assert torch.equal(RecentPenalty(1.7, 32)(ids, logits), logits), "all of it was read"


def test_a_window_goes_on_after_a_restart(loaded, tmp_path):
    how = SIZES | dict(repetition_penalty=1.5, repetition_window=30, seed=0)
    stream = kvalign.stream(loaded.model, loaded.tokenizer, PROMPT, **how)
    "".join(stream)
    stream.feed(" It was")
    pieces = iter(stream)
    for _ in range(9):
        next(pieces)
    stream.save(tmp_path / "talk")
    again = kvalign.load_stream(tmp_path / "talk", loaded.model, loaded.tokenizer)
    assert again.answers == stream.answers and "".join(again) == "".join(pieces)
    for one in (stream, again):
        one.feed(" Then")
    assert "".join(again) == "".join(stream) != ""
    assert ids_of(loaded, **how | dict(repetition_window=0)) != ids_of(loaded, **how)


def test_the_command_line_has_the_same_names_and_defaults():
    flags = {field.name for field in fields(StreamSettings)}
    assert {field.name for field in fields(Sampling)} <= flags
    settings = StreamSettings()
    assert settings.sampling() == {}, "the defaults are those of Sampling"
    assert StreamSettings(top_p=0.5).sampling() == {"top_p": 0.5, "do_sample": True}
    assert StreamSettings(do_sample=False, top_p=0.5).sampling()["do_sample"] is False
    assert set(OF_MODEL) <= GenerationConfig().to_dict().keys(), "transformers' names"


def test_a_text_ends_with_its_first_stop_string(loaded, tmp_path):
    how = dict(cache_size=24, max_new_tokens=40, seed=0)
    whole = "".join(kvalign.stream(loaded.model, loaded.tokenizer, PROMPT, **how))
    stop = whole[20:26]
    end = whole.index(stop) + len(stop)
    stream = kvalign.stream(
        loaded.model, loaded.tokenizer, PROMPT, stop_strings=["not there", stop], **how
    )
    text = "".join(stream)
    assert whole.startswith(text) and end <= len(text) < len(whole)
    assert text == stream.text and stop not in text[: end - len(stop)]
    assert stream.has_ended and not stream.is_cut and list(stream) == []
    stream.save(tmp_path / "talk")
    again = kvalign.load_stream(tmp_path / "talk", loaded.model, loaded.tokenizer)
    assert again.sampling == stream.sampling and list(again) == []
    for one in (stream, again):
        one.feed(" Then")
    assert "".join(again) == "".join(stream) != "", "a stop string in what came before is none"
    texts = ["", ""]
    batch = kvalign.stream_batch(
        loaded.model, loaded.tokenizer, [PROMPT, "In"], stop_strings=stop, **how
    )
    for row, piece in batch:
        texts[row] += piece
    assert texts[0] == text and len(texts[1]) > 20


def test_rows_without_a_limit_end_where_the_model_ends_them(loaded, monkeypatch):
    """So that every prompt has its turn; of a model that ends no text they need a limit."""
    prompts, how = [PROMPT, "In", "The king"], dict(cache_size=24, seed=2)
    ends = [ids_of(loaded, **how | dict(seed=seed))[seed] for seed in (2, 3, 4)]
    monkeypatch.setattr(loaded.model.generation_config, "eos_token_id", ends)
    texts = dict.fromkeys(range(3), "")
    of_model = loaded.model, loaded.tokenizer
    for row, piece in kvalign.stream_batch(*of_model, prompts, max_rows=2, **how):
        texts[row] += piece
        assert len(texts[row]) < 10_000
    for row, prompt in enumerate(prompts):
        alone = kvalign.stream(*of_model, prompt, stop_at_end=True, **how | dict(seed=2 + row))
        assert "".join(alone) == texts[row] and alone.has_ended
    monkeypatch.setattr("kvalign.streaming.batch.end_ids", lambda *of_model: [])
    with pytest.raises(UserError, match="^no token of this model ends a text: give max_new_tok"):
        next(kvalign.stream_batch(*of_model, prompts, **how))
    assert next(kvalign.stream_batch(*of_model, prompts, stop_at_end=False, **how))
