"""A text of many lines and tokenizers trained on a text, in memory."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

TEXT = "".join(
    f"{i} the cat, {'  ' * (i % 3)}said it's {i * i % 17}!\n" + "\n" * (i % 5 == 0) + " it ran\n"
    for i in range(400)
)


def byte_tokenizer(vocab_size: int, text: str, pattern=None) -> PreTrainedTokenizerBase:
    """Byte-level BPE, or bytes folded to `vocab_size` ids where that is less than 256."""
    bpe = Tokenizer(models.BPE())
    splits = [pattern] if pattern else []
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet() if vocab_size > 256 else []
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe)
