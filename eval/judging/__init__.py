"""Readability of a text: the rules for its chunks, and the words that they know."""
