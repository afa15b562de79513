"""What is used of an aligner: the least that streams held-out text best."""

import pytest
import torch
from helpers.methods import tables
from helpers.tiny_models import VOCAB

from kvalign.aligners.base import Verdict
from kvalign.methods import make_method
from kvalign.models.architectures import spec_of
from kvalign.streaming.scoring import score_stepwise
from kvalign.training import judge as judging
from kvalign.training.judge import NUM_ROWS, ROW_LABELS, excerpts, judge, streamed, usual_sinks
from kvalign.training.text import Texts

KVS = ("key", "value")
NOTHING, KEYS, VALUES, BOTH = (), ("key",), ("value",), KVS


def trained_table(model, num_sinks):
    table = tables(model, num_sinks=num_sinks, chunk_len=48)
    untrained = {name: x.clone() for name, x in table.state_dict().items()}
    for x in table.parameters():
        x.fill_(2)
    return table, untrained


def text(num_tokens=2000, seed=5):
    return torch.randint(2, VOCAB, (num_tokens,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("kind", "means", "parts", "num_sinks"),
    [
        # Without sinks the table mends what is broken; with four it is worse than rotation alone.
        ("llama", {(0, NOTHING): 5, (0, BOTH): 3.1, (4, NOTHING): 3, (4, BOTH): 3.2}, NOTHING, 4),
        ("llama", {(4, NOTHING): 3, (4, KEYS): 2.9, (4, VALUES): 3.3, (4, BOTH): 3.1}, KEYS, 4),
        ("gpt2", {(0, NOTHING): 4, (4, NOTHING): 3.9, (0, BOTH): 3, (4, BOTH): 3.0001}, BOTH, 0),
        ("gpt2", {(0, NOTHING): 4, (0, BOTH): 3.5, (4, BOTH): 3.2, (4, NOTHING): 3.9}, BOTH, 4),
        # What cannot be told apart is simplest: fewer parts, then the usual sinks.
        ("llama", {(0, NOTHING): 2.999, (4, NOTHING): 3, (4, BOTH): 2.998}, NOTHING, 4),
        ("gpt2", {(0, NOTHING): 4, (0, VALUES): 3.001, (0, BOTH): 3}, VALUES, 0),
    ],
)
def test_the_least_that_is_best_is_used(models, monkeypatch, kind, means, parts, num_sinks):
    model = models[kind]
    table, untrained = trained_table(model, usual_sinks(spec_of(model.config).family))
    noise = torch.Generator().manual_seed(0)

    def told(model, text, rows, name, num_sinks, aligner=None, realign_every=1):
        used = tuple(kv for kv in KVS if aligner is not None and getattr(aligner, kv).any())
        assert (name == "kvalign") == bool(used)
        mean = means.get((num_sinks, used), 9)
        return mean + 0.1 * torch.randn(len(rows), 8, 250, generator=noise)

    monkeypatch.setattr(judging, "streamed", told)
    found = judge(table, untrained, model, Texts([], [text()]), KVS)
    assert (tuple(found["parts"]), found["num_sinks"]) == (parts, num_sinks)
    assert found["val_nll"] == pytest.approx(means[num_sinks, parts], abs=0.02)
    beside = found["without"]["num_sinks"]
    assert beside == found["tried"]["num_sinks"]
    assert found["without"]["val_nll"] == pytest.approx(means.get((beside, NOTHING), 9), abs=0.02)
    assert [one["cache_size"] for one in found["against_discard_half"]] == [32, 47] * bool(parts)
    for kv in KVS:
        for name in (kv, f"{kv}_scale"):
            left = torch.full_like(untrained[name], 2) if kv in parts else untrained[name]
            assert torch.equal(table.state_dict()[name], left)


def test_too_little_text_proves_nothing(models):
    """Fewer labels than an interval needs: nothing is used, with the usual sinks."""
    for kind, num_sinks in (("llama", 4), ("gpt2", 0)):
        table, untrained = trained_table(models[kind], num_sinks)
        found = judge(table, untrained, models[kind], Texts([], [text(60)]), KVS)
        assert found["num_labels"] < 200
        assert (found["parts"], found["num_sinks"]) == ([], num_sinks)


def test_excerpts_fit_short_texts_and_do_not_overlap():
    for lens, largest in (((9,), 8), ((500, 90), 63), ((20_000,), 255)):
        choosing, rest = excerpts(Texts([], [torch.arange(n) for n in lens]), largest)
        for rows in (choosing, rest):
            labels = [ids[:, size + 1 :] for size, ids in rows.items()]
            assert all(x.numel() and torch.equal(x, labels[0]) for x in labels)
        for size, ids in choosing.items():
            both = torch.cat([ids, rest[size]])
            assert size <= largest and (both.diff(dim=1) == 1).all()
            if len(lens) == 1:
                assert both.unique().numel() == both.numel()
    assert list(rest) == [32, 64, 128, 255] and labels[0].shape == (NUM_ROWS - 4, ROW_LABELS)
    opened, _ = excerpts(Texts([], [torch.arange(2, 4002)], opening=[1]), 255)
    assert all((ids[:, 0] == 1).all() for ids in opened.values())


def test_a_label_counts_once_at_all_cache_sizes(models, monkeypatch):
    """Two sets of equal worth, whose losses differ by noise that all sizes share: one is found
    better than the other in a fortieth of all texts. As three texts it would be in a thirteenth.
    """
    table, untrained = trained_table(models["gpt2"], 0)
    noise = torch.Generator().manual_seed(0)

    def told(model, text, rows, name, num_sinks, **options):
        if num_sinks or name == "discard-half":
            return torch.full((len(rows), 8, 128), 9.0)
        return 3 + torch.randn(1, 8, 128, generator=noise).expand(len(rows), -1, -1)

    monkeypatch.setattr(judging, "streamed", told)
    some = Texts([], [text()])
    found = [judge(table, untrained, models["gpt2"], some, KEYS)["parts"] for _ in range(200)]
    assert 0 < sum(parts == ["key"] for parts in found) <= 12  # 5 expected; 15 as three texts


def test_what_is_reported_had_no_part_in_the_choice(models, monkeypatch):
    """The rest is worse than the rows that chose, and says at which sizes `discard-half` wins."""
    table, untrained = trained_table(models["gpt2"], 0)

    def told(model, text, rows, name, num_sinks, aligner=None, realign_every=1):
        num_rows = len(rows[32])
        losses = torch.full((len(rows), num_rows, 128), 4.0 if name == "streaming-llm" else 3.0)
        losses += 0.5 * (num_rows > 4)
        losses[-1] -= 0.1 * (name == "discard-half")
        return losses + num_sinks + 0.01 * torch.randn(losses.shape)

    monkeypatch.setattr(judging, "streamed", told)
    found = judge(table, untrained, models["gpt2"], Texts([], [text(4000)]), KEYS)
    assert (found["parts"], found["num_sinks"]) == (["key"], 0)
    figures = (found["val_nll"], found["without"]["val_nll"], found["discard_half"])
    assert figures == pytest.approx((3.5, 4.5, 3.45), abs=0.01)
    told_of = {(*row["parts"], row["num_sinks"]): row["val_nll"] for row in found["streams"]}
    by_set = {(0,): 4, (4,): 8, ("key", 0): 3, ("key", 4): 7}
    assert told_of == pytest.approx(by_set, abs=0.01)
    level, worse = (Verdict(**one) for one in found["against_discard_half"])
    assert level.low < 1 < level.high and worse.is_worse and 1.1 < worse.low < worse.high < 1.11


@pytest.mark.slow
def test_rows_side_by_side_are_rows_alone(models):
    rows = text(240).view(3, 80)
    found = streamed(models["llama"], Texts([], []), {20: rows}, "streaming-llm", num_sinks=4)
    method = make_method("streaming-llm", models["llama"], cache_size=20, num_sinks=4)
    alone = torch.cat([score_stepwise(method, row[None]) for row in rows])
    assert torch.allclose(found.flatten(), alone, atol=1e-4)
