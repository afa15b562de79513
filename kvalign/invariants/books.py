"""What a cache tells transformers: lengths, masks and positions."""

from kvalign.invariants.aged import age
from kvalign.invariants.base import Invariant, Measured, NotApplicableError
from kvalign.invariants.subject import Subject


def measure_masks(subject: Subject) -> Measured:
    aged = age(subject)
    note = f"first at token {aged.where}" if aged.fault else ""
    return Measured(aged.fault, 0, note)


def measure_positions(subject: Subject) -> Measured:
    context_len = subject.context_len
    if context_len is None:
        raise NotApplicableError("nothing limits this model's positions")
    subject.needs_eviction()
    positions = age(subject).watched.positions
    last = max(positions)
    if last < context_len and positions[-1] == len(positions) - 1:
        note = f"{last} after {len(positions)} tokens: it runs on, to {context_len} and beyond"
        return Measured(context_len, context_len - 1, note)
    return Measured(last, context_len - 1, f"over {len(positions)} tokens")


MASKS = Invariant(
    about="get_mask_sizes and get_seq_length say what attention gets, in every layer",
    unit="entries off",
    look_at="get_mask_sizes: its length is that of what update returns, its offset makes the "
    "newest key the newest position's",
    measure=measure_masks,
)
POSITIONS = Invariant(
    about="positions stay below the context length however long the stream is",
    unit="position",
    look_at="get_seq_length, which transformers takes for the next token's position",
    measure=measure_positions,
)
