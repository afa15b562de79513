"""Shared parts of all evaluations: settings, the grid of methods, the document of results."""
