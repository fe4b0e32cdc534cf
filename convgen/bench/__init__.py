"""Measuring a step of training of what was compiled, on the ranks that a launcher started."""
