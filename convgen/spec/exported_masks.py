"""Elements that a mask picks, `y[m]`, whose number depends on data: here all elements are computed instead.

    x[m] = 4 * y[m] + 1          index, mul, add, index_put         where(m, 4 * y' + 1, x)
    (y[m] ** 2).mean()           index, pow, mean                   where(m, y' ** 2, 0).sum() / m.sum()

y' = where(m, y, 1): the source computes nothing from elements that the mask doesn't pick; here they are 1, and what is
computed from them, even NaN, reaches neither a result nor a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from operator import ge, getitem, le
from typing import TYPE_CHECKING, Any

from convgen.spec.aten.elementwise import BY_ELEMENT
from convgen.spec.exported_nodes import call_beside, mapped, replace_by

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def compute_masked(program: ExportedProgram) -> None:
    """Rewrite the program in place where elements that a mask picks are computed element by element, put back by the
    same mask, summed or averaged. Other uses of masks stay, and are refused later for their size."""
    nodes: Any = program.graph_module.graph.nodes
    if any(n.op == "call_function" and _mask_of(n) is not None for n in nodes):
        _Masks(program).run()
        program.graph_module.recompile()


def _mask_of(node: Any) -> Any:
    """The single mask by which a node picks or puts elements, if it covers x's first dimensions; else None."""
    import torch

    aten: Any = torch.ops.aten
    if node.target is aten.masked_select.default:
        x, places = node.args[0], node.args[1:]
        if x.meta["val"].dim() != places[0].meta["val"].dim():
            return None
    elif node.target in (aten.index.Tensor, aten.index_put.default):
        x, places = node.args[:2]
    else:
        return None
    if len(places) != 1 or not isinstance(places[0], torch.fx.Node):
        return None
    m, value = places[0].meta["val"], x.meta["val"]
    return places[0] if m.dtype == torch.bool and m.shape == value.shape[: m.dim()] else None


class _Masks:
    """One graph. `full`: by node with picked elements, the node with all elements, and its mask."""

    def __init__(self, program: ExportedProgram) -> None:
        self.program = program
        self.graph: Any = program.graph_module.graph
        self.full: dict[Any, tuple[Any, Any]] = {}
        self.several: dict[Any, Any] = {}  # by node that hands on what masks pick, what it is given
        self.keys: dict[Any, int] = {}
        self.known: dict[Any, int] = {}

    def run(self) -> None:
        import torch

        aten: Any = torch.ops.aten
        casts = (aten.to.dtype, aten._to_copy.default)
        for node in list(self.graph.nodes):
            if node.op != "call_function":
                continue
            if node.target is getitem:
                source, place = node.args
                if source in self.several:
                    self.full[node] = self.full[self.several[source][place]]
                continue
            picked = [x for x in node.all_input_nodes if x in self.full]
            with self.graph.inserting_before(node):
                if node.target in (aten.index.Tensor, aten.masked_select.default):
                    if not picked and (m := _mask_of(node)) is not None:
                        self.full[node] = self.pick(node, node.args[0], m), m
                elif not picked:
                    continue
                elif node.target is aten.index_put.default:
                    self.put(node)
                elif node.target in (aten.sum.default, aten.mean.default) and not node.kwargs:
                    self.summed(node, *self.full[node.args[0]], mean=node.target is aten.mean.default)
                elif node.target._schema.name.removeprefix("aten::") in BY_ELEMENT and self.of_one_mask(node, picked):
                    self.loss(node, picked)
                elif node.target is aten.broadcast_tensors.default:
                    shapes = [self.full[x][0].meta["val"].shape for x in picked]
                    if all(shape == shapes[0] for shape in shapes) and self.of_one_mask(node, picked):
                        self.several[node] = node.args[0]
                elif (torch.Tag.pointwise in node.target.tags or node.target in casts) and self.of_one_mask(
                    node, picked
                ):
                    self.full[node] = self.of_all(node, node.args, node.kwargs), self.full[picked[0]][1]
        self.clean()

    def of_all(self, node: Any, args: Any, kwargs: Any) -> Any:
        """Apply the node's operator to all elements."""
        args, kwargs = mapped((args, kwargs), lambda x: self.full[x][0])
        return self.call(node, node.target, *args, **kwargs)

    def call(self, like: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        return call_beside(self.graph, like, target, *args, **kwargs)

    def wide(self, like: Any, m: Any, x: Any) -> Any:
        """A mask of x's first dimensions, with dimensions of 1 for the others."""
        import torch

        for _ in range(x.meta["val"].dim() - m.meta["val"].dim()):
            m = self.call(like, torch.ops.aten.unsqueeze.default, m, -1)
        return m

    def chosen(self, like: Any, m: Any, x: Any, other: Any) -> Any:
        """x where m is true; elsewhere a number, or the elements of another tensor."""
        import torch

        aten: Any = torch.ops.aten
        if not isinstance(other, torch.fx.Node):
            other = self.call(like, aten.full_like.default, x, other)
        return self.call(like, aten.where.self, self.wide(like, m, x), x, other)

    def pick(self, node: Any, x: Any, m: Any) -> Any:
        return self.chosen(node, m, x, 1)

    def of_one_mask(self, node: Any, picked: Sequence[Any]) -> bool:
        """Whether a node reads only numbers and elements that one mask picks."""
        if any(x not in picked for x in node.all_input_nodes):
            return False
        masks, dims = {self.key(self.full[x][1]) for x in picked}, {x.meta["val"].dim() for x in picked}
        return len(masks) == len(dims) == 1

    def put(self, node: Any) -> None:
        x, _, value, *accumulate = node.args
        m = _mask_of(node)
        if any(accumulate) or m is None or value not in self.full or x in self.full:
            return
        full, by = self.full[value]
        same = full.meta["val"].shape == x.meta["val"].shape and full.meta["val"].dtype == x.meta["val"].dtype
        if same and self.key(by) == self.key(m):
            replace_by(self.program, node, self.chosen(node, m, full, x))

    def loss(self, node: Any, picked: Sequence[Any]) -> None:
        """Rewrite a loss of picked elements: each, their mean or their sum."""
        op = node.target._schema
        place = BY_ELEMENT[op.name.removeprefix("aten::")]
        args = [*node.args, *(node.kwargs.get(a.name, a.default_value) for a in op.arguments[len(node.args) :])]
        reduction, args[place] = args[place], 0
        full, m = self.of_all(node, tuple(args), {}), self.full[picked[0]][1]
        if reduction:
            self.summed(node, full, m, mean=reduction == 1)
        else:
            self.full[node] = full, m

    def summed(self, node: Any, full: Any, m: Any, *, mean: bool) -> None:
        import torch

        aten: Any = torch.ops.aten
        total = self.call(node, aten.sum.default, self.chosen(node, m, full, 0))
        if mean:
            rest = full.meta["val"].shape[m.meta["val"].dim() :]
            count = self.call(node, aten.mul.Tensor, self.call(node, aten.sum.default, m), prod(rest))
            total = self.call(node, aten.div.Tensor, total, count)
        if total.meta["val"].dtype == node.meta["val"].dtype:
            replace_by(self.program, node, total)

    def key(self, node: Any) -> int:
        """A number that is equal for nodes that compute the same from the same."""
        import torch

        if node not in self.keys:
            tags = getattr(node.target, "tags", ())
            if node.op != "call_function" or torch.Tag.nondeterministic_seeded in tags:
                said: Any = node
            else:
                of = mapped((node.args, node.kwargs), lambda n: ("node", self.key(n)))
                said = node.target, repr(of)
            self.keys[node] = self.known.setdefault(said, len(self.known))
        return self.keys[node]

    def clean(self) -> None:
        """Drop nodes that nobody reads now: sizes that depend on data, and checks of their bounds."""
        import torch

        sizes: dict[Any, Any] = {}  # by node of a size, the mask
        for node in list(self.graph.nodes):
            if node.target is torch.ops.aten.sym_size.int and node.args[0] in self.full:
                sizes[node] = self.full[node.args[0]][1]
            elif node.target is torch.ops.aten._assert_tensor_metadata.default and node.args[0] in self.full:
                self.graph.erase_node(node)
            elif node.target is torch.ops.aten._assert_scalar.default:
                said = node.args[0]
                if getattr(said, "target", None) not in (ge, le) or said.args[0] not in sizes:
                    continue
                size, bound = said.args
                most = sizes[size].meta["val"].numel()
                if bound == 0 if said.target is ge else isinstance(most, int) and bound >= most:
                    self.graph.erase_node(node)
        self.graph.eliminate_dead_code()
