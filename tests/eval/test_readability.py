"""What methods write and answer: one stream each, judged alike, the same again with one seed."""

import json
import math
import shlex
from pathlib import Path

import pytest
from helpers.tiny_models import CONTEXT_LEN, first_layers, tiny_model

from kvalign.app.cli.main import main
from kvalign.eval.evaluations.readability import EVALUATION
from kvalign.eval.judging import RULES, SHA256, WORD_LIST, dense_perplexity, load_words
from kvalign.eval.judging.chunks import judged
from kvalign.models.loading import load_model

SHORT = ["eval", "readability", "--cache-sizes", "12", "--max-new-tokens", "24", "--json"]

GOOD = "The island was settled by people who came from the sea, and they lived there. " * 3


def run_json(capsys, *argv):
    assert main(list(argv)) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_passages_are_what_generate_writes(capsys):
    argv = [*SHORT, "--methods", "streaming-llm,recompute", "--num-prompts", "2"]
    found = run_json(capsys, *argv)
    cells = [(r["method"], r["no_repeat_ngram_size"], r["prompt"]) for r in found["rows"]]
    assert cells == [
        (m, n, p) for m in ("streaming-llm", "recompute") for n in (0, 2) for p in (0, 1)
    ]
    words = load_words()
    assert found["word_list"] == WORD_LIST and found["rule"]["name"] == "paper"
    for row in found["rows"]:
        for name, value in judged(row["text"], words, RULES["paper"]).items():
            assert row[name] == value
        assert row["dense_perplexity"] > 1 and row["num_tokens"] == 24
    row = found["rows"][3]  # 2-grams are not repeated, prompt included
    argv = ["generate", "--method", "streaming-llm", "--cache-size", "12", "--max-new-tokens", "24"]
    argv += ["--no-repeat-ngram-size", "2", "--seed", "0", "--prompt", found["prompts"][1]]
    assert run_json(capsys, *argv, "--json")["text"] == row["text"]


@pytest.mark.slow
def test_runs_with_other_seeds_give_an_interval(capsys, tmp_path):
    """Each is what its seed alone writes; the page shows those of the first."""
    shallow = first_layers(load_model("gpt2-mini"), 2)
    for part in (shallow.model, shallow.tokenizer):
        part.save_pretrained(tmp_path)
    argv = [*SHORT, "--methods", "window", "--no-repeat-ngram-sizes", "0", "--num-prompts", "2"]
    argv += ["--model", str(tmp_path)]
    few, alone = (run_json(capsys, *argv, "--seed", seed) for seed in ("3", "12"))
    found = run_json(capsys, *argv, "--seed", "3", "--num-seeds", "10")
    assert [row["seed"] for row in found["rows"]] == 2 * [*range(3, 13)]
    assert [*found["rows"][::10], *found["rows"][9::10]] == few["rows"] + alone["rows"]
    (mean,), (of_few,) = EVALUATION.rows(found), EVALUATION.rows(few)
    assert mean["num_passages"] == 20 and "readable_low" not in of_few
    assert mean["readable_low"] < mean["readable"] <= mean["readable_high"]
    (one, other) = EVALUATION.panels(found)
    assert [len(panel.passages) for panel in (one, other)] == [1, 1]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with two texts."""
    monkeypatch.chdir(tmp_path)
    Path("good.txt").write_text(GOOD, encoding="utf-8")
    Path("bad.txt").write_text("Zq qX <b>, Zw \x1b[31m" * 9, encoding="utf-8")
    return tmp_path


@pytest.mark.slow
def test_page_is_written_with_its_document(folder, capsys):
    argv = ["eval", "readability", "--methods", "window", "--cache-sizes", "24"]
    argv += ["--max-new-tokens", "4"]
    for _ in range(2):  # as if it had been killed
        assert main([*argv, "--page", "new"]) == 0
        assert capsys.readouterr().out.endswith("report: new/report.html\n")
        names = {str(path.relative_to("new")) for path in Path("new").rglob("*.*")}
        drawn = {f"plots/readability-C24-prompt1.{ending}" for ending in ("png", "svg")}
        assert names == {"readability.json", "report.html", *drawn}
        page = Path("new/report.html").read_text(encoding="utf-8")
        assert "no repeated 2-gram" in page and "repetition allowed" in page and SHA256 in page
        Path("new/report.html").unlink()
    assert main([*argv, "--page", "new", "--seed", "1"]) == 2
    assert "new has results of readability already" in capsys.readouterr().err
    document = json.loads(Path("new/readability.json").read_text(encoding="utf-8"))
    assert document["command"] == f"kvalign {shlex.join(argv)}"
    assert run_json(capsys, *argv, "--json")["rows"] == document["rows"]


def test_texts_of_any_program(folder, capsys):
    argv = ["eval", "readability", "--rule", "authors", "--text", "good.txt,bad.txt"]
    found = run_json(capsys, *argv, "--json", "--page", "mine")
    of_texts = {"model": None, "text": ["good.txt", "bad.txt"], "rule": "authors"}
    assert found["settings"] == of_texts
    assert found["command"] == f"kvalign {shlex.join(argv)}" and "torch" not in found["environment"]
    words = load_words()
    for row, name in zip(found["rows"], ("good.txt", "bad.txt"), strict=True):
        judgement = judged(Path(name).read_text(encoding="utf-8"), words, RULES["authors"])
        assert row["method"] == name and {key: row[key] for key in judgement} == judgement
    assert [row["readable"] for row in found["rows"]] == [1.0, 0.0]
    page = Path("mine/report.html").read_text(encoding="utf-8")
    assert "Readability of texts" in page and "Rule authors: " in page and "&lt;b&gt;" in page
    assert 'id="words"' not in page
    assert Path("mine/plots/readability.svg").exists()
    assert main(["report", "mine", "--terminal"]) == 0
    assert "good.txt" in capsys.readouterr().out


@pytest.mark.parametrize(("num_prompt", "num_passage"), [(1, 1), (5, 40), (40, 110), (90, 30)])
def test_dense_perplexity_sees_half_a_span_or_all(num_prompt, num_passage, ids):
    model, span = tiny_model("gpt2"), CONTEXT_LEN // 2
    stream = ids[0, : num_prompt + num_passage]
    found = dense_perplexity(model, stream[:num_prompt], stream[num_prompt:], span)
    nll, scored = 0.0, num_prompt
    while scored < len(stream):  # the same windows, token by token
        end = min(len(stream), max(scored + span // 2, span))
        for i in range(scored, end):
            seen = stream[max(0, end - span) : i]
            assert len(seen) >= min(i, span // 2)
            logits = model(input_ids=seen[None]).logits[0, -1]
            nll -= logits.log_softmax(-1)[stream[i]].item()
        scored = end
    assert math.isclose(found, math.exp(nll / num_passage), rel_tol=1e-4)
