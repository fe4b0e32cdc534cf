"""Running a generated module on one machine: virtual ranks, processes, and the comparison with a reference."""
