"""Parallel reading of training data from striped disk arrays ([SW] 5.2)."""
