"""A layer's file as a network of one row: its own storage and roles, what travels for them, other targets, prices."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from free_networks import imported, ranks_of, sent_by
from generate import random_problem
from passing import passed
from sampling import cases_of, draws
from torch import Tensor
from torch.nn import functional

from convgen.algebra.conv import PHASES, Conv
from convgen.algebra.space import Space
from convgen.commands.main import cli
from convgen.commands.networks import compile_graphs
from convgen.commands.one_row import compile_one_rows
from convgen.compiler import compile_layer
from convgen.cost.machines import load_machine
from convgen.cost.model import Model
from convgen.cost.network import volume
from convgen.cost.schedule import schedule_cost
from convgen.cost.timeline import simulate
from convgen.emit.volume import volume as volume_of_layer
from convgen.errors import InputError
from convgen.explain.program import program_cost_text
from convgen.network_compiler import CompiledNetwork, compile_text
from convgen.passes.hold_x import HoldX
from convgen.passes.share import Share
from convgen.plan.program.edited import read_text
from convgen.program.build import lower
from convgen.program.network_text import show
from convgen.program.shared import shared
from convgen.resources import data_file
from convgen.spec.layer import Distribution, Layer, Options
from convgen.spec.reader import layer_from_dict, layer_to_dict, read_csv
from convgen.spec.target import read_target
from convgen.verify.network import check_network, report_text

OF_GRADIENT = {"x": "backward_data", "w": "backward_filter"}


def drawn(draw: Random) -> Layer:
    """A layer with layouts of its own, and with roles of its own in some phases."""
    conv, grid, stored, roles = random_problem(draw, transposed=draw.random() < 0.25)
    if conv.transposed:  # a network's cut off as many rows on both sides
        alike = (replace(s, pad_hi=s.pad_lo, extent=s.extent + s.pad_hi - s.pad_lo) for s in conv.spatial)
        conv = replace(conv, spatial=tuple(alike))
        if min(s.extent for s in conv.spatial) < 1:
            return drawn(draw)
    pairs = {p: tuple((a, role) for role, axes in roles[p].nests for a in axes) for p in PHASES}
    if draw.random() < 0.4:
        pairs = dict.fromkeys(PHASES, pairs["forward"])
    said = [p for p in PHASES if draw.random() < 0.8]
    return Layer(
        name="drawn",
        conv=conv,
        dtype="float64",
        grid=grid,
        algorithm=None,
        distribution=Distribution(x=stored["x"].axes, w=stored["w"].axes, y=stored["y"].axes),
        roles=tuple((p, pairs[p]) for p in said),
        options=Options(hold_x=draw.choice(("gathered", "stored"))),
    )


def as_a_network(layer: Layer, folder: Path, **options: Any) -> CompiledNetwork:
    """By the layer's file."""
    file = folder / "layer.yaml"
    file.write_text(json.dumps(layer_to_dict(layer)))
    plain: dict[str, Any] = {"grid": None, "algorithm": None, "dtype": None}
    (one,) = compile_one_rows([str(file)], **plain, **options)
    return one.compiled


def reference(conv: Conv, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """By ATen, on one device."""
    stride, dilation = [s.stride for s in conv.spatial], [s.dilation for s in conv.spatial]
    dims = len(conv.spatial)
    if conv.transposed:
        crops, more = [s.pad_lo for s in conv.spatial], [s.output_padding for s in conv.spatial]
        of = getattr(functional, f"conv_transpose{dims}d")
        return of(x, w, bias, stride, crops, more, conv.groups, dilation)
    wide = functional.pad(x, [n for s in reversed(conv.spatial) for n in (s.pad_lo, s.pad_hi)])
    return getattr(functional, f"conv{dims}d")(wide, w, bias, stride, 0, dilation, conv.groups)


def right_on_ranks(compiled: CompiledNetwork, layer: Layer, folder: Path) -> None:
    """Outputs, gradients of x, w and the bias, and what every rank sends."""
    conv, generator = layer.conv, torch.Generator().manual_seed(0)
    shapes = [conv.shape("x"), conv.shape("w"), *([(conv.filters,)] if conv.bias else [])]
    operands = [torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_() for s in shapes]
    y = reference(conv, operands[0], operands[1], operands[2] if conv.bias else None)
    dy = torch.randn(y.shape, dtype=torch.float64, generator=generator)
    y.backward(dy)
    names = [v.name for v in compiled.graph.parameters]
    state = dict(zip(names, [t.detach() for t in operands[1:]], strict=True))
    net = imported(compiled.package().files, folder)
    for rank, ran in enumerate(ranks_of(net, layer.grid, {"x": operands[0].detach()}, state, [dy], ["y"])):
        found = [ran.outputs[0], ran.inputs[0], *(ran.gradients[n] for n in names)]
        for got, want in zip(found, [y.detach(), *(t.grad for t in operands)], strict=True):
            assert got is not None and want is not None
            torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
        assert ran.sent == sent_by(compiled.program, rank, of_inputs=True)


@pytest.mark.parametrize("seed", cases_of(24, "test_a_drawn_layer_is_right_on_ranks"))
def test_a_drawn_layer_is_right_on_ranks(seed: int, tmp_path: Path) -> None:
    draw = Random(f"one row {seed}")
    for _ in range(2):
        layer = drawn(draw)
        try:
            compiled = as_a_network(layer, tmp_path)
        except InputError as error:
            assert layer.conv.groups > 1 and "groups" in error.fact, error
            continue
        right_on_ranks(compiled, layer, tmp_path)


# ---- What travels ----


def sends(steps: Iterable[dict[str, Any]]) -> Counter[tuple[str, tuple[int, ...]]]:
    """A network's volume leaves out what sends nothing."""
    found = ((s["collective"], tuple(s["bytes_sent_per_rank"])) for s in steps)
    return Counter((kind, sent) for kind, sent in found if any(sent))


def of_schedule(layer: Layer) -> dict[str, list[dict[str, Any]]]:
    """Bytes by phase of the layer's schedule, what is alike fetched once; padding is nowhere in memory."""
    one, space = compile_layer(layer), Space(layer.conv, layer.grid, virtual_padding=True)
    schedule = lower(layer.name, space, one.choice.stored, one.choice.roles, bias=layer.conv.bias)
    passes = (HoldX(choice=layer.options.hold_x), Share())
    return volume_of_layer(passed(schedule, space, *passes), space, 8)


def test_what_a_layer_sends_its_network_sends(tmp_path: Path) -> None:
    """Forward to the byte, step by step. Backward in all at most as much, and what it fetches once it fetches once."""
    seen: Counter[str] = Counter()
    for seed in range(200):
        layer = drawn(Random(f"bytes {seed}"))
        if layer.conv.groups > 1:
            continue
        plain = as_a_network(layer, tmp_path).plain
        found, wanted = volume(plain, of_inputs=True), of_schedule(layer)
        assert sends(found["forward"]) == sends(wanted["forward"]), seed
        there = found["backward"]
        steps = [s for phase in OF_GRADIENT.values() for s in wanted[phase]]
        sums = [sum(sum(s["bytes_sent_per_rank"]) for s in some) for some in (there, steps)]
        assert sums[0] <= sums[1], seed
        once = shared(plain.rows[0], (True, True))
        seen |= Counter({"rows": bool(once.rows), "held": bool(once.held), "given": bool(once.given)})
        seen["alike"] += sends(there) == sends(steps)
        seen["fewer"] += sums[0] < sums[1]
    assert len(seen) == 5 and min(seen["alike"], seen["fewer"]) > 10, seen


@pytest.mark.parametrize("seed", cases_of(12, "test_a_shared_fetch_is_right_on_ranks"))
def test_a_shared_fetch_is_right_on_ranks(seed: int, tmp_path: Path) -> None:
    """What is fetched for one gradient serves the other, and a text without the line says so."""
    draw = Random(f"shared {seed}")
    while True:
        layer = drawn(draw)
        if layer.conv.groups > 1:
            continue
        compiled = as_a_network(layer, tmp_path)
        once = shared(compiled.program.rows[0], (True, True))
        if once.rows or once.held or once.given:
            break
    right_on_ranks(compiled, layer, tmp_path)
    text = read_text(show(compiled.program), "schedule.txt")
    again = compile_text(compiled.graph, text)
    assert again.program == compiled.program


# ---- What it takes ----


@pytest.mark.parametrize("machine", ["lassen", "dgx_h200"])
@pytest.mark.parametrize(
    ("algorithm", "grid"),
    [("spatial", {"H": 2, "W": 2}), ("stationary-x", {"N": 2, "C": 2}), ("stationary-y", {"N": 2, "F": 2})],
)
def test_a_step_without_overlap_takes_what_the_schedule_does(
    algorithm: str, grid: dict[str, int], machine: str, tmp_path: Path
) -> None:
    """Of kernels that pad by themselves; a row's launch is taken to be a layer's. Rows that nothing reads are in a
    layer's blocks, and not in what a row touches: under a hundredth."""
    on = replace(load_machine(machine), network_launch_s=None)
    for layer in read_csv(data_file("tuning", "layers", "resnet50.csv"), grid=grid, algorithm=algorithm)[:54:9]:
        made = compile_layer(replace(layer, target=read_target("cuda:sm_90")), machine=on)
        stored = {t: layout.axes for t, layout in made.choice.stored.items()}
        roles = tuple((p, tuple((a, i) for i, axes in r.nests for a in axes)) for p, r in made.choice.roles.items())
        given = replace(made.layer, algorithm=None, distribution=Distribution(**stored), roles=roles)
        cost = schedule_cost(made.schedule, Model(made.space, on, layer.dtype)).total().seconds
        one = as_a_network(given, tmp_path)
        found = simulate(one.plain, on, one.dtype, of_inputs=True).serial_s
        strided = any(s.stride > 1 for s in layer.conv.spatial)
        assert found == pytest.approx(cost, rel=1e-2 if strided else 1e-7), layer.name


# ---- Other targets, and what is refused ----

LAYER: dict[str, Any] = {
    "name": "a", "layer": "conv2d", "input": [2, 4, 6, 6], "out_channels": 4, "kernel_size": 3,
    "padding": [[1, 1], [0, 2]],
    "bias": True, "dtype": "float64", "grid": {"p": 2},
    "distribution": {"x": ["*", "*", "p", "*"], "w": ["*", "*"], "y": ["*", "*", "p", "*"]},
}  # fmt: skip


def convgen(*words: object) -> Result:
    return CliRunner().invoke(cli, [str(w) for w in words])


def written(folder: Path, **others: Any) -> Path:
    file = folder / "layer.yaml"
    file.write_text(json.dumps({k: v for k, v in (LAYER | others).items() if v is not None}))
    return file


@pytest.mark.parametrize(("algorithm", "dtype"), [(None, "float64"), ("spatial", "float64"), ("spatial", "tfloat32")])
def test_a_layer_of_a_gpu_has_kernels_beside_it(algorithm: str | None, dtype: str, tmp_path: Path) -> None:
    plain: dict[str, Any] = {"distribution": None, "algorithm": "spatial", "grid": {"H": 2}} if algorithm else {}
    file = written(tmp_path, dtype=dtype, **plain)
    done = convgen("compile", file, "--overlap", "--target", "cuda:sm_90", "-o", tmp_path)
    assert done.exit_code == 0, done.output
    assert any(path.name.startswith("convolution_1") for path in (tmp_path / "a").iterdir())
    options: dict[str, Any] = {"grid": None, "algorithm": None, "dtype": None, "target": "cuda:sm_90"}
    (one,) = compile_one_rows([str(file)], **options)
    report = check_network(one.compiled, {}, interpret=True)
    assert report.ok and report.dtype == dtype, report_text(report)


def test_the_layers_own_machine_prices_it(tmp_path: Path) -> None:
    """A machine whose links are so slow that a halo goes on its way early."""
    machine = tmp_path / "slow.yaml"
    machine.write_text(
        "name: slow\nranks_per_node: 2\nlatency_s: 1e-5\nlink_bytes_per_s: 1e8\nmemory_bytes_per_s: 1e10\n"
        "peak_flops_per_s: {float64: 1e11, float32: 1e11, tfloat32: 1e11, bfloat16: 1e11, float16: 1e11}\n"
        "efficiency: 0.5\nlaunch_s: 1e-7\n"
    )
    own = convgen("compile", written(tmp_path, machine=str(machine)), "--overlap", "--emit", "schedule").stdout
    said = convgen("compile", written(tmp_path), "--overlap", "--machine", machine, "--emit", "schedule").stdout
    assert own == said and "start" in own


@pytest.mark.parametrize(
    ("others", "words", "what"),
    [
        ({"options": {"sums": "native"}}, (), "native sums"),
        ({"options": {"kernels": {"forward": "unfolded"}}}, (), "kernels by name"),
        ({}, ("--target", "sw26010"), "sw26010"),
        ({"layer": "conv_transpose2d"}, (), "other rows below"),
        ({"groups": 2, "grid": {"p": 2, "q": 1}, "input": [2, 6, 6, 6], "out_channels": 6,
          "distribution": {"x": ["*", "*", "*", "*"], "w": ["*", "*"], "y": ["*", "*", "*", "*"]},
          "roles": {"forward": {"p": "none"}}}, (), ""),
        ({"groups": 3, "input": [2, 6, 6, 6], "out_channels": 6,
          "distribution": {"x": ["*", "p", "*", "*"], "w": ["*", "*"], "y": ["*", "*", "*", "*"]}},
         (), "know no groups"),
        ({"groups": 3, "input": [2, 6, 6, 6], "out_channels": 6,
          "distribution": {"x": ["*", "*", "*", "*"], "w": ["*", "*"], "y": ["*", "*", "*", "*"]},
          "roles": {"forward": {"p": "G"}}}, (), "splits 3 groups"),
        ({}, ("--pass", "start-halos", "--machine", "lassen"), "one of the two"),
    ],
)  # fmt: skip
def test_what_no_row_has_is_refused(others: dict[str, Any], words: tuple[str, ...], what: str, tmp_path: Path) -> None:
    done = convgen("compile", written(tmp_path, **others), "--overlap", *words, "--emit", "schedule")
    if not what:
        assert done.exit_code == 0, done.output
        return
    assert isinstance(done.exception, InputError), done.output
    assert what in str(done.exception) and "try" in str(done.exception)


# ---- Rows of a network's file ----


def write_network(file: Path, data: dict[str, Any]) -> None:
    """A key a line."""
    file.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in data.items()))


def network_of(draw: Random, folder: Path) -> tuple[Path, str, dict[str, Any]]:
    """Two convolutions with a rectifier between them, one or both of which say how they are laid out."""
    where = {"p": draw.choice((2, 3)), "q": draw.choice((1, 2))}

    def axes(dims: int) -> list[Any]:
        places: list[list[str]] = [[] for _ in range(dims)]
        for a in where:
            if (d := draw.randint(-1, dims - 1)) >= 0:
                places[d].append(a)
        return [names or "*" for names in places]

    def placed() -> dict[str, Any]:
        roles = {p: {a: draw.choice(("N", "C", "F", "H", "W", "none")) for a in where} for p in PHASES}
        some = {p: r for p, r in roles.items() if draw.random() < 0.6}
        return {"distribution": {"x": axes(4), "w": axes(2), "y": axes(4)}} | ({"roles": some} if some else {})

    a = {"name": "a", "kind": "conv", "out_channels": 4, "kernel_size": 3, "padding": 1, "bias": True, **placed()}
    b = {"name": "b", "kind": "conv", "out_channels": 3, "kernel_size": 3, "stride": 2, "padding": [[1, 0], [0, 1]]}
    if draw.random() < 0.5:
        b |= placed()
    c = {"name": "c", "kind": "linear", "out_features": 5, "bias": draw.random() < 0.5}
    if draw.random() < 0.7:
        roles = {p: {a: draw.choice(("N", "C", "F", "none")) for a in where} for p in PHASES if draw.random() < 0.6}
        c |= {"distribution": {"x": axes(2), "w": axes(2), "y": axes(2)}} | ({"roles": roles} if roles else {})
    nodes = [a, {"kind": "relu"}, b, {"kind": "flatten"}, c]
    data = {"name": "net", "input": [3, 4, 7, 6], "dtype": "float64", "nodes": nodes}
    file = folder / "net.yaml"
    write_network(file, data)
    return file, ",".join(f"{k}={n}" for k, n in where.items()), {"a": a, "b": b, "c": c}


@pytest.mark.parametrize("seed", cases_of(8, "test_rows_of_a_network_are_as_its_file_says"))
def test_rows_of_a_network_are_as_its_file_says(seed: int, tmp_path: Path) -> None:
    """By letters and by the search: right on ranks, stored so, with these roles."""
    draw = Random(f"rows {seed}")
    file, grid, nodes = network_of(draw, tmp_path)
    for algorithm in (None, "auto"):
        none: dict[str, Any] = {"dtype": None, "target": None}
        (one,) = compile_graphs([str(file)], grid=grid, algorithm=algorithm, **none)
        program, sizes = one.compiled.plain, dict(one.compiled.program.grid.axes)
        made = {"a": ("input", "a.weight", "a"), "b": ("a_relu", "b.1.weight", "b_1")}
        for name, node in nodes.items():
            products = {"a": "a_sum", "b": "b_1", "c": "c_sum" if nodes["c"]["bias"] else "c"}
            (row,) = (r for r in program.rows if r.bound.makes[0] == products[name])
            called = row.bound.operation.as_convolution
            values = made.get(name) or (*row.bound.reads, "c")
            for tensor, value in zip("xwy", values, strict=True):
                if "distribution" in node:
                    said = [[] if e == "*" else [a for a in e if sizes[a] > 1] for e in node["distribution"][tensor]]
                    assert [list(axes) for axes in program.values[value].stored[: len(said)]] == said
            ways = {"forward": row} | {
                p: k for p, t in (("backward_data", 0), ("backward_filter", 1)) for j, k in row.derived if j == t
            }
            for phase, roles in node.get("roles", {}).items():
                said = {a: role for a, role in roles.items() if role != "none" and sizes[a] > 1}
                found = {a: called.get(i, i) for i, axes in ways.get(phase, row).roles for a in axes}
                assert found == said, (phase, algorithm)
        report = check_network(one.compiled, one.tensors)
        assert report.ok, report_text(report)


@pytest.mark.parametrize(
    ("change", "grid", "what", "line"),
    [
        ({"distribution": {"x": ["*", "*", "p", "*"], "w": ["*", "*"]}}, "p=2", "distribution.y is missing", 4),
        ({"distribution": {"x": ["*", "*", "p"], "w": ["*", "*"], "y": ["*"] * 4}}, "p=2", "3 entries", 4),
        ({"distribution": {"x": ["*", "*", "p", "*"], "w": ["*", "*"], "y": ["*"] * 4}}, "N=2", "not in the grid", 4),
        ({"roles": {"forward": {"p": "N"}}}, "p=2", "roles without distribution", 4),
        ({"distribution": {"x": ["*"] * 4, "w": ["*", "*"], "y": ["*"] * 4}, "roles": {"forward": {"p": "Q"}}}, "p=2",
         "no role", 4),
        ({"kind": "linear", "distribution": {"x": ["*"], "w": ["*", "*"], "y": ["*", "*"]}}, "p=2", "1 entries", 4),
        ({"kind": "linear", "distribution": {"x": ["*", "*"], "w": ["*", "*"], "y": ["*", "*"]},
          "roles": {"forward": {"p": "G"}}}, "p=2", "role", 4),
        ({"kind": "relu", "distribution": {}}, "p=2", "unknown key 'distribution' of relu", 4),
    ],
)  # fmt: skip
def test_what_a_row_says_wrongly_is_refused_with_its_line(
    change: dict[str, Any], grid: str, what: str, line: int, tmp_path: Path
) -> None:
    node = {"name": "a", "kind": "conv", "out_channels": 4, "kernel_size": 3, "padding": 1} | change
    if node["kind"] == "relu":
        node = {"name": "a", **change}
    if is_linear := node["kind"] == "linear":
        node = {"name": "a", "out_features": 3, **change}
    file = tmp_path / "net.yaml"
    shape = [2, 4] if is_linear else [2, 4, 6, 6]
    file.write_text(f"name: net\ninput: {shape}\nnodes:\n- {json.dumps(node)}\n")
    done = convgen("compile", file, "--grid", grid, "--emit", "schedule")
    assert isinstance(done.exception, InputError), done.output
    assert what in str(done.exception) and f"net.yaml:{line}" in str(done.exception)


def test_two_layouts_of_one_value_are_refused(tmp_path: Path) -> None:
    nodes = [
        {"name": n, "kind": "conv", "out_channels": 4, "kernel_size": 1,
         "distribution": {"x": x, "w": ["*", "*"], "y": ["*", "p", "*", "*"]}}
        for n, x in (("a", ["p", "*", "*", "*"]), ("b", ["*", "*", "p", "*"]))
    ]  # fmt: skip
    file = tmp_path / "net.yaml"
    write_network(file, {"name": "net", "input": [2, 4, 6, 6], "nodes": nodes})
    done = convgen("compile", file, "--grid", "p=2", "--emit", "schedule")
    assert isinstance(done.exception, InputError) and "stored as [*, p, *, *] and as [*, *, p, *]" in str(
        done.exception
    )


def test_a_layer_is_checked_and_explained_as_a_network(tmp_path: Path) -> None:
    file = written(tmp_path)
    done = convgen("check", file, "--overlap")
    assert done.exit_code == 0 and "gradients of inputs" in done.output, done.output
    done = convgen("explain", file, "--overlap")
    assert done.exit_code == 0 and "memory of the fullest rank" in done.output, done.output
    done = convgen("explain", data_file("tuning", "layers", "resnet50.csv"), "--overlap", "--grid", "N=2")
    assert isinstance(done.exception, InputError) and "one at a time" in str(done.exception)


def test_auto_is_never_dearer_than_the_layouts_of_its_module(tmp_path: Path) -> None:
    """By the timeline, with what travels meanwhile and the input's gradient; what ranks send for it is said."""
    for number in range(draws(20)):
        draw = Random(f"auto {number}")
        k, groups = draw.choice((1, 3, 5)), draw.choice((1, 1, 1, 2))
        said: dict[str, Any] = {
            "name": "auto", "layer": "conv2d", "algorithm": "auto", "out_channels": draw.choice((4, 16, 64)),
            "input": [draw.choice((1, 2, 4, 8)), draw.choice((4, 16, 64)), *draw.choices((8, 14, 15, 32), k=2)],
            "kernel_size": k, "padding": k // 2, "stride": draw.choice((1, 1, 2)), "groups": groups,
            "bias": draw.random() < 0.3,
            "grid": draw.choice(({"a": 2}, {"a": 3}, {"a": 4, "b": 2}, {"a": 2, "b": 2, "c": 2})),
        }  # fmt: skip
        layer, machine = layer_from_dict(said), load_machine(draw.choice(("lassen", "dgx_h200", "cpu")))
        compiled = as_a_network(layer, tmp_path, machine=machine.name)
        choice = compile_layer(layer, machine=machine)
        as_written = replace(
            layer,
            algorithm=None,
            distribution=Distribution(**{t: layout.axes for t, layout in choice.choice.stored.items()}),
            roles=tuple(
                (p, tuple((a, role) for role, axes in r.nests for a in axes)) for p, r in choice.choice.roles.items()
            ),
        )
        other = as_a_network(as_written, tmp_path, machine=machine.name)
        took, takes = (
            simulate(one.program, machine, one.dtype, of_inputs=True, alike=True).end_s for one in (other, compiled)
        )
        assert takes <= took, number
        sent = [s for s in volume(compiled.program, of_inputs=True)["backward"] if s["step"].endswith(".dx")]
        assert all(f"{sum(s['bytes_sent_per_rank']):,}" in program_cost_text(compiled) for s in sent)
