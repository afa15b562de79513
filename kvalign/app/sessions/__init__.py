"""Streams and conversations of the command line."""
