"""Entry point of transformers' `custom_generate`: endless generation with the installed package."""

from kvalign import stream_generate


def generate(model, **arguments):
    """Return the output of `model.generate` with `kvalign.stream_generate`.

    Args:
        model: a causal language model of transformers.
        arguments: those of `model.generate` and of `kvalign.stream_generate`.
    """
    return model.generate(custom_generate=stream_generate, **arguments)
