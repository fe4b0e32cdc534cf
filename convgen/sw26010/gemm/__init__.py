"""GEMM on the mesh ([SW] 4.1): plan, program, counts, seconds."""
