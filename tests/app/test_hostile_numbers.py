"""Numbers on the command line that are no numbers, or far from any that could be meant: refused by
the settings' own bounds before anything is loaded or written.
"""

import pytest
from helpers.refusals import refused

BIG = 10**30
COMMANDS_OF = {
    "generate": ["generate", "--prompt", "The"],
    "chat": ["chat", "--say", "Who?"],
    "gen-data": ["gen-data", "--out", "d"],
    "network": ["train", "--aligner-kind", "network", "--data", "d", "--out", "a"],
    "table": ["train", "--aligner-kind", "table", "--out", "a"],
    "anchored": ["train", "--aligner-kind", "anchored", "--out", "a"],
    "tune": ["tune", "--target", "key", "--data", "d", "--out", "a"],
    "pretrain": ["pretrain", "--out", "m"],
    "perplexity": ["eval", "perplexity"],
    "latency": ["eval", "latency"],
    "readability": ["eval", "readability"],
    "streameval": ["eval", "streameval"],
    "recall": ["eval", "recall"],
    "needle": ["eval", "needle"],
    "told": ["eval", "told"],
    "attention": ["eval", "attention"],
    "eval chat": ["eval", "chat"],
    "eval run": ["eval", "run", "quick", "--out", "o"],
    "lanes": ["lanes", "--out", "l.html"],
    "demo-ui": ["demo-ui"],
    "import": ["import-published", "--keys", "k", "--values", "v", "--model", "m", "--out", "a"],
}
# Command, flag and values that it refuses.
WRONG = """
generate --temperature 1e-40 1e-300 inf -inf nan 1e400 -1e-9 1e30 ten
generate --repetition-penalty 0 1e-40 1e-300 inf nan -1 1e30
generate --top-p 0 1.0001 inf nan -0.5
generate --min-p -0.1 1.1 inf nan
generate --top-k -1 -5 1.5 {big}
generate --no-repeat-ngram-size -1 {big} 1e3
generate --max-new-tokens 0 -1 {big} inf
generate --cache-size 0 -1 {big} 1e3 100000000000
generate --num-sinks -1 {big} 2.0
generate --num-evicted 0 -1 {big} half-ish 1.5
generate --realign-every 0 -1 {big}
generate --seed -1 {big} 18446744073709551616 9223372036854775808 1.5
chat --seed -1 {big} 9223372036854775808
chat --temperature 1e-40 inf
chat --num-sinks -1 many {big}
chat --max-new-tokens 0 {big}
gen-data --shard-mb inf nan 0 -1 1e9 1e300
gen-data --num-tokens 0 -1 {big} 1e5
gen-data --chunk-len 1 0 -1 {big} 100000000000
gen-data --batch-size 0 -1 1000000000 {big}
gen-data --num-evicted 0 {big}
gen-data --num-sinks -1 {big}
gen-data --stride 0 -1 {big}
gen-data --val-share 0 0.6 1 nan inf
gen-data --workers 0 -1 100000 {big}
gen-data --seed -1 {big} 18446744073709551616
network --lr inf nan 0 -1 1e30
network --weight-decay inf nan -1 1e30
network --batch-size 0 1000000000 {big}
network --num-threads -1 100000 {big}
network --devices 0 -1 100000 {big}
network --seed -1 {big} 18446744073709551616
network --key-hidden1 0 -1 100000000000 {big}
network --position-dim 0 100000000000
network --max-epochs 0 {big}
network --vals-per-epoch 0 {big}
table --num-tokens 0 {big}
table --chunk-len 7 100000000000 {big}
table --num-threads 100000
table --lr inf 1e30
table --seed -1 {big}
anchored --key-hidden2 100000000000
anchored --num-threads 100000
tune --num-trials 0 {big}
tune --hidden-sizes 0 100000000000 {big}
tune --min-batch-size 3 1000000000 {big}
tune --max-batch-size 1000000000 {big}
tune --min-lr 0 inf
tune --max-lr inf 1e30
tune --reduction-factor 1 inf nan
tune --cpus-per-trial 0 {big}
tune --gpus-per-trial -1 inf nan 1e30
tune --seed {big}
pretrain --vocab-size 256 100000000000 {big}
pretrain --context-len 15 100000000000 {big}
pretrain --num-layers 0 100000000000 {big}
pretrain --hidden-size 63 100 100000000000 {big}
pretrain --batch-size 0 1000000000 {big}
pretrain --lr inf nan 0 1e30
pretrain --matrix-lr inf 1e30
pretrain --num-threads 100000 -1
pretrain --decay-share 0 1.5 nan
pretrain --short-share -0.1 1.5 inf
pretrain --repeat-share -0.1 1.5 nan
pretrain --rename-share -0.1 1.5 inf
pretrain --copy-weight -1 inf nan 1e30
pretrain --save-minutes 0 inf nan
pretrain --seed -1 {big} 18446744073709551616
pretrain --num-tokens 0 {big}
perplexity --num-tokens 0 {big}
perplexity --cache-sizes 0 -1 {big} 64,{big}
perplexity --realign-every 0 {big}
latency --num-threads 100000 {big}
latency --batch-sizes 0 1000000000 {big} 1,{big}
latency --prompt-len 0 100000000000 {big}
latency --num-trials 0 {big}
latency --trial-len 0 {big}
latency --seed -1 {big}
readability --num-prompts 0 {big}
readability --max-new-tokens 0 {big}
readability --seed -1 {big}
readability --top-k 0 {big}
streameval --num-lines 0 {big} 1000000000
streameval --distances -1 {big}
streameval --query-every 0 {big}
streameval --seed {big}
recall --num-questions 0 {big} 100000000000
recall --num-streams 0 1000000 {big}
recall --cache-sizes 1 2 3 64,3
recall --seed -1 {big}
needle --distances -1 {big} 100000 4,-1
needle --num-needles 0 -1 145 {big}
needle --gap -1 100000 {big}
needle --num-streams 0 {big} 10000000
needle --cache-sizes 0 {big}
needle --seed -1 {big}
told --talk -1 {big} 100000 4,-1
told --passage-len 0 -1 100000 {big}
told --num-conversations 0 {big} 10000000
told --cache-sizes 0 {big}
told --seed -1 {big}
attention --num-texts 1 {big} 100000000000
attention --num-steps 0 {big}
eval chat --num-turns 0 {big}
eval chat --max-new-tokens {big}
eval run --cpus-per-cell 0 {big}
eval run --gpus-per-cell -1 inf nan
lanes --cache-size 0 {big}
lanes --num-evicted 0 {big}
demo-ui --port -1 65536 {big}
import --chunk-len 1 {big} 100000000000
import --num-sinks -1 {big}
"""
ROWS = [
    (COMMANDS_OF[command.strip()], flag, value)
    for line in WRONG.format(big=BIG).strip().splitlines()
    for command, flag, values in [line.partition("--")]
    for flag, *several in [values.split()]
    for value in several
]


@pytest.mark.parametrize(
    ("argv", "name", "value"), ROWS, ids=[f"{a[:2][-1]} {n} {v}"[:60] for a, n, v in ROWS]
)
def test_numbers(argv, name, value, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    refused([*argv, f"--{name}={value}"], f"--{name}", capfd)
