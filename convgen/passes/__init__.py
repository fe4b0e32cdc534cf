"""Passes, one idea a file: a schedule or a program in, one out, and the same object where nothing changes."""
