"""A small store of real recordings: a tiny random GPT-2, shifts 1 and 2."""

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, PreTrainedTokenizerFast

from kvalign.data_gen.recording import record
from kvalign.data_gen.settings import RecordSettings
from kvalign.data_gen.store import Store, open_store
from kvalign.models.architectures import spec_of
from kvalign.models.loading import LoadedModel

CHUNK_LEN, NUM_SINKS, SHIFTS = 16, 4, (1, 2)


@dataclass(frozen=True)
class Recorded:
    folder: Path
    model: PreTrainedModel

    @property
    def store(self) -> Store:
        return open_store(self.folder)


def record_tiny(folder: Path, **changes) -> Recorded:
    """Record 12 chunks, two a shard; `changes` are of GPT2Config."""
    torch.manual_seed(1)
    sizes = dict(vocab_size=256, n_positions=32, n_embd=16, n_layer=2, n_head=2)
    sizes |= dict(bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(GPT2Config(**sizes | changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.ndim > 1 else 1)
    text = folder.with_suffix(".txt")
    text.write_text("".join(chr(32 + (7 * n * n + n // 3) % 90) for n in range(2000)))
    sizes = dict(chunk_len=CHUNK_LEN, num_sinks=NUM_SINKS, num_evicted=SHIFTS, shard_mb=0.006)
    sizes |= dict(num_tokens=12 * CHUNK_LEN)
    loaded = LoadedModel(model, bytes_tokenizer(), spec_of(model.config, "tiny"))
    record(RecordSettings(corpus=(f"text:{text}",), out=folder, **sizes), loaded=loaded)
    return Recorded(folder, model)


def bytes_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(alphabet)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bpe)
