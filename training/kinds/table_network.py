"""Kind `table-network`: tables, and a network that corrects an entry when it is written."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvalign.foundation.settings import MOST_RATE, MOST_SIZE, keywords_of, option
from kvalign.training.kinds.table import TableSettings
from kvalign.training.settings import kind_of

if TYPE_CHECKING:
    from kvalign.models.loading import LoadedModel


@dataclass(frozen=True, kw_only=True)
class TableNetworkSettings(TableSettings):
    """Train position tables on text, and with them, through the streaming LM, a network that
    corrects an entry once, when it is written. For learned positions.

    Example:
        kvalign train --aligner-kind table-network --num-tokens 20000 --chunk-len 64 --max-steps 50 --out my-table-network
    """  # noqa: E501

    aligner_kind: str = kind_of("table-network")
    objective: str = option(
        "context",
        help="context: divergence from the LM that sees its whole context; kl: from the LM that "
        "re-encodes at each step; nll: the LM's own loss on the text",
        choices=("context", "kl", "nll"),
    )
    lr: float = option(
        1e-3,
        help="learning rate of the tables; the network's is twice that",
        above=0,
        at_most=MOST_RATE,
    )
    hidden: int = option(64, help="hidden size of the network", at_least=1, at_most=MOST_SIZE)


@keywords_of(TableNetworkSettings)
def train_table_network(
    settings: TableNetworkSettings, *, loaded: "LoadedModel | None" = None
) -> dict[str, dict[str, Any]]:
    """Train tables and a network beside them with `objective`, and save the aligner in `out`, as
    `train_table` does.
    """
    from kvalign.training.table_run import fit
    from kvalign.training.text_run import train_on_text

    return train_on_text(fit, settings, loaded)


SETTINGS, train = TableNetworkSettings, train_table_network
