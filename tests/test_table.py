"""Position tables: moved from birth, so nothing adds up; estimated as plain means."""

import pytest
import torch
from conftest import CONTEXT_LEN, tiny_model
from test_methods import CACHE_SIZE, make, step
from tiny_store import CHUNK_LEN, NUM_SINKS, record_tiny

from kvalign.aligners import Aligner, TableAligner, new_config
from kvalign.cli import main
from kvalign.models import spec_of
from kvalign.training.tables import mean_table


def tables(model, scale=0.0, num_sinks=0) -> TableAligner:
    """Tables for a tiny model, random of a given size."""
    spec = spec_of(model.config, "tiny")
    fields = dict(chunk_len=CONTEXT_LEN, num_sinks=num_sinks, shifts=(1,))
    aligner = TableAligner(new_config("table", model, spec, **fields))
    torch.manual_seed(3)
    for table in (aligner.key, aligner.value):
        table.data = scale * torch.randn_like(table)
    return aligner.requires_grad_(False)


def test_zero_tables_are_streaming_llm(model, ids):
    stale = step(make("streaming-llm", model), ids[:, :90], CACHE_SIZE + 1)
    moved = step(make("kvalign", model, aligner=tables(model)), ids[:, :90], CACHE_SIZE + 1)
    assert torch.equal(stale, moved)


@pytest.mark.parametrize("num_evicted", [1, 3, 16])
@pytest.mark.parametrize("num_sinks", [0, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_entries_are_moved_once_however_often_they_moved(num_evicted, num_sinks, dtype, ids):
    """After 180 tokens every entry is its birth less m[born] plus m[now], rounded twice."""
    model = tiny_model("gpt2").to(dtype)
    aligner = tables(model, scale=0.5)
    sizes = dict(num_evicted=num_evicted, num_sinks=num_sinks)
    method, births = make("kvalign", model, aligner=aligner, **sizes), []
    for layer in method.cache.layers:
        births.append(record_births(layer))
    step(method, ids[:, :180], CACHE_SIZE + 1)
    slots = method.cache.slots
    born, now = slots.born[num_sinks:], torch.arange(num_sinks, len(slots))
    assert (born - now).max() >= CACHE_SIZE - num_sinks - num_evicted
    tolerance = dict(rtol=2 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)
    for i, layer in enumerate(method.cache.layers):
        for target, table in ((0, aligner.key[i]), (1, aligner.value[i])):
            stored = (layer.keys, layer.values)[target]
            birth = torch.cat([pair[target] for pair in births[i]], 2)[:, :, slots.index]
            assert torch.equal(stored[:, :, :num_sinks], birth[:, :, :num_sinks])
            moved = birth[:, :, num_sinks:].float() + (table[:, now] - table[:, born])
            assert torch.allclose(stored[:, :, num_sinks:].float(), moved, **tolerance)


def record_births(layer) -> list:
    """Every key and value that a layer of the cache is given from now on."""
    given, update = [], layer.update

    def recording(keys, values, *args, **kwargs):
        given.append((keys, values))
        return update(keys, values, *args, **kwargs)

    layer.update = recording
    return given


def test_fewer_sinks_than_recorded_are_refused(models):
    with pytest.raises(ValueError, match="num_sinks must be at least 4 with this aligner"):
        make("kvalign", models["gpt2"], num_sinks=2, aligner=tables(models["gpt2"], num_sinks=4))


def test_means_are_plain_means(tmp_path):
    """Against sums over the recorded encodings, chunk by chunk and position by position."""
    recorded = record_tiny(tmp_path / "caches")
    for target in ("key", "value"):
        table = mean_table(recorded.store, target)
        assert not table[:, :, :NUM_SINKS].any()
        for position in range(NUM_SINKS, CHUNK_LEN):
            entries = []
            for shard in recorded.store.shards("train"):
                stale, aligned = shard.tensors(target)
                for first, x in ((NUM_SINKS + shard.num_evicted, stale), (NUM_SINKS, aligned)):
                    if first <= position < first + x.shape[3]:
                        entries += list(x[:, :, :, position - first].double())
            mean = torch.stack(entries).mean(0).float()
            assert torch.allclose(table[:, :, position], mean, atol=1e-6)


def test_train_writes_tables_that_generate_takes(tmp_path, capfd):
    data, out = str(tmp_path / "caches"), str(tmp_path / "tables")
    argv = ["gen-data", "--num-tokens", "2560", "--chunk-len", "64", "--num-sinks", "0", "--out"]
    assert main([*argv, data]) == 0
    train = ["train", "--aligner-kind", "table", "--data", data, "--out", out]
    assert main(train) == 0
    aligner = Aligner.from_pretrained(out)
    assert isinstance(aligner, TableAligner)
    assert aligner.config.training["key"]["ratio"] < 1
    assert "--aligner-kind table" in (tmp_path / "tables/README.md").read_text()
    capfd.readouterr()
    assert main(train) == 2
    assert "already holds an aligner" in capfd.readouterr().err
    argv = ["generate", "--prompt", "The", "--cache-size", "40", "--max-new-tokens", "60"]
    assert main([*argv, "--aligner", out, "--num-sinks", "2", "--num-evicted", "7"]) == 0


def test_rotary_models_need_no_table(tmp_path, capfd):
    data = str(tmp_path / "caches")
    argv = [
        "gen-data",
        "--model",
        "llama-mini",
        "--num-tokens",
        "512",
        "--chunk-len",
        "64",
        "--out",
    ]
    assert main([*argv, data]) == 0
    argv = ["train", "--aligner-kind", "table", "--data", data, "--out", str(tmp_path / "t")]
    capfd.readouterr()
    assert main(argv) == 2
    assert "is rotary: its keys are moved exactly by rotation" in capfd.readouterr().err
    assert not (tmp_path / "t").exists()
