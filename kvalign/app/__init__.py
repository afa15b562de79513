"""Application: the command line and the pages. It may import every layer; no layer imports it."""
