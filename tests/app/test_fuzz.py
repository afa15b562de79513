"""Hundreds of almost right inputs, over every boundary: each is taken, or refused in one line and
in seconds, and leaves nothing. A case that is found becomes a row of a table of the hostile tests.

KVALIGN_FUZZ_SEED repeats a run; it is printed with what was found.
"""

import dataclasses
import json
import os
import secrets
import time

import pytest
from helpers.hostile_weights import header
from helpers.refusals import SECONDS, altered_aligner, altered_model, files_in
from helpers.results_example import documents
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import kvalign
from kvalign import load_model
from kvalign.aligners import Aligner
from kvalign.app.cli.arguments import parse
from kvalign.app.cli.catalogue import COMMANDS, Command
from kvalign.app.cli.main import main
from kvalign.app.commands.eval_run import parse_suite
from kvalign.data_gen.corpus import conversations
from kvalign.data_gen.store import open_store
from kvalign.eval.report import read
from kvalign.foundation.errors import RunError, UserError
from kvalign.foundation.settings import flag

pytestmark = pytest.mark.slow

SEED = int(os.environ.get("KVALIGN_FUZZ_SEED") or secrets.randbelow(2**32))
CASES = dict(flags=150, suites=80, results=40, aligners=40, prompts=30, streams=30)
CASES |= dict(models=15, recordings=15)
NAMES = st.sampled_from(["../../etc/passwd", "/etc/passwd", "a\x00b", "train-k1-00000.safetensors"])
PLAIN = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=True)
PLAIN |= st.text(max_size=20) | NAMES


def within(inner):
    return st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)


JSON = st.recursive(PLAIN, within, max_leaves=6)


@st.composite
def changed(draw, values):
    """A document with one of its values, at any depth, replaced, removed or added to."""
    values = json.loads(json.dumps(values))
    place = values
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = draw(st.sampled_from(keys))
        inner = place[key]
        if isinstance(inner, dict | list) and inner and draw(st.booleans()):
            place = inner
            continue
        break
    action = draw(st.sampled_from(["replace", "remove", "add"]))
    if action == "replace":
        place[key] = draw(JSON)
    elif action == "remove":
        del place[key]
    elif isinstance(place, dict):
        place[draw(st.text(max_size=8))] = draw(JSON)
    else:
        place.append(draw(JSON))
    return values


def few(name):
    """Hypothesis' settings for a boundary: so many cases, none kept from run to run."""
    quiet = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    quiet += [HealthCheck.filter_too_much]
    how = dict(phases=[Phase.generate, Phase.shrink], suppress_health_check=quiet)
    return settings(max_examples=CASES[name], deadline=None, database=None, **how)


def survives(call, folder=None):
    """Takes it, or refuses it in one line."""
    before, began = folder and files_in(folder), time.process_time()
    said, code = "", 0
    try:
        call()
    except (UserError, RunError, FileNotFoundError) as error:
        said = str(error)
    except SystemExit as end:
        code = end.code
    except MemoryError:
        pass
    assert "\n" not in said and code in (0, 2)
    assert time.process_time() - began < SECONDS
    assert folder is None or files_in(folder) == before, "it left something behind"


NUMBERS = """
0 -0 1 -1 2 7 64 1e3 1e-40 1e400 inf -inf nan 0x10 1_000 1.5 1,2 ,1 1, 2**3 - + . e
32767 65536 2147483648 -2147483649 4294967296 9223372036854775807 9223372036854775808
-9223372036854775809 18446744073709551616 1267650600228229401496703205376
"""
WORDS = """
auto half window kvalign,window none None True false cpu meta cuda:0 / . .. ~ - -- text: hub:
marked: marked:marked:x gpt2-mini python-docs x.png a.jsonl {out} $HOME *
"""
SOME = st.sampled_from([*NUMBERS.split(), *WORDS.split()])
VALUES = SOME | st.text(max_size=6) | st.integers().map(str) | st.floats().map(str)
KINDS = [(c, k, cls) for c in COMMANDS for k, cls in Command(c).all_settings().items()]


@seed(SEED)
@few("flags")
@given(data=st.data())
def test_flags(data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command, _, cls = data.draw(st.sampled_from(KINDS))
    names = [f.name for f in dataclasses.fields(cls)]
    words = []
    for name in data.draw(st.lists(st.sampled_from(names), max_size=3)) if names else []:
        words.append(f"{flag(name)}={data.draw(VALUES)}")
    for f in dataclasses.fields(cls):
        if "MISSING" in repr(f.default) and data.draw(st.integers(0, 9)):
            value = data.draw(VALUES)
            words += [value] if f.metadata["positional"] else [f"{flag(f.name)}={value}"]
    survives(lambda: parse(cls, words, command), tmp_path)


SUITE = {
    "title": "x",
    "variables": {"corpus": "python-docs"},
    "prepare": [{"name": "p", "command": "train table --out {out}/a"}],
    "cells": [
        {"name": "a", "command": "eval perplexity --corpus {corpus} --cache-sizes 16,32"},
        {"name": "b", "command": "eval latency --methods window --num-trials 2"},
    ],
}


@seed(SEED)
@few("suites")
@given(data=st.data())
def test_suites(data, capsys):
    suite = data.draw(changed(SUITE))
    if isinstance(suite.get("cells"), list) and data.draw(st.booleans()):
        words = " ".join(data.draw(st.lists(VALUES | st.sampled_from(["eval", "chat", "--seed"]))))
        suite["cells"].append({"name": "c", "command": words})
    text = json.dumps(suite)
    cut = data.draw(st.integers(0, len(text)))
    more = data.draw(st.sampled_from(["", "&a ", "*a", "? "]))
    if data.draw(st.booleans()):
        text = text[:cut] + more + text[cut + data.draw(st.integers(0, 2)) :]
    survives(lambda: parse_suite(text, "s.yaml"))


@seed(SEED)
@few("results")
@given(data=st.data(), name=st.sampled_from(sorted(documents())))
def test_results(data, name, tmp_path):
    document = data.draw(changed(documents()[name]))
    (tmp_path / "r.json").write_text(json.dumps(document))
    survives(lambda: read(tmp_path), tmp_path)


@seed(SEED)
@few("aligners")
@given(data=st.data(), name=st.sampled_from(["recall-llama-table", "gpt2-mini-network"]))
def test_aligners(data, name, aligners):
    folder = aligners / name
    config, weights = folder / "config.json", folder / "model.safetensors"
    kept = config.read_text(), weights.read_bytes()
    try:
        if data.draw(st.booleans()):
            config.write_text(json.dumps(data.draw(changed(json.loads(kept[0])))))
        else:
            weights.write_bytes(almost(kept[1], data.draw))
        survives(lambda: Aligner.from_pretrained(folder), aligners)
    finally:
        config.write_text(kept[0])
        weights.write_bytes(kept[1])


@seed(SEED)
@few("recordings")
@given(data=st.data(), name=st.sampled_from(["config.json", "manifest.json"]))
def test_recordings(data, name, recording):
    path = recording / name
    kept = path.read_text()
    try:
        path.write_text(json.dumps(data.draw(changed(json.loads(kept)))))
        survives(lambda: open_store(recording, verify=True), recording)
    finally:
        path.write_text(kept)


def almost(whole, draw):
    """Bytes of a safetensors file with its header changed, its end lost, or some bytes others."""
    length = int.from_bytes(whole[:8], "little")
    values, rest = json.loads(whole[8 : 8 + length]), whole[8 + length :]
    how = draw(st.sampled_from(["header", "cut", "bytes", "length"]))
    if how == "header":
        return header(draw(changed(values)), rest)(None)
    if how == "cut":
        return whole[: draw(st.integers(0, len(whole)))]
    if how == "length":
        return draw(st.integers(0, 2**64 - 1)).to_bytes(8, "little") + whole[8:]
    changed_bytes = bytearray(whole)
    for place in draw(st.lists(st.integers(0, len(whole) - 1), max_size=4)):
        changed_bytes[place] = draw(st.integers(0, 255))
    return bytes(changed_bytes)


@seed(SEED)
@few("models")
@given(data=st.data(), name=st.sampled_from(["recall-gpt2", "recall-llama"]))
def test_models(data, name, models_folder):
    folder = models_folder / name
    files = ["config.json", "tokenizer_config.json", "generation_config.json", "model.safetensors"]
    path = folder / data.draw(st.sampled_from(files))
    kept = path.read_bytes()
    try:
        if path.suffix == ".json":
            path.write_text(json.dumps(data.draw(changed(json.loads(kept)))))
        else:
            path.write_bytes(almost(kept, data.draw))
        survives(lambda: load_model(str(folder)), models_folder)
    finally:
        path.write_bytes(kept)


@seed(SEED)
@few("prompts")
@given(rows=st.lists(JSON | changed({"turns": ["a", "b"]}), max_size=3), more=st.binary(max_size=4))
def test_prompts(rows, more, tmp_path):
    lines = [json.dumps(row).encode() for row in rows]
    (tmp_path / "p.jsonl").write_bytes(b"\n".join([*lines, more]))
    survives(lambda: conversations(str(tmp_path / "p.jsonl")), tmp_path)


@seed(SEED)
@few("streams")
@given(data=st.data())
def test_streams(data, talk, recall):
    kept = talk.read_bytes()
    try:
        length = int.from_bytes(kept[:8], "little")
        values = json.loads(kept[8 : 8 + length])
        if data.draw(st.booleans()):
            about = json.loads(values["__metadata__"]["stream"])
            values["__metadata__"]["stream"] = json.dumps(data.draw(changed(about)))
            values["__metadata__"].pop("sha256", None)  # it would end what is looked at
            talk.write_bytes(header(values, kept[8 + length :])(None))
        else:
            talk.write_bytes(almost(kept, data.draw))
        survives(lambda: kvalign.load_stream(talk, recall.model, recall.tokenizer), talk.parent)
    finally:
        talk.write_bytes(kept)


@pytest.fixture(autouse=True)
def told():
    """pytest shows the seed with what is found."""
    print(f"fuzz, seed {SEED}")


@pytest.fixture(scope="module")
def recall():
    return load_model("recall-gpt2")


@pytest.fixture(scope="module")
def aligners(tmp_path_factory):
    folder = tmp_path_factory.mktemp("aligners")
    for name in ("recall-llama-table", "gpt2-mini-network"):
        altered_aligner(folder / name, f"kvalign-{name}")
    return folder


@pytest.fixture(scope="module")
def models_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name in ("recall-gpt2", "recall-llama"):
        altered_model(folder / name, name)
    return folder


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recording") / "r"
    assert main(["gen-data", "--num-tokens", "600", "--chunk-len", "64", "--out", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def talk(tmp_path_factory, recall):
    path = tmp_path_factory.mktemp("talk") / "talk.safetensors"
    how = dict(cache_size=8, method="kvalign")
    stream = kvalign.stream(recall.model, recall.tokenizer, [5, 6, 7], **how)
    pieces = iter(stream)
    for _ in range(20):
        next(pieces)
    stream.save(path)
    return path
