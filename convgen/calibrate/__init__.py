"""Measuring the machine that runs: links, collectives and local work of all ranks at once, as a machine file."""
