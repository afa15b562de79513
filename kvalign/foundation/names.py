"""Names: registries, the name that was meant by one that is nearly right, and keywords."""

import difflib
import inspect
import pkgutil
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from typing import Generic, TypeVar, cast

from kvalign.foundation.errors import KeywordError, UserError

# What other programs call it, where its letters do not tell (`difflib` finds the others).
_ALIASES = {
    "max_new_tokens": "max_tokens max_length max_len max_completion_tokens n_predict num_predict",
    "no_do_sample": "greedy no_sample no_sampling",
    "do_sample": "greedy sampling",
    "temperature": "temp",
    "top_k": "k",
    "top_p": "p nucleus",
    "repetition_penalty": "rep_pen",
    "no_stop_at_end": "ignore_eos",
    "stop_at_end": "stop_on_eos eos",
    "stop_strings": "stop stop_sequences stop_words",
    "lookup": "prompt_lookup_num_tokens prompt_lookup speculative speculative_decoding",
    "seed": "random_seed random_state rng manual_seed sampling_seed generator",
    "cache_size": "cache_len max_cache_len cache_length kv_size window window_size window_length "
    "n_ctx num_ctx ctx_size context_size context_length",
    "cache_sizes": "cache_len cache_lens kv_size window_size context_length",
    "num_sinks": "sink_size attention_sinks attention_sink_size num_sink_tokens n_keep",
    "num_evicted": "evict evict_size",
    "num_tokens": "max_tokens",
    "aligner": "adapter checkpoint",
    "dtype": "torch_dtype precision",
    "weights": "quantization quantize quantized load_in_4bit load_in_8bit",
    "float32": "fp32 f32",
    "float16": "fp16 f16 half",
    "int8": "8bit q8_0 w8",
    "int4": "4bit q4_0 q4_1 w4",
    "out": "output_dir out_dir save_dir",
    "corpus": "dataset data_set text",
    "lr": "learning_rate",
    "max_rows": "batch_size",
    "system": "system_prompt",
    "say": "message",
    "state": "session",
}


REMOVED = {
    "demo-ui": "kvalign serve answers any client of OpenAI's API, kvalign lanes shows the cache "
    "step by step, and kvalign eval readability has methods write side by side",
    "completion": 'eval "$(register-python-argcomplete kvalign)" completes in bash and zsh',
    "eval chat": "kvalign eval told asks for what a conversation told, and kvalign eval "
    "readability judges what is written",
    "eval import-losses": "eval/results/paper.md has its figures, and version 0.2 the command",
    **{
        name: f"kvalign list {name} shows them"
        for name in ("methods", "policies", "aligners", "corpora")
    },
    "anchored": "table-network is what came of it",
    "kvalign-gpt2-mini-anchored": "kvalign-gpt2-mini-table-network is what came of it",
}
"""What to use in place of commands, kinds, aligners and flags that are no more."""


def nearest(name: str, names: Iterable[str], cutoff: float = 0.65) -> str | None:
    """The known name that was meant, by its name in other programs or its letters; None: none."""
    names = list(names)
    others = [candidate for candidate, aliases in _ALIASES.items() if name in aliases.split()]
    near = difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    return next((candidate for candidate in others or near if candidate in names), None)


T = TypeVar("T")


class Registry(UserDict[str, T], Generic[T]):
    """Mapping from names to objects at `module:member`, which are imported at first use. Names can
    be listed, in help and at a shell's TAB, without that.

    A notebook can add to it without a file: `METHODS["mine"] = MyMethod`.

    Args:
        what: the kind of thing, for messages: `method`.
        targets: `module:member` by name, in the order of listings.
    """

    def __init__(self, what: str, targets: Mapping[str, str]):
        super().__init__(cast(Mapping[str, T], targets))
        self.what = what

    def __getitem__(self, name: str) -> T:
        value = self.data[name]
        if isinstance(value, str):  # not imported yet
            value = self.data[name] = pkgutil.resolve_name(value)
        return value

    def find(self, name: str) -> T:
        """Return the object of a name; UserError, with the known names, if it is unknown."""
        if name not in self:
            raise UserError(unknown(self.what, name, self))
        return self[name]


def unknown(what: str, name: str, names: Iterable[str]) -> str:
    """Message for an unknown name: `unknown method 'x'; did you mean y? (known: y, z)`."""
    if name in REMOVED:
        return f"{what} {name!r} was removed: {REMOVED[name]}"
    names = list(names)
    near = nearest(name, names)
    hint = f"; did you mean {near}?" if near else ""
    return f"unknown {what} {name!r}{hint} (known: {', '.join(names)})"


F = TypeVar("F", bound=Callable)


class _PlainText(str):
    """Text of a signature that `help` shows as it is, without quotation marks."""

    __repr__ = str.__str__


def spelled_out(config: type) -> Callable[[F], F]:
    """Let the signature of a function name the keys of a typed dictionary beside its `**config`.
    `help`, completion, `check_keywords` and transformers' `generate` read them there.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        *named_first, rest = signature.parameters.values()
        named = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=_PlainText("..."),
                annotation=_PlainText(getattr(hint, "__forward_arg__", hint)),
            )
            for name, hint in config.__annotations__.items()
        ]
        rest = rest.replace(annotation=_PlainText(config.__name__))
        function.__signature__ = signature.replace(parameters=[*named_first, *named, rest])  # type: ignore[attr-defined]
        return function

    return decorate


def check_keywords(function: Callable, keywords: Iterable[str]) -> None:
    """Raise KeywordError for the first keyword that is not a parameter of the function."""
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    for name in keywords:
        if name not in names:
            near = nearest(name, names)
            hint = f"did you mean {near}?" if near else f"it has {', '.join(names)}"
            raise KeywordError(f"{function.__name__}() has no keyword {name!r}: {hint}")
