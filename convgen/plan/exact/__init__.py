"""Exact minimisation of a sum of tables: by elimination, under a budget of memory; and [SP] V-C's longest paths."""
