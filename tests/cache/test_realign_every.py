"""Entries that are moved every so many evictions, against lists of entries moved by the formula."""

import pytest
import torch
from helpers.methods import CACHE_SIZE, anchored, network, step, tables
from helpers.pairwise import one_of_each
from helpers.tiny_models import CONTEXT_LEN
from transformers import DynamicCache

from kvalign.aligners import Move
from kvalign.cache.realign import check_realign_every, realigner_of
from kvalign.cache.sizes import CacheSizes
from kvalign.foundation.errors import UserError
from kvalign.methods.kvalign import KVAlign
from kvalign.models.architectures import rotation_of
from kvalign.models.rope import rerotate
from kvalign.streaming.scoring import score, score_stepwise

ALIGNERS = {
    "table": lambda model: tables(model, scale=0.5),
    "anchored": lambda model: random_weights(anchored(model, scale=0.5)),
    "network": lambda model: network(model, train=True),
}
CELLS = [("gpt2", "table"), *((k, a) for k in ("gpt2", "llama") for a in ("anchored", "network"))]


def random_weights(aligner):
    torch.manual_seed(4)
    for net in (aligner.key, aligner.value):
        torch.nn.init.normal_(net.fc3.weight, std=0.3)
    return aligner


class Reference:
    """One layer's entries [H, D] as a list: the token's key and value at its birth, the position of
    that birth, and what attention sees now.
    """

    def __init__(self, layer, model, aligner, sizes):
        self.layer, self.aligner, self.sizes = layer, aligner, sizes
        rotation = rotation_of(model)
        self.inv_freq = rotation.inv_freq if rotation else torch.zeros(0)
        self.births, self.now = [], []
        self.dropped = self.moved = 0

    def append(self, key, value, position):
        self.births.append((key, value, position))
        self.now.append((key, value))

    def evict(self):
        first, k = self.sizes.num_sinks, self.sizes.num_evicted
        if len(self.births) <= self.sizes.cache_size:
            return
        del self.births[first : first + k], self.now[first : first + k]
        self.dropped += k
        if self.dropped - self.moved >= self.sizes.realign_every:
            for place in range(first, len(self.now)):
                self.now[place] = self.moved_to(place, self.dropped - self.moved)
            self.moved = self.dropped

    def moved_to(self, place, shift):
        move = Move(shift, place, torch.tensor([place]))
        if self.aligner.recursive:
            key, value = (x[None, :, None] for x in self.now[place])
            key = rerotate(key, shift, self.inv_freq)
            key, value = self.aligner.realign(self.layer, key, value, move)
        else:
            key, value, position = self.births[place]
            key, value = key[None, :, None], value[None, :, None]
            key = rerotate(key, position, self.inv_freq)
            at = torch.tensor([position])
            key, value = self.aligner.realign(
                self.layer, *self.aligner.anchor(self.layer, key, value, at), move
            )
            key = rerotate(key, -place, self.inv_freq)
        return key[0, :, 0], value[0, :, 0]

    def seen(self):
        """Keys and values [1, H, S, D]; of a rotary model the sinks follow those that ran on."""
        keys, values = (torch.stack(x, 1)[None] for x in zip(*self.now, strict=True))
        first, behind = self.sizes.num_sinks, self.dropped - self.moved
        keys[:, :, :first] = rerotate(keys[:, :, :first], -behind, self.inv_freq)
        return keys, values


@torch.no_grad()
def reference_logits(model, aligner, sizes, ids):
    layers = [Reference(i, model, aligner, sizes) for i in range(model.config.num_hidden_layers)]
    logits = []
    for i in range(ids.shape[1]):
        cache = DynamicCache([layer.seen() for layer in layers] if i else None)
        position = i - layers[0].moved
        out = model(
            input_ids=ids[:, i : i + 1],
            position_ids=torch.tensor([[position]]),
            past_key_values=cache,
        )
        logits.append(out.logits[:, -1])
        for layer, held in zip(layers, cache.layers, strict=True):
            layer.append(held.keys[0, :, -1], held.values[0, :, -1], position)
            layer.evict()
    return torch.stack(logits)


@pytest.mark.parametrize(("cell", "every"), one_of_each(CELLS, [(1, 1), (1, 3), (3, 7)]))
def test_moves_are_those_of_the_formula(cell, every, models, ids):
    (kind, aligner), (num_evicted, realign_every) = cell, every
    model = models[kind]
    trained, sizes = ALIGNERS[aligner](model), CacheSizes(CACHE_SIZE, 4, num_evicted, realign_every)
    method = KVAlign(model, sizes, aligner=trained)
    expected = reference_logits(model, trained, sizes, ids[:1, :70])
    assert torch.allclose(step(method, ids[:1, :70], 1), expected, atol=2e-4)
    assert method.cache.get_seq_length() <= sizes.last_position


@pytest.mark.parametrize(("num_evicted", "realign_every"), [(1, 3), (2, 3), (16, 20)])
def test_scoring_is_stepping(num_evicted, realign_every, models, ids):
    for kind in ("gpt2", "opt"):
        sizes = CacheSizes(CACHE_SIZE, 4, num_evicted, realign_every)
        method = KVAlign(models[kind], sizes, aligner=tables(models[kind], scale=0.5))
        assert method.is_exact
        expected = score_stepwise(method, ids[:1])
        assert torch.allclose(score(method, ids[:1]), expected, atol=2e-4)


@pytest.mark.parametrize("aligner", [*ALIGNERS])
def test_rows_of_unequal_length_on_alibi(aligner, models, ids):
    """Positions have run on by others in each row, and a mask goes by places."""
    model, lens = models["bloom"], (4, 27)
    batch = KVAlign(model, CacheSizes(CACHE_SIZE, 4, 1, 3), aligner=ALIGNERS[aligner](model))
    alone, others = ([batch.new() for _ in lens] for _ in range(2))
    for one, other, row, num in zip(alone, others, ids, lens, strict=True):
        one.feed(row[None, :num])
        other.feed(row[None, :num])
    batch.join(others)
    for i in range(20):
        tokens = torch.stack([row[num + i] for row, num in zip(ids, lens, strict=True)])[:, None]
        expected = [one.feed(token[None]) for one, token in zip(alone, tokens, strict=True)]
        assert torch.allclose(batch.feed(tokens), torch.cat(expected), atol=1e-4)


def test_it_changes_what_is_seen(models, ids):
    model, logits = models["gpt2"], []
    for realign_every in (1, 3):
        sizes = CacheSizes(CACHE_SIZE, 4, 1, realign_every)
        method = KVAlign(model, sizes, aligner=tables(model, scale=0.5))
        logits.append(step(method, ids[:, :40], CACHE_SIZE + 1))
    every, third = logits
    assert torch.allclose(every[0], third[0], atol=1e-5)
    assert (every[1:] - third[1:]).abs().amax((1, 2)).min() > 1e-3


@pytest.mark.parametrize(
    ("num_evicted", "most", "last_position"), [(1, 44, 63), (2, 44, 62), (3, 45, 62), (16, 48, 52)]
)
def test_positions_are_used_and_no_more_than_there_are(
    num_evicted, most, last_position, models, ids
):
    """Of a model of 64, whole evictions run on from a cache of 20."""
    model, aligner = models["gpt2"], tables(models["gpt2"], scale=0.5)
    sizes = CacheSizes(CACHE_SIZE, 4, num_evicted, most)
    method, highest = KVAlign(model, sizes, aligner=aligner), 0
    for i in range(ids.shape[1]):
        highest = max(highest, method.cache.get_seq_length())
        assert torch.isfinite(method.feed(ids[:, i : i + 1])).all()
    assert highest == sizes.last_position == last_position < CONTEXT_LEN
    chunks = KVAlign(model, sizes, aligner=anchored(model, scale=0.5))
    assert not chunks.is_exact and torch.isfinite(chunks.feed(ids)).all()
    with pytest.raises(UserError, match=f"realign_every must be at most {most} for ") as caught:
        KVAlign(model, CacheSizes(CACHE_SIZE, 4, num_evicted, most + 1), aligner=aligner)
    assert "\n" not in str(caught.value)


def test_where_it_has_no_effect_it_is_refused(models):
    sizes = CacheSizes(CACHE_SIZE, 4, 1, 3)
    for kind, aligner in CELLS:
        check_realign_every(sizes, realigner_of(models[kind], ALIGNERS[aligner](models[kind])))
    rotary_table = realigner_of(models["llama"], tables(models["llama"]))
    for realigner in (realigner_of(models["llama"]), rotary_table):
        with pytest.raises(UserError, match="realign_every must be 1"):
            check_realign_every(sizes, realigner)
        check_realign_every(CacheSizes(CACHE_SIZE, 4, 1, 1), realigner)
