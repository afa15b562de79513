"""Methods on tiny models, and the logits of stepping through a text with one."""

import torch

from helpers.pairwise import one_of_each
from helpers.tiny_models import CONTEXT_LEN, KINDS
from kvalign.aligners import Aligner, NetworkAligner, TableAligner, TableNetworkAligner, new_config
from kvalign.methods import make_method
from kvalign.methods.base import Method
from kvalign.methods.registry import METHODS
from kvalign.models.architectures import spec_of

CACHE_SIZE = 20
_SIZES = dict(key_hidden1=16, key_hidden2=8, value_hidden1=8, value_hidden2=16)
STREAMING = [name for name in METHODS if name != "dense"]


def network(model, train=False, **changes) -> Aligner:
    """An aligner for a tiny model: zero-initialised, or with random weights of some effect."""
    torch.manual_seed(2)
    fields = dict(chunk_len=CONTEXT_LEN, num_sinks=4, shifts=(1,), sizes=_SIZES) | changes
    aligner = NetworkAligner(new_config("network", model, spec_of(model.config, "tiny"), **fields))
    if train:
        for net in (aligner.key, aligner.value):
            torch.nn.init.normal_(net.fc3.weight, std=0.3)
    return aligner.requires_grad_(False)


def make(name, model, **changes) -> Method:
    extra = {"aligner": network(model, train=True)} if METHODS[name].takes_aligner else {}
    return make_method(name, model, **({"cache_size": CACHE_SIZE} | extra | changes))


def made(name, model, **sizes) -> Method:
    """A method by name; `tables` is kvalign with these."""
    if name != "tables":
        return make(name, model, **sizes)
    return make("kvalign", model, **{"aligner": tables(model, 0.5)} | sizes)


def step(method, ids, first):
    """Logits [num_steps, B, V] of feeding `first` tokens at once and the others one by one."""
    method.reset()
    logits = [method.feed(ids[:, :first])]
    logits += [method.feed(ids[:, i : i + 1]) for i in range(first, ids.shape[1])]
    return torch.stack(logits)


def tables(model, scale=0.0, num_sinks=0, chunk_len=CONTEXT_LEN) -> TableAligner:
    """Tables for a tiny model, random of a given size."""
    spec = spec_of(model.config, "tiny")
    fields = dict(chunk_len=chunk_len, num_sinks=num_sinks, shifts=(1,))
    aligner = TableAligner(new_config("table", model, spec, **fields))
    torch.manual_seed(3)
    for table in (aligner.key, aligner.value):
        table.data = scale * torch.randn_like(table)
    for scales in (aligner.key_scale, aligner.value_scale):
        scales.data = (scale * torch.randn_like(scales)).exp()
    return aligner.requires_grad_(False)


def table_network(model, scale=0.0) -> TableNetworkAligner:
    """These tables, and a random network of the same size on what is written."""
    fields = dict(chunk_len=CONTEXT_LEN, num_sinks=0, shifts=(1,), sizes={"hidden": 8})
    spec = spec_of(model.config, "tiny")
    aligner = TableNetworkAligner(new_config("table-network", model, spec, **fields))
    aligner.load_state_dict(tables(model, scale).state_dict(), strict=False)
    for net in aligner.network:
        for output in (net.key, net.value):
            torch.nn.init.normal_(output.weight, std=scale)
            torch.nn.init.normal_(output.bias, std=scale)
    return aligner.requires_grad_(False)


WAYS = [(name, kind, {}) for name, kind in one_of_each((*METHODS, "tables"), KINDS)]
"""Each method, tables, and each architecture, once: names for `made`, kinds, sizes."""
