"""Pictures of the documentation: one for each idea, drawn from real caches, aligners and streams,
and, where Chromium is, the page of `kvalign serve` with a conversation.

    python tests/scripts/pictures.py [MODEL]
"""

import sys
from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

sys.path.append(str(Path(__file__).parents[1]))  # as a script it has its own folder alone

import kvalign
from kvalign.aligners import Aligner
from kvalign.app.commands.lanes import EXAMPLES, record
from kvalign.cache.sizes import CacheSizes
from kvalign.eval.drawing import INK, THEME, save

ASSETS = Path(__file__).parents[2] / "docs" / "assets"
SINK, WINDOW, NEW, AWAY, BACK = "#7B61C9", "#1F83C4", "#009E73", "#d8dce0", "#D55E00"
WIDTH = 7.6  # inches


def row(axes: Axes, y: float, texts: list[str], colors: list[str], title: str = "") -> None:
    """Cells with texts, from the left; white text on what is dark."""
    for x, (text, color) in enumerate(zip(texts, colors, strict=True)):
        axes.add_patch(Rectangle((x, y), 0.94, 0.8, color=color))
        ink = INK if color in (AWAY, "white") else "white"
        axes.text(x + 0.47, y + 0.4, text, ha="center", va="center", color=ink, fontsize=8)
    axes.text(-0.3, y + 0.4, title, ha="right", va="center", fontsize=8)


def strips(
    height: float, num_cells: float, num_rows: float, left: float = 4.5
) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots()
    axes.set(xlim=(-left, num_cells + 0.1), ylim=(num_rows, -0.2))
    axes.axis("off")
    return figure, axes


def legend(axes: Axes, names: dict[str, str]) -> None:
    boxes = [Rectangle((0, 0), 1, 1, color=color) for color in names.values()]
    place = dict(loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=len(names))
    axes.legend(boxes, names, fontsize=8, frameon=False, **place)


def draw_pass() -> Figure:
    """A step of a full cache: in each slot a token, and the position at which it is seen."""
    sizes, token = CacheSizes(cache_size=7, num_sinks=3), 14
    frame, before = (record("kvalign", sizes)[n] for n in (token, token - 1))
    at = {entry[0]: entry for entry in frame["seen"]}
    held = [*before["held"]]
    gone = next(slot for slot, one in enumerate(held) if one is None or one not in at)
    held[gone] = token
    colors = [NEW if x == token else SINK if x < 3 else WINDOW for x in held]
    figure, axes = strips(1.75, len(held), 3.1)
    row(axes, 0, [str(n) for n in range(len(held))], ["white"] * len(held), "slot")
    row(axes, 1, [str(x) for x in held], colors, "token of the stream")
    row(axes, 2, [str(at[x][2]) for x in held], colors, "position")
    legend(axes, {"sink": SINK, "window": WINDOW, "new": NEW})
    return figure


def draw_table() -> Figure:
    """How far a table moves a key that is one position nearer to the start."""
    aligner = Aligner.from_pretrained("kvalign-gpt2-mini-table-kl")
    tables = {name: x.float() for name, x in aligner.state_dict().items()}
    means, scales = tables["key"], tables["key_scale"]  # [L, H, P, D], [L, H, P]
    step = (means[:, :, 1:] - means[:, :, :-1]).norm(dim=-1) / scales[:, :, 1:]
    figure = Figure(figsize=(WIDTH, 3.0), layout="constrained")
    axes = figure.subplots()
    for layer, far in enumerate(step.mean(1)):
        shade = mpl.colormaps["viridis"](layer / len(step))
        axes.plot(range(1, len(far) + 1), far, color=shade, linewidth=1.2, label=f"layer {layer}")
    axes.set(xlabel="position of the key", ylabel="moved at an eviction,\nby the keys' own scatter")
    axes.set_ylim(0, 3.2)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, frameon=False, ncols=3)
    return figure


def draw_memory() -> Figure:
    """A step with a memory: what the cache holds, what left it, and what this step takes back."""
    example = EXAMPLES["with a memory"]
    token, num_sinks = example["shown"], example["num_sinks"]
    names = ("cache_size", "num_sinks", "memory", "num_recalled")
    frame = record(example["method"], CacheSizes(**{name: example[name] for name in names}))[token]
    seen, back, lost = {x[0] for x in frame["seen"]}, {*frame["back"]}, {*frame["lost"]}

    def color(x: int) -> str:
        if x == token:
            return NEW
        if x in back:
            return BACK
        if x in seen:
            return SINK if x < num_sinks else WINDOW
        return AWAY if x in lost else "white"

    figure, axes = strips(1.0, token + 1, 1.1, left=0.2)
    texts = [str(x) if x in seen | back | {token} else "" for x in range(token + 1)]
    row(axes, 0, texts, [*map(color, range(token + 1))])
    for text in axes.texts:
        text.set_fontsize(6)
    kinds = {"sink": SINK, "window": WINDOW, "new": NEW, "in the memory": AWAY, "taken back": BACK}
    legend(axes, kinds)
    return figure


def draw_edit() -> Figure:
    """A text before and after an edit: what stays, what moves, and what is encoded."""
    loaded = kvalign.load_model("gpt2-mini")
    tokenizer = loaded.tokenizer
    kept, gone, rest = "The ship was", " built in Norway .", " It had a crew of 200 men ."
    stream = kvalign.stream(loaded.model, tokenizer, kept, cache_size=64, temperature=0)
    starts = [len(stream.ids)]
    for text in (gone, rest):
        stream.feed(text)
        starts.append(len(stream.ids))
    before, (start, stop, end) = stream.ids[:], starts
    new = tokenizer(" Dutch .", add_special_tokens=False)["input_ids"]
    stream.edit(start, stop, new)
    words = [[tokenizer.decode([x]).strip() for x in ids] for ids in (before, stream.ids)]
    figure, axes = strips(2.0, end, 4.0, left=1.2)
    colors = [SINK] * start + [AWAY] * (stop - start) + [WINDOW] * (end - stop)
    row(axes, 0, words[0], colors, "before")
    row(axes, 1, [*map(str, range(end))], colors)
    colors = [SINK] * start + [NEW] * len(new) + [WINDOW] * (end - stop)
    row(axes, 2.2, words[1], colors, "after")
    row(axes, 3.2, [*map(str, range(len(stream.ids)))], colors)
    for text in axes.texts:
        text.set_fontsize(6.5)
    names = {"stays": SINK, "leaves": AWAY, "moves, not encoded": WINDOW}
    legend(axes, names | {f"encoded: {len(new)} of {len(stream.ids)} tokens": NEW})
    return figure


DRAWN = {"pass": draw_pass, "table": draw_table, "memory": draw_memory, "edit": draw_edit}


def photograph(name: str, path: Path) -> None:
    """The page of a server of this model, after a few turns, with the strip of its cache."""
    import re

    from helpers.browser import launched
    from helpers.served import serving

    settings = dict(cache_size=96, method="streaming-llm", memory=2000, num_recalled=16, edit=True)
    browser = next(browsers := launched())
    with serving(kvalign.load_model(name), **settings) as server:
        tab = browser.new_page(viewport={"width": 1000, "height": 760})
        tab.set_default_timeout(600_000)
        tab.goto(server.address)
        tab.locator("summary").evaluate("one => { one.parentNode.open = true; }")
        tab.locator("#max_tokens").fill("40")
        tab.locator("summary").evaluate("one => { one.parentNode.open = false; }")
        for text in TALK:
            tab.get_by_label("Message", exact=True).fill(text)
            tab.get_by_role("button", name="Send").click()
            tab.locator("#status", has_text=re.compile("^(?!Answering)")).wait_for()
        tab.screenshot(path=path, full_page=True)
    browsers.close()


TALK = (
    "My cat is called Pixel. Say hello to her.",
    "What do cats like to eat?",
    "Where should she sleep?",
    "What is my cat called?",
)


def main(model: str = "smollm2-135m-instruct") -> int:
    torch.set_num_threads(1)
    with mpl.rc_context(THEME):
        for name, draw in DRAWN.items():
            save(draw(), ASSETS / f"{name}.png")
    photograph(model, ASSETS / "page.png")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
