# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (what torch leaves untyped)
"""Last steps of batch norms that the kernel of the product behind them does: it makes the operand that it reads, and
writes it.

    forward_later   a norm's last step leaves memory for its result, and everything that the result is made of
    forward_behind  the product that reads it first writes it, and makes its own result with moments
    vjp_later       a norm's backward makes its sums a channel, and leaves the gradient of what it normalises
    vjp_behind      the product that made what was normalised writes that, and makes its operands' gradients

Where a product has no such kernel the norm's own writes what was left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from convgen.operations.convolution import PROLOGUES
from convgen.operations.row import Prologue

from .listing import Line

if TYPE_CHECKING:
    from .actions import Actions
    from .local_code import LocalCode
    from .taken_steps import Chosen


class Later(NamedTuple):
    """What a norm's step leaves to the product that is the first to read its result.

    Attributes:
        of: the last step, which the product does.
        made: memory for the result; `read`: the tensor whose elements it is made of.
        given: the kernel's other arguments, in its order; `eps`: the norm's.
        now: writes the result by the norm's own kernel.
    """

    of: Prologue
    made: Tensor
    read: Tensor
    given: tuple[Any, ...]
    eps: float
    now: Callable[[], None]

    def done(self) -> Tensor:
        """The result, written by the norm's own kernel."""
        self.now()
        return self.made


def with_results_left(wanted: Sequence[Chosen], actions: Actions) -> list[Chosen]:
    """Forward's steps, where norms leave their results to products that are the first to read them."""
    found, left = [*wanted], dict[str, int]()
    for n, (line, makes, reads) in enumerate(wanted):
        if line.kind == "update":  # an updated buffer may be an addend behind a norm
            left.clear()
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
    """Backward's steps, where norms leave the gradient of what they normalise to the products that made it."""
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
    """The slot of a sum's one addend, if the other is None because a norm makes both in one; else ""."""
    empty = [
        k
        for k, slot in enumerate(add.reads)
        if slot in makers and wanted[makers[slot]].line.key in actions.without_gradient
    ]
    return add.reads[1 - empty[0]] if len(empty) == 1 else ""


def vjp_behind(
    code: LocalCode, needed: Sequence[bool], plain: Callable[..., Any], kept: Any, later: Any, *before: Tensor | None
) -> Any:
    """Gradients of a product's operands, where a norm may have left the result's gradient to the product.

    Args:
        plain: makes them of a gradient that is there; before: another gradient of the first operand, which is added to
            its own.
    """
    if not isinstance(later, Later):
        return plain(kept, later, *before)
    stand, kernel, own, given = code.stand, None, kept, None
    if stand.mixes and code.says:
        own, given, _ = kept
    others = [t for t in before if t is not None]
    if code.takes(later) and code.says and needed[0] and len(own) == len(needed) == 2:
        first = later.made.dtype if given is None else given[0]  # the type of the first operand's gradient
        if not others or first == later.made.dtype:
            kernel = stand.operation.behind_norm(stand.row.way, code.at, later.of, later.made, own[1], *others)
    if kernel is None:
        return plain(kept, later.done(), *before)
    dx = kernel.back(later, own[1], *others)
    dw = stand.operation.vjp(stand.row.way, code.at, (False, needed[1]), own, later.made)[1]
    found = (dx, dw)
    return found if given is None else tuple([g if g is None else g.to(k) for g, k in zip(found, given, strict=True)])
