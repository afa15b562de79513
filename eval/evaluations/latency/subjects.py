"""Subjects of `kvalign eval latency`: a model with prompts, aligners that need no training, and the
bare step, which is the cost of a step without any work on the cache.
"""

import itertools
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvalign.aligners import KINDS, Aligner, new_config
from kvalign.cache.sizes import CacheSizes, num_evicted_of
from kvalign.data_gen.corpus import conversations
from kvalign.eval.evaluations.latency.settings import LatencySettings
from kvalign.eval.protocol.data import FLOOR
from kvalign.eval.protocol.grid import aligners_of, load
from kvalign.foundation.errors import UserError
from kvalign.foundation.machine import resolved
from kvalign.methods.base import Method, last_logits
from kvalign.methods.registry import METHODS
from kvalign.models.architectures import spec_of
from kvalign.models.input_ids import ids_of
from kvalign.models.loading import LoadedModel, check_device, precision_of
from kvalign.models.packed import PACKED, pack
from kvalign.steppers.captured import Graph, Inputs, Regions, record_cuda_graph, without_padding
from kvalign.steppers.compiled import has_compiler

DEFAULT_KINDS = ("table", "network")
SHAPE_PREFIX = "shape:"
RANDOM = "random"  # of --prompts
SMOLLM2: dict[str, Any] = dict(
    **dict(num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, hidden_size=576),
    **dict(intermediate_size=1536, vocab_size=49152, max_position_embeddings=8192),
)
QWEN3: dict[str, Any] = dict(
    **dict(num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, hidden_size=1024),
    **dict(intermediate_size=3072, vocab_size=151936, max_position_embeddings=40960),
    **dict(head_dim=128, rope_theta=1000000.0),
)
LLAMA3: dict[str, Any] = dict(
    **dict(num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, hidden_size=4096),
    **dict(intermediate_size=14336, vocab_size=128256, max_position_embeddings=8192),
    rope_theta=500000.0,
)
SHAPES = {
    "distilgpt2": dict(model_type="gpt2", n_layer=6, n_head=12, n_embd=768, vocab_size=50257),
    "gpt2": dict(model_type="gpt2", n_layer=12, n_head=12, n_embd=768, vocab_size=50257),
    "gpt2-xl": dict(model_type="gpt2", n_layer=48, n_head=25, n_embd=1600, vocab_size=50257),
    "smollm2-135m": dict(model_type="llama", tie_word_embeddings=True, **SMOLLM2),
    "qwen3-0.6b": dict(model_type="qwen3", tie_word_embeddings=True, **QWEN3),
    "llama-3-8b": dict(model_type="llama", tie_word_embeddings=False, **LLAMA3),
}


def random_model(
    shape: str, device: str = "cpu", weights: str = "float32", seed: int = 0
) -> PreTrainedModel:
    """Random model of a well-known shape: weights do not change speed."""
    if shape not in SHAPES:
        raise UserError(f"unknown shape {shape!r} (known: {', '.join(SHAPES)})")
    device = resolved(device)
    dtype, packed_as = precision_of(device, None, weights)
    check_device(device)
    torch.manual_seed(seed)
    config = AutoConfig.for_model(**SHAPES[shape])
    with torch.device(device):  # where large ones are made in seconds
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype or "float32"))
    model.eval().requires_grad_(False)
    if packed_as in PACKED:
        pack(model, packed_as)
    return model


def random_ids(
    model: PreTrainedModel, num_rows: int, num_tokens: int, rng: torch.Generator
) -> Tensor:
    """[num_rows, num_tokens] int64 on the model's device."""
    ids = torch.randint(model.config.vocab_size, (num_rows, num_tokens), generator=rng)
    return ids.to(model.device)


def load_with_prompts(
    settings: LatencySettings, loaded: LoadedModel | None
) -> tuple[LatencySettings, PreTrainedModel, list[Tensor]]:
    """Settings, their model, and prompts [1, T] before the first token."""
    rng = torch.Generator().manual_seed(settings.seed)
    if loaded is None and settings.model.startswith(SHAPE_PREFIX):
        shape = settings.model.removeprefix(SHAPE_PREFIX)
        model = random_model(shape, settings.device, settings.weights, settings.seed)
        return settings, model, [random_ids(model, 1, settings.prompt_len, rng)]
    is_random = settings.prompts == RANDOM
    texts = [] if is_random else [turns[0] for turns in conversations(settings.prompts)]
    settings, loaded = load(settings, loaded)
    model, tokenizer = loaded.model, loaded.tokenizer
    if is_random:
        return settings, model, [random_ids(model, 1, settings.prompt_len, rng)]
    prompts = [torch.tensor([ids_of(text, tokenizer, prefix=True)]) for text in texts]
    return settings, model, [ids.to(model.device) for ids in prompts]


def untrained_aligners(model: PreTrainedModel, settings: LatencySettings) -> list[Aligner] | None:
    """Untrained aligners, which change nothing but take as long as trained ones, of the requested
    kinds, or if no trained one is available; None if trained ones are used, or no method uses any.
    """
    if settings.aligner or not any(METHODS.find(name).takes_aligner for name in settings.methods):
        return None
    if not settings.aligner_kinds and aligners_of(settings, model):
        return None
    spec, sizes = spec_of(model.config, settings.model), settings.cache_sizes
    aligners = []
    for kind in settings.aligner_kinds or DEFAULT_KINDS:
        cls = KINDS.find(kind)
        sinks = settings.num_sinks or (cls.default_num_sinks,)
        shifts = {
            num_evicted_of(num_evicted, size - num_sinks)
            for size, num_sinks in itertools.product(sizes, sinks)
            for num_evicted in settings.num_evicted or (1,)
        }
        config = new_config(
            kind,
            model,
            spec,
            chunk_len=max(sizes) + max(settings.realign_every),
            num_sinks=sinks[0],
            shifts=tuple(shifts),
            sizes=dict(cls.default_sizes),
        )
        aligners.append(cls(config).requires_grad_(False).eval())
    return aligners


class BareStep(Method):
    """Bare step in the form of a method, to be timed among them; `make_method` does not know it.

    It is one pass of the model over one token per row, with a buffer of C + 1 entries in each
    layer, one of which is overwritten. It is the lower bound for methods that see C + 1 entries per
    step; it streams nothing.

    Args:
        captured: whether it is captured, and `compiled` whether regions of the model are compiled
            before, as those of methods are.
    """

    name = FLOOR
    about = "one pass over C + 1 entries, nothing evicted: a lower bound, not a method"

    def __init__(
        self,
        model: PreTrainedModel,
        cache_size: int,
        compiled: bool = False,
        captured: bool = False,
    ):
        super().__init__(model, CacheSizes(cache_size, num_sinks=0))
        self.regions = Regions(model) if compiled and has_compiler() else None
        self.is_captured = captured
        self.reset()

    def reset(self) -> None:
        self.graph: Graph | None = None
        num_entries = self.sizes.first_input_len
        layers = [BareLayer(num_entries) for _ in range(self.spec.num_layers)]
        self.cache = Cache(layers=layers)

    def feed(self, ids: Tensor) -> Tensor:
        """Read a first input, whose last C + 1 tokens fill the buffer, with zeros if it is shorter;
        after that one token per row, at position C, in place of the one before.
        """
        ids = ids[:, -self.sizes.first_input_len :]
        if ids.shape[1] > 1:
            return self.forward(ids, self.cache)
        return self._replay(ids) if self.is_captured else self._step(ids)

    @torch.no_grad()
    def _step(self, ids: Tensor) -> Tensor:
        with self.in_eval_mode():
            return last_logits(self.model, ids, self.cache)

    def _replay(self, ids: Tensor) -> Tensor:
        if self.graph is None:
            own = Inputs(ids.clone(), ids.new_empty(0))
            compiled = nullcontext() if self.regions is None else self.regions.called()
            with without_padding(self.model), compiled:
                self.graph = record_cuda_graph(lambda inputs: self._step(inputs.ids), own, None)
        self.graph.inputs.ids.copy_(ids)
        return self.graph.replay().clone()


class BareLayer(DynamicLayer):
    """Buffer of one layer: `keys` and `values` [B, H, C + 1, D], full from the first input on."""

    is_croppable = False

    def __init__(self, num_entries: int):
        super().__init__()
        self.num_entries = num_entries

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Overwrite the last entry with a token's [B, H, 1, D]; a first input makes the buffer."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            batch_size, num_heads, length, head_dim = key_states.shape
            shape = (batch_size, num_heads, self.num_entries, head_dim)
            self.keys, self.values = key_states.new_zeros(shape), value_states.new_zeros(shape)
            self.keys[:, :, :length] = key_states
            self.values[:, :, :length] = value_states
            self._last = self.keys[:, :, -1:], self.values[:, :, -1:]
            return key_states, value_states
        self._last[0].copy_(key_states)
        self._last[1].copy_(value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.num_entries - 1 if self.is_initialized else 0
