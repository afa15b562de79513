"""`kvalign chat` in the tests' process."""

import json

from kvalign import load_stream
from kvalign.app.cli.main import main

SMALL = ["--model", "gpt2-mini", "--cache-size", "40", "--max-new-tokens", "12", "--seed", "0"]
SMALL += ["--repetition-penalty", "1"]


def chat(*flags):
    return main(["chat", *SMALL, *flags])


def answers(capsys):
    return [a["text"] for a in json.loads(capsys.readouterr().out)["answers"]]


def said(path, loaded):
    return load_stream(path, loaded.model, loaded.tokenizer)
