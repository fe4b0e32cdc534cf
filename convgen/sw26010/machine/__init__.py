"""One core group of the SW26010: its numbers, its memories and buses, emulated."""
