"""The corpus `recall`: a stream of facts and questions (`kvalign.data_gen.facts`) as text."""

from collections.abc import Iterator

from kvalign.data_gen.corpus import in_pieces

NUM_TOKENS = {"train": 1_000_000, "test": 200_000}
SEEDS = {"train": 0, "test": 1}
LINE_LEN = 64  # tokens


class Recall:
    about = "facts, questions and answers for the models recall-gpt2 and recall-llama; offline"

    def texts(self, rest: str, split: str) -> Iterator[str]:
        """One stream, `LINE_LEN` tokens a line."""
        from kvalign.data_gen.facts import WORDS, FactStreams  # numpy

        stream = FactStreams(SEEDS[split])
        lines = (stream.take(LINE_LEN)[0] for _ in range(NUM_TOKENS[split] // LINE_LEN))
        return in_pieces(" ".join(WORDS[i] for i in line) + "\n" for line in lines)
