from .kinds.anchored import train_anchored as train_anchored
from .kinds.network import train_network as train_network
from .kinds.table import train_table as train_table
from .kinds.table_network import train_table_network as train_table_network
from .network_judge import judge_aligner as judge_aligner
from .pretraining import pretrain as pretrain
from .published import import_published as import_published
from .sweep import tune_network as tune_network
