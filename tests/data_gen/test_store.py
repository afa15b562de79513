"""A store gives back what was written and refuses what is damaged, unfinished or hostile."""

import json

import pytest
import torch

from kvalign.data_gen.store import (
    KV,
    PAIRS,
    open_store,
    sha256,
    shard_at,
    write_json,
    write_shard,
)

SHAPE = [2, 3, 5, 4]  # L, H, S, D


@pytest.fixture
def folder(tmp_path):
    """A store of three shards, written by hand."""
    config = {
        "settings": {"num_evicted": [1], "dtype": "float16"},
        "shapes": {"1": SHAPE},
    }
    write_json(tmp_path / "config.json", config)
    entries = []
    for split, index, num_chunks in (("train", 0, 2), ("train", 1, 1), ("val", 0, 1)):
        shard = shard_at(tmp_path, config, split, 1, index, num_chunks)
        tensors = {name: _numbers(name, split, index, num_chunks) for name in PAIRS}
        write_shard(shard, {**tensors, "chunk": torch.arange(num_chunks)}, {"note": index})
        fields = ("split", "num_evicted", "num_chunks", "num_rows")
        entry = {field: getattr(shard, field) for field in fields}
        entries.append({"file": shard.path.name, **entry, "sha256": sha256(shard.path)})
    write_json(tmp_path / "manifest.json", {"shards": entries})
    return tmp_path


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
            for kv in KV:
                stale, aligned = shard.tensors(kv)
                place = (split, index, shard.num_chunks)
                assert torch.equal(stale, _numbers(f"{kv}_stale", *place))
                assert torch.equal(aligned, _numbers(f"{kv}_aligned", *place))
            assert shard.notes() == {"note": index}
            assert shard.chunks().tolist() == list(range(shard.num_chunks))


def test_same_pairs_are_the_same_bytes(folder):
    path = folder / "train-k1-00000.safetensors"
    before = path.read_bytes()
    for _ in range(5):
        shard = open_store(folder).shards("train")[0]
        tensors = {name: _numbers(name, "train", 0, 2) for name in PAIRS}
        write_shard(shard, {"chunk": torch.arange(2), **tensors}, {"note": 0})
        assert path.read_bytes() == before


def test_missing_and_unfinished_stores_are_refused(folder, tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"no recorded data in .*: record some with kvalign"
    ):
        open_store(tmp_path / "nowhere")
    (folder / "manifest.json").unlink()
    with pytest.raises(ValueError, match="is unfinished: run the same gen-data command again"):
        open_store(folder)


@pytest.mark.parametrize("num_bytes", [0, 7, 100, -1])
def test_truncated_shards_are_refused(folder, num_bytes):
    path = folder / "train-k1-00001.safetensors"
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(
        ValueError, match=r"train-k1-00001.safetensors is damaged \(.*\): delete it"
    ):
        open_store(folder)


def test_missing_and_exchanged_shards_are_refused(folder):
    path = folder / "train-k1-00001.safetensors"
    path.rename(folder / "val-k1-00000.safetensors")
    with pytest.raises(ValueError, match=r"train-k1-00001.safetensors is damaged \(it is missing"):
        open_store(folder)
    path.write_bytes((folder / "train-k1-00000.safetensors").read_bytes())
    with pytest.raises(
        ValueError, match=r"key_stale must be .*1, 2, 3, 5, 4.* found .*2, 2, 3, 5, 4"
    ):
        open_store(folder)


def test_verification_reads_every_byte(folder):
    path = open_store(folder, verify=True).shards("val")[0].path
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    open_store(folder)
    with pytest.raises(ValueError, match=r"val-k1-00000.*its SHA-256 differs"):
        open_store(folder, verify=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"file": "../train-k1-00000.safetensors"}, "is not the name of a shard"),
        ({"file": "/etc/passwd"}, "is not the name of a shard"),
        ({"file": "train-k1-00000.safetensors\n"}, "is not the name of a shard"),
        ({"file": 3}, "is not the name of a shard"),
        ({"file": None}, "is not the name of a shard"),
        ({"num_chunks": "2"}, "num_evicted or num_chunks"),
        ({"num_chunks": True}, "num_evicted or num_chunks"),
        ({"num_chunks": -2}, "num_evicted or num_chunks"),
        ({"file": "train-k7-00000.safetensors"}, "num_evicted or num_chunks"),
        ({"num_rows": 61}, "num_rows of train-k1-00000"),
        ({"split": "val"}, "num_rows of train-k1-00000"),
        ({"num_evicted": 2}, "num_rows of train-k1-00000"),
    ],
)
def test_hostile_manifests_are_refused(folder, change, message):
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["shards"][0] |= change
    write_json(folder / "manifest.json", manifest)
    with pytest.raises(ValueError, match=f"manifest.json is damaged: .*{message}"):
        open_store(folder)


@pytest.mark.parametrize("name", ["config.json", "manifest.json"])
@pytest.mark.parametrize("content", ["", "[]", "3", "{", "[" * 100_000, '{"shards": 1}', "\xff"])
def test_damaged_json_is_refused_naming_the_file(folder, name, content):
    (folder / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=name):
        open_store(folder)


@pytest.mark.parametrize(
    "config",
    [
        {"settings": {"num_evicted": [1], "dtype": "int8"}, "shapes": {"1": SHAPE}},
        {"settings": {"num_evicted": [], "dtype": "float16"}, "shapes": {"1": SHAPE}},
        {"settings": {"num_evicted": ["1"], "dtype": "float16"}, "shapes": {"1": SHAPE}},
        {"settings": {"num_evicted": [1], "dtype": ["float16"]}, "shapes": {"1": SHAPE}},
        {"settings": {"num_evicted": [1], "dtype": "float16"}, "shapes": {"1": SHAPE[:3]}},
        {"settings": {"num_evicted": [1], "dtype": "float16"}, "shapes": {"1": [2, 3, 5, 0]}},
        {"settings": [], "shapes": {}},
    ],
)
def test_damaged_configs_are_refused(folder, config):
    write_json(folder / "config.json", config)
    with pytest.raises(ValueError, match=r"config\.json is damaged"):
        open_store(folder)
