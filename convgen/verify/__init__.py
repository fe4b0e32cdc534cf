"""Running a generated module on one machine: virtual ranks, processes, and the comparison with a reference."""

import os

# MKL keeps freed memory in lists, one for each thread. In a child forked from a process whose threads have used MKL, a
# walk along them may never end (seen with torch 2.13: dgemm in mm_account_ptr_by_tid). MKL reads this when torch loads
# it.
os.environ.setdefault("MKL_DISABLE_FAST_MM", "1")
