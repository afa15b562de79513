"""Networks published by the authors of KV-Align, converted to an aligner folder.

The authors' code defines what they compute (github.com/eecs585projectorg/kv-align:
kv_align/get_kv_align.py, key_value_network.py, training_data.py and cache.py):

- out = x + fc3(relu(fc2(relu(fc1([x, position, block, head]))))), concatenated in this order, which
  is also that of `RealignNet`.
- Position 0 is the first slot after the sinks. Of the 256 rows of emb_pos the first 251 were
  trained (chunks of 256 tokens, 4 sinks, 1 evicted).
- x is an entry of the model's own cache. A rotary model caches rotated keys, so the network for its
  keys also learned to rotate them by one position: the best linear fit to the one for SmolLM2 is
  that rotation, to 1 %. Here a key is rotated before an aligner gets it
  (`kvalign.cache.realigner.Recursive`); `with_rotation` puts the difference into the weights.
"""

import warnings
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvalign.aligners import AlignerConfig, NetworkAligner, RealignNet, new_config
from kvalign.aligners.kinds import SHARED_SIZES, TARGETS
from kvalign.foundation import progress
from kvalign.foundation.errors import NotFoundError, UserError
from kvalign.foundation.files import sha256
from kvalign.foundation.settings import keywords_of
from kvalign.models.architectures import ModelSpec, rotation_of
from kvalign.models.loading import LoadedModel, load_model
from kvalign.models.rope import Rotation
from kvalign.training.aligner_folder import check_free, record_of, save
from kvalign.training.settings import ImportPublishedSettings

SOURCE = "github.com/eecs585projectorg/kv-align"

# By the name of a weight in `RealignNet`: the authors'.
_NAMES = {
    "position.weight": "emb_pos.weight",
    "layer.weight": "emb_blocks.weight",
    "head.weight": "emb_heads.weight",
    **{name: name for i in (1, 2, 3) for name in (f"fc{i}.weight", f"fc{i}.bias")},
}


@keywords_of(ImportPublishedSettings)
@progress.shown_as("import-published")
def import_published(
    settings: ImportPublishedSettings, *, loaded: LoadedModel | None = None
) -> AlignerConfig:
    """Make an aligner from the authors' two files, after checking them against the base model.

    Returns:
        the aligner's config.

    Raises:
        ExistsError: `out` has an aligner, and `overwrite` is not set.
        NotFoundError: a file is missing.
        UserError: a file that is not such a network, or one for another model.
    """
    check_free(settings.out, settings.overwrite)
    paths = dict(zip(TARGETS, (settings.keys, settings.values), strict=True))
    nets = {kv: read_network(path) for kv, path in paths.items()}
    loaded = loaded or load_model(settings.model, dtype="float32")
    for kv, path in paths.items():
        _check_fit(nets[kv], path, loaded.spec, settings)
    if rotation := rotation_of(loaded.model):
        nets["key"] = with_rotation(nets["key"], rotation)
    hidden = {f"{kv}_hidden{i}": len(nets[kv][f"fc{i}.bias"]) for kv in TARGETS for i in (1, 2)}
    origin = {"weights": f"trained and published by the authors of KV-Align ({SOURCE})"}
    training = {}
    for kv, path in paths.items():
        data = {**origin, "licence": "theirs", "file": path.name, "sha256": sha256(path)}
        training[kv] = record_of("import-published", settings, data)
    config = new_config(
        "network",
        loaded.model,
        loaded.spec,
        chunk_len=settings.chunk_len,
        num_sinks=settings.num_sinks,
        shifts=(1,),
        sizes=_shared_sizes(nets["key"]) | hidden,
        training=training,
    )
    for net in nets.values():
        net["position.weight"] = net["position.weight"][: config.num_positions]
    aligner = NetworkAligner(config)
    for kv in TARGETS:
        getattr(aligner, kv).load_state_dict(nets[kv])
    save(aligner, settings.out)
    return config


def read_network(path: Path) -> dict[str, Tensor]:
    """The weights in a file, by the names of `RealignNet`, in float32; nothing in the file is
    executed.

    Raises:
        NotFoundError: the file does not exist.
        UserError: it was not saved by torch, has more than tensors and plain values, or is not a
            network of this layout.
    """
    if not path.is_file():
        raise NotFoundError(f"no file {str(path)!r}: the authors' files are in models/ of {SOURCE}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what it says of the file is said below
            saved = torch.load(path, weights_only=True, map_location="cpu")
    except Exception:  # damaged bytes make torch raise any of a dozen kinds
        raise UserError(
            f"{path} is damaged or has more than tensors and plain values, which is not executed"
        ) from None
    state = saved.get("model_state_dict") if isinstance(saved, dict) else None
    if not isinstance(state, dict):
        raise UserError(f"{path} has no model_state_dict: it is not a file that the authors saved")
    if missing := [name for name in _NAMES.values() if name not in state]:
        raise UserError(f"{path} holds no KV-Align network: missing {', '.join(missing)}")
    return {ours: state[theirs].float() for ours, theirs in _NAMES.items()}


def with_rotation(net: dict[str, Tensor], rotation: Rotation) -> dict[str, Tensor]:
    """The network F of a rotary model's keys as x -> F(R x), where R rotates away from the start by
    one position and undoes the cache's own rotation.

    F(R x) = x + (R - 1) x + f(R x): R goes into the first layer; (R - 1) x takes 2 D units more in
    each hidden layer, as x = relu(x) - relu(-x). This is the published map when entries are evicted
    one by one, the only way that the authors have. `net` has the names of `RealignNet`.
    """
    head_dim = len(net["fc3.bias"])
    one = torch.eye(head_dim, dtype=torch.float32)
    matrix = rotation.shift(one, -1).T  # [D, D], R
    vector, positions = net["fc1.weight"].tensor_split([head_dim], dim=1)
    signs = torch.cat([one, -one])  # [2 D, D]
    through = torch.cat([signs, signs.new_zeros(2 * head_dim, positions.shape[1])], 1)
    first = torch.cat([vector @ matrix, positions], 1)
    return {
        **net,
        "fc1.weight": torch.cat([first, through]),
        "fc2.weight": torch.block_diag(
            net["fc2.weight"], torch.eye(2 * head_dim, dtype=torch.float32)
        ),
        "fc3.weight": torch.cat([net["fc3.weight"], (matrix - one) @ signs.T], 1),
        **{name: pad(net[name], (0, 2 * head_dim)) for name in ("fc1.bias", "fc2.bias")},
    }


def _check_fit(
    net: dict[str, Tensor], path: Path, spec: ModelSpec, settings: ImportPublishedSettings
) -> None:
    """Raise UserError for shapes that do not fit each other, the model or the caches."""
    num_positions = settings.chunk_len - settings.num_sinks - 1
    longest, heads = len(net["position.weight"]), spec.num_kv_heads
    sizes = {f"hidden{i}": len(net[f"fc{i}.bias"]) for i in (1, 2)} | _shared_sizes(net)
    with torch.device("meta"):
        fitting = RealignNet(spec.head_dim, longest, spec.num_layers, heads, **sizes)
    for name, weight in fitting.state_dict().items():
        shape, needed = tuple(net[name].shape), tuple(weight.shape)
        if shape != needed:
            raise UserError(
                f"{path}: {_NAMES[name]} is {shape}, needed {needed} for {spec.name} "
                f"({spec.num_layers} layers, {heads} KV heads of size {spec.head_dim})"
            )
    if num_positions > longest:
        raise UserError(
            f"{path}: emb_pos.weight has {longest} positions, needed {num_positions} for "
            f"--chunk-len {settings.chunk_len}: at most {longest + settings.num_sinks + 1}"
        )


def _shared_sizes(net: dict[str, Tensor]) -> dict[str, int]:
    embeddings = ("position.weight", "layer.weight", "head.weight")
    return {size: net[name].shape[1] for size, name in zip(SHARED_SIZES, embeddings, strict=True)}
