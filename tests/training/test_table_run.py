"""Tables from text, alone or with a network, tuned through the frozen model, judged by its loss."""

import json

import pytest
import torch
from helpers.methods import tables
from helpers.other_weights import change, copy_of
from helpers.smaller import ENOUGH_LABELS, INSIDE
from helpers.tiny_corpus import TEXT, byte_tokenizer
from helpers.tiny_models import CONTEXT_LEN, VOCAB, tiny_model
from transformers import AutoTokenizer

from kvalign import checkpoints
from kvalign.aligners import Aligner, TableAligner
from kvalign.app.cli.main import main
from kvalign.cache import segments
from kvalign.cache.realigner import realigner_of
from kvalign.cache.sizes import CacheSizes
from kvalign.cache.streaming_cache import StreamingCache
from kvalign.data_gen.recording import encode
from kvalign.foundation.errors import UserError
from kvalign.models.architectures import spec_of
from kvalign.models.loading import LoadedModel
from kvalign.training import table_run, train_table_network
from kvalign.training.settings import TableSettings
from kvalign.training.text import Texts
from kvalign.training.text_run import measure


def random_text(num_tokens=4000) -> Texts:
    rng = torch.Generator().manual_seed(5)
    ids = torch.randint(2, VOCAB, (num_tokens,), generator=rng)
    return Texts([ids[:-600]], [ids[-600:]])


@pytest.fixture
def little_work(monkeypatch):
    """Little text in place of Python's documentation, and small steps."""
    for name, value in INSIDE.items():
        monkeypatch.setattr(name, value)


@pytest.fixture
def verdicts(little_work, monkeypatch):
    """As much text as a verdict needs."""
    monkeypatch.setattr("kvalign.training.judge.ROW_LABELS", ENOUGH_LABELS)


def test_moments_are_plain_moments(models):
    model, text = models["gpt2"], random_text()
    aligner, chunks = tables(model), text.chunks("train", CONTEXT_LEN)
    table_run.standardise(aligner, model, chunks, ("key", "value"))
    entries = dict(zip(("key", "value"), encode(model, chunks), strict=True))
    for kv, x in entries.items():
        means = x.double().mean(0)
        assert torch.allclose(getattr(aligner, kv).double(), means, atol=1e-5)
        spread = (x.double() - means).square().mean((0, -1)).sqrt()
        scales = getattr(aligner, f"{kv}_scale").double()
        assert torch.allclose(scales, spread / spread[..., -1:], rtol=1e-3)
        assert (scales[..., -1] == 1).all()


def projected(model) -> TableAligner:
    table = tables(model)
    table_run.project_positions(table, model, ("key", "value"))
    return table


def test_projected_means_are_the_layers_own_projections(models):
    model = models["gpt2"]
    table, positions = projected(model), model.transformer.wpe.weight[:CONTEXT_LEN]
    for layer, block in enumerate(model.transformer.h):
        for i, kv in ((1, "key"), (2, "value")):
            size = model.config.n_embd
            weight = block.attn.c_attn.weight[:, i * size : (i + 1) * size]
            expected = (positions - positions[0]) @ weight
            means = getattr(table, kv)[layer].transpose(0, 1).flatten(1)
            assert torch.allclose(means - means[0], expected, atol=1e-5)
    assert (table.key_scale == 1).all()


def test_other_models_are_not_projected(models):
    with pytest.raises(UserError, match="for gpt2 models, not opt ones"):
        projected(models["opt"])


def test_moving_half_a_chunk_is_measured(models):
    model, text = models["gpt2"], random_text()
    chunks = text.chunks("val", CONTEXT_LEN)
    none = measure(tables(model), model, chunks)["key"]
    assert none["ratio"] == pytest.approx(1, abs=1e-6)
    aligner = tables(model)
    table_run.standardise(aligner, model, text.chunks("train", CONTEXT_LEN), ("key", "value"))
    found = measure(aligner, model, chunks)
    assert found["key"]["input_label_mse"] == pytest.approx(none["input_label_mse"])
    assert max(part["ratio"] for part in found.values()) < 0.9


def test_kl_is_zero_where_streaming_is_exact():
    """With one layer, a rotary stream equals re-encoding what it keeps."""
    ids = random_text().train[0][:400].view(4, 100)

    def divergence(model, sizes):
        cache = StreamingCache(spec_of(model.config), sizes, realigner_of(model))
        logits = segments.feed(cache, model, ids[:, :-1], logits_to_keep=99 - 20)
        rng = torch.Generator().manual_seed(0)
        return table_run.stream_loss("kl", model, sizes, ids, logits, rng)

    model = tiny_model("llama", num_hidden_layers=1)
    for num_evicted in (1, 5):
        assert divergence(model, CacheSizes(20, 0, num_evicted)).abs() < 1e-4
    assert divergence(tiny_model("gpt2"), CacheSizes(20, 0)) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "target"), [("nll", "both"), ("kl", "key")])
def test_tuning_lowers_the_validation_loss_and_leaves_the_rest(objective, target):
    model, text = tiny_model("gpt2", n_layer=3), random_text()
    aligner = tables(model, chunk_len=32)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    before = table_run.validate(aligner, model, text, objective)
    settings = TableSettings(
        out="unused", objective=objective, target=target, max_steps=30, lr=5e-3
    )
    found = table_run.tune(aligner, model, text, settings)
    assert found["val_before"] == pytest.approx(before)
    assert found["val_after"] == pytest.approx(
        table_run.validate(aligner, model, text, objective), abs=1e-5
    )
    assert found["val_after"] < before
    assert set(aligner.state_dict()) == {"key", "value", "key_scale", "value_scale"}
    assert not any(parameter.requires_grad for parameter in aligner.parameters())
    assert bool(aligner.key.any()) and bool(aligner.value.any()) == (target == "both")
    assert all(torch.equal(weights[name], weight) for name, weight in model.state_dict().items())


SMALL = ["--num-tokens", "6000", "--chunk-len", "48"]


def test_train_writes_what_generate_takes(tmp_path, capfd, caplog, verdicts):
    out = str(tmp_path / "aligner")
    train = ["train", "table", *SMALL, "--max-steps", "4", "--out", out]
    assert main([*train, "--json"]) == 0
    assert "max_steps has no effect with --objective mse" in caplog.text
    printed, aligner = json.loads(capfd.readouterr().out), Aligner.from_pretrained(out)
    assert isinstance(aligner, TableAligner)
    assert printed == aligner.config.training
    assert printed["key"]["ratio"] < 1 and printed["key"]["used"]
    assert "kvalign train table" in (tmp_path / "aligner/README.md").read_text()
    assert main(train) == 0
    assert "already has this, finished: nothing to do" in capfd.readouterr().err
    assert main([*train, "--num-tokens", "5900"]) == 2
    assert "already holds an aligner" in capfd.readouterr().err
    argv = ["generate", "--prompt", "The", "--cache-size", "40", "--max-new-tokens", "60"]
    assert main([*argv, "--aligner", out, "--num-sinks", "2", "--num-evicted", "7"]) == 0


@pytest.mark.slow
def test_an_aligner_of_other_weights_is_not_finished(tmp_path, capfd, caplog, little_work):
    """All is kept where nothing is judged."""
    folder, out = copy_of("llama-mini", tmp_path / "m"), tmp_path / "aligner"
    train = ["train", "table", *SMALL, "--model", str(folder), "--no-judge"]
    train += ["--out", str(out)]
    assert main(train) == 0
    said, card = capfd.readouterr(), (out / "README.md").read_text()
    assert "not used" not in said.out and "judged" not in said.out and str(out) in said.err
    assert "| key |" in card and "changes nothing" not in card and "--no-judge" in card
    aligner = Aligner.from_pretrained(out)
    assert aligner.key.any() and aligner.value.any() and aligner.config.num_sinks == 4
    assert main(train) == 0
    assert "already has this, finished: nothing to do" in capfd.readouterr().err
    change(folder)
    assert main(train) == 2
    assert f"was trained with other weights than {folder} has now: give" in capfd.readouterr().err


@pytest.mark.slow
def test_tables_that_do_not_help_are_not_used(tmp_path, capfd, verdicts):
    """Rotary keys need none: what is saved then changes nothing, and is said to."""
    out = str(tmp_path / "aligner")
    argv = ["train", "table", "--model", "llama-mini", *SMALL, "--out", out]
    assert main(argv) == 0
    said = capfd.readouterr()
    assert "not used: " in said.out and "the saved aligner changes nothing" in said.out
    assert "next: kvalign generate --model llama-mini\n" in said.err
    card = (tmp_path / "aligner/README.md").read_text()
    assert "| key |" in card and "**It changes nothing**" in card and "yes |" not in card
    aligner = Aligner.from_pretrained(out)
    assert not aligner.key.any() and (aligner.key_scale == 1).all()


@pytest.mark.slow
def test_models_that_must_be_stepped_are_trained_on_moments(tmp_path, capfd, little_work):
    """BLOOM's attention is its own: tables from moments, judged step by step; no nll."""
    folder = tmp_path / "bloom"
    tiny_model("bloom", vocab_size=8192).save_pretrained(folder)
    AutoTokenizer.from_pretrained(checkpoints.model_path("gpt2-mini")).save_pretrained(folder)
    argv = ["train", "table", "--model", str(folder), *SMALL]
    out = str(tmp_path / "aligner")
    capfd.readouterr()
    assert main([*argv, "--objective", "nll", "--out", out]) == 2
    assert "--objective nll is not for bloom models" in capfd.readouterr().err
    assert main([*argv, "--out", out, "--json"]) == 0
    printed = json.loads(capfd.readouterr().out)
    judged = printed["key"]["judged"]
    assert [kv for kv in ("key", "value") if printed[kv]["used"]] == judged["parts"]
    assert len(judged["streams"]) == 8


def in_memory(kind, tmp_path):
    """A model that was not loaded, and a text to train on."""
    (tmp_path / "text.txt").write_text(TEXT)
    model = tiny_model(kind)
    loaded = LoadedModel(model, byte_tokenizer(64, TEXT), spec_of(model.config, "tiny"))
    return loaded, dict(corpus=f"text:{tmp_path / 'text.txt'}", num_tokens=2000, chunk_len=32)


@pytest.mark.parametrize("target", ["both", "value"])
def test_network_is_trained_for_the_parts_that_were_asked_for(target, tmp_path):
    """On a model in memory, the same again with one seed."""
    loaded, options = in_memory("gpt2", tmp_path)
    options |= dict(hidden=4, max_steps=3, judge=False, target=target, chunk_len=CONTEXT_LEN)
    results = train_table_network(out=tmp_path / "out", loaded=loaded, **options)
    record = results["value"]
    assert "--model tiny" in record["command"]
    assert record["objective"] == "context" and record["val_after"] <= record["val_before"]
    trained = Aligner.from_pretrained(tmp_path / "out")
    assert trained.config.positions == ((CONTEXT_LEN - 1, CONTEXT_LEN * 15 // 16),)
    assert trained.config.base_model == "tiny"
    for net in trained.network:
        is_trained = {"key": net.key.weight.any().item(), "value": net.value.weight.any().item()}
        assert is_trained == {"key": target == "both", "value": True}
    torch.rand(1)  # the seed decides, not what was drawn before
    train_table_network(out=tmp_path / "again", loaded=loaded, **options)
    again = Aligner.from_pretrained(tmp_path / "again").state_dict()
    assert all(torch.equal(x, again[name]) for name, x in trained.state_dict().items())


def test_table_networks_are_for_learned_positions(tmp_path):
    loaded, options = in_memory("llama", tmp_path)
    with pytest.raises(UserError, match="table-network is for learned positions, not rotary"):
        train_table_network(out=tmp_path / "out", loaded=loaded, **options)


def test_teacher_sees_as_far_back_as_its_context_length_allows():
    model = tiny_model("gpt2")
    ids = torch.randint(60, (2, CONTEXT_LEN + table_run.STRIDE + 5))
    logits = table_run.context_logits(model, ids, 10)
    assert logits.shape[1] == ids.shape[1] - 10
    whole = model(ids[:, :CONTEXT_LEN]).logits[:, 10:]
    assert torch.allclose(logits[:, : CONTEXT_LEN - 10], whole, atol=1e-5)
    last = model(ids[:, -CONTEXT_LEN:]).logits[:, -1]
    assert torch.allclose(logits[:, -1], last, atol=1e-5)
