"""A store gives back what was written and refuses what is damaged, unfinished or hostile."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvalign.aligners.network_sizes import TARGETS
from kvalign.data_gen.chunks import ShardChunks
from kvalign.data_gen.config import PAIRS, RecordingConfig
from kvalign.data_gen.store import ShardNotes, expected_shard, open_store, write_shard
from kvalign.foundation.errors import UserError
from kvalign.foundation.files import sha256, write_json

SHAPE = [2, 3, 5, 4]  # L, H, S, D
SETTINGS = {
    "model": "tiny",
    "corpus": ["python-docs"],
    "num_tokens": 100,
    "chunk_len": 10,
    "num_sinks": 4,
    "num_evicted": [1],
    "stride": 10,
    "val_share": 0.1,
    "dtype": "float16",
    "shard_mb": 64.0,
    "batch_size": 8,
    "device": "cpu",
    "seed": 0,
}
CONFIG = {
    "format": 1,
    "settings": SETTINGS,
    "model": {
        "name": "tiny",
        "model_type": "gpt2",
        "family": "learned",
        "num_layers": 2,
        "num_kv_heads": 3,
        "head_dim": 4,
        "context_len": 64,
    },
    "embedding_fingerprint": [0.5] * 16,
    "stale": "keys and values as encoded",
    "shapes": {"1": SHAPE},
    "chunks_per_shard": 2,
    "versions": {"python": "3.11"},
}


@pytest.fixture
def folder(tmp_path):
    """A store of three shards, written by hand."""
    write_json(tmp_path / "config.json", CONFIG)
    config = RecordingConfig.model_validate(CONFIG)
    entries = []
    for split, index, num_chunks in (("train", 0, 2), ("train", 1, 1), ("val", 0, 1)):
        chunks = ShardChunks(split, index, torch.arange(num_chunks), torch.empty(num_chunks, 10))
        shard = expected_shard(tmp_path, config, chunks, 1)
        tensors = {name: _numbers(name, split, index, num_chunks) for name in PAIRS}
        write_shard(shard, {**tensors, "chunk": torch.arange(num_chunks)}, _notes(index))
        fields = ("split", "num_evicted", "num_chunks", "num_rows")
        entry = {field: getattr(shard, field) for field in fields}
        entries.append({"file": shard.path.name, **entry, "sha256": sha256(shard.path)})
    manifest = {
        "num_chunks": {"train": 3, "val": 1},
        "num_rows": {"train": 90, "val": 30},
        "input_label_mse": {"key": {"1": 0.5}, "value": {"1": 0.25}},
        "shards": entries,
    }
    write_json(tmp_path / "manifest.json", manifest)
    return tmp_path


def _notes(index: int) -> ShardNotes:
    return ShardNotes(squared_error={"key": 0.5 + index, "value": 0.25}, tokens_sha256="ab")


def _numbers(name: str, split: str, index: int, num_chunks: int) -> torch.Tensor:
    seed = 10 * PAIRS.index(name) + 2 * index + (split == "val")
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_chunks, *SHAPE, generator=generator).half()


def test_what_was_written_is_read(folder):
    store = open_store(folder)
    assert store.shifts == (1,)
    assert [s.path.name for s in store.shards("train")] == [
        "train-k1-00000.safetensors",
        "train-k1-00001.safetensors",
    ]
    assert [s.num_rows for s in store.shards("train") + store.shards("val")] == [60, 30, 30]
    for split in ("train", "val"):
        for index, shard in enumerate(store.shards(split)):
            for kv in TARGETS:
                stale, aligned = shard.tensors(kv)
                place = (split, index, shard.num_chunks)
                assert torch.equal(stale, _numbers(f"{kv}_stale", *place))
                assert torch.equal(aligned, _numbers(f"{kv}_aligned", *place))
            assert shard.notes() == _notes(index)
            assert load_file(shard.path)["chunk"].tolist() == list(range(shard.num_chunks))


def test_missing_and_exchanged_shards_are_refused(folder):
    path = folder / "train-k1-00001.safetensors"
    path.rename(folder / "val-k1-00000.safetensors")
    with pytest.raises(UserError, match=r"train-k1-00001.safetensors is damaged \(it is missing"):
        open_store(folder)
    path.write_bytes((folder / "train-k1-00000.safetensors").read_bytes())
    with pytest.raises(
        UserError, match=r"key_stale must be .*1, 2, 3, 5, 4.* found .*2, 2, 3, 5, 4"
    ):
        open_store(folder)


def test_verification_reads_every_byte(folder):
    path = open_store(folder, verify=True).shards("val")[0].path
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    open_store(folder)
    with pytest.raises(UserError, match=r"val-k1-00000.*its SHA-256 differs"):
        open_store(folder, verify=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_rows": 61}, "num_rows must be 60, the manifest has 61"),
        ({"num_chunks": 3, "num_rows": 90}, "key_stale must be"),
        (
            {"file": "train-k7-00000.safetensors", "num_evicted": 7},
            "num_evicted 7 was not recorded",
        ),
    ],
)
def test_manifests_that_do_not_fit_the_recording_are_refused(folder, change, message):
    _change_first_entry(folder, change)
    with pytest.raises(UserError, match=rf"00000\.safetensors is damaged \({message}"):
        open_store(folder)


def _change_first_entry(folder, change):
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["shards"][0] |= change
    write_json(folder / "manifest.json", manifest)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"settings": SETTINGS | {"dtype": "int8"}}, "settings.dtype"),
        ({"settings": SETTINGS | {"num_evicted": [2, 1]}}, ".*num_evicted must be ascending"),
        ({"shapes": {"1": [2, 3, 6, 4]}}, ".*shapes must be those that follow from settings"),
        ({"model": CONFIG["model"] | {"family": "spiral"}}, "model.family"),
        ({"format": 2}, "format"),
    ],
)
def test_damaged_configs_are_refused(folder, change, field):
    write_json(folder / "config.json", CONFIG | change)
    with pytest.raises(UserError, match=rf"config\.json: {field}") as caught:
        open_store(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"file": "../train-k1-00000.safetensors"}, "0.file: String should match"),
        ({"num_chunks": "2"}, "0.num_chunks: Input should be a valid integer, got '2'"),
        ({"split": "val"}, "0: .*file must be named after split and num_evicted"),
        ({"more": 1}, "0.more: Extra inputs"),
    ],
)
def test_hostile_manifests_are_refused(folder, change, message):
    _change_first_entry(folder, change)
    with pytest.raises(UserError, match=rf"manifest\.json: shards\.{message}") as caught:
        open_store(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "metadata", [None, {"kvalign": ""}, {"kvalign": "[" * 10_000}, {"kvalign": '{"note": 1}'}]
)
def test_notes_of_others_are_refused(folder, metadata):
    shard = open_store(folder).shards("val")[0]
    save_file({"chunk": torch.arange(1)}, shard.path, metadata=metadata)
    with pytest.raises(UserError, match="val-k1-00000.safetensors is not a shard of kvalign"):
        shard.notes()
