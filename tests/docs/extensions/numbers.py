"""The corpus `numbers`: counting, for tests that need a text which is easy to predict."""

from collections.abc import Iterator

from kvalign.data_gen.corpus import in_pieces


class Numbers:
    about = "the numbers from 0 on; offline"

    def texts(self, rest: str, split: str) -> Iterator[str]:
        first = 0 if split == "train" else 100_000
        numbers = range(first, first + 10_000)
        return in_pieces(f"The number {n} comes after {n - 1}.\n" for n in numbers)
