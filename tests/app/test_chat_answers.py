"""Answers of `kvalign chat`: how they are drawn, cut, and go on."""

import io
import json
import re
import shutil

import pytest
from helpers.chatting import SMALL, answers, chat, said

from kvalign import checkpoints
from kvalign.app.cli.main import main
from kvalign.app.sessions.conversation import Conversation, ConversationSettings
from kvalign.models.loading import load_model


def test_a_cut_answer_goes_on(monkeypatch, capsys):
    """It ends in an ellipsis, and goes on with the tokens of a longer answer."""
    monkeypatch.setattr("sys.stdin", io.StringIO("/continue\nWho?\n/continue\n"))
    plain = ["--repetition-penalty", "1"]
    assert chat(*plain) == 0
    shown = capsys.readouterr()
    assert shown.err.count("cut by --max-new-tokens 12 (/continue goes on)") == 2
    assert "there is no answer that was cut" in shown.err
    first, second = re.findall(r"(?s)(?:Who\?|/continue)\n(.*?)…\n", shown.out)
    assert chat(*plain, "--json", "--say", "Who?", "--max-new-tokens", "24") == 0
    assert answers(capsys) == [first + second]


def test_the_model_reads_that_an_answer_was_cut(templated, capsys):
    conversation = Conversation(ConversationSettings(seed=0, max_new_tokens=3), templated)
    for turn in ("Who?", "Why?"):
        assert "".join(conversation.answer(turn)) and conversation.is_cut
    text = templated.tokenizer.decode(conversation.stream.ids)
    cut = text.index("…")
    assert text.count("…") == 1 and text[cut + 1 :].startswith("\nuser: Why?")
    begin = conversation.stream.notes["turns"].split()[1]
    before = templated.tokenizer.decode(conversation.stream.ids[: int(begin)])
    assert before.endswith("…"), "it belongs to the answer, not to the turn"


@pytest.fixture
def templated():
    loaded = load_model("gpt2-mini")
    loaded.tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return loaded


def test_answers_are_calm_where_nobody_says(capsys):
    assert main(["chat", *SMALL[:-2], "--say", "Who?", "--json"]) == 0
    used = json.loads(capsys.readouterr().out)["settings"]
    assert (used["temperature"], used["top_p"], used["do_sample"]) == (0.3, 0.9, True)
    assert (used["repetition_penalty"], used["repetition_window"]) == (1.1, 256)


def test_a_conversation_takes_new_sampling_flags_and_keeps_them(tmp_path, capsys):
    path, loaded = tmp_path / "talk.safetensors", load_model("gpt2-mini")
    flags = ["--state", str(path), "--say"]
    assert chat(*flags, "Who?") == 0
    assert chat(*flags, "Why?", "--top-p", "0.5", "--max-new-tokens", "9", "--seed", "7") == 0
    for _ in range(2):
        sampling = said(path, loaded).sampling
        assert (sampling.top_p, sampling.seed) == (0.5, 7)
        assert sampling.top_k == 20 and sampling.stop_at_end
        capsys.readouterr()
        assert main(["chat", *flags, "When?"]) == 0
        err = capsys.readouterr().err
        assert "--top-p 0.5 --seed 7" in err and "; saved in" in err
    assert said(path, loaded).sampling.max_new_tokens == 9


@pytest.fixture(scope="module")
def warm_model(tmp_path_factory):
    """gpt2-mini with a generation_config that says how to sample, as instructed models have."""
    folder = shutil.copytree(
        checkpoints.model_path("gpt2-mini"), tmp_path_factory.mktemp("models") / "warm"
    )
    path = folder / "generation_config.json"
    how = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "repetition_penalty": 1.2}
    path.write_text(json.dumps(json.loads(path.read_text()) | how))
    return str(folder)


@pytest.mark.slow
def test_a_conversation_samples_as_its_model_says(warm_model, capsys):
    chat = lambda *flags: main(["chat", *SMALL[:-2], *flags])  # noqa: E731
    options = ["--model", warm_model, "--method", "discard-half", "--say", "Who?"]
    assert chat(*options) == 0
    banner = capsys.readouterr().err.splitlines()[0]
    assert "--temperature 0.6 --top-k 20 --top-p 0.95 --seed 0 --repetition-penalty 1.2" in banner
    assert "(--temperature, --top-p, --repetition-penalty: from the model's generation_config)" in (
        banner
    )
    assert chat(*options, "--top-p", "1", "--json") == 0
    used = json.loads(capsys.readouterr().out)["settings"]
    assert (used["temperature"], used["top_p"], used["seed"]) == (0.6, 1.0, 0)


@pytest.mark.slow
def test_generate_has_defaults_of_its_own(warm_model, capsys):
    """They do not depend on the model: methods and models are compared by them."""
    how = ["--method", "window", "--max-new-tokens", "5", "--prompt", "It", "--json"]
    assert main(["generate", "--model", warm_model, *how]) == 0
    used = json.loads(capsys.readouterr().out)["settings"]
    assert (used["temperature"], used["top_k"], used["top_p"]) == (1.0, 20, 1.0)
    assert used["do_sample"] and used["max_new_tokens"] == 5
    assert main(["generate", *how]) == 0
    printed = capsys.readouterr()
    drawn = json.loads(printed.out)["settings"]["seed"]
    assert drawn != used["seed"] and f"--seed {drawn}" in printed.err
