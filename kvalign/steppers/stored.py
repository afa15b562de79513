"""Decode step, compiled once by AOTInductor into a file of the user's cache folder. Later starts
load it without a compiler and without tracing.

The file contains neither weights nor the cache's counts. A step is a function of tokens, their
positions and the entries in the buffers; it writes those of the tokens. So it is valid for all
models, and tables, of one shape and with the same attributes.
"""

import functools
import hashlib
import json
import logging
import platform
import re
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, final

import torch
import transformers
from torch import Tensor, nn
from torch.backends.cpu import get_cpu_capability
from torch.export import Dim
from torch.nn.functional import pad
from transformers import Cache, PreTrainedModel

from kvalign.aligners import table as aligner_table
from kvalign.aligners.table import TableAligner
from kvalign.cache import int8
from kvalign.cache import layer as cache_layer
from kvalign.cache.int8 import is_read_by_kernel
from kvalign.cache.realigner import OnRead
from kvalign.cache.streaming_cache import StreamingCache
from kvalign.foundation import files, progress
from kvalign.foundation.files import sha256
from kvalign.foundation.progress import warn_once
from kvalign.methods.base import Method, Stepper
from kvalign.methods.cached import Cached
from kvalign.models import attention, kernel, packed, rope
from kvalign.models.fetched import cache_dir
from kvalign.models.packed import GROUP
from kvalign.models.wrapped import in_eval_mode
from kvalign.steppers import step_module
from kvalign.steppers.compiled import Compiled, Snapshot, has_compiler, is_plain, names_of, stays
from kvalign.steppers.step_module import StepModule

log = logging.getLogger(__name__)

StoredStep = Callable[[list[Tensor]], list[Tensor]]
"""Of tokens [B, 1], their positions [B, 1], the slot [1] of their entries, the places [B, S] of the
entries that they see, and keys and values as each layer stores them, [B, H, S, width of the form]:
logits [B, 1, V]. The entries of the tokens are written. With our kernel B and S may change; other
attention is of one row, with a full cache. Where the kernel rotates keys of 8 bits, it is given
their angles behind all others (`kvalign.models.kernel.attend`).
"""

NUM_KEPT = 16  # steps, of 5 MB; those that were used longest ago go
_UNNAMED, _GROUP = re.compile(r"constant\d+"), torch.tensor(GROUP)
"""What inductor makes a constant for each packed product, and what it is."""
_EXACT, _ROUNDED = 1e-3, 0.2
"""By how much logits of a step may differ from the model's, relative to their standard deviation:
in float32, where 1e-6 was found, and where products round their inputs to 8 bits, where one step
beside a border goes the other way: 0.04 with SmolLM2 of 30 layers.
"""
OTHER_LOGITS = (
    "a stored step is not taken: it gives other logits than this model, which was changed after it "
    "was loaded, or the model of the step was; kvalign compile makes the step again"
)
CHANGED = "the model was changed: its stored step is no longer taken"
EVERY = 32  # steps between two comparisons of the whole model: together 0.02 ms a step


@final
class Stored(Stepper):
    """Decode steps of a model that are stored: those of entries that are not moved, where attention
    does not go by their order. Where our kernel attends, these are steps of any rows and cache
    size; one file is for one row, another for several. Else they are steps of one row with a full
    cache that evicts one entry, and no table places entries.

    Args:
        method: whose entries, of 8 bits or not, and tables they are for.
        makes: whether steps without a file are compiled; else they are left to the model.

    Attributes:
        falls_back: whether steps that cannot be stored are compiled at each start.
    """

    def __init__(self, method: Cached, *, makes: bool = True):
        self.model = model = method.model
        attention.install(model.config)
        self.is_int8, self.makes = method.sizes.cache_dtype == "int8", makes
        self.num_sinks, self.falls_back = method.sizes.num_sinks, makes
        self.table = table_of(method.cache)
        self._runs: dict[bool, StoredStep | None] = {}  # by whether they are for one row
        self._step = self._made_step()
        self._snapshot = Snapshot(model)
        self._cache: Callable[[], Cache | None] = lambda: None
        self._num = 0  # of steps of this cache

    @classmethod
    def ready(cls, method: Method) -> Self | None:
        if not isinstance(method, Cached) or not is_plain(method.cache):
            return None
        if method.model.device.type != "cpu" or is_empty():
            return None
        stepper = cls(method, makes=False)
        # A network corrects entries once something was evicted; the others' steps are alike.
        corrects = stepper.table is not None and stepper.table.corrects
        first = method.sizes.first_input_len if corrects else method.sizes.num_sinks + 1
        stepper._try(method, 1, first)
        return stepper

    @classmethod
    def compiling(cls, method: Method, **options: Any) -> Self | None:
        return cls(method) if isinstance(method, Cached) else None

    def _made_step(self) -> StepModule:
        return StepModule(self.model, self.is_int8, self.table, self.num_sinks)

    def has(self, num_rows: int) -> bool:
        """Return whether a stored step of so many rows has been loaded."""
        return self._runs.get(num_rows == 1) is not None

    def word_for(self, num_rows: int) -> str | None:
        return "stored" if self.has(num_rows) else "compiled" if self.falls_back else None

    @functools.cached_property
    def fallback(self) -> Stepper | None:
        """The compiled model, for steps that are not stored; None without a compiler."""
        return Compiled.of(self.model)

    def prepare(self, method: Method, num_rows: int) -> bool:
        self.falls_back = False
        # With some attention only steps of a full cache are stored.
        lens = method.sizes.num_sinks + 1, method.sizes.first_input_len
        return any(self._try(method, num_rows, num) for num in lens)

    def _try(self, method: Method, num_rows: int, num_tokens: int) -> bool:
        """Step once after so many tokens; return whether the step is a stored one."""
        trial, rng = method.new(), torch.Generator().manual_seed(0)
        trial.stepper = self
        for num in (num_tokens, 1):  # of equal tokens attention would not matter
            ids = torch.randint(self.model.config.vocab_size, (num_rows, num), generator=rng)
            trial.feed(ids.to(self.model.device))
        return self.has(num_rows)

    def logits(self, ids: Tensor, cache: StreamingCache) -> Tensor | None:
        if (inputs := self._inputs(ids, cache)) is not None:
            run = self._run_for(cache, inputs)
            if run is not None:
                return run(inputs)[0][:, -1]
        if self.falls_back and self.fallback is not None:
            return self.fallback.logits(ids, cache)
        return None

    def _inputs(self, ids: Tensor, cache: Cache) -> list[Tensor] | None:
        if not is_plain(cache) or len(cache.attention) < len(cache.layers):
            return None
        layer, step = cache.attention[0], cache.step
        if step is None or not step.is_decode or step.in_order:
            return None
        if self.table is None:
            fits = stays(cache)
        else:
            fits = table_of(cache) is self.table and cache.sizes.num_sinks == self.num_sinks
            fits = fits and (not self.table.corrects or step.evicting is True)
        if not fits:
            return None
        if layer.device.type != "cpu" or layer.dtype != self.model.dtype:
            return None
        entries, angles = [layer.entries for layer in cache.attention], None
        step = cache.describe()
        if is_read_by_kernel(self.model, entries[0].data.keys):
            places = step.sight_of_one.places_of_one.expand(len(ids), -1)
            places = pad(places, (0, entries[0].num_slots - step.size), value=-1).contiguous()
            angles = cache.angles if cache.reads_stored else None
        elif (
            self.table is None
            and len(ids) == 1
            and cache.sizes.num_evicted == 1
            and step.size == cache.sizes.first_input_len
            and not step.hides
        ):
            places = step.places
        else:
            return None
        seen = [x for ring in entries for x in ring.data]
        if angles is not None:
            seen.append(angles)
        return [ids, step.position_ids, step.slot, places, *seen]

    def _run_for(self, cache: Cache, inputs: list[Tensor]) -> StoredStep | None:
        """The compiled step, if there is one for the model as it is now."""
        had = self._runs
        if not self._is_as_it_was(cache):
            self._snapshot = Snapshot(self.model)
            self._step = self._made_step()
            self._runs = {}
        is_one = len(inputs[0]) == 1
        if is_one not in self._runs:
            request = self._step, inputs, self.makes
            self._runs[is_one] = load_or_make(*request) if self._snapshot.is_plain else None
            if self._runs[is_one] is None and had.get(is_one) is not None:
                log.warning(CHANGED)
        return self._runs[is_one]

    def _is_as_it_was(self, cache: Cache) -> bool:
        """Return whether the model is as when its steps were loaded. Hooks and the `forward` of
        classes are compared before each step, the rest as a stream begins and every few steps.
        """
        self._num = self._num + 1 if self._cache() is cache else 0
        self._cache = weakref.ref(cache)
        snapshot = self._snapshot
        return snapshot.holds() if self._num % EVERY == 0 else snapshot.code_holds()


def folder() -> Path:
    """Folder of compiled steps."""
    return cache_dir() / "steps"


def is_empty() -> bool:
    """Return whether no step has been stored yet."""
    return next(folder().glob("*.pt2"), None) is None


def load_or_make(step: StepModule, inputs: list[Tensor], makes: bool) -> StoredStep | None:
    """The file's step for these inputs if it gives the model's logits [B, 1, V]; else
    compiled, if it `makes` one. None if there is none, or none is possible.
    """
    weights = step.tensors()  # which it reads where they lie
    about = _about(step, inputs, weights)
    key = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()[:32]
    file = folder() / f"{key}.pt2"
    with in_eval_mode([*step.model.modules()]):
        if (run := _load(file, weights)) is not None:
            if _gives_logits_of(step, run, inputs):
                return run
            log.warning(OTHER_LOGITS)
        if not makes or not has_compiler():
            return None
        try:
            with files.being_made(file):  # another start may be making it
                run = _load(file, weights)
                if run is None or not _gives_logits_of(step, run, inputs):
                    run = _make(step, inputs, weights, file)
                return run
        except Exception as error:  # what export does not take, or a full disk
            why = next(iter(str(error).splitlines()), type(error).__name__)
            warn_once(f"the step of this model cannot be stored: {why}")
            return None


def _gives_logits_of(step: StepModule, run: StoredStep, inputs: list[Tensor]) -> bool:
    """Return whether a step runs, and gives the logits that the model gives now."""
    copies = [x.detach() for x in inputs]  # which the step marks
    expected = step(*copies)
    try:
        logits = run([*copies])[0]
    except RuntimeError as error:
        log.info("a stored step failed its trial: %s", error)
        return False
    is_exact = inputs[4].dtype == torch.float32 and packed.weights_of(step.model) == "float32"
    most = _EXACT if is_exact else _ROUNDED
    return bool((logits - expected).std() <= most * expected.std())


@progress.shown_as("compile")
def _make(
    step: StepModule, inputs: list[Tensor], weights: dict[str, Tensor], file: Path
) -> StoredStep | None:
    """The step, once a file has it and it gives the model's logits."""
    progress.phase("tracing the step, once; a minute or more, later starts load it")

    def write(package: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            may_change = _dims(step.model, inputs)
            exported = torch.export.export(
                step, tuple(inputs), strict=False, dynamic_shapes=may_change
            )
            progress.phase("compiling the step, once; a minute or more, later starts load it")
            torch._inductor.aoti_compile_and_package(
                exported,
                package_path=str(package),
                inductor_configs={
                    "aot_inductor.package_constants_in_so": False,
                    # Headers are compiled apart in longer than one step takes with them.
                    "aot_inductor.precompile_headers": False,
                    "cpp.threads": 1,  # products have several; what lies between them is too little
                    **kernel.inductor_configs(),
                },
            )
        run = _opened(package, weights)
        if not _gives_logits_of(step, run, inputs):
            raise RuntimeError("the compiled step gives other logits than the model")

    files.keep(file, write)
    forget_old()
    return _load(file, weights)


def _dims(model: PreTrainedModel, inputs: list[Tensor]) -> tuple[Any, ...] | None:
    """The dimensions of the inputs that may change: the slots, and rows if there are several."""
    if not is_read_by_kernel(model, inputs[4]):
        return None
    rows = {0: Dim("rows", min=2)} if len(inputs[0]) > 1 else {}
    slots = Dim("slots", min=2)
    of_entries = [rows | {2: slots}] * (len(inputs[4:]) // 2 * 2)
    of_angles = [{2: Dim("places", min=2)}] * (len(inputs[4:]) % 2)
    return rows, rows, {}, rows | {1: slots}, (*of_entries, *of_angles)


def forget_old() -> None:
    """Remove all files except those of the `NUM_KEPT` steps that were used last."""
    for old in sorted(folder().glob("*.pt2"), key=lambda path: path.stat().st_mtime)[:-NUM_KEPT]:
        files.forget(old)


def _load(file: Path, weights: dict[str, Tensor]) -> StoredStep | None:
    """The step of a file; None where there is none, or it is damaged."""
    if not files.is_whole(file):
        return None
    try:
        run = _opened(file, weights)
    except (KeyError, OSError, RuntimeError):
        return None
    with suppress(OSError):  # others may own the folder
        file.touch()  # the newest are kept
    return run


def _opened(file: Path, weights: dict[str, Tensor]) -> StoredStep:
    """The step of a whole file. `aoti_load_package` would compile and run six programs first, to
    compare this CPU with that of the file: the file's name has it already.
    """
    compiled = torch._C._aoti.AOTIModelPackageLoader(str(file), "model", True, 1, -1)  # one thread
    names = compiled.get_constant_fqns()
    needed = {x: _GROUP if _UNNAMED.fullmatch(x) else weights[x] for x in names}
    compiled.load_constants(needed, False, True, True)  # all of them, where they lie
    return compiled.boxed_run


def _about(step: StepModule, inputs: list[Tensor], weights: dict[str, Tensor]) -> dict[str, Any]:
    """All that a compiled step depends on."""
    model, table = step.model, step.table
    config = {k: v for k, v in model.config.to_dict().items() if k != "_name_or_path"}
    is_any = is_read_by_kernel(model, inputs[4])  # of any rows and slots
    fixed = [(*x.shape[1::2],) if is_any else (*x.shape, *x.stride()) for x in inputs[4:]]
    modules = cache_layer, int8, rope, packed, kernel, aligner_table, step_module
    sources = (Path(__file__), *(Path(str(x.__file__)) for x in modules), *kernel.SOURCES)
    return {
        "config": config,
        "attention": model.config._attn_implementation,
        "modules": [
            (name, type(x).__qualname__, _numbers_of(x)) for name, x in model.named_modules()
        ],
        "weights": {name: (tuple(x.shape), x.dtype) for name, x in weights.items()},
        "entries": [(of_one, x.dtype) for of_one, x in zip(fixed, inputs[4:], strict=True)],
        "is_one": len(inputs[0]) == 1,
        "table": None if table is None else (table.kind, step.num_sinks),
        "versions": (torch.__version__, transformers.__version__),
        "kernel": kernel.is_here(),
        "sources": [sha256(path) for path in sources],
        "cpu": (platform.machine(), torch.cpu.get_capabilities(), get_cpu_capability()),
    }


def _numbers_of(module: nn.Module) -> dict[str, Any]:
    """A module's numbers and words, which a step contains."""
    values = {name: vars(module)[name] for name in names_of(module) if name != "name_or_path"}
    return {name: x for name, x in values.items() if isinstance(x, int | float | str | tuple)}


def table_of(cache: Any) -> TableAligner | None:
    """Tables that place a cache's entries, each at its position, when attention reads them."""
    realigner = cache.realigner
    if not isinstance(realigner, OnRead) or realigner.rotation is not None:
        return None
    return realigner.table if realigner.place_positions is None else None
