"""`anchored`: the paper's network, applied once to the entry without its position and never to its
own output.

It adds to the output of position tables: out = table(x, p_now) + f(x, p_now, layer, head), where x
is the entry without its position. Before training it equals the table. It is trained on pairs of
many shifts.
"""

from kvalign.aligners.base import Aligner, Birth, Flags, Move
from kvalign.aligners.config import AlignerConfig
from kvalign.aligners.entries import KV
from kvalign.aligners.kinds import NETWORK_SIZES, TARGETS
from kvalign.aligners.network import new_net
from kvalign.aligners.table import TableAligner


class AnchoredAligner(Aligner):
    """Position tables, and a `RealignNet` for keys and for values."""

    kind = "anchored"
    recursive = False
    default_sizes = NETWORK_SIZES

    def __init__(self, config: AlignerConfig):
        super().__init__(config)
        self.table = TableAligner(config)
        self.key, self.value = (new_net(config, kv, config.chunk_len) for kv in TARGETS)

    def anchor(self, layer: int, entries: KV, birth: Birth, evicting: Flags = False) -> KV:
        return self.table.anchor(layer, entries, birth)

    def realign(self, layer: int, entries: KV, move: Move) -> KV:
        placed = self.table.realign(layer, entries, move)
        keys, values = (
            net.correction(x.float(), layer, move.first)
            for net, x in zip((self.key, self.value), entries, strict=True)
        )
        if move.births is not None:
            has_moved = (move.births != move.now)[..., None]
            keys, values = keys * has_moved, values * has_moved
        return KV(placed.keys + keys, placed.values + values)
