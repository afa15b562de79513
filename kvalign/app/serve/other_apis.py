"""Fields of requests that other servers and services have and this one does not.

Whoever sends one means something by it. So it is refused by name, as OpenAI's own fields are that
are not supported. A name that is neither here nor in OpenAI's API is ignored, and a header says so.
"""

from typing import Any

_OFF = (False,)
_NONE: tuple[Any, ...] = ()

VLLM: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": _OFF,
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "chat_template": _NONE,
    "continue_final_message": _OFF,
    "documents": ([],),
    "guided_choice": _NONE,
    "guided_grammar": _NONE,
    "guided_json": _NONE,
    "guided_regex": _NONE,
    "ignore_eos": _OFF,
    "include_reasoning": (True,),
    "include_stop_str_in_output": _OFF,
    "length_penalty": (1,),
    "logits_processors": ([],),
    "min_tokens": (0,),
    "mm_processor_kwargs": _NONE,
    "prompt_logprobs": _NONE,
    "return_token_ids": _OFF,
    "return_tokens_as_token_ids": _OFF,
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": _NONE,
    "stop_token_ids": ([],),
    "structural_tag": _NONE,
    "structured_outputs": _NONE,
    "truncate_prompt_tokens": _NONE,
    "use_beam_search": _OFF,
}

LLAMA_CPP: dict[str, tuple[Any, ...]] = {
    "dry_allowed_length": _NONE,
    "dry_base": _NONE,
    "dry_multiplier": (0,),
    "dry_penalty_last_n": _NONE,
    "dry_sequence_breakers": _NONE,
    "dynatemp_exponent": _NONE,
    "dynatemp_range": (0,),
    "grammar": ("",),
    "json_schema": _NONE,
    "lora": ([],),
    "mirostat": (0,),
    "mirostat_eta": _NONE,
    "mirostat_tau": _NONE,
    "n_discard": _NONE,
    "n_keep": (0,),
    "n_predict": _NONE,
    "n_probs": (0,),
    "repeat_last_n": _NONE,
    "repeat_penalty": (1,),
    "samplers": _NONE,
    "tfs_z": (1,),
    "top_n_sigma": (-1,),
    "typical_p": (1,),
    "xtc_probability": (0,),
    "xtc_threshold": _NONE,
}

OTHERS: dict[str, tuple[Any, ...]] = {
    "do_sample": (True,),  # transformers, TGI
    "enable_thinking": _NONE,  # Qwen's service; here a field of chat_template_kwargs
    "format": _NONE,  # Ollama
    "max_new_tokens": _NONE,
    "models": _NONE,  # OpenRouter
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "num_ctx": _NONE,
    "num_predict": _NONE,
    "options": ({},),
    "provider": _NONE,
    "reasoning": _NONE,
    "reasoning_format": _NONE,
    "safe_prompt": _OFF,  # Mistral
    "system": _NONE,  # Anthropic
    "think": _NONE,
    "thinking": _NONE,  # Anthropic, DeepSeek
    "thinking_budget": _NONE,
    "top_a": (0,),
    "transforms": ([],),
    "truncate": _NONE,
    "typical": _NONE,
    "watermark": _OFF,
}

REFUSED = VLLM | LLAMA_CPP | OTHERS
"""By name, the values that ask for nothing; null always does."""
