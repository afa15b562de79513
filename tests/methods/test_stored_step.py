"""A decode step that is compiled once, stored, and loaded by later starts."""

import copy
import logging

import pytest
import torch
from helpers.comings import come_and_go
from helpers.methods import table_network, tables
from helpers.model_changes import CHANGES, OF_CODE
from helpers.tiny_models import tiny_model
from helpers.uncompiled_step import not_compiled
from torch._inductor import config
from torch._inductor.exc import InvalidCxxCompiler

from kvalign import make_method
from kvalign.models import attention, kernel, packed
from kvalign.steppers import compiled as of_torch
from kvalign.steppers import stored as of_file
from kvalign.steppers.compiled import Compiled
from kvalign.steppers.stored import CHANGED

SIZE, NUM = 16, 110  # several laps of the ring, and turns of all keys
SIZES = dict(cache_size=SIZE, warn=False)

needs_kernel = pytest.mark.skipif(not kernel.is_here(), reason="no AVX2, or no compiler")


def never(*args, **kwargs):
    raise AssertionError("it was to be stored")


pytestmark = pytest.mark.slow  # a step is compiled in seconds, more for each layer


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """Where steps are kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVALIGN_CACHE", str(folder := tmp_path_factory.mktemp("user")))
        # What calls the kernels computes nothing, and takes the compiler half of its time.
        patch.setattr(config.aot_inductor, "compile_wrapper_opt_level", "O0")
        yield folder


def tiny(kind="llama", **sizes):
    """Such a model of heads of 16, which our kernel takes."""
    if kind == "llama":
        sizes = {"head_dim": 16} | sizes
    return copy.deepcopy(tiny_model(kind, **sizes))


@pytest.fixture(scope="module")
def llama(folder):
    """A model whose step is stored, once for all tests."""
    model = tiny(num_hidden_layers=1)
    differ(model, num=SIZE + 2)
    return model


def differ(model, stored=True, name="streaming-llm", num=NUM, first=SIZE + 1, **sizes):
    """By how much logits of steps differ from those of eager ones."""
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, num), generator=rng)
    plain, compiled = (make_method(name, model, **{**SIZES, **sizes}) for _ in range(2))
    compiled.compile()
    if stored:
        compiled.stepper.fallback = Compiled(model, never)
    most = 0.0
    for method in (plain, compiled):
        method.feed(ids[:, :first])
    for i in range(first, num):
        token = ids[:, i : i + 1]
        most = max(most, (plain.feed(token) - compiled.feed(token)).abs().max().item())
    assert compiled.stepper.has(1) == stored
    return most


def test_a_stored_step_is_the_eager_one(llama):
    """Across laps of the ring and turns of all keys."""
    assert differ(llama) < 1e-5


def test_of_learned_positions_and_attention_of_its_own(monkeypatch):
    not_compiled(monkeypatch, exported=True)
    assert differ(tiny("gpt_neo")) < 1e-5


@needs_kernel
@pytest.mark.parametrize("make", [tables, table_network])
@pytest.mark.parametrize("sizes", [{}, dict(cache_dtype="int8"), dict(num_sinks=4)], ids=str)
def test_tables_place_what_a_stored_step_reads_and_writes(make, sizes, monkeypatch):
    """A network corrects entries once something was evicted: before that its steps are eager."""
    found, model = not_compiled(monkeypatch, exported=True), tiny("gpt2", n_embd=64)
    sizes = dict(num_sinks=0) | sizes
    aligner = make(model, scale=0.3)
    most = 0.1 if "cache_dtype" in sizes else 1e-4  # a number beside a border goes the other way
    assert differ(model, name="kvalign", aligner=aligner, **sizes) < most
    num, method = len(found), make_method("kvalign", model, aligner=aligner, **SIZES, **sizes)
    method.compile().stepper.fallback = None
    for _ in range(6):
        method.feed(torch.ones(1, 1).long())
    assert (len(found) > num) == (make is tables)


OF_ROWS = [{}, dict(num_evicted=3), dict(cache_dtype="int8")]


@needs_kernel
@pytest.mark.parametrize("sizes", OF_ROWS, ids=str)
def test_rows_of_any_lengths_that_come_and_go_are_those_alone(sizes, monkeypatch):
    """From the first token after the prompts: of a row alone and of several, filling and full."""
    found, model = not_compiled(monkeypatch), tiny()
    method = make_method("streaming-llm", model, **SIZES, **sizes)
    method.compile().stepper.fallback = Compiled(model, never)
    when = dict(num_steps=44, leave=12, join=30)
    batch, rows, _ = come_and_go(method, (6, 3, 17, 9), (0, 2), **when)
    assert rows == [0, 2, 3] and set(found) >= {1, 2, 3}
    num, token = len(found), torch.ones(3, 1).long()
    (plain := make_method("streaming-llm", model, **SIZES, **sizes)).join([batch])
    torch.testing.assert_close(batch.feed(token), plain.feed(token), rtol=1e-4, atol=1e-4)
    assert found[num:] == [3]


@needs_kernel
def test_several_rows_are_read_however_a_caller_slices_them(llama):
    """Columns of a batch do not lie side by side, and ids need not be of 64 bits."""
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(96, (3, SIZE + 8), generator=rng)
    plain, stored = (make_method("streaming-llm", llama, **SIZES) for _ in range(2))
    stored.compile().stepper.fallback = Compiled(llama, never)
    assert stored.stepper.prepare(stored, 2)
    for method in (plain, stored):
        method.feed(ids[:, :4])
    for i in range(4, ids.shape[1]):
        token = (ids.int() if i % 2 else ids)[:, i : i + 1]
        torch.testing.assert_close(stored.feed(token), plain.feed(token), rtol=1e-4, atol=1e-4)


@needs_kernel
@pytest.mark.parametrize(
    ("model", "num_asked"),
    [(tiny(), 2), (tiny(head_dim=8), 0), (tiny("mistral", head_dim=16), 0)],
    ids=["taken", "of a head of 8", "that has a window"],
)
def test_our_kernel_attends_in_a_step_that_it_can_take(model, num_asked, monkeypatch):
    asked, attend = [], kernel.attend
    monkeypatch.setattr(kernel, "attend", lambda *x, **how: asked.append(x) or attend(*x, **how))
    step, dim = of_file.StepModule(model), model.config.head_dim
    at = torch.tensor([SIZE - 1]), torch.arange(SIZE)[None]
    token = torch.ones(1, 1).long(), torch.tensor([[SIZE]])
    inputs = [*token, *at, *torch.randn(6, 1, 2, SIZE, dim)]
    expected = step(*inputs)  # keys are marked, but not looked at
    attention.install(model.config)
    torch.testing.assert_close(step(*inputs), expected, rtol=1e-4, atol=1e-4)
    assert len(asked) == num_asked


def test_with_a_window_packed_weights_and_entries_of_8_bits(monkeypatch):
    """Which round their inputs: a number beside a border may go the other way."""
    model = tiny("mistral", num_hidden_layers=1)
    with monkeypatch.context() as uncompiled:
        not_compiled(uncompiled)
        assert differ(model) < 1e-5
    packed.pack(model, "int4")
    assert differ(model, cache_dtype="int8") < 0.1


def test_a_start_takes_what_is_stored_and_makes_nothing(llama, monkeypatch, tmp_path):
    monkeypatch.setattr("torch.export.export", never)
    monkeypatch.setattr("torch.compile", never)
    monkeypatch.setattr("torch._inductor.codecache.get_device_information", never)  # by a compiler
    ids = torch.randint(96, (1, SIZE + 4))

    def fed(compile):
        method = make_method("streaming-llm", llama, **SIZES, compile=compile)
        parts = ids[:, : SIZE + 1], *ids[:, SIZE + 1 :].split(1, 1)
        return method, torch.stack([method.feed(x) for x in parts])

    _, eager = fed(False)
    taken, logits = fed(None)
    assert taken.stepper.has(1) and (logits - eager).abs().max() < 1e-5
    monkeypatch.setenv("KVALIGN_CACHE", str(tmp_path))
    assert fed(None)[0].stepper is None
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps" / "of-another-model.pt2").touch()
    other, logits = fed(None)
    assert not other.stepper.has(1) and torch.equal(logits, eager)


def begun(model, compile):
    """Method after the tokens of a full cache, the last of which was a step; then ten more."""
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(96, (1, SIZE + 12), generator=rng)
    method = make_method("streaming-llm", model, **SIZES, compile=compile)
    for part in (ids[:, : SIZE + 1], ids[:, SIZE + 1 : SIZE + 2]):
        method.feed(part)
    return method, ids[:, SIZE + 2 :].split(1, 1)


WEIGHTS = {"other data", "another parameter", "assigned weights", "weights in place"}
OTHERS = {"a forward", "an adapter", "an attribute", "a number that becomes a tensor"}


@needs_kernel
@pytest.mark.parametrize("name", [x for x in CHANGES if x in {*WEIGHTS, *OTHERS, *OF_CODE[::3]}])
def test_a_stream_feels_a_change_of_its_model(name, llama, monkeypatch, caplog):
    """At the next step that of code or of weights in place, others as a stream begins. With other
    weights the stored step goes on; else the model itself does, as a line says.
    """
    monkeypatch.setattr("torch.export.export", never)
    model = copy.deepcopy(llama)
    (eager, tokens), (taken, _) = begun(model, False), begun(model, None)
    assert taken.stepper.has(1)
    CHANGES[name](model, monkeypatch)
    if name not in (*OF_CODE, "weights in place"):
        eager.reset()
        taken.reset()
    for token in tokens:
        assert (eager.feed(token) - taken.feed(token)).abs().max() < 1e-4
    assert taken.stepper.has(1) == (name in WEIGHTS)
    lines = [record.message for record in caplog.records]
    assert lines.count(CHANGED) == (not taken.stepper.has(1))


@pytest.fixture
def made(monkeypatch):
    """Files of the steps that would be made."""
    made = []
    monkeypatch.setattr(of_file, "_make", lambda *args: made.append(args[-1]))
    return made


def is_taken(model):
    """Whether a stored step is taken where one is asked for."""
    method = make_method("streaming-llm", model, **SIZES).compile()
    return method.stepper.prepare(method, 1)


def test_a_model_that_does_other_things_takes_no_step_of_a_clean_one(
    llama, made, monkeypatch, caplog
):
    """Where no key tells it, logits do; a step that is asked for is made anew."""
    monkeypatch.setattr(torch.nn.functional, "silu", lambda x, inplace=False: x.tanh())
    (eager, tokens), (taken, _) = begun(llama, False), begun(llama, None)
    for token in tokens:
        assert torch.equal(taken.feed(token), eager.feed(token))
    lines = [record.message for record in caplog.records]
    assert not taken.stepper.has(1) and lines.count(of_file.OTHER_LOGITS) == 1 and not made
    assert not is_taken(llama) and len(made) == 1 and made[0].exists()


@pytest.mark.parametrize(
    ("where", "other"),
    [
        ("kvalign.steppers.stored.torch.__version__", "1.0"),
        ("kvalign.steppers.stored.transformers.__version__", "1.0"),
        ("torch.cpu.get_capabilities", lambda: 3),
    ],
)
def test_another_version_or_cpu_has_a_file_of_its_own(where, other, llama, made, monkeypatch):
    assert is_taken(llama)
    monkeypatch.setattr(where, other)
    assert not is_taken(llama) and len(made) == 1 and not made[0].exists()


def test_a_step_that_fails_its_trial_is_made_anew(llama, made, monkeypatch):
    """It keeps nobody from starting."""

    def fail(inputs):
        raise RuntimeError("planted")

    monkeypatch.setattr(of_file, "_load", lambda file, weights: fail)
    assert not is_taken(llama) and len(made) == 1
    assert not begun(llama, None)[0].stepper.has(1)


def test_a_step_in_a_folder_that_cannot_be_written_is_taken(llama, made, monkeypatch):
    monkeypatch.setattr("pathlib.Path.touch", refuse)
    assert is_taken(llama) and not made


def test_a_step_that_cannot_be_kept_is_told_why(llama, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("KVALIGN_CACHE", str(tmp_path))
    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    assert not is_taken(llama)
    assert "cannot be stored: [Errno 30] Read-only" in caplog.text


def refuse(path, *args, **kwargs):
    raise OSError(30, "Read-only file system", str(path))


@pytest.mark.parametrize("harm", ["damaged", "foreign", "no json"])
def test_a_file_that_is_not_whole_is_made_anew(harm, llama, folder, made):
    kept = {path: path.read_bytes() for path in (folder / "steps").iterdir()}
    for file in sorted((folder / "steps").glob("*.pt2")):
        whole, about = file.read_bytes(), file.with_suffix(".json")
        if harm == "damaged":
            file.write_bytes(whole[:5000] + b"\0" * 64 + whole[5064:])
        elif harm == "foreign":
            about.write_text("[]")
        else:
            about.unlink()
    assert not is_taken(llama) and len(made) == 1
    for path, whole in kept.items():
        path.write_bytes(whole)


def test_without_a_compiler_a_line_says_so_and_steps_are_eager(
    llama, tmp_path, monkeypatch, caplog
):
    def none():
        raise InvalidCxxCompiler

    monkeypatch.setenv("KVALIGN_CACHE", str(tmp_path))
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", none)
    of_torch.has_compiler.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert differ(llama, stored=False, num=SIZE + 5) == 0
    assert [record.message for record in caplog.records].count(of_torch.NO_COMPILER) == 1
    of_torch.has_compiler.cache_clear()
