"""Readability of a text: the rules by which its chunks are judged, and the words they know."""
