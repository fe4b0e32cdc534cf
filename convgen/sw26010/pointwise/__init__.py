"""Layers that touch every element once or twice: ReLU, sums of branches, SGD, normalisation ([SW] 6.1)."""
