"""Transposed convolution as a layer: the sum of a convolution, read from the other side, shown as convolutions are.

Random layers of one to three dimensions with stride, output padding, groups, dilation, crops that differ and ragged or
empty blocks, under named algorithms and any roles, against torch's own in float64; and what is refused.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from generate import algorithm_problem, random_conv, random_transposed_spatial
from modules import Case, assert_adjoint, assert_counted, assert_true, draw, make, on_gpu, run
from sampling import draws
from test_kernels_module import fused
from test_module_contract import assert_opchecks
from torch import Tensor

from convgen.algebra.algorithms import ALGORITHMS
from convgen.algebra.conv import PHASES, Conv, Spatial
from convgen.algebra.grid import Grid
from convgen.algebra.layout import Window
from convgen.algebra.space import Space
from convgen.compiler import compile_layer
from convgen.cost.machines import load_machine
from convgen.errors import InputError, InternalError
from convgen.kernels.choose import local_problems
from convgen.kernels.partition import SPLITS, local_problem
from convgen.network_compiler import plan_graph
from convgen.operations.layer import wanted
from convgen.plan.program.layer_files import plan_text
from convgen.plan.setting import Setting
from convgen.program.nodes import Schedule, is_convolution
from convgen.program.text import parse, show
from convgen.program.verify import verify
from convgen.spec.network_graph import network_graph
from convgen.spec.network_reader import network_from_dict
from convgen.spec.reader import layer_from_dict, layer_to_dict, read_csv, read_layer, read_layers
from convgen.spec.target import CPU
from convgen.tune.wanted import of_layers
from convgen.verify.check import check
from convgen.verify.program import global_tensors, reference
from convgen.verify.virtual import VirtualTransport, World

LAYERS = draws(30)
UP: dict[str, Any] = {
    "name": "up", "layer": "conv_transpose2d", "input": [4, 6, 7, 5], "out_channels": 8, "kernel_size": 3, "stride": 2,
    "padding": 1, "output_padding": 1, "bias": True, "dtype": "float64", "grid": {"N": 2, "H": 2},
    "algorithm": "spatial",
}  # fmt: skip


def up(**changes: Any) -> Any:
    return layer_from_dict({key: v for key, v in (UP | changes).items() if v is not None})


def assert_right(case: Case) -> None:
    verify(case.schedule, case.space)
    assert parse(show(case.schedule)) == case.schedule
    given = global_tensors(case.layer)
    ran = run(case, given)
    assert_true(case, ran, reference(case.layer.conv, given))
    assert_counted(case, ran)
    assert_adjoint(case, given, ran)


# ---- Right ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", range(6))
def test_any_layer(part: int) -> None:
    for seed in range(part, LAYERS, 6):
        assert_right(draw(seed, transposed=True))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_named_algorithms(algorithm: str) -> None:
    for seed in range(draws(2)):
        assert_right(draw(seed, algorithm=algorithm, least=2, most=12, transposed=True))


@pytest.mark.parametrize("part", range(4))
def test_kernels_of_a_gpu(part: int) -> None:
    """In Triton's interpreter, every other one with parts and rims read where they lie."""
    for seed in range(part, draws(12), 4):
        case = draw(seed, least=2, most=6, transposed=True)
        case = on_gpu(case) if seed % 2 else fused(case)
        verify(case.schedule, case.space)
        given = global_tensors(case.layer)
        ran = run(case, given)
        assert_true(case, ran, reference(case.layer.conv, given))
        assert_counted(case, ran)


@pytest.mark.parametrize("algorithm", ["stationary-x", "stationary-y", "stationary-w", "spatial"])
def test_kernels_of_a_gpu_read_parts_and_rims(algorithm: str) -> None:
    grid = {"stationary-x": "NC", "stationary-y": "NF", "stationary-w": "CF", "spatial": "HW"}[algorithm]
    name = f"up_{algorithm}".replace("-", "_")
    layer = up(name=name, grid=dict.fromkeys(grid, 2), algorithm=algorithm, input=[3, 12, 5, 6], target="cuda")
    compiled = compile_layer(layer)
    case = fused(make(algorithm_problem(algorithm, layer.conv, layer.grid), name, random.Random(0)))
    assert ("as=rim" if algorithm == "spatial" else "as=parts") in show(case.schedule)
    given = global_tensors(case.layer)
    assert_true(case, run(case, given), reference(case.layer.conv, given))
    report = check(compiled, interpret=True)
    assert report.ok, report


def test_on_processes() -> None:
    for changes in ({}, {"grid": {"C": 2, "F": 2}, "algorithm": "stationary-w", "groups": None}):
        report = check(compile_layer(up(**changes)), transport="processes", timeout_s=240)
        assert report.ok, report
        assert report.counted_equals_volume


def test_reference_is_torchs_layer() -> None:
    """The same extents and values as torch's own padding and output padding give."""
    rng = random.Random(5)
    for _ in range(30):
        dims = rng.choice((1, 2, 3))
        kernel, stride, dilation = ([rng.randint(1, 3) for _ in range(dims)] for _ in range(3))
        more = [rng.randrange(max(s, d)) for s, d in zip(stride, dilation, strict=True)]
        padding = [rng.randint(0, min(d * (k - 1), s)) for k, s, d in zip(kernel, stride, dilation, strict=True)]
        rows = [rng.randint(3, 4) for _ in range(dims)]
        groups, bias = rng.choice((1, 2, 3)), rng.random() < 0.5
        spec = {
            "name": "one", "layer": f"conv_transpose{dims}d", "input": [2, 2 * groups, *rows],
            "out_channels": 3 * groups, "kernel_size": kernel, "stride": stride, "padding": padding,
            "output_padding": more, "dilation": dilation, "groups": groups, "bias": bias, "dtype": "float64",
            "grid": {"N": 1},
        }  # fmt: skip
        layer = layer_from_dict(spec)
        given = global_tensors(layer)
        function = getattr(torch.nn.functional, layer.kind)
        y = function(given["x"], given["w"], given.get("bias"), stride, padding, more, groups, dilation)
        assert tuple(y.shape) == layer.conv.shape("y")
        torch.testing.assert_close(reference(layer.conv, given)["y"], y, rtol=1e-12, atol=1e-12)
        assert [s.out for s in layer.conv.spatial] == rows


# ---- The same sum --------------------------------------------------------------------------------------------------


def test_layouts_are_those_of_the_convolution_of_the_same_sum() -> None:
    """x and y, C and F change their names; what a rank holds, wants and convolves does not."""
    rng = random.Random(3)
    for seed in range(20):
        case = draw(seed, transposed=True)
        conv, roles = case.layer.conv, dict(case.schedule.roles)
        other = Space(conv.direct, case.layer.grid, virtual_padding=rng.random() < 0.5)
        space = Space(conv, case.layer.grid, virtual_padding=other.virtual_padding)
        for phase in PHASES:
            swapped = {"C": "F", "F": "C"}
            nests = tuple((swapped.get(r, r), axes) for r, axes in roles[phase].nests)
            rows = roles[phase].rows if phase != "backward_filter" else _other_rows(roles[phase].rows)
            ours = {conv.direct_tensor(t.tensor): t for t in wanted(space, phase, roles[phase])}
            theirs = wanted(other, conv.direct_phase(phase), replace(roles[phase], nests=nests, rows=rows))
            for layout in theirs:
                assert replace(ours[layout.tensor], tensor=layout.tensor) == layout
                assert (other.frame(layout) == space.frame(ours[layout.tensor])).all()


def _other_rows(rows: str) -> Any:
    return {"output": "input", "input": "output"}[rows]


def test_local_problems_are_those_of_the_convolution_of_the_same_sum() -> None:
    compiled = compile_layer(up(target="cuda"))
    found = {use.phase: w.problem for w in of_layers([compiled]) for use in w.uses}
    assert {p: q.phase for p, q in found.items()} == {p: compiled.layer.conv.direct_phase(p) for p in PHASES}
    assert (found["forward"].channels, found["forward"].filters) == (8, 6)
    assert [(d.x, d.y) for d in found["forward"].dims] == [(7, 4), (10, 5)]
    for _, step in compiled.schedule.steps():
        if is_convolution(step):
            problems = local_problems(compiled.layer, compiled.schedule, compiled.space, step)
            assert sum(p.flops for p in problems) >= 2 * compiled.layer.conv.elements("x") * 8 * 9
    rng = random.Random(2)
    for _ in range(10):
        conv = random_conv(rng, transposed=True)
        for split in SPLITS:
            other: Any = {"channel": "filter", "filter": "channel"}.get(split, split)
            ours = local_problem(conv, split, 2, "forward", "float32")
            assert ours == local_problem(conv.direct, other, 2, "backward_data", "float32")


def test_rows_of_x_are_exact_whatever_the_output_padding() -> None:
    rng = random.Random(0)
    for _ in range(200):
        s = random_transposed_spatial(rng, "W", 6)
        rows = (s.extent + s.pad_lo + s.pad_hi - s.reach - 1 - s.output_padding) / s.stride + 1
        assert s.out == rows


# ---- The schedule --------------------------------------------------------------------------------------------------


def halo() -> tuple[Schedule, Space]:
    compiled = compile_layer(up(bias=False))
    return compiled.schedule, compiled.space


def test_text_names_what_it_is() -> None:
    schedule, _ = halo()
    text = show(schedule)
    assert "%y = conv_transpose_forward %x_halo, %w" in text
    assert "%dx = conv_transpose_backward_data %dy_halo, %w" in text
    assert "conv_transpose_backward_filter %dy, %x_halo" in text
    assert parse(text) == schedule
    w = compile_layer(up(grid={"C": 2, "F": 2}, distribution={"x": ["C", "*", "*", "*"], "w": ["*", "F"],
        "y": ["C", "*", "*", "*"]}, algorithm=None, roles={"forward": {"C": "N"}}))  # fmt: skip
    assert [str(t) for _, t in w.schedule.stored[1:2]] == ["w[*, F]"]
    assert "all_gather %w dim=F over=F" in show(w.schedule)


@pytest.mark.parametrize(
    ("before", "after", "rule"),
    [
        ("conv_transpose_forward", "conv_forward", "check_steps_take_their_operands"),
        ("x[N, *, H+(1,1), *]", "x[N, *, H+(0,1), *]", "check_windows_are_needed"),
        ("%dx = conv_transpose_backward_data %dy_halo", "%dx = conv_transpose_backward_data %dy", "check_every_value"),
        ("conv_transpose_forward %x_halo", "conv_transpose_forward %x", "check_rows_are_at_hand"),
        ("over=N,H", "over=N", "check_"),
    ],
)
def test_verify_refuses_the_neighbour(before: str, after: str, rule: str) -> None:
    schedule, space = halo()
    verify(schedule, space)
    assert before in show(schedule)
    with pytest.raises(InternalError, match=rule):
        verify(parse(show(schedule).replace(before, after)), space)


def test_verify_knows_whose_channels_come_first() -> None:
    """w split on C is right for x split on C; on its second dimension it is not."""
    compiled = compile_layer(up(grid={"C": 2}, algorithm="stationary-x", bias=False, input=[4, 8, 7, 5]))
    verify(compiled.schedule, compiled.space)
    assert "w[C, *]" in show(compiled.schedule)
    with pytest.raises(InternalError, match="check_operands_match"):
        verify(parse(show(compiled.schedule).replace("w[C, *]", "w[*, C]")), compiled.space)


def test_verify_counts_rows() -> None:
    """A window wider by a row than is needed, or narrower, is no right one."""
    schedule, space = halo()
    halos = [s for _, s in schedule.steps() if s.type.has_window]
    assert {s.type.windows[2] for s in halos} == {Window(1, 1)}
    assert space.conv.rows["x", 2].index.extent == 14


# ---- The module ----------------------------------------------------------------------------------------------------


def stationary_w(name: str, **changes: Any) -> Case:
    rows = tuple(Spatial(n, 9, 3, 2, 1, 1) for n in "HW")
    conv = Conv(4, 6, 9, rows, groups=3, bias=True, transposed=True)
    grid = Grid((("F", 2), ("G", 2), ("C", 2)))
    return make(algorithm_problem("stationary-w", conv, grid), name, random.Random(name), **changes)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_module_is_torchs_layer_cut_into_blocks(dtype: str) -> None:
    case = stationary_w(f"transposed_initial_{dtype}", dtype=dtype)
    layer = case.module
    torch.manual_seed(7)
    whole = torch.nn.ConvTranspose2d(6, 9, 3, stride=2, padding=1, groups=3, dtype=case.dtype)

    def program(end: VirtualTransport) -> tuple[Tensor, Tensor, dict[str, torch.Size]]:
        mesh = layer.init_mesh(transport=end)
        module = layer.Conv(mesh, seed=7)
        shapes = {k: layer.gather({"weight": "w"}.get(k, k), v, mesh).shape for k, v in module.state_dict().items()}
        return layer.gather("w", module.weight, mesh), layer.gather("bias", module.bias, mesh), shapes

    for weight, bias, shapes in World(8).run(program):
        assert torch.equal(weight, whole.weight)
        assert torch.equal(bias, whole.bias)
        assert shapes == {k: v.shape for k, v in whole.state_dict().items()}


def test_gradcheck_of_second_order() -> None:
    conv = Conv(1, 2, 2, (Spatial("W", 6, 2, 2, 1, 0, 2, 1),), bias=True, transposed=True)
    case = make(
        algorithm_problem("sample", conv, Grid((("N", 1),))), "transposed_twice", random.Random(0),
        memory_format="contiguous",
    )  # fmt: skip

    def program(end: VirtualTransport) -> bool:
        mesh = case.module.init_mesh(transport=end)
        given = global_tensors(case.layer)
        leaves = [case.module.scatter(n, given[n], mesh).requires_grad_() for n in ("x", "w", "bias")]

        def first(*leaves: Tensor) -> tuple[Tensor, ...]:
            y = case.module.conv(*leaves, mesh=mesh)
            return torch.autograd.grad(y.pow(3).sum(), leaves, create_graph=True)

        return torch.autograd.gradcheck(first, leaves)

    assert World(1).run(program) == [True]


def test_opcheck_and_vmap() -> None:
    case = stationary_w("transposed_checked", memory_format="contiguous")
    assert_opchecks(case)
    layer, given = case.module, global_tensors(case.layer)
    many = torch.stack([given["x"], 2 * given["x"]])

    def program(end: VirtualTransport) -> bool:
        mesh = layer.init_mesh(transport=end)
        w, bias = (layer.scatter(n, given[n], mesh) for n in ("w", "bias"))
        xs = torch.stack([layer.scatter("x", x, mesh) for x in many])
        ys = torch.vmap(lambda x: layer.conv(x, w, bias, mesh=mesh))(xs)
        return all(torch.equal(y, layer.conv(x, w, bias, mesh=mesh)) for x, y in zip(xs, ys, strict=True))

    assert all(World(8).run(program))


# ---- Layer files ---------------------------------------------------------------------------------------------------


def test_round_trips() -> None:
    for changes in ({}, {"padding": [[0, 2], [1, 3]]}, {"dilation": 3, "output_padding": [0, 2]}):
        layer = up(**changes)
        data = layer_to_dict(layer)
        assert layer_from_dict(data) == layer
        assert (data["layer"], data["input"]) == ("conv_transpose2d", [4, 6, 7, 5])
        assert data["padding"] == changes.get("padding", [[1, 1], [1, 1]])
        assert data["output_padding"] == changes.get("output_padding", [1, 1])
    assert up(padding="valid", output_padding=None).conv.shape("y") == (4, 8, 15, 11)
    assert "output_padding" not in layer_to_dict(up(layer="conv2d", output_padding=None))


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "name,layer,N,C,H,W,F,K,S,P,output_padding\na,conv_transpose2d,4,6,7,5,8,3,2,1,1\nb,,4,6,7,5,8,3,2,1,\n"
    )
    a, b = read_csv(path, grid={"N": 2})
    assert (a.kind, a.conv.shape("y"), b.kind) == ("conv_transpose2d", (4, 8, 14, 10), "conv2d")
    path.write_text("name,layer,N,C,H,W,F,K,S,P\na,conv_transposed2d,4,6,7,5,8,3,2,1\n")
    with pytest.raises(InputError, match="layer is 'conv_transposed2d'"):
        read_csv(path, grid={"N": 2})


@pytest.mark.parametrize(
    ("line", "said", "hint"),
    [
        ("output_padding: 2", "output_padding 2 along H, with stride 2 and dilation 1", "output_padding up to 1"),
        ("output_padding: [1, 1, 1]", "output_padding has length 3, conv_transpose2d has", "a list of 2"),
        ("groups: 4", "groups 4 doesn't divide both C=6 and out_channels=8", "groups: 1 or 2"),
        ("padding: same", "padding same on conv_transpose2d", "padding: [[0, 1], [0, 1]] makes stride times"),
        ("padding: 9", "7 rows with stride 2 and a kernel that spans 3 make 15, padding cuts off 9 + 9", "up to 14"),
        ("layer: conv2d\noutput_padding: 0", "output_padding on conv2d", "layer: conv_transpose2d"),
        (
            "grid: {D: 2}\nalgorithm: spatial",
            "algorithm spatial on conv_transpose2d has no role for an axis",
            "N, H, W",
        ),
    ],
)
def test_refused(tmp_path: Path, line: str, said: str, hint: str) -> None:
    data = {"name": "up", "layer": "conv_transpose2d", "input": [4, 6, 7, 5], "out_channels": 8, "kernel_size": 3,
            "stride": 2, "grid": {"N": 2}}  # fmt: skip
    given = dict(one.split(": ", 1) for one in line.splitlines())
    lines = [f"{k}: {given.pop(k, v)}" for k, v in data.items()] + [f"{k}: {v}" for k, v in given.items()]
    path = tmp_path / "up.yaml"
    path.write_text("\n".join(lines))
    with pytest.raises(InputError) as caught:
        read_layer(path)
    assert said in caught.value.fact
    assert hint in caught.value.hint
    key = line.splitlines()[-1].split(":")[0] if not line.startswith("grid") else "grid"
    assert caught.value.where == f"{path}:{next(i for i, one in enumerate(lines, 1) if one.startswith(key))}"


def test_padding_that_stands_for_same_is_same() -> None:
    for stride, kernel, dilation in ((1, 3, 1), (2, 3, 1), (2, 4, 1), (3, 2, 1), (2, 1, 1), (2, 3, 2)):
        spec = UP | {"stride": stride, "kernel_size": kernel, "dilation": dilation, "output_padding": 0}
        with pytest.raises(InputError) as caught:
            layer_from_dict(spec | {"padding": "same"})
        said = caught.value.hint.split(" makes ")[0].replace("padding: ", '"padding": ').replace("output_", "")
        first, _, second = said.partition(', "padding": ')
        padding, more = eval(first.split(": ")[1]), eval(second or "0")
        made = layer_from_dict(spec | {"padding": padding, "output_padding": more}).conv.shape("y")
        assert made == (4, 8, 7 * stride, 5 * stride), (stride, kernel, dilation)


# Down, up, and what was there before beside it.
DECODER: dict[str, Any] = {
    "name": "decoder",
    "input": [4, 6, 8, 10],
    "nodes": [
        {"name": "down", "kind": "conv", "out_channels": 8, "kernel_size": 3, "stride": 2, "padding": 1},
        {"name": "relu", "kind": "relu"},
        {"name": "up", "kind": "conv_transpose", "out_channels": 6, "kernel_size": 3, "stride": 2, "padding": 1,
         "output_padding": 1},
        {"name": "cat", "kind": "concat", "from": ["input", "up"]},
        {"name": "grouped", "kind": "conv_transpose", "out_channels": 8, "kernel_size": 2, "stride": 2, "groups": 2,
         "dilation": 3, "bias": False},
    ],
}  # fmt: skip


def test_networks(tmp_path: Path) -> None:
    """From a file into a plan, whose layers are right."""
    network = network_from_dict(DECODER)
    grouped = torch.nn.ConvTranspose2d(12, 8, 2, stride=2, groups=2, dilation=3, bias=False)
    assert network.node["grouped"].shape == tuple(grouped(torch.zeros(4, 12, 8, 10)).shape)
    assert network.node["grouped"].weights == grouped.weight.numel()
    assert network.node["up"].flops == 2 * 4 * 8 * 4 * 5 * 6 * 9
    setting = Setting(machine=load_machine("cpu"))
    for grid in (Grid((("a", 2), ("b", 2))), Grid((("a", 3),))):
        _, plan = plan_graph(network_graph(network), grid.ranks, setting, grid)
        (tmp_path / "plan.yaml").write_text(plan_text(network, plan.program, CPU, ["a test"], 0, []))
        layers = read_layers(tmp_path / "plan.yaml")
        assert [layer.name for layer in layers] == ["down", "up", "grouped"]
        assert all(check(compile_layer(layer, machine=setting.machine)).ok for layer in layers)


def test_auto_serves() -> None:
    for seed in range(draws(6)):
        case = draw(seed, algorithm="stationary-w", least=2, most=4, transposed=True)
        grid = Grid(tuple((f"a{i}", size) for i, (_, size) in enumerate(case.layer.grid.axes)))
        layer = replace(case.layer, algorithm="auto", distribution=None, roles=(), grid=grid)
        assert check(compile_layer(layer)).ok


def test_mesh_of_an_sw26010_refuses() -> None:
    compiled = compile_layer(up(target="sw26010"))
    with pytest.raises(InputError, match="the mesh's plans are for convolutions, conv_transpose2d is a transposed one"):
        compiled.module()
