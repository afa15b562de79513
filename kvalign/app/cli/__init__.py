"""Command line: from words to a command and its settings."""
