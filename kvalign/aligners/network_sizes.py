"""Default sizes of realignment networks, which the paper's sweep found for DistilGPT2."""

TARGETS = ("key", "value")
SHARED_SIZES = ("position_dim", "layer_dim", "head_embed_dim")
NETWORK_SIZES = {
    "key_hidden1": 256,
    "key_hidden2": 64,
    "value_hidden1": 64,
    "value_hidden2": 128,
    "position_dim": 32,
    "layer_dim": 8,
    "head_embed_dim": 4,
}
