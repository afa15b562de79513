"""Every setting of transformers' `generate`: obeyed, without use, or refused by name."""

import inspect

import pytest
import torch
from helpers.tiny_models import tiny_model
from transformers import (
    CompileConfig,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    TopKLogitsWarper,
    WatermarkingConfig,
)

import kvalign
from kvalign.streaming.generation import GIVE_WAY, REFUSED

PROMPT = torch.arange(1, 9)[None]
SAMPLED = dict(do_sample=True)
EXAMPLES = {
    "attention_mask": dict(attention_mask=torch.ones_like(PROMPT)),
    "bad_words_ids": dict(bad_words_ids=[[3], [7, 2]]),
    "begin_suppress_tokens": dict(begin_suppress_tokens=[*range(40)]),
    "do_sample": SAMPLED,
    "encoder_no_repeat_ngram_size": dict(encoder_no_repeat_ngram_size=1),
    "encoder_repetition_penalty": dict(encoder_repetition_penalty=5.0),
    "eos_token_id": dict(eos_token_id=[*range(0, 96, 4)]),
    "epsilon_cutoff": SAMPLED | dict(epsilon_cutoff=0.01),
    "eta_cutoff": SAMPLED | dict(eta_cutoff=0.01),
    "exponential_decay_length_penalty": dict(
        eos_token_id=5, exponential_decay_length_penalty=(3, 3.0)
    ),
    "forced_bos_token_id": dict(forced_bos_token_id=3),
    "forced_eos_token_id": dict(eos_token_id=5, forced_eos_token_id=5),
    "generation_config": dict(generation_config=GenerationConfig(max_new_tokens=5)),
    "logits_processor": SAMPLED | dict(logits_processor=LogitsProcessorList([TopKLogitsWarper(2)])),
    "max_length": dict(max_length=12, max_new_tokens=None),
    "max_new_tokens": dict(max_new_tokens=7),
    "max_time": dict(max_time=0.0),
    "min_length": dict(eos_token_id=[*range(0, 96, 2)], min_length=12),
    "min_new_tokens": dict(eos_token_id=[*range(0, 96, 2)], min_new_tokens=5),
    "min_p": SAMPLED | dict(min_p=0.5),
    "no_repeat_ngram_size": dict(no_repeat_ngram_size=1),
    "num_return_sequences": SAMPLED | dict(num_return_sequences=3),
    "pad_token_id": SAMPLED
    | dict(num_return_sequences=3, eos_token_id=[*range(0, 96, 3)], pad_token_id=9),
    "prefix_allowed_tokens_fn": dict(prefix_allowed_tokens_fn=lambda row, ids: [1, 2]),
    "remove_invalid_values": dict(remove_invalid_values=True),
    "renormalize_logits": SAMPLED | dict(renormalize_logits=True),
    "repetition_penalty": dict(repetition_penalty=5.0),
    "sequence_bias": dict(sequence_bias=[[[3], 50.0]]),
    "stopping_criteria": dict(stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(11)])),
    "suppress_tokens": dict(suppress_tokens=[*range(40)]),
    "temperature": SAMPLED | dict(temperature=0.3),
    "top_h": SAMPLED | dict(top_h=0.5),
    "top_k": SAMPLED | dict(top_k=2),
    "top_p": SAMPLED | dict(top_p=0.5),
    "typical_p": SAMPLED | dict(typical_p=0.5),
    "watermarking_config": dict(watermarking_config=WatermarkingConfig()),
}
"""Keywords with each of the settings that are obeyed."""
# These are tried elsewhere: streamer, tokenizer and stop_strings in test_generation.py; the others
# are how `generate` is called at all.
ELSEWHERE = {"streamer", "tokenizer", "stop_strings", "custom_generate", "trust_remote_code"}
ELSEWHERE |= {"inputs", "input_ids", "bos_token_id"}
NO_USE = {
    *("early_stopping", "length_penalty", "diversity_penalty", "low_memory"),
    *("assistant_tokenizer", "assistant_confidence_threshold", "assistant_ensemble_weight"),
    *("assistant_lookbehind", "target_lookbehind", "speculation_type", "max_matching_ngram_size"),
    *("num_assistant_tokens", "num_assistant_tokens_schedule"),
    *("output_attentions", "output_hidden_states", "output_logits", "output_scores"),
    *("continuous_batching_config", "disable_compile", "decoder_start_token_id"),
    "transformers_version",
}
"""Details of what is refused, and what a decoder does not have."""
WRONG = {
    "assistant_early_exit": 1,
    "assistant_model": tiny_model("llama"),
    "cache_config": {"nbits": 4},
    "cache_implementation": "static",
    "compile_config": CompileConfig(),
    "constraints": [1],
    "dola_layers": "low",
    "force_words_ids": [[1]],
    "guidance_scale": 1.5,
    "inputs_embeds": torch.ones(1, 8, 32),
    "is_assistant": True,
    "max_cache_len": 50,
    "negative_prompt_attention_mask": torch.ones_like(PROMPT),
    "negative_prompt_ids": PROMPT,
    "num_beam_groups": 2,
    "num_beams": 2,
    "past_key_values": DynamicCache(),
    "penalty_alpha": 0.6,
    "position_ids": PROMPT + 20,
    "prefill_chunk_size": 4,
    "prompt_lookup_num_tokens": 3,
    "return_dict_in_generate": True,
    "synced_gpus": True,
    "token_healing": True,
    "use_cache": False,
    "use_mtp": True,
}
BEFORE = {"token_healing", "is_assistant"}
"""What `generate` cannot do with any function of one's own, and says first."""


def generated(model, through=True, **keywords):
    """The tokens after the prompt, of `generate` with a stream or of `generate` alone; or of the
    function itself, if through is None.
    """
    settings = dict(max_new_tokens=20, eos_token_id=None) | keywords
    if "generation_config" in keywords:
        settings = keywords
    of_stream = dict(method="streaming-llm", cache_size=40)
    torch.manual_seed(0)
    if through is None:
        return kvalign.stream_generate(model, PROMPT, **of_stream, **settings)
    if through:
        settings |= dict(custom_generate=kvalign.stream_generate, **of_stream)
    return model.generate(PROMPT, **settings)


def test_each_setting_of_the_installed_transformers_is_known():
    config = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    arguments = set(inspect.signature(GenerationMixin.generate).parameters) - {"self", "kwargs"}
    assert not (config | arguments) - EXAMPLES.keys() - ELSEWHERE - NO_USE - REFUSED.keys()
    assert set(WRONG) == set(REFUSED)


@pytest.mark.parametrize("through", [True, None])
@pytest.mark.parametrize("name", EXAMPLES)
def test_what_is_obeyed_acts_as_without_a_stream(name, through, models):
    model, keywords = models["llama"], EXAMPLES[name]
    found = generated(model, through, **keywords)
    assert torch.equal(found, generated(model, False, **keywords))


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_is_refused_is_named_and_the_value_that_asks_for_nothing_is_taken(name, models):
    model, (_, nothing) = models["gpt2"], REFUSED[name]
    assert torch.equal(generated(model, None, **{name: nothing}), generated(model))
    keywords = {name: WRONG[name]}
    with pytest.raises(kvalign.UserError, match=f"streaming .*{name}") as caught:
        generated(model, None, **keywords)
    assert "\n" not in str(caught.value)
    if name not in BEFORE:
        with pytest.raises(kvalign.UserError, match=f"streaming .*{name}"):
            generated(model, **keywords)


def test_the_models_own_choice_of_a_cache_gives_way():
    model = tiny_model("llama")
    plain = generated(model)
    for name in GIVE_WAY:
        setattr(model.generation_config, name, WRONG[name])
        own = {name: WRONG[name]}
        assert torch.equal(generated(model), plain)
        assert torch.equal(generated(model, None), plain)
        with pytest.raises(kvalign.UserError, match=name):
            generated(model, None, **own)
        setattr(model.generation_config, name, None)
    model.generation_config.num_beams = 2
    with pytest.raises(kvalign.UserError, match="num_beams must be 1, got 2"):
        generated(model)


def test_a_direct_call_ends(models):
    """By the default of `generate`, if its keywords say nothing."""
    model = models["llama"]
    with pytest.warns(UserWarning, match="default `max_length`"):
        assert kvalign.stream_generate(model, PROMPT, cache_size=16).shape == (1, 28)
