"""Saved streams with a memory: a save appends what is new to a file beside the stream's own. In
`test_every_moment.py` one that is interrupted leaves the stream of before.
"""

import os
from types import SimpleNamespace

import pytest
import torch
from helpers.tiny_models import tiny_model

import kvalign
from kvalign.models.loading import load_model
from kvalign.streaming import memory_file

PROMPT = "The history of the island"
NUM_NUMBERS = 2 * 2 * 2 * 16  # of a record: layers, keys and values, heads, their dim
RECORD = 4 * NUM_NUMBERS


@pytest.fixture(scope="module")
def loaded():
    return with_tokenizer(tiny_model("llama", head_dim=16, vocab_size=8192))


def with_tokenizer(model):
    return SimpleNamespace(model=model, tokenizer=load_model("llama-mini").tokenizer)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "talk.safetensors"


def begin(loaded, prompt=PROMPT * 10, **options):
    options = dict(cache_size=16, num_sinks=2, memory=200, max_new_tokens=8, seed=0) | options
    return kvalign.stream(loaded.model, loaded.tokenizer, prompt, method="streaming-llm", **options)


def go_on(stream, num=1):
    for _ in range(num):
        stream.feed(" and then")
        "".join(stream)


def load(path, loaded):
    return kvalign.load_stream(path, loaded.model, loaded.tokenizer)


def is_same(path, loaded, stream):
    """Whether the stream in a file goes on as this one does, which goes on."""
    again = load(path, loaded)
    for one in (again, stream):
        go_on(one)
    return again.ids == stream.ids


def files(path):
    return sorted(one.name.removeprefix(path.name) for one in path.parent.iterdir())


def mark(path, number=0):
    """Make the first record of a memory's file another."""
    with memory_file.path_of(path, number).open("r+b") as file:
        file.write(bytes(RECORD))


def is_marked(path, number=0):
    return memory_file.path_of(path, number).read_bytes()[:RECORD] == bytes(RECORD)


def test_a_save_writes_what_is_new(loaded, path):
    stream = begin(loaded, PROMPT * 60)
    go_on(stream)
    stream.save(path)
    file = memory_file.path_of(path, 0)
    num = stream.num_fed - 2
    assert file.stat().st_size == num * RECORD > 6 * path.stat().st_size
    whole = file.read_bytes()
    mark(path)
    go_on(stream)
    stream.save(path)
    assert files(path) == ["", ".memory.0"]
    assert file.stat().st_size == (num + 10) * RECORD and is_marked(path)
    assert file.read_bytes()[RECORD : len(whole)] == whole[RECORD:]
    with file.open("r+b") as out:
        out.write(whole[:RECORD])
    assert is_same(path, loaded, stream)


@pytest.mark.skipif(os.name == "nt", reason="Windows has other rights")
def test_only_the_owner_reads_what_was_said(loaded, path):
    """Whatever the umask, and what an older version left readable."""
    umask = os.umask(0)
    try:
        stream = begin(loaded, PROMPT * 60)
        piece = kvalign.encode(loaded.model, loaded.tokenizer, PROMPT)
        for _ in range(2):
            go_on(stream)
            stream.save(path)
            piece.save(path.with_name("piece"))
            assert {one.stat().st_mode & 0o777 for one in path.parent.iterdir()} == {0o600}
            for one in path.parent.iterdir():
                one.chmod(0o644)
    finally:
        os.umask(umask)
    assert len([*path.parent.iterdir()]) == 3


@pytest.mark.slow
@pytest.mark.parametrize("form", ["float32", "int8", "bfloat16"])
def test_a_memory_that_turns_many_times(form, loaded, path):
    """Its file is never more than twice as long as the memory, and there is one."""
    if form == "bfloat16":
        model = tiny_model("llama", head_dim=16, vocab_size=8192)
        loaded = with_tokenizer(model.to(torch.bfloat16))
    stream = begin(loaded, cache_dtype="int8" if form == "int8" else "model")
    a_number, numbers = {"float32": 4, "int8": 1 + 4 / 16, "bfloat16": 2}[form], []
    for num in (20, 800, 5, 700, 700):
        stream.feed(torch.randint(8192, (num,)).tolist())
        go_on(stream)
        stream.save(path)
        most = stream.method.cache.memory.of[0].most
        (file,) = path.parent.glob("*.memory.*")
        numbers.append(file.name[-1])
        assert file.stat().st_size <= 2 * most * NUM_NUMBERS * a_number
        assert is_same(path, loaded, stream)
    assert stream.num_fed > 3 * most and set(numbers) == {"0", "1"}


def test_another_stream_takes_the_place(loaded, path):
    stream = begin(loaded)
    go_on(stream, 3)
    stream.save(path)
    ids = list(stream.ids)
    stream.encode_anew(ids[:2] + ids[40:])  # the same text, in another memory
    go_on(stream, 3)
    stream.save(path)
    assert files(path) == ["", ".memory.1"] and is_same(path, loaded, stream)
    other = begin(loaded, "Ships")
    go_on(other, 4)
    other.save(path)
    assert files(path) == ["", ".memory.0"] and is_same(path, loaded, other)
    begin(loaded, memory=0).save(path)
    assert files(path) == [""]


@pytest.mark.parametrize("change", [lambda x: x.unlink(), lambda x: x.write_bytes(b"short")])
def test_what_is_gone_is_written_anew(change, loaded, path):
    stream = begin(loaded)
    go_on(stream)
    stream.save(path)
    change(memory_file.path_of(path, 0))
    with pytest.raises(ValueError, match=r"memory\.0"):
        load(path, loaded)
    stream.save(path)
    assert files(path) == ["", ".memory.1"] and is_same(path, loaded, stream)
