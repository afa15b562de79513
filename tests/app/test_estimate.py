"""How long a suite will take is said before it starts."""

import dataclasses

from kvalign.app.suites import forecast
from kvalign.app.suites.suite import parse_suite, read_suite
from kvalign.eval.evaluations.perplexity import PerplexitySettings


def steps_of(name, variables=""):
    return {x.name: x.settings for x in parse_suite(read_suite(name), name, "", variables)}


def test_steps_and_tokens_are_those_of_the_commands():
    works = {name: forecast.work_of(x) for name, x in steps_of("paper-distilgpt2").items()}
    # Window, streaming-llm and discard-half step once, and each of three aligners twice.
    assert works["perplexity-wikitext"] == (
        4 * 20_000 * (3 + 3 * 2),
        20_000 * (33 + 65 + 129 + 256),
    )
    assert works["latency"] == (4 * 3 * 5000 * (3 + 2 * 2), 3 * 5000 * (33 + 65 + 129 + 256))
    assert works["readability"] == (10_000 * (3 + 2 * 2), 10_000 * 65)
    assert works["caches"] == (0, 50_000 // 32 * 256 * 2)
    stepwise = PerplexitySettings(methods=("window",), num_tokens=100, stepwise=True)
    assert forecast.work_of(stepwise) == (100, 0)
    assert forecast.work_of(dataclasses.replace(stepwise, stepwise=False)) == (0, 100)


def test_a_long_suite_says_its_hours_and_a_short_one_nothing(monkeypatch):
    monkeypatch.setattr(forecast, "speeds", lambda settings: (0.036, 0.0, "cpu"))
    long = steps_of("paper-distilgpt2")
    num_steps = sum(forecast.work_of(settings)[0] for settings in long.values())
    line = forecast.estimate(long)
    assert line.startswith(f"about {num_steps / 1e5:.1f} hours on cpu, without the training of net")
    assert forecast.estimate(steps_of("quick")) == forecast.estimate({}) == ""


def test_what_is_measured_is_a_step_and_a_token(tmp_path):
    (settings, *_) = steps_of("quick").values()
    step_s, token_s, device = forecast.speeds(settings)
    assert 0 < token_s < step_s < 10 and device in ("cpu", "cuda")
    missing = steps_of("paper-distilgpt2", f"model={tmp_path}")
    assert forecast.estimate(missing) == ""
