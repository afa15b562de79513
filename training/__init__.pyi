from .judge import judge_aligner as judge_aligner
from .kinds import train_network as train_network
from .kinds import train_table as train_table
from .kinds import train_table_network as train_table_network
from .pretraining import pretrain as pretrain
from .published import import_published as import_published
from .recall_tuning import tune_memory as tune_memory
from .sweep import tune_network as tune_network
