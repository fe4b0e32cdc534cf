"""Convolution on the mesh ([SW] 4.2, 4.3): plans, programs, seconds."""
