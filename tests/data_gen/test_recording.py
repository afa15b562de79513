"""A store has the pairs of its chunks; interrupted runs resume; others are refused."""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.tiny_corpus import TEXT, byte_tokenizer
from helpers.tiny_models import CONTEXT_LEN, VOCAB, tiny_model
from safetensors.torch import load_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvalign import data_gen
from kvalign.data_gen import workers
from kvalign.data_gen.config import SPLITS
from kvalign.data_gen.pairs import record_pairs
from kvalign.data_gen.recording import record
from kvalign.data_gen.settings import RecordSettings
from kvalign.data_gen.store import open_store
from kvalign.foundation.errors import UserError
from kvalign.models.architectures import spec_of
from kvalign.models.identity import say_weak
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
        small = {
            "corpus": (f"text:{text_file}",),
            "out": tmp_path / "pairs",
            "num_tokens": 480,
            "chunk_len": 24,
            "num_evicted": (1, 3),
            "batch_size": 2,
            "shard_mb": 0.08,
        }
        return RecordSettings(**small | changes)

    return make


def _bytes(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
        if not path.name.startswith(".")
    }


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


def test_mse_is_that_of_the_stored_numbers(gpt2, settings):
    store = record(settings(), loaded=gpt2)
    for kv in ("key", "value"):
        for shift in store.shifts:
            pairs = [
                shard.tensors(kv)
                for split in SPLITS
                for shard in store.shards(split)
                if shard.num_evicted == shift
            ]
            stale, aligned = (
                torch.cat([x.double() for x in side]) for side in zip(*pairs, strict=True)
            )
            expected = torch.nn.functional.mse_loss(stale, aligned).item()
            assert store.manifest.input_label_mse[kv][shift] == pytest.approx(expected)
    num_rows = {split: sum(s.num_rows for s in store.shards(split)) for split in SPLITS}
    assert num_rows == store.manifest.num_rows


def test_resumed_runs_end_in_the_same_bytes(gpt2, settings, tmp_path, monkeypatch):
    undisturbed = record(settings(out=tmp_path / "a"), loaded=gpt2)
    expected = _bytes(undisturbed.folder)
    assert len(undisturbed.shards("train")) > 4
    out = tmp_path / "b"
    write_shard, written = workers.write_shard, []

    def crash_at_third(shard, *args):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(shard.path.name)
        write_shard(shard, *args)

    monkeypatch.setattr(workers, "write_shard", crash_at_third)
    with pytest.raises(KeyboardInterrupt):
        record(settings(out=out), loaded=gpt2)
    with pytest.raises(UserError, match="is unfinished: run the same gen-data command again"):
        open_store(out)
    assert not expected.keys() <= _bytes(out).keys()
    (out / ".train-k1-00001.partial.safetensors").write_bytes(b"left by a crash")
    monkeypatch.setattr(workers, "write_shard", write_shard)
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


def test_changed_text_is_recorded_again(gpt2, settings, text_file, tmp_path):
    path = tmp_path / "changing.txt"
    path.write_text("the cat " + text_file.read_text())
    record(settings(corpus=(f"text:{path}",)), loaded=gpt2)
    (tmp_path / "pairs" / "manifest.json").unlink()
    path.write_text(text_file.read_text())
    store = record(settings(corpus=(f"text:{path}",)), loaded=gpt2)
    other = record(settings(out=tmp_path / "other"), loaded=gpt2)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert store.manifest.text_sha256 == {f"text:{path}": digest}
    assert other.manifest.text_sha256 == {f"text:{text_file}": digest}
    assert store.manifest.shards == other.manifest.shards


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


def test_recordings_of_version_0_1_are_read_and_resumed(gpt2, wrap, settings, caplog):
    """Their config has the embedding's fingerprint as `probe`, and no identity of the model."""
    store = record(settings(), loaded=gpt2)
    expected = _bytes(store.folder)
    config = json.loads((store.folder / "config.json").read_text())
    config["probe"] = config.pop("embedding_fingerprint")
    del config["identity"]
    config["versions"]["kvalign"] = "0.1.0"
    old = json.dumps(config)
    (store.folder / "config.json").write_text(old)
    assert open_store(store.folder, verify=True).config.embedding_fingerprint == tuple(
        config["probe"]
    )
    say_weak.cache_clear()
    assert record(settings(), loaded=gpt2).manifest == store.manifest
    assert "says of its model only 16 embedding weights" in caplog.text
    other = tiny_model("gpt2")
    other.transformer.wte.weight.mul_(2)
    with pytest.raises(UserError, match="embedding_fingerprint is"):
        record(settings(), loaded=wrap(other))
    config["versions"]["kvalign"] = store.config.versions["kvalign"]
    (store.folder / "config.json").write_text(json.dumps(config))
    (store.folder / "manifest.json").unlink()
    sorted(store.folder.glob("*.safetensors"))[-1].unlink()
    record(settings(), loaded=gpt2)
    assert _bytes(store.folder) | {"config.json": ""} == expected | {"config.json": ""}


def test_a_loaded_model_is_for_one_worker(gpt2, settings):
    with pytest.raises(UserError, match="workers load the model themselves"):
        record(settings(workers=2), loaded=gpt2)


def test_what_cannot_be_recorded_is_refused_before_anything_is_written(gpt2, settings, tmp_path):
    with pytest.raises(UserError, match=f"--chunk-len must be at most {CONTEXT_LEN} for tiny gpt2"):
        record(settings(chunk_len=CONTEXT_LEN + 1), loaded=gpt2)
    with pytest.raises(UserError, match=r"--chunk-len must be above --num-sinks \+ --num-evicted"):
        settings(chunk_len=24, num_evicted=(1, 20))
    with pytest.raises(UserError, match=r"--stride must be at most --chunk-len \(24\), got 25"):
        settings(stride=25)
    with pytest.raises(UserError, match=r"--num-tokens must be at least 48 .* got 47"):
        record(settings(num_tokens=47), loaded=gpt2)
    short = tmp_path / "short.txt"
    short.write_text("the cat\n")
    with pytest.raises(UserError, match="has 3 tokens, 48 are needed"):
        record(settings(corpus=(f"text:{short}",)), loaded=gpt2)
    assert not (tmp_path / "pairs").exists()


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


def test_numbers_that_do_not_fit_are_refused(wrap, settings):
    model = tiny_model("gpt2")
    model.transformer.h[0].attn.c_attn.bias += 1e5
    with pytest.raises(UserError, match="do not fit --dtype float16: use bfloat16 or float32"):
        record(settings(), loaded=wrap(model))


@pytest.mark.slow
def test_keywords_are_settings(gpt2, text_file, tmp_path):
    store = data_gen.record(
        corpus=[f"text:{text_file}"],
        out=str(tmp_path / "out"),
        num_tokens=480,
        chunk_len=24,
        loaded=gpt2,
    )
    assert store.config.settings.num_evicted == (1,)
    assert store.config.model == gpt2.spec
    with pytest.raises(UserError, match="--chunk-len must be at least 2"):
        data_gen.record(out=tmp_path, chunk_len=1)
