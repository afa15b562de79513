"""A stream as its user meets it: tokens and text without end, for one or many, and the loss of a
text."""
