"""Tokens that end an answer."""

from torch import Tensor
from transformers import (
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from kvalign.foundation.settings import typed
from kvalign.streaming.turns import answer_end


def end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that end an answer, sorted: those that the model's generation_config names, its config
    or its tokenizer, and the one with which its chat template ends an answer.

    Published models name the end of a turn in one of these places and not in the others. A model
    that writes it and is not stopped goes on as the user.

    Raises:
        UserError: a config names something else than token ids.
    """
    ends = {*ends_of(model.generation_config), *ends_of(model.config.get_text_config())}
    return sorted((ends | {tokenizer.eos_token_id, answer_end(tokenizer)}) - {None})


def ends_of(config: GenerationConfig | PretrainedConfig) -> list[int]:
    """End tokens that a config or a generation_config names: none, one or several.

    Raises:
        UserError: they are not token ids.
    """
    end = config.eos_token_id
    if isinstance(end, Tensor):
        end = end.reshape(-1).tolist()
    ends = [] if end is None else end if isinstance(end, list | tuple) else [end]
    which = "generation_config" if isinstance(config, GenerationConfig) else "config"
    return [typed(f"eos_token_id of a model's {which}", one, int) for one in ends]
