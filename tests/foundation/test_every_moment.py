"""Ctrl-C at every line of each writer: what is on the disk is the old state or the new one, whole,
and the next write leaves nothing else.
"""

import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from helpers.methods import tables
from helpers.tiny_models import tiny_model

import kvalign
from kvalign.aligners import Aligner
from kvalign.data_gen.store import PAIRS, Shard, write_shard
from kvalign.foundation.files import is_whole, keep, read_json, write_json
from kvalign.models.loading import load_model
from kvalign.streaming import stream_file

WRITING = ("files", "stream_file", "memory_file", "base", "store", "loading")
"""Modules whose lines are interrupted."""
FILES = {str(x) for x in Path(kvalign.__file__).parent.rglob("*.py") if x.stem in WRITING}


class Moments:
    """Lines of ours, of which the one of this number is interrupted; of a loop two laps count."""

    def __init__(self, at=0):
        self.at, self.num, self.seen = at, 0, Counter()

    def __call__(self, frame, event, arg):
        if frame.f_code.co_filename not in FILES:
            return None
        line = frame.f_code, frame.f_lineno
        self.seen[line] += event == "line"
        if event == "line" and self.seen[line] <= 2:
            self.num += 1
            if self.num == self.at:
                raise KeyboardInterrupt
        return self


def run(write, folder, at=0):
    """Write, interrupted or not; return the number of moments."""
    moments, before = Moments(at), sys.gettrace()
    sys.settrace(moments)
    try:
        write(folder)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return moments.num


@pytest.fixture(scope="module")
def llama():
    return tiny_model("llama", head_dim=16, vocab_size=8192)


def of_stream(how, model):
    """A stream that grew, another one, or one without a memory, in place of one with a memory."""
    tokenizer, saved = load_model("llama-mini").tokenizer, []

    def keep(text, memory):
        options = dict(cache_size=16, num_sinks=2, max_new_tokens=2, seed=0, memory=memory)
        one = kvalign.stream(model, tokenizer, text * 10, method="streaming-llm", **options)
        for _ in range(2 if how == "goes on" else 1):
            "".join(one)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(stream_file, "write", lambda path, *what: saved.append(what))
                one.save(Path("talk"))
            one.feed(" and then")

    keep("The history of the island", 200)
    if how != "goes on":
        keep("Another one", 200 if how == "another" else 0)

    def read(folder):
        about, _ = stream_file.read(folder / "talk")
        return about.num_fed, about.memory_file, stream_file.checksum_of(folder / "talk")

    write = [lambda folder, x=x: stream_file.write(folder / "talk", *x) for x in saved]
    return *write, read


def of_aligner(how, model):
    made = [tables(tiny_model("gpt2"), scale) for scale in (0.0, 0.1)]
    write = [lambda folder, one=one: one.save_pretrained(folder / "a") for one in made]
    return *write, lambda folder: Aligner.from_pretrained(folder / "a").revision


def of_json(how, model):
    write = [lambda folder, x=x: write_json(folder / "x.json", {"x": x}) for x in (1, 2)]
    return *write, lambda folder: read_json(folder / "x.json")


def of_shard(how, model):
    def write(number, folder):
        tensors = {name: torch.full((2,), number) for name in (*PAIRS, "chunk")}
        shard = Shard(file="s", split="val", num_evicted=1, num_chunks=1, num_rows=1)
        write_shard(shard.model_copy(update={"folder": folder}), tensors, {"x": number})

    def read(folder):
        shard = Shard(file="s", split="val", num_evicted=1, num_chunks=1, num_rows=1, folder=folder)
        return shard.notes(), [x.tolist() for x in shard.tensors("key")]

    return *(lambda folder, x=x: write(x, folder) for x in (1, 2)), read


def of_kept(how, model):
    write = [
        lambda folder, x=x: keep(folder / "k.so", lambda path: path.write_text(x)) for x in "ab"
    ]
    return *write, lambda folder: is_whole(folder / "k.so") and (folder / "k.so").read_text()


WRITERS = {
    **{f"a stream: {how}": (of_stream, how) for how in ("goes on", "another", "no memory")},
    "an aligner": (of_aligner, ""),
    "results": (of_json, ""),
    "a shard": (of_shard, ""),
    "a kept file": (of_kept, ""),
}


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.slow if "stream" in x else ()) for x in WRITERS]
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an open file
def test_the_old_or_the_new(name, llama, tmp_path):
    make, how = WRITERS[name]
    before, write, read = make(how, llama)
    for folder in ("before", "whole"):
        (tmp_path / folder).mkdir()
    before(tmp_path / "before")
    old = read(tmp_path / "before")
    shutil.copytree(tmp_path / "before", tmp_path / "whole", dirs_exist_ok=True)
    num = run(write, tmp_path / "whole")
    new, left = read(tmp_path / "whole"), names(tmp_path / "whole")
    assert old != new and num > 10
    found = []
    for at in range(1, num + 1):
        folder = tmp_path / "now"
        shutil.copytree(tmp_path / "before", folder)
        run(write, folder, at)
        found.append(read(folder))
        assert found[-1] in (old, new), at
        if at % 3 == 0:
            write(folder)
            assert read(folder) == new and names(folder) == left
        shutil.rmtree(folder)
    assert {*map(str, found)} == {str(old), str(new)}


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
