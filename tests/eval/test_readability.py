"""What methods write and answer: one stream each, judged alike, the same again with one seed."""

import json

import pytest
import torch

from kvalign import load_model, make_method
from kvalign.app.cli import main
from kvalign.eval import chat
from kvalign.eval.evaluations.readability import EVALUATION
from kvalign.eval.fluency import measures
from kvalign.eval.words import load_words

SHORT = [
    "eval",
    "readability",
    "--words",
    "english-words",
    "--cache-sizes",
    "24",
    "--max-new-tokens",
    "40",
    "--json",
]


def run_json(capsys, *argv):
    assert main(list(argv)) == 0
    return json.loads(capsys.readouterr().out)


def test_passages_are_what_generate_writes(capsys):
    argv = [*SHORT, "--methods", "streaming-llm,recompute", "--num-prompts", "2"]
    found = run_json(capsys, *argv, "--no-repeat-ngram-sizes", "0,2")
    cells = [(r["method"], r["no_repeat_ngram_size"], r["prompt"]) for r in found["rows"]]
    assert cells == [
        (m, n, p) for m in ("streaming-llm", "recompute") for n in (0, 2) for p in (0, 1)
    ]
    words = load_words("english-words").words
    for row in found["rows"]:
        for name, value in measures(row["text"], words).items():
            assert row[name] == value
        assert row["dense_perplexity"] > 1 and row["num_tokens"] == 40
    row = found["rows"][3]  # 2-grams are not repeated, prompt included
    argv = ["generate", "--method", "streaming-llm", "--cache-size", "24", "--max-new-tokens", "40"]
    argv += ["--no-repeat-ngram-size", "2", "--prompt", found["prompts"][1], "--json"]
    assert run_json(capsys, *argv)["text"] == row["text"]


def test_table_has_the_means_of_the_passages(capsys):
    found = run_json(capsys, *SHORT, "--methods", "window", "--num-prompts", "2")
    (mean,) = EVALUATION.rows(found)
    assert mean["num_passages"] == 2 and "text" not in mean and "prompt" not in mean
    for name in ("readable", "distinct_1", "dense_perplexity"):
        assert mean[name] == pytest.approx(sum(row[name] for row in found["rows"]) / 2)


def test_answers_come_from_one_stream():
    """The command's answers are those of a loop that feeds every turn to one method."""
    found = chat(
        methods=("streaming-llm",),
        cache_sizes=(24,),
        num_turns=3,
        max_new_tokens=12,
        top_k=1,
        words="english-words",
    )
    loaded = load_model("gpt2-mini")
    method = make_method("streaming-llm", loaded.model, cache_size=24)
    logits, num_fed = None, 0
    for row, turn in zip(found["rows"], found["turns"], strict=True):
        opening = "\n\n" if num_fed else ""
        ids = loaded.tokenizer(f"{opening}USER: {turn}\n\nASSISTANT:").input_ids
        if logits is not None:
            ids = [int(logits.argmax()), *ids]
        num_fed += len(ids)
        assert row["num_fed"] == num_fed
        logits = method.feed(torch.tensor([ids]))
        answer = []
        for _ in range(11):
            answer.append(int(logits.argmax()))
            logits = method.feed(torch.tensor([[answer[-1]]]))
            num_fed += 1
        answer.append(int(logits.argmax()))
        assert loaded.tokenizer.decode(answer) == row["text"]
