"""The least of sums of tables, exactly: by elimination, under a budget of memory; and [SP] V-C's longest paths."""
