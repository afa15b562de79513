"""Networks trained on the steps of streams: the very steps that streaming makes."""

import pytest
import torch
from helpers.methods import anchored
from helpers.tiny_models import VOCAB, tiny_model

from kvalign.aligners import AnchoredAligner
from kvalign.methods import make_method
from kvalign.training.anchored_run import Streams, loss_of, new_streams, tune_networks
from kvalign.training.kinds import AnchoredSettings
from kvalign.training.text import Text

CHUNK_LEN = 32


def aligner_of(model) -> AnchoredAligner:
    torch.manual_seed(0)
    aligner = anchored(model, chunk_len=CHUNK_LEN)
    for net in (aligner.key, aligner.value):
        torch.nn.init.normal_(net.fc3.weight, std=0.05)
    return aligner


def random_ids(*shape: int) -> torch.Tensor:
    return torch.randint(2, VOCAB, shape, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("arch", ["gpt2", "gpt_neo", "llama"])
def test_steps_are_those_of_the_method(models, arch):
    model, ids = models[arch], random_ids(3, 40)
    aligner = aligner_of(model)
    method = make_method("kvalign", model, aligner=aligner, cache_size=12, num_sinks=0)
    method.feed(ids[:, :13])
    method.feed(ids[:, 13:14])
    layers = method.cache.layers
    stored = [layer.newest(layer.sources, 12).map(torch.clone) for layer in layers]
    streams = Streams(aligner, model, stored)
    with torch.no_grad():
        for end in range(14, 40):
            found = streams.step(ids[:, end])
            expected = method.feed(ids[:, end : end + 1])
            assert torch.allclose(found, expected.reshape(found.shape), atol=1e-4)


def test_kl_is_that_to_re_encoding(models):
    """With untrained tables a learned position's entries are stale; at their birth they are not."""
    model, ids, aligner = models["gpt2"], random_ids(2, 30), aligner_of(models["gpt2"])
    for net in (aligner.key, aligner.value):
        net.clear()
    streams = new_streams(aligner, model, ids[:, :12], 12)
    with torch.no_grad():
        first, second = (streams.step(ids[:, end]) for end in (12, 13))
    assert loss_of("kl", model, ids[:, :14], first).abs() < 1e-5
    assert loss_of("kl", model, ids[:, 1:15], second) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["kl", "nll"])
def test_training_lowers_the_validation_loss_and_leaves_the_model(objective):
    model = tiny_model("gpt2", n_layer=3)
    aligner, ids = aligner_of(model), random_ids(1, 4000)[0]
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    tables = {name: weight.clone() for name, weight in aligner.table.state_dict().items()}
    settings = AnchoredSettings(out="unused", objective=objective, max_steps=40, lr=3e-3)
    found = tune_networks(aligner, model, Text([ids[:-600]], [ids[-600:]]), settings)
    assert found["val_after"] < found["val_before"]
    assert not any(parameter.requires_grad for parameter in aligner.parameters())
    assert all(torch.equal(weights[name], weight) for name, weight in model.state_dict().items())
    assert all(torch.equal(tables[name], x) for name, x in aligner.table.state_dict().items())
