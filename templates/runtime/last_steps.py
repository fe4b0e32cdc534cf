# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (what torch leaves untyped)
"""Last steps of batch norms that the kernel of the product behind them does: it makes what it reads, and writes it.

    forward_later   a norm's last step: memory of what it makes, without its values, with all that it is made of
    forward_behind  a product: of that what the norm makes, its own result, and moments of this
    vjp_later       the gradients' sums a channel, and the gradient of what is normalised in the same way
    vjp_behind      a product's gradients: of that the gradient that it reads, and its operands'

A product whose kernel can't has the norm's own write it first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from convgen.operations.convolution import PROLOGUES
from convgen.operations.row import Prologue

from .listing import Line
from .local_code import LocalCode

if TYPE_CHECKING:
    from .actions import Actions
    from .taken_steps import Chosen


class Later(NamedTuple):
    """What a norm's step leaves to whoever reads what it makes first.

    Attributes:
        made: memory for it; `read`: what it is made of, element by element, first of all.
        given: what else kernels take, in their order; `eps`: the norm's.
        now: write it.
    """

    of: Prologue
    made: Tensor
    read: Tensor
    given: tuple[Any, ...]
    eps: float
    now: Callable[[], None]

    def done(self) -> Tensor:
        """What is made."""
        self.now()
        return self.made


def with_results_left(wanted: Sequence[Chosen], actions: Actions) -> list[Chosen]:
    """Steps of forward, where norms leave what they make to products that are the first to read it."""
    found, left = [*wanted], dict[str, int]()
    for n, (line, makes, reads) in enumerate(wanted):
        numbers = {slot: left.pop(slot) for slot in dict.fromkeys(line.reads) if slot in left}
        k = numbers.get(line.reads[0], -1) if line.reads and line.reads.count(line.reads[0]) == 1 else -1
        if PROLOGUES and k >= 0 and line.kind == "forward_moments" and not line.again:
            norm, made, slot = found[k], line.reads[0], f"{line.reads[0]}.later"
            makes_later = (slot, *norm.line.makes[1:])
            found[k] = norm._replace(line=norm.line._replace(kind="forward_later", makes=makes_later))
            behind = line._replace(kind="forward_behind", reads=(slot, *line.reads[1:]), makes=(*line.makes, made))
            found[n] = wanted[n]._replace(line=behind, makes=(*makes, norm.makes[0]), reads=reads)
        if line.kind == "forward" and ("forward_later", line.key) in actions.of_norms and not line.again:
            left[line.makes[0]] = n
    return found


def with_gradients_left(wanted: Sequence[Chosen], actions: Actions, stays: Collection[str]) -> list[Chosen]:
    """Steps of backward, where norms leave the gradient of what they normalise to the products that made it."""
    if not PROLOGUES:
        return [*wanted]
    found, makers = [*wanted], dict[str, int]()
    readers = Counter(slot for one in wanted for slot in one.line.reads)
    for n, (line, _, reads) in enumerate(wanted):
        if _is_product(line, actions) and all(reads):
            k = makers.get(line.reads[1], -1)
            slots = [line.reads[1]]
            while k >= 0 and wanted[k].line.kind == "add":
                slots.append(_addend_of(wanted[k].line, wanted, makers, actions))
                k = makers.get(slots[-1], -1)
            later = wanted[k].line.kind + "_later" if k >= 0 else ""
            alone = all(readers[slot] == 1 and slot not in stays for slot in slots)
            if alone and k >= 0 and (later, wanted[k].line.key) in actions.of_norms and not wanted[k].line.again:
                found[k] = wanted[k]._replace(line=wanted[k].line._replace(kind=later))
                found[n] = wanted[n]._replace(line=line._replace(kind=f"{line.kind}_behind"))
        makers |= dict.fromkeys(line.makes, n)
    return found


def _is_product(line: Line, actions: Actions) -> bool:
    if line.kind not in ("vjp", "vjp_sum") or line.again or (line.kind, line.key) in actions.of_norms:
        return False
    return line.key in actions.stands and actions.stands[line.key].operation.may_have_moments


def _addend_of(add: Line, wanted: Sequence[Chosen], makers: dict[str, int], actions: Actions) -> str:
    """Of a sum of which a norm makes one addend, and nothing of the other, the slot of the first; else its own."""
    empty = [
        k
        for k, slot in enumerate(add.reads)
        if slot in makers and wanted[makers[slot]].line.key in actions.without_gradient
    ]
    return add.reads[1 - empty[0]] if len(empty) == 1 else ""


def forward_behind(code: LocalCode, plain: Callable[..., tuple[Any, ...]], later: Any, *others: Tensor) -> Any:
    """A product's result, what it keeps where it keeps something, moments, and what it has read.

    Args:
        plain: makes these, but the last, of what is there.
    """
    if not isinstance(later, Later):
        return *plain(later, *others), later
    stand, kernel, operands = code.stand, None, (later.made, *others)
    types = tuple([t.dtype for t in operands])
    if _fits(code, later) and len(others) == 1:
        operands = tuple(stand.taken(operands)) if stand.autocast else operands
        kernel = stand.operation.behind_norm(stand.row.way, code.at, later.of, *operands)
    if kernel is not None and code.keeps and code.says is None:
        code.says = not code.between and stand.operation.has_vjp(stand.row.way, code.at, *operands)
    if kernel is None or (code.keeps and not code.says):
        return *plain(later.done(), *others), later.made
    made, moments = kernel.with_moments(later, *operands[1:])
    if not code.keeps:
        return made, moments, later.made
    kept = stand.operation.kept_of(kernel, made, operands)
    return made, (kept, types, (made.dtype,)) if stand.mixes else kept, moments, later.made


def _fits(code: LocalCode, later: Later) -> bool:
    """Whether what a norm has left is what local code takes: all of it, in the type in which it is."""
    kind = later.made.dtype
    as_taken = kind == later.read.dtype and (not code.stand.autocast or kind == code.stand.low)
    return as_taken and code.is_whole and not code.is_nothing


def vjp_behind(
    code: LocalCode, needed: Sequence[bool], plain: Callable[..., Any], kept: Any, later: Any, *before: Tensor
) -> Any:
    """Gradients of a product's operands.

    Args:
        plain: makes these of what is there; before: another gradient of the first operand, to which its own is added.
    """
    if not isinstance(later, Later):
        return plain(kept, later, *before)
    stand, kernel, own, given = code.stand, None, kept, None
    if stand.mixes and code.says:
        own, given, _ = kept
    if _fits(code, later) and code.says and needed[0] and len(own) == len(needed) == 2:
        first = later.made.dtype if given is None else given[0]  # the type of the gradient to which another is added
        if not before or first == later.made.dtype:
            kernel = stand.operation.behind_norm(stand.row.way, code.at, later.of, later.made, own[1], *before)
    if kernel is None:
        return plain(kept, later.done(), *before)
    dx = kernel.back(later, own[1], *before)
    dw = stand.operation.vjp(stand.row.way, code.at, (False, needed[1]), own, later.made)[1]
    found = (dx, dw)
    return found if given is None else tuple([g if g is None else g.to(k) for g, k in zip(found, given, strict=True)])
