"""Attention: queries are split, keys and values whole; masks are of positions in the whole."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import inf, sqrt
from typing import Any

from convgen.algebra.relations import Ratio
from convgen.algebra.signature import WHOLE, Made, Operand, Signature
from convgen.late import torch
from convgen.operations.row import At, Operation, Work, numbers, own, touched


@dataclass(frozen=True)
class Attention(Operation):
    """softmax(q k' * scale + mask) v for q[N, heads, L, E], k[N, heads of k, S, E], v[N, heads of k, S, V].

    Keys and values are whole. A head of q reads the head of k and v that it shares with heads / heads_k - 1 others.

    Attributes:
        masked: a fourth operand [N or 1, heads or 1, L, S] is added to the scores.
        causal: the query in row l of the whole sees the keys up to l.
        scale: of the scores; by default 1 / sqrt(E).
    """

    batch: int
    heads: int
    heads_k: int
    queries: int
    keys: int
    width: int
    width_v: int
    masked: tuple[int, int] | None = None
    causal: bool = False
    scale: float | None = None

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        n, head, row = own("N", "H", "L")
        shared = head if self.heads == self.heads_k else Made(("H",), Ratio(1, self.heads // self.heads_k))
        inputs = [
            Operand("q", (self.batch, self.heads, self.queries, self.width), (n, head, row, WHOLE)),
            Operand("k", (self.batch, self.heads_k, self.keys, self.width), (n, shared, WHOLE, WHOLE)),
            Operand("v", (self.batch, self.heads_k, self.keys, self.width_v), (n, shared, WHOLE, WHOLE)),
        ]
        if self.masked:
            batch, heads = self.masked
            dims = (n if batch == self.batch else WHOLE, head if heads == self.heads else WHOLE, row, WHOLE)
            inputs.append(Operand("mask", (batch, heads, self.queries, self.keys), dims))
        y = Operand("y", (self.batch, self.heads, self.queries, self.width_v), (n, head, row, WHOLE))
        extents = (("N", self.batch), ("H", self.heads), ("L", self.queries))
        return (Signature(extents, tuple(inputs), (y,)),)

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        q, k, v, *mask = operands
        if self.heads != self.heads_k:
            heads = numbers(at.blocks["H"], q) // (self.heads // self.heads_k) - at.inside[1][1][0]
            k, v = k.index_select(1, heads), v.index_select(1, heads)
        added = mask[0] if mask else None
        if self.causal:
            seen = numbers(at.blocks["L"], q)[:, None] >= numbers((0, self.keys), q)
            later = q.new_zeros(seen.shape).masked_fill(~seen, -inf)
            added = later if added is None else added + later
        return (torch.nn.functional.scaled_dot_product_attention(q, k, v, added, scale=self.scale),)

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        q, k, v, *mask = operands
        k, v = (t.repeat_interleave(self.heads // self.heads_k, 1) for t in (k, v))
        scores = torch.einsum("nhle,nhse->nhls", q, k) * (self.scale or 1 / sqrt(self.width))
        if mask:
            scores = scores + mask[0]
        if self.causal:
            scores = scores + torch.full((self.queries, self.keys), -inf, dtype=q.dtype).triu(1)
        return (torch.einsum("nhls,nhsv->nhlv", scores.softmax(-1), v),)

    def work(self, way: int, at: At) -> Work:
        """Two products of scores' size; a causal mask halves neither."""
        scores = at.extent("N") * at.extent("H") * at.extent("L") * self.keys
        return Work(2 * scores * (self.width + self.width_v), touched(at, self.signatures[way]))
