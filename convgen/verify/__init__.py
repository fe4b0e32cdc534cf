"""Running a generated module on one machine: virtual ranks, processes, and the comparison with a reference."""

import os

# MKL keeps freed memory in lists by thread; in a child forked from a process whose threads have used MKL, walking
# them may never end (seen with torch 2.13: dgemm in mm_account_ptr_by_tid). Read when torch loads MKL.
os.environ.setdefault("MKL_DISABLE_FAST_MM", "1")
