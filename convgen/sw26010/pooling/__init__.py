"""Pooling on the mesh ([SW] 4.4)."""
