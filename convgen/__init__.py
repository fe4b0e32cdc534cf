"""convgen: a compiler for distributed convolutions."""

__version__ = "0.1.0"
