"""The layout of every layer of a network: candidates, an exact search over the graph, and what it found."""
