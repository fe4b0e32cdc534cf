"""Networks written by hand as modules and graphs: the shapes that the file infers, and packages that train exactly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from network_modules import exported_graph, module_of
from sampling import cases_of, draws

from convgen.algebra.grid import Grid
from convgen.commands.main import cli
from convgen.network_compiler import compile_network
from convgen.plan.program.layer_files import planned_layers
from convgen.spec.network import Network
from convgen.spec.network_graph import network_graph
from convgen.spec.network_reader import network_from_dict, read_network
from convgen.spec.taken import MODULE
from convgen.spec.target import CPU
from convgen.verify.network import check_network

NETWORKS = sorted((Path(__file__).parent.parent / "examples" / "networks").glob("*.yaml"))


def written(draw: Random) -> Network:
    """A few nodes of every kind, branches among them."""
    dims = draw.choice((1, 2, 2, 3))
    nodes: list[dict[str, Any]] = []

    def node(kind: str, **keys: Any) -> None:
        nodes.append({"name": f"n{len(nodes)}", "kind": kind, **keys})

    bias = draw.random() < 0.5
    node("conv", out_channels=4, kernel_size=3, padding=1, bias=bias)
    node("batch_norm")
    node("relu")
    if dims == 2 and draw.random() < 0.5:
        node("conv", out_channels=4, kernel_size=2, padding="same", groups=draw.choice((1, 2)))
    node(draw.choice(("max_pool", "avg_pool")), kernel_size=3, stride=draw.choice((1, 2)), padding=1)
    stem = nodes[-1]["name"]
    node("conv", out_channels=4, kernel_size=1, bias=bias)
    node(draw.choice(("add", "concat")), **{"from": [stem, nodes[-1]["name"]]})
    node("conv_transpose", out_channels=4, kernel_size=3, stride=2, padding=1, output_padding=1)
    node("dropout")
    node("global_avg_pool")
    if draw.random() < 0.5:
        node("flatten")
    node("linear", out_features=5, bias=bias)
    if draw.random() < 0.7:
        node("softmax_loss")
    shape = [draw.choice((2, 3)), 3, *(draw.choice((7, 8)) for _ in range(dims))]
    return network_from_dict({"name": "net", "input": shape, "dtype": "float64", "nodes": nodes})


@pytest.mark.parametrize("seed", cases_of(4, "test_a_written_network_trains_exactly"))
def test_a_written_network_trains_exactly(seed: int) -> None:
    """Outputs, gradients, buffers and three steps of training, beside one device; bytes as VOLUME says."""
    draw = Random(f"written {seed}")
    network = written(draw)
    axes = draw.choice(((("N", 2), ("H", 2)), (("W", 3),), (("C", 2), ("N", 2))))
    if network.nodes[0].shape[3:] == ():
        axes = tuple((a.replace("H", "W"), n) for a, n in axes)
    report = check_network(compile_network(network_graph(network), Grid(axes)), {})
    assert report.ok, report


def test_its_graph_is_that_of_its_module() -> None:
    """Call for call, value for value, as torch.export finds them; calls of no module are no module's."""
    for seed in range(draws(3)):
        network = written(Random(f"graph {seed}"))
        exported = exported_graph(network)
        calls = tuple(replace(c, kind=c.kind if c.module else "") for c in exported.calls)
        assert replace(exported, calls=calls, modules=()) == network_graph(network)  # by hand there are none to read


def test_no_node_is_called_as_what_modules_have() -> None:
    assert {n for n in dir(torch.nn.Module()) if not n.startswith("__")} <= MODULE
    node = {"name": "train", "kind": "conv", "out_channels": 4, "kernel_size": 1}
    graph = network_graph(network_from_dict({"name": "n", "input": [1, 3, 9, 9], "nodes": [node]}))
    assert [p.name for p in graph.parameters] == ["train_.weight"]


@pytest.mark.parametrize("path", NETWORKS, ids=lambda p: p.stem)
def test_the_papers_networks_are_modules(path: Path) -> None:
    """As many parameters as the file says; each node's shape, without running it."""
    network = read_network(path)
    with torch.device("meta"):
        module = module_of(network)
        x = torch.zeros(network.nodes[0].shape)
        seen: dict[str, tuple[int, ...]] = {}
        for name, part in module.named_children():
            part.register_forward_hook(lambda _m, _x, y, name=name: seen.update({name: tuple(y.shape)}))
        module.run(x)
    assert sum(p.numel() for p in module.parameters()) == sum(n.weights for n in network.nodes)
    for node in network.nodes[1:]:
        if node.kind not in ("linear", "softmax_loss"):
            assert seen[node.name] == node.shape


def test_commands_take_a_written_network(tmp_path: Path) -> None:
    """compile, explain and import; what the file says already is refused."""
    file = tmp_path / "tiny.yaml"
    file.write_text(
        "name: tiny\ninput: [4, 3, 8, 8]\nnodes:\n  - {name: a, kind: conv, out_channels: 4, kernel_size: 3}\n"
        "  - {name: b, kind: batch_norm}\n"
    )

    def convgen(*words: object) -> str:
        done = CliRunner().invoke(cli, [str(w) for w in words])
        return f"{done.output}{done.exception}"

    assert "grid(N=2, H=2)" in convgen("compile", file, "--grid", "N=2,H=2", "--emit", "schedule")
    assert "a" in convgen("explain", file, "--grid", "H=2")
    out = tmp_path / "graph.yaml"
    assert f"wrote {out}" in convgen("import", file, "-o", out)
    assert "modelled, steps one after the other" in convgen("plan", out, "--machine", "lassen", "--ranks", 4)
    assert "says its input" in convgen("import", file, "--input", "4,3,8,8", "-o", tmp_path / "other.yaml")
    assert "--input is missing" in convgen("import", "torch.nn:ReLU", "-o", tmp_path / "other.yaml")
    assert "says no grid" in convgen("compile", file)


def test_layers_of_a_plan_are_the_files() -> None:
    """Padding that stands before a convolution is the layer's own, and names that modules have are the file's."""
    conv = {"kind": "conv", "out_channels": 4, "kernel_size": 3}
    nodes = [conv | {"name": "stem", "padding": [[0, 1], [1, 1]]}, conv | {"name": "train", "padding": 1}]
    network = network_from_dict({"name": "n", "input": [2, 3, 9, 8], "nodes": nodes})
    program = compile_network(network_graph(network), Grid((("H", 2),))).plain
    stem, train = planned_layers(network, program, CPU)
    assert (stem.name, train.name) == ("stem", "train")
    assert (stem.conv, train.conv) == (network.node["stem"].conv, network.node["train"].conv)
