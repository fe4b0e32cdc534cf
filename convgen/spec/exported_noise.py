"""Operators that draw random numbers, written with `rand` and `randn`: of the same distributions.

normal, normal_, Normal.rsample     mean + std * randn
uniform_                            low + (high - low) * rand
exponential_ (Gumbel's noise)       max(-log(1 - rand), eps / 2) / rate
bernoulli of tensors                rand < p
randint                             low + floor((high - low) * rand)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from convgen.spec.exported_nodes import call_beside, replace_by

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def write_noise(program: ExportedProgram) -> None:
    """Rewrite the program in place; other operators that draw stay, and are refused later."""
    import torch

    graph: Any = program.graph_module.graph
    changed = False
    for node in list(graph.nodes):
        target = str(node.target)
        written = WRITTEN.get(target.removeprefix("aten.")) if node.op == "call_function" else None
        if written is None:
            continue
        schema = node.target._schema.arguments
        given = {a.name: a.default_value for a in schema}
        given |= {a.name: x for a, x in zip(schema, node.args, strict=False)} | node.kwargs
        with graph.inserting_before(node):
            by = written(_Beside(graph, node), given)
        if by is not None and by.meta["val"].dtype == node.meta["val"].dtype:
            replace_by(program, node, by)
            graph.erase_node(node)
            changed = True
    if changed:
        graph.eliminate_dead_code()
        torch.fx.GraphModule.recompile(program.graph_module)


class _Beside:
    """Adds operators in place of a node."""

    def __init__(self, graph: Any, node: Any) -> None:
        self.graph, self.node = graph, node

    def __call__(self, name: str, *args: Any, **kwargs: Any) -> Any:
        import torch

        packet, _, overload = name.partition(".")
        target = getattr(getattr(torch.ops.aten, packet), overload or "default")
        return call_beside(self.graph, self.node, target, *args, **kwargs)

    def noise(self, name: str, like: Any) -> Any:
        """Noise of a tensor's shape."""
        return self(f"{name}_like", like)

    def sized(self, name: str, given: dict[str, Any], dtype: Any) -> Any:
        return self(name, given["size"], dtype=dtype, device=given.get("device"))


def _normal(at: _Beside, given: dict[str, Any]) -> Any:
    """Normal noise with a mean and a deviation, tensors or numbers; no gradient reaches either."""
    import torch

    mean, std, made = given["mean"], given["std"], at.node.meta["val"]
    if "size" in given:
        z = at.sized("randn", given, made.dtype)
    else:
        like = next(x for x in (given.get("self"), mean, std) if isinstance(x, torch.fx.Node))
        if like.meta["val"].shape != made.shape:
            return None
        z = at.noise("randn", like)
    for x, how in ((std, "mul"), (mean, "add")):
        if isinstance(x, torch.fx.Node):
            z = at(f"{how}.Tensor", z, at("detach", x))
        elif x != (1 if how == "mul" else 0):
            z = at(f"{how}.Tensor", z, x)
    return z


def _uniform(at: _Beside, given: dict[str, Any]) -> Any:
    low, high = given["from"], given["to"]
    u = at.noise("rand", given["self"])
    return u if (low, high) == (0, 1) else at("add.Tensor", at("mul.Tensor", u, high - low), low)


def _exponential(at: _Beside, given: dict[str, Any]) -> Any:
    import torch

    least = torch.finfo(at.node.meta["val"].dtype).eps / 2  # torch's own bound, so that none is 0
    u = at.noise("rand", given["self"])
    e = at("clamp_min", at("neg", at("log", at("rsub.Scalar", u, 1))), least)
    return e if given["lambd"] == 1 else at("div.Tensor", e, given["lambd"])


def _bernoulli(at: _Beside, given: dict[str, Any]) -> Any:
    p = given.get("p", given["self"])
    if p.meta["val"].shape != at.node.meta["val"].shape:
        return None
    drawn = at("lt.Tensor", at.noise("rand", p), at("detach", p))
    return at("_to_copy", drawn, dtype=at.node.meta["val"].dtype)


def _integers(at: _Beside, given: dict[str, Any]) -> Any:
    import torch

    low, high = given.get("low", 0), given["high"]
    if not isinstance(low, int) or not isinstance(high, int):
        return None
    u = at.sized("rand", given, torch.float64)
    drawn = at("floor", at("mul.Tensor", u, high - low))
    return at("add.Tensor", at("_to_copy", drawn, dtype=at.node.meta["val"].dtype), low)


WRITTEN = {
    "normal_functional.default": _normal,
    "normal.float_float": _normal,
    "normal.Tensor_float": _normal,
    "normal.float_Tensor": _normal,
    "normal.Tensor_Tensor": _normal,
    "uniform.default": _uniform,
    "exponential.default": _exponential,
    "bernoulli.default": _bernoulli,
    "bernoulli.Tensor": _bernoulli,
    "randint.default": _integers,
    "randint.low": _integers,
}
