"""Streams for users: endless tokens and text, for one or many streams, and the loss of a text."""
