"""Rows with products: convolutions, transposed ones, and contractions, of which linear layers are some.

They take most of a step, hold what they gather, and have roles of their own; other rows follow them.
"""

from __future__ import annotations

from convgen.operations.contraction import Contraction
from convgen.operations.convolution import Convolution
from convgen.operations.row import Operation
from convgen.operations.transposed import TransposedConvolution

PRODUCTS = (Convolution, TransposedConvolution, Contraction)


def is_product(operation: Operation) -> bool:
    return isinstance(operation, PRODUCTS)
