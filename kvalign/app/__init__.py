"""The application: the command line and the pages. It may use everything; nothing uses it."""
