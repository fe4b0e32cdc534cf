"""Passes: one idea a file, schedule -> schedule, the same object when nothing changes."""
