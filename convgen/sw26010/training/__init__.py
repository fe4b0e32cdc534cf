"""A node's training step of a whole network, and many nodes' ([SW] 5, 6.2, 6.3)."""
