"""The command line, a file a command: the only room that knows all others, and that none knows."""
