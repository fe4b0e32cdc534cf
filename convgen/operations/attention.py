"""Attention: queries are split, keys and values are whole; masks go by positions in the whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, sqrt
from typing import Any

from convgen.algebra.relations import Ratio
from convgen.algebra.signature import WHOLE, Made, Operand, Signature
from convgen.late import torch
from convgen.operations.row import At, Operation, Work, numbers, own, read_here, summed_to, touched


@dataclass(frozen=True)
class Attention(Operation):
    """softmax(q k' * scale + mask) v for q[N, heads, L, E], k[N, heads of k, S, E], v[N, heads of k, S, V].

    Keys and values are whole. A head of q reads the head of k and v that it shares with heads / heads_k - 1 others.

    Attributes:
        masked: whether a fourth operand [N or 1, heads or 1, L, S] is added to the scores.
        causal: whether the query in row l of the whole sees only keys up to l.
        scale: the factor of the scores; by default 1 / sqrt(E).
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
        given, added = self._read(at, *operands)
        return (torch.nn.functional.scaled_dot_product_attention(*given, added, scale=self.scale),)

    def _read(self, at: At, q: Any, k: Any, v: Any, mask: Any = None) -> tuple[tuple[Any, Any, Any], Any]:
        """The operands q, k and v with as many heads of k and v as of q, and what is added to the scores."""
        if self.heads != self.heads_k:
            k, v = self._of_each(at, k), self._of_each(at, v)
        if self.causal:
            seen = numbers(at.blocks["L"], q)[:, None] >= numbers((0, self.keys), q)
            later = q.new_zeros(seen.shape).masked_fill(~seen, -inf)
            mask = later if mask is None else mask + later
        return (q, k, v), mask

    def _of_each(self, at: At, t: Any) -> Any:
        """An operand k or v with a head for each of q's; None stays None."""
        return None if t is None else t.index_select(1, self._heads(at, t))

    def _heads(self, at: At, like: Any) -> Any:
        """The number of the head of k and v that each head of q reads."""
        return numbers(at.blocks["H"], like) // (self.heads // self.heads_k) - at.inside[1][1][0]

    def has_vjp(self, way: int, at: At, *operands: Any) -> bool:
        """Whether `kept` and `vjp` differentiate: on a CPU; a GPU's kernels differ in what they keep."""
        return not operands[0].is_cuda

    def kept(self, way: int, at: At, wanted: Sequence[bool], *operands: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The result, and logarithms of sums where ATen's kernel by blocks of keys runs, which has no gradient of a
        mask; else probabilities."""
        given, added = self._read(at, *operands)
        aten, scale = torch.ops.aten, self.scale
        if torch._fused_sdp_choice(*given, added, scale=scale) == 1 and not any(wanted[3:]):
            y, sums = aten._scaled_dot_product_flash_attention_for_cpu(*given, attn_mask=added, scale=scale)
            return (y,), (*operands, y, sums)
        y, shares = aten._scaled_dot_product_attention_math(*given, added, scale=scale)
        of_scores = wanted[0] or wanted[1] or any(wanted[3:])
        read = zip(operands, (wanted[1], wanted[0], of_scores), strict=False)
        return (y,), (*(t if asked else None for t, asked in read), shares)

    def vjp(self, way: int, at: At, wanted: Sequence[bool], kept: Sequence[Any], *dys: Any) -> tuple[Any, ...]:
        (dy,), aten = dys, torch.ops.aten
        if len(kept) == 4:
            found = self._of_products(at, wanted, kept, dy)
        else:
            *operands, y, sums = kept
            given, added = self._read(at, *operands)
            back = aten._scaled_dot_product_flash_attention_for_cpu_backward
            found = [*back(dy, *given, y, sums, 0.0, False, attn_mask=added, scale=self.scale), None]
        if self.heads != self.heads_k:
            heads = self._heads(at, dy)
            for j in (1, 2):
                if wanted[j]:
                    found[j] = aten.index_select_backward(found[j], read_here(at, j), 1, heads)
        return tuple(g if asked else None for g, asked in zip(found, wanted, strict=False))

    def _of_products(self, at: At, wanted: Sequence[bool], kept: Sequence[Any], dy: Any) -> list[Any]:
        """Gradients of q, of k and v for each of q's heads, and of the mask."""
        (q, k, v, shares), scale, found = kept, self.scale or 1 / sqrt(self.width), list[Any]([None] * 4)
        if self.heads != self.heads_k:
            k, v = self._of_each(at, k), self._of_each(at, v)
        if wanted[2]:
            found[2] = shares.mT @ dy
        if not (wanted[0] or wanted[1] or any(wanted[3:])):
            return found
        scores = torch.ops.aten._softmax_backward_data(dy @ v.mT, shares, -1, shares.dtype)
        if wanted[0]:
            found[0] = scores @ k * scale
        if wanted[1]:
            found[1] = scores.mT @ q * scale
        if any(wanted[3:]):
            found[3] = summed_to(scores, read_here(at, 3))
        return found

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
        """The work of two products of the scores' size; a causal mask halves neither."""
        scores = at.extent("N") * at.extent("H") * at.extent("L") * self.keys
        return Work(2 * scores * (self.width + self.width_v), touched(at, self.signatures[way]))
