"""Lists of what there is: from the code's own tables and registries, and of pages of results."""

import re

from transformers import AutoConfig

from helpers.result_parts import RESULTS
from kvalign import checkpoints
from kvalign.aligners import Aligner
from kvalign.models.architectures import FAMILIES, OWN_ATTENTION, window_of
from kvalign.policies import POLICIES


def architectures() -> str:
    """A row an architecture."""
    rows = ["| architecture | positions | layers see | attention |", "|---|---|---|---|"]
    for kind, family in FAMILIES.items():
        own = OWN_ATTENTION.get(kind)
        attention = f"its own: {own}" if own else "of the registry"
        rows.append(f"| `{kind}` | {family} | {_sight(kind)} | {attention} |")
    return "\n".join(rows) + "\n"


def policies() -> str:
    """A row a policy."""
    rows = [f"| `{name}` | {policy.about} |" for name, policy in POLICIES.items()]
    return "\n".join(["| policy | what it does |", "|---|---|", *rows]) + "\n"


def positions() -> str:
    """A row a shipped aligner whose full caches were placed: their sizes, and at which position."""
    rows = []
    for name in checkpoints.ALIGNERS:
        config = Aligner.from_pretrained(name).config
        own = ", ".join(str(size) for size, at in config.positions if at == size)
        moved = ", ".join(f"{size} at {at}" for size, at in config.positions if at != size)
        rows += [f"| `{name}` | {moved} | {own} |"] if config.positions else []
    head = ["| aligner | C, computed elsewhere | C, at its own position |", "|---|---|---|"]
    return "\n".join([*head, *rows]) + "\n"


def findings() -> str:
    """Heading and finding of each page of results, in the order of their index."""
    index = (RESULTS / "README.md").read_text(encoding="utf-8")
    paragraphs = []
    for name in re.findall(r"^\| \[([\w-]+\.md)\]", index, re.MULTILINE):
        page = (RESULTS / name).read_text(encoding="utf-8")
        title, finding, _ = page.split("\n\n", 2)
        text = f"{finding.replace('**', '')}\n([figures](../eval/results/{name}))"
        paragraphs.append(f"## {title.lstrip('# ')}\n\n{text}\n")
    return "\n".join(paragraphs)


def _sight(kind: str) -> str:
    """What layers see, by the config that transformers makes where nothing is said."""
    config = AutoConfig.for_model(kind)
    kinds, window = {*(getattr(config, "layer_types", None) or ())}, window_of(config)
    if "chunked_attention" in kinds:
        return f"all, or a chunk of {config.attention_chunk_size}"
    if window is None:
        return "all"
    return f"all, or {window}" if "full_attention" in kinds else f"{window}"
