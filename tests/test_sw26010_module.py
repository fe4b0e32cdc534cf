"""Modules for target sw26010: right on virtual ranks, and what they report is what the closed forms say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from modules import assert_counted, assert_true, draw, on_mesh, run

from convgen.compiler import Compiled, compile_layer
from convgen.schedule.nodes import PHASES
from convgen.schedule.verify import verify
from convgen.spec.build import layer_from_dict
from convgen.verify.program import forget_module, global_tensors, load_module, reference
from convgen.verify.virtual import VirtualTransport, World

LAYER: dict[str, Any] = {
    "name": "small", "layer": "conv2d", "input": [5, 6, 7, 6], "out_channels": 4, "kernel_size": 3, "padding": 1,
    "bias": True, "dtype": "float64", "grid": {"H": 2}, "algorithm": "spatial", "target": "sw26010",
}  # fmt: skip


def compiled(**changes: Any) -> Compiled:
    return compile_layer(layer_from_dict({**LAYER, **changes}))


def reports(one: Compiled, folder: Path, calls: int = 1, level: str = "fast") -> tuple[list[Any], dict[str, Any]]:
    """Each rank's report after every call, and the first rank's blocks of results."""
    path = folder / f"{one.layer.name}.py"
    path.write_text(one.module(), encoding="utf-8")
    layer = load_module(path)
    layer.LEVEL = level
    given = global_tensors(one.layer)

    def program(end: VirtualTransport) -> tuple[list[Any], dict[str, Any]]:
        mesh = layer.init_mesh("cpu", transport=end)
        local = {name: layer.scatter(name, value, mesh) for name, value in given.items()}
        seen: list[Any] = [layer.report(mesh)]
        y = torch.empty(0)
        for _ in range(calls):
            x, w = (local[name].clone().requires_grad_() for name in ("x", "w"))
            y = layer.conv(x, w, local.get("bias"), mesh=mesh)
            y.backward(local["dy"])
            seen.append(layer.report(mesh))
        whole = {"y": layer.gather("y", y, mesh), "dx": layer.gather("dx", x.grad, mesh)}
        return seen, whole | {"dw": layer.gather("dw", w.grad, mesh)}

    try:
        ran = World(one.layer.grid.ranks).run(program)
        return [seen for seen, _ in ran], {**ran[0][1], "PLANS": layer.PLANS}
    finally:
        forget_module(layer)


@pytest.mark.parametrize("part", range(2))
def test_random_layers(part: int) -> None:
    """Any algorithm or roles, groups, strides, dilation, uneven padding, ranks with nothing to do."""
    cases = [case for seed in range(60) if len((case := draw(seed, most=4)).layer.conv.spatial) < 3]
    for seed, case in list(enumerate(cases))[part::2]:
        options = replace(case.layer.options, core_groups=1 + seed % 4)
        case = on_mesh(case, options)
        verify(case.schedule, case.space)
        given = global_tensors(case.layer)
        ran = run(case, given)
        assert_true(case, ran, reference(case.layer.conv, given))
        assert_counted(case, ran)


def test_reports_equal_the_closed_forms(tmp_path: Path) -> None:
    for changes in ({}, {"dtype": "float32", "grid": {"C": 2}, "algorithm": "stationary-x", "groups": 2}):
        one = compiled(**changes, options={"core_groups": 3})
        seen, results = reports(one, tmp_path)
        for rank, (before, after) in enumerate(seen):
            assert before == {} and set(after) == set(PHASES)
            for phase in PHASES:
                (plan,) = [p for p in results["PLANS"][phase] if rank in p["ranks"]]
                done = after[phase]
                assert done["call"] == 1 and done["chosen"] == ["the only one"] * 3
                assert {**done, "ranks": plan["ranks"]} == plan | {k: done[k] for k in ("call", "chosen", "level")}
