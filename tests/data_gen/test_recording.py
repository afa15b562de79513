"""Chunks are windows of the corpora's tokens, pairs are plain encodings, a store has the
pairs of its chunks; interrupted runs resume; others are refused.
"""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.tiny_corpus import TEXT, byte_tokenizer
from helpers.tiny_models import KINDS, VOCAB, tiny_model
from safetensors.torch import load_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvalign.data_gen import recording
from kvalign.data_gen.corpora import cut_chunks, equal_shares
from kvalign.data_gen.recording import SPLITS, first_val_chunk, record, record_pairs, split_of
from kvalign.data_gen.settings import RecordSettings
from kvalign.data_gen.store import open_store
from kvalign.foundation.errors import UserError
from kvalign.models.architectures import rotation_of, spec_of
from kvalign.models.loading import LoadedModel


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return byte_tokenizer(VOCAB, TEXT)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "cat.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def wrap(tokenizer):
    def wrapped(model: PreTrainedModel) -> LoadedModel:
        return LoadedModel(
            model, tokenizer, spec_of(model.config, f"tiny {model.config.model_type}")
        )

    return wrapped


@pytest.fixture(scope="session")
def gpt2(wrap) -> LoadedModel:
    return wrap(tiny_model("gpt2"))


@pytest.fixture
def settings(text_file, tmp_path):
    def make(**changes) -> RecordSettings:
        small = dict(corpus=(f"text:{text_file}",), out=tmp_path / "pairs", num_tokens=480)
        small |= dict(chunk_len=24, num_evicted=(1, 3), batch_size=2, shard_mb=0.08)
        return RecordSettings(**small | changes)

    return make


def _bytes(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
        if not path.name.startswith(".")
    }


@pytest.mark.parametrize("stride", [24, 7])
@pytest.mark.parametrize("sizes", [(1000,), (1,) * 300 + (50,) * 14, (23, 25, 0, 952)])
def test_chunks_are_windows_of_the_stream(stride, sizes):
    stream, pieces = list(range(990)), []
    for size in sizes:
        pieces.append(stream[sum(map(len, pieces)) :][:size])
    expected = [stream[start : start + 24] for start in range(0, 990 - 23, stride)]
    assert list(cut_chunks(pieces, 24, stride)) == expected


@pytest.mark.parametrize("stride", [24, 16, 7, 1])
def test_no_token_is_in_both_splits(stride):
    rule = {"chunk_len": 24, "stride": stride, "val_share": 0.2, "seed": 3}
    tokens = {"train": set(), "val": set(), None: set()}
    for index in range(4000):
        tokens[split_of(index, **rule)] |= set(range(index * stride, index * stride + 24))
    assert tokens["train"].isdisjoint(tokens["val"])
    assert 0.1 < len(tokens["val"]) / (4000 * stride) < 0.3
    assert next(i for i in range(4000) if split_of(i, **rule) == "val") == first_val_chunk(
        24, stride
    )
    assert split_of(0, **rule) == "train"


def test_seed_draws_another_split():
    def drawn(seed: int) -> list:
        return [split_of(index, 24, 24, 0.5, seed) for index in range(100)]

    assert drawn(0) == drawn(0) != drawn(1)


def test_several_corpora_give_equal_shares():
    first, second = [[1, 2], [3, 4, 5], [6, 7]], [[11], [12, 13], [14, 15, 16]]
    expected = [1, 2, 3, 4, 11, 12, 13, 14, 15]
    for num_tokens, ids in ((8, expected[:-1]), (9, expected)):
        pieces = equal_shares([first, second], num_tokens)
        assert [id_ for piece in pieces for id_ in piece] == ids


def _encode(model, ids: torch.Tensor) -> list[torch.Tensor]:
    """Keys and values of one chunk [T], by the whole model and its own cache: [L, H, T, D] each."""
    layers = model(input_ids=ids[None], use_cache=True).past_key_values.layers
    return [torch.cat([getattr(x, name) for x in layers]) for name in ("keys", "values")]


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_are_plain_encodings(models, kind, wrap):
    model, num_sinks, shift = models[kind], 4, 3
    ids = torch.randint(0, VOCAB, (2, 20), generator=torch.Generator().manual_seed(0))
    pairs = record_pairs(wrap(model), ids, num_sinks, (1, shift))[shift]
    for row, chunk in enumerate(ids):
        key_stale, value_stale = (x[..., 7:, :] for x in _encode(model, chunk))
        rest = torch.tensor([*chunk[:4].tolist(), *chunk[7:].tolist()])
        key_aligned, value_aligned = (x[..., 4:, :] for x in _encode(model, rest))
        if hasattr(model.base_model, "rotary_emb"):
            key_stale = rotation_of(model).shift(key_stale, shift)
        expected = (key_stale, key_aligned, value_stale, value_aligned)
        for a, b in zip(pairs, expected, strict=True):
            assert a.shape == (2, *b.shape)
            assert torch.allclose(a[row], b, atol=1e-4)


def test_pairs_have_every_entry_of_layers_with_a_window(wrap):
    model = tiny_model("mistral", sliding_window=8)
    ids = torch.arange(20)[None]
    assert record_pairs(wrap(model), ids, 4, (1,))[1][0].shape[3] == 15


def test_store_holds_the_pairs_of_its_chunks(gpt2, tokenizer, text_file, settings):
    store = record(settings(dtype="float32", batch_size=1), loaded=gpt2)
    assert store.shifts == (1, 3)
    ids = torch.tensor(tokenizer(text_file.read_text())["input_ids"][:480]).view(20, 24)
    seen = {split: set() for split in SPLITS}
    for split in SPLITS:
        for shard in store.shards(split):
            indices = load_file(shard.path)["chunk"]
            seen[split] |= set(indices.tolist())
            expected = [
                record_pairs(gpt2, ids[[i]], 4, (1, 3))[shard.num_evicted] for i in indices.tolist()
            ]
            expected = [torch.cat(x) for x in zip(*expected, strict=True)]
            found = [*shard.tensors("key"), *shard.tensors("value")]
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
            assert shard.num_rows == expected[0][..., 0].numel()
    assert sorted([*seen["train"], *seen["val"]]) == list(range(20))
    assert {split: len(places) for split, places in seen.items()} == store.manifest.num_chunks


def test_resumed_runs_end_in_the_same_bytes(gpt2, settings, tmp_path, monkeypatch):
    undisturbed = record(settings(out=tmp_path / "a"), loaded=gpt2)
    expected = _bytes(undisturbed.folder)
    assert len(undisturbed.shards("train")) > 4
    out = tmp_path / "b"
    write_shard, written = recording.write_shard, []

    def crash_at_third(shard, *args):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(shard.path.name)
        write_shard(shard, *args)

    monkeypatch.setattr(recording, "write_shard", crash_at_third)
    with pytest.raises(KeyboardInterrupt):
        record(settings(out=out), loaded=gpt2)
    with pytest.raises(UserError, match="is unfinished: run the same gen-data command again"):
        open_store(out)
    assert not expected.keys() <= _bytes(out).keys()
    (out / ".train-k1-00001.partial.safetensors").write_bytes(b"left by a crash")
    monkeypatch.setattr(recording, "write_shard", write_shard)
    record(settings(out=out), loaded=gpt2)
    assert _bytes(out) == expected

    last = sorted(out.glob("*.safetensors"))[-1]
    for damaged in (last.unlink, lambda: last.write_bytes(last.read_bytes()[:-1])):
        damaged()
        (out / "manifest.json").unlink()
        kept = {p.name: p.stat().st_mtime_ns for p in out.glob("*.safetensors") if p != last}
        record(settings(out=out), loaded=gpt2)
        assert _bytes(out) == expected
        assert kept == {
            p.name: p.stat().st_mtime_ns for p in out.glob("*.safetensors") if p != last
        }


def test_finished_recordings_are_left_alone(gpt2, settings):
    store = record(settings(), loaded=gpt2)
    before = {path: path.stat().st_mtime_ns for path in store.folder.iterdir()}
    again = record(settings(batch_size=7, num_evicted=(3, 1, 3)), loaded=gpt2)
    assert again.manifest == store.manifest
    assert before == {path: path.stat().st_mtime_ns for path in store.folder.iterdir()}


def test_another_recording_is_refused(gpt2, wrap, settings, tmp_path):
    store = record(settings(), loaded=gpt2)
    with pytest.raises(UserError, match="other settings \\(num_tokens is 480 there, 504 now\\)"):
        record(settings(num_tokens=504), loaded=gpt2)
    with pytest.raises(UserError, match=r"num_evicted is \[1, 3\] there, \[1\] now"):
        record(settings(num_evicted=(1,)), loaded=gpt2)
    other = tiny_model("gpt2")
    other.transformer.h[1].mlp.c_proj.weight[2, 3] += 1
    with pytest.raises(UserError, match="identity is"):
        record(settings(), loaded=wrap(other))
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    with pytest.raises(UserError, match="photos holds other files"):
        record(settings(out=tmp_path / "photos"), loaded=gpt2)
    assert open_store(store.folder).manifest == store.manifest


def test_a_full_disk_is_noticed_before_anything_is_written(gpt2, settings, tmp_path, monkeypatch):
    """What an interrupted recording has written needs no room any more."""
    folder = record(settings(), loaded=gpt2).folder
    whole, shards = _bytes(folder), [*folder.glob("*.safetensors")]
    sizes = [path.stat().st_size for path in shards]
    free = sum(sizes) // 2
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free))
    with pytest.raises(UserError, match="a recording of 480 tokens needs .* kB in .* left"):
        record(settings(out=tmp_path / "other"), loaded=gpt2)
    assert not (tmp_path / "other").exists()
    (folder / "manifest.json").unlink()
    shards[0].unlink()
    free = sizes[0]
    assert _bytes(record(settings(), loaded=gpt2).folder) == whole


def test_missing_exchanged_and_changed_shards_are_refused(gpt2, settings):
    folder = record(settings(), loaded=gpt2).folder
    path, other = (sorted(folder.glob(f"train-k{k}-*"))[0] for k in (1, 3))
    whole = path.read_bytes()
    path.unlink()
    with pytest.raises(UserError, match=rf"{path.name} is damaged \(it is missing"):
        open_store(folder)
    path.write_bytes(other.read_bytes())
    with pytest.raises(UserError, match="key_stale must be .* found "):
        open_store(folder)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    open_store(folder)
    with pytest.raises(UserError, match=rf"{path.name}.*its SHA-256 differs"):
        open_store(folder, verify=True)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"shapes": {}}))
    with pytest.raises(UserError, match=r"damaged \(config.json has no shape for k="):
        open_store(folder)
