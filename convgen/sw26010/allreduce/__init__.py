"""The all-reduce of [SW] 5.1 on supernodes: simulated message by message, and by its equations."""
