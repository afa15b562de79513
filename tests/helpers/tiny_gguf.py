"""GGUF files of tiny models, written by the gguf package as llama.cpp's converter would."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("t h", "th e", "Ġ the")
TOKENS = [*SPECIAL, *bytes_to_unicode().values(), *(merge.replace(" ", "") for merge in MERGES)]
TOKENIZER = {
    "model": "gpt2",
    "pre": "default",
    "tokens": TOKENS,
    "token_type": [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)),
    "merges": list(MERGES),
    "bos_token_id": TOKENS.index("<|im_start|>"),
    "eos_token_id": TOKENS.index("<|im_end|>"),
    "unknown_token_id": TOKENS.index("<|endoftext|>"),
    "add_bos_token": False,
}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def readers() -> None:
    """Skip where the packages that read such files are missing."""
    for package in ("gguf", "accelerate"):
        pytest.importorskip(package, reason=f"needs {package}, of the extra gguf")


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    *,
    quantised: str = "",
    architecture: str = "",
    scaling: str = "",
    leave_out: str = "",
    tokenizer: Mapping[str, Any] | None = None,
    name: str = "tiny",
) -> dict[str, torch.Tensor]:
    """Write a Llama or a Qwen.

    Args:
        model: its vocabulary is that of the tokenizer.
        quantised: what matrices are quantised to, as Q8_0, if not all is in float32.
        architecture: what the file says it is, if not what it is.
        scaling: a RoPE scaling for it to name.
        leave_out: what the names of tensors to leave out begin with.
        tokenizer: settings, by their names after `tokenizer.ggml.`.
        name: what the file calls the model.

    Returns:
        the weights that are in the file, unpacked, by transformers' names.
    """
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, architecture or config.model_type)
    writer.add_name(name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if config.model_type == "llama":
        writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if scaling:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling))
    for key, value in (TOKENIZER if tokenizer is None else tokenizer).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}
        add.get(type(value), writer.add_array)(f"tokenizer.ggml.{key}", value)
    writer.add_chat_template(TEMPLATE)
    family = gguf.MODEL_ARCH[config.model_type.upper()]
    names = gguf.get_tensor_name_map(family, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    if config.model_type != "llama":
        heads = {}
    unpacked = {}
    for name, tensor in model.state_dict().items():
        weights = tensor.float().numpy()
        if quantised and weights.ndim == 2:
            kind = gguf.GGMLQuantizationType[quantised]
            weights = gguf.quants.dequantize(gguf.quants.quantize(weights, kind), kind)
        unpacked[name] = torch.from_numpy(weights.copy())
        place = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if leave_out and place.startswith(leave_out):
            continue
        for part, count in heads.items():  # llama.cpp rotates pairs of neighbours
            if part in name:
                halves = weights.reshape(count, 2, -1, weights.shape[1])
                weights = halves.swapaxes(1, 2).reshape(weights.shape)
        if quantised and weights.ndim == 2:
            writer.add_tensor(place, gguf.quants.quantize(weights, kind), raw_dtype=kind)
        else:
            writer.add_tensor(place, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return unpacked
