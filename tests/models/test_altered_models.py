"""Models that are compiled, quantised, wrapped or in training mode stream like any other; a
snapshot sees what was changed.
"""

import copy
import itertools

import pytest
import torch
from helpers.methods import CACHE_SIZE, make, step, tables
from helpers.model_changes import CHANGES, OF_CODE
from helpers.pairwise import one_of_each
from helpers.tiny_models import KINDS, tiny_model
from torch._dynamo.utils import counters

import kvalign
from kvalign.methods.registry import METHODS
from kvalign.models import wrapped
from kvalign.steppers import compiled
from kvalign.steppers.compiled import Snapshot
from kvalign.streaming.scoring import score


def greedy(method, ids, count):
    return torch.stack(list(itertools.islice(kvalign.stream_tokens(method, ids), count)), 1)


@pytest.mark.slow
def test_compiled_model_writes_the_same_tokens(models, ids):
    """Without generated code, which would take a C++ compiler."""
    torch.compiler.reset()
    counters.clear()  # a reset keeps what earlier tests of this process counted
    expected = greedy(make("kvalign", models["gpt2"]), ids[:, :9], 30)
    method = make("kvalign", torch.compile(models["gpt2"], backend="eager"))
    assert torch.equal(greedy(method, ids[:, :9], 30), expected)
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]
    torch.compiler.reset()


FAST = [("tables", "gpt2"), ("streaming-llm", "llama")]
NAMES = ("window", "streaming-llm", "tables", "kvalign", "discard-half")
OTHERS = one_of_each(NAMES, KINDS[::2])
MEMORY = dict(memory=40, num_recalled=4)
CASES = [*((*x, MEMORY) for x in FAST), *((*x, {}) for x in OTHERS)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind", "sizes"), CASES)
def test_a_full_cache_is_compiled_once(name, kind, sizes, models, ids):
    """At most two graphs, the second for any size, across laps of the ring and turns of keys."""
    torch.compiler.reset()
    counters.clear()
    model, ids = models[kind], ids[:, :80]
    extra = {"aligner": tables(model, scale=0.5)} if name == "tables" else {}
    name = "kvalign" if name == "tables" else name
    plain, compiled = (make(name, model, **extra, **sizes) for _ in range(2))
    compiled.compile(backend="eager")
    for method in (plain, compiled):
        method.feed(ids[:, : CACHE_SIZE + 1])
    for i in range(CACHE_SIZE + 1, ids.shape[1]):
        token = ids[:, i : i + 1]
        found = compiled.feed(token)
        if i == CACHE_SIZE + 20:
            first = dict(counters["stats"])
        assert torch.allclose(found, plain.feed(token), atol=1e-5)
    assert first["unique_graphs"] == counters["stats"]["unique_graphs"] <= 2
    assert not counters["graph_break"]
    torch.compiler.reset()


SEEN = ("a forward", "weights in place")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OF_CODE[::3], *SEEN])
@pytest.mark.filterwarnings("ignore:.*global hooks.*")
def test_a_compiled_stream_feels_a_change_at_its_next_step(name, ids, monkeypatch, caplog):
    """PyTorch sees most changes, and compiles again; a model with other hooks is not compiled."""
    torch.compiler.reset()
    compiled.warn_once.cache_clear()
    model, ids = copy.deepcopy(tiny_model("llama", num_hidden_layers=1)), ids[:1]
    plain, method = (make("streaming-llm", model) for _ in range(2))
    method.compile(backend="eager")
    for one in (plain, method):
        one.feed(ids[:, : CACHE_SIZE + 1])
    for i in range(CACHE_SIZE + 1, CACHE_SIZE + 9):
        if i == CACHE_SIZE + 5:
            CHANGES[name](model, monkeypatch)
        token = ids[:, i : i + 1]
        assert torch.allclose(method.feed(token), plain.feed(token), atol=1e-5)
    lines = [record.message for record in caplog.records]
    assert lines.count(compiled.OTHER_CODE) == (name in OF_CODE)
    torch.compiler.reset()


@pytest.fixture
def llama():
    return copy.deepcopy(tiny_model("llama"))


@pytest.mark.parametrize("name", CHANGES)
def test_a_snapshot_sees_a_change(name, llama, monkeypatch):
    """Except that of weights where they lie."""
    before = Snapshot(llama)
    ids = torch.randint(96, (1, 9), generator=torch.Generator().manual_seed(0))
    logits = llama(input_ids=ids).logits
    assert before.holds() and before.is_plain
    CHANGES[name](llama, monkeypatch)
    assert not torch.allclose(llama(input_ids=ids).logits, logits, atol=1e-3)
    assert before.holds() == (name == "weights in place")
    assert before.code_holds() == (name not in OF_CODE)
    after = Snapshot(llama)
    assert after.holds() and after.is_plain == (name not in {*OF_CODE, "a forward", "an adapter"})


def test_a_model_as_it_is_made_is_plain(model):
    snapshot = Snapshot(model)
    assert snapshot.is_plain and snapshot.holds()


def test_the_mode_and_what_transformers_leaves_on_a_model_are_no_changes(llama):
    """Hooks that collect hidden states stay, idle, after a call that has asked for them."""
    before = Snapshot(llama)
    llama(input_ids=torch.ones(1, 2).long(), output_hidden_states=True)
    llama.train()
    assert any(one._forward_hooks for one in llama.modules())
    after = Snapshot(llama)
    assert after.is_plain and before.code_holds()


@pytest.mark.parametrize("name", ["streaming-llm", "kvalign"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantised_model_streams(name, models, ids):
    """Until the first eviction with the tokens of its plain, growing cache; then without end."""
    quantised = torch.ao.quantization.quantize_dynamic(models["llama"], {torch.nn.Linear})
    assert sum(".quantized." in type(module).__module__ for module in quantised.modules()) > 5
    expected = greedy(make("dense", quantised), ids[:, :9], CACHE_SIZE - 9)
    found = greedy(make(name, quantised), ids[:, :9], 100)
    assert found.shape == (2, 100)
    assert torch.equal(found[:, : CACHE_SIZE - 9], expected)


DROPOUT = dict.fromkeys(("attention_dropout", "attn_pdrop", "hidden_dropout", "dropout"), 0.3)


@pytest.mark.parametrize(("name", "kind"), one_of_each(METHODS, ("gpt2", "llama", "bloom")))
def test_a_model_in_training_mode_streams_without_dropout(name, kind, ids, caplog):
    """Also while it is scored; afterwards each part of it is in the mode in which it was."""
    wrapped.warn_once.cache_clear()
    model, ids = tiny_model(kind, **DROPOUT), ids[:1, :60]

    def found():
        logits = step(make(name, model), ids, CACHE_SIZE + 5)
        return torch.cat([logits.flatten(), score(make(name, model), ids).flatten()])

    expected = found()
    model.train()
    model.get_input_embeddings().eval()
    modes = [module.training for module in model.modules()]
    assert not torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
    assert torch.equal(found(), expected)
    assert [module.training for module in model.modules()] == modes
    assert [r.message[:30] for r in caplog.records].count("the model is in training mode,") == 1


def with_lora(model):
    """The model with layers of PEFT that have an effect, and dropout."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(4)
    is_gpt2 = model.config.model_type == "gpt2"
    how = dict(r=4, lora_dropout=0.3, init_lora_weights=False, fan_in_fan_out=is_gpt2)
    names = ["c_attn"] if is_gpt2 else ["q_proj", "k_proj", "v_proj"]
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=names, **how)
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize(("kind", "name"), one_of_each(["llama", "gpt2"], METHODS))
def test_lora_streams_as_if_it_were_merged(name, kind, ids):
    """Fresh layers of PEFT are in training mode, with dropout, while the model is not."""
    ids = ids[:, :60]
    plain = step(make(name, tiny_model(kind)), ids, CACHE_SIZE + 1)
    aligner = {"aligner": tables(tiny_model(kind), 0.5)} if name == "kvalign" else {}
    found = step(make(name, with_lora(tiny_model(kind)), **aligner), ids, CACHE_SIZE + 1)
    merged = with_lora(tiny_model(kind)).merge_and_unload().eval()
    expected = step(make(name, merged, **aligner), ids, CACHE_SIZE + 1)
    assert torch.allclose(found, expected, atol=1e-3)
    assert (found - plain).abs().max() > 0.1
