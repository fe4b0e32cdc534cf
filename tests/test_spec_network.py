"""Network files: what they mean, the papers' networks, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from convgen.commands.main import cli
from convgen.errors import InputError
from convgen.explain.network import said_kind
from convgen.spec.network import Network
from convgen.spec.network_reader import network_from_dict, read_network, with_batch
from convgen.spec.reader import read_csv
from convgen.spec.yaml import parse_yaml

ROOT = Path(__file__).resolve().parent.parent
NETWORKS = sorted((ROOT / "examples" / "networks").glob("*.yaml"))
TABLES = {"mesh1k": "mesh1k_assumed", "mesh2k": "mesh2k_assumed"}


def network(nodes: str, head: str = "") -> Network:
    document = parse_yaml(f"name: net\ninput: [2, 4, 9, 8]\n{head}nodes:\n{nodes}", "net.yaml")
    return network_from_dict(document.data, document.source)


@pytest.mark.parametrize("file", NETWORKS, ids=lambda file: file.stem)
def test_convolutions_of_the_papers_networks(file: Path) -> None:
    """Equal to the tables of tuning/layers in everything, in order."""
    found = {n.name: n.conv for n in read_network(file).nodes if n.kind == "conv"}
    table = ROOT / "tuning" / "layers" / f"{TABLES.get(file.stem, file.stem)}.csv"
    wanted = {layer.name: layer.conv for layer in read_csv(table, grid={"N": 1})}
    assert list(found.items()) == list(wanted.items())


def test_seven_networks() -> None:
    assert [file.stem for file in NETWORKS] == [
        "alexnet",
        "mesh1k",
        "mesh2k",
        "resnet50",
        "vgg16",
        "wrn50_2",
        "wrn50_4",
    ]


def test_weights_are_the_published_ones() -> None:
    """torchvision's ResNet-50 has 25 557 032 parameters, its last layer's 1000 biases among them; VGG-16 138 357 544
    with 4224 biases of convolutions; [INT]'s AlexNet 60 954 656 and its linear layers' 9192 biases."""
    weights = {f.stem: sum(node.weights for node in read_network(f).nodes) for f in NETWORKS}
    assert weights["resnet50"] == 25_557_032 - 1000
    assert weights["vgg16"] == 138_357_544 - 4224
    assert weights["alexnet"] == 60_954_656 + 9192


def test_shapes_of_every_kind() -> None:
    found = network("""
  - {name: a, kind: conv, out_channels: 6, kernel_size: [3, 2], stride: [2, 1], padding: [[1, 0], [0, 1]], groups: 2}
  - {kind: batch_norm}
  - {kind: relu}
  - {name: p, kind: max_pool, kernel_size: 2, stride: 1}
  - {name: q, kind: avg_pool, from: a_relu, kernel_size: 2, stride: 1}
  - {name: both, kind: add, from: [p, q]}
  - {name: more, kind: concat, from: [both, p]}
  - {kind: dropout}
  - {name: g, kind: global_avg_pool}
  - {name: f, kind: flatten, from: more_dropout}
  - {name: gf, kind: flatten, from: g}
  - {name: all, kind: concat, from: [gf, f]}
  - {name: l, kind: linear, out_features: 5, bias: true}
  - {kind: softmax_loss}
""")
    shapes = {node.name: node.shape for node in found.nodes}
    assert shapes == {
        "input": (2, 4, 9, 8),
        "a": (2, 6, 4, 8),
        "a_batch_norm": (2, 6, 4, 8),
        "a_relu": (2, 6, 4, 8),
        "p": (2, 6, 3, 7),
        "q": (2, 6, 3, 7),
        "both": (2, 6, 3, 7),
        "more": (2, 12, 3, 7),
        "more_dropout": (2, 12, 3, 7),
        "g": (2, 12, 1, 1),
        "f": (2, 252),
        "gf": (2, 12),
        "all": (2, 264),
        "l": (2, 5),
        "l_softmax_loss": (),
    }
    assert found.node["l"].weights == 264 * 5 + 5
    assert found.node["a"].flops == 2 * (2 * 6 * 4 * 8) * 2 * 6
    assert said_kind(found.node["a"]) == "conv 3x2/2x1 g2"
    assert with_batch(found, 7).node["all"].shape == (7, 264)
    assert with_batch(found, 7).node["a"].flops == found.node["a"].flops // 2 * 7


def test_blocks_nest_and_repeat() -> None:
    blocks = """blocks:
  pair:
    - {name: c, kind: conv, out_channels: $width, kernel_size: 1}
    - {kind: relu}
  skip:
    - {name: p, block: pair, width: $width, repeat: 2}
    - {name: s, kind: add, from: [p, in]}
"""
    found = network("  - {name: b, block: skip, width: 4, repeat: [x, y]}\n", blocks)
    assert [(n.name, n.inputs) for n in found.nodes[1:6]] == [
        ("bx_p1_c", ("input",)),
        ("bx_p1_c_relu", ("bx_p1_c",)),
        ("bx_p2_c", ("bx_p1_c_relu",)),
        ("bx_p2_c_relu", ("bx_p2_c",)),
        ("bx_s", ("bx_p2_c_relu", "input")),
    ]
    assert found.nodes[-1].inputs == ("by_p2_c_relu", "bx_s")


def test_nodes_may_stand_in_any_order() -> None:
    found = network("  - {name: b, kind: relu, from: a}\n  - {name: a, kind: dropout, from: input}\n")
    assert [node.name for node in found.nodes] == ["input", "a", "b"]


CONV = "{name: a, kind: conv, out_channels: 4, kernel_size: 3}"


@pytest.mark.parametrize(
    ("nodes", "fact", "line", "hint"),
    [
        ("- {name: a, kind: conv2d}", "unknown kind 'conv2d'", 4, "conv; kinds are conv, conv_transpose, max_pool"),
        ("- {name: a, kind: [conv]}", "unknown kind ['conv']", 4, "kinds are conv, conv_transpose, max_pool"),
        ("- {name: a, kind: relu, from: b}", "a reads b, which no node is", 4, "input"),
        (f"- {CONV}\n  - {{name: b, kind: add, from: [a, input]}}", "add of a [2, 4, 7, 6] and input [2", 5, "shape"),
        (f"- {CONV}\n  - {{name: b, kind: relu, from: input}}", "2 nodes are read by none: a, b", 4, "one output"),
        ("- {name: a, kind: relu, from: b}\n  - {name: b, kind: relu, from: a}", "cycle: a -> b -> a", 4, ""),
        (f"- {CONV}\n  - {CONV}", "the name a stands twice", 5, "a name a node"),
        ("- {name: a, kind: max_pool, kernel_size: 2, padding: [[0, 1], [1, 1]]}", "max_pool pads H by 0", 4, "sides"),
        ("- {name: a, kind: avg_pool, kernel_size: 2, padding: same, stride: 1}", "avg_pool pads H by", 4, "sides"),
        ("- {name: a, kind: avg_pool, kernel_size: 3, padding: 2}", "by 2 rows, more than half of the 3", 4, "up to 1"),
        ("- {name: a, kind: conv, out_channels: 4}", "conv needs kernel_size", 4, "kernel_size"),
        ("- {name: a, kind: conv, out_channels: 4, kernel_size: 12}", "H has no output", 4, "kernel_size up to"),
        ("- {name: a, kind: conv, out_channels: 4, kernel_size: 1, strides: 2}", "unknown key 'strides'", 4, "stride"),
        ("- {name: a, kind: linear, out_features: 4}", "spatial dimensions", 4, "flatten"),
        ("- {name: a, block: b}", "block 'b' is unknown", 4, "none"),
        ("- {kind: softmax_loss}\n  - {kind: relu}", "a loss", 5, "nothing reads a loss"),
        ("- {name: 1x1, kind: relu}", "not a Python identifier", 4, "_1x1"),
        ("- {name: __class__, kind: relu}", "an attribute of every object", 4, "name: class_"),
        ("- {name: a, kind: relu, from: [input, input]}", "names a node twice", 4, "once"),
        ("- {name: a, kind: conv, out_channels: $f, kernel_size: 1}", "'$f' has no value", 4, "f: ..."),
    ],
)  # fmt: skip
def test_refused(nodes: str, fact: str, line: int, hint: str) -> None:
    with pytest.raises(InputError) as caught:
        network(f"  {nodes}\n")
    assert fact in caught.value.fact
    assert caught.value.where == f"net.yaml:{line}"
    assert hint in caught.value.hint


def test_a_mistake_in_a_block_says_where_it_is_used() -> None:
    with pytest.raises(InputError) as caught:
        network(
            "  - {name: a, block: b, width: 0}\n",
            "blocks:\n  b:\n    - {name: c, kind: linear, out_features: $width}\n",
        )
    assert caught.value.where == "net.yaml:5"
    assert re.search(r"block +b, used as a +\(net.yaml:7\)", str(caught.value))
    deep = "".join(f"  b{i}:\n    - {{name: c, block: b{i + 1}}}\n" for i in range(600))
    with pytest.raises(InputError, match="100 deep at b100"):
        network("  - {name: a, block: b0}\n", f"blocks:\n{deep}")
    with pytest.raises(InputError, match="contains itself"):
        network("  - {name: a, block: b}\n", "blocks:\n  b:\n    - {name: c, block: b}\n")


def test_the_command_prints_a_table() -> None:
    def run(*arguments: str) -> Any:
        return CliRunner().invoke(cli, ["network", str(ROOT / "examples/networks/resnet50.yaml"), *arguments])

    lines = run("--batch", "1").output.splitlines()
    assert lines[2].split() == ["conv1", "conv", "7x7/2", "1", "64", "112", "112", "9408", "3.06", "0.236"]
    assert "forward 7.716 GFLOP for 1 sample " in lines[-1]  # MODELS C4: 7.716
    assert '"weights": 25556032' in run("--json").output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("compile", "examples/networks/alexnet.yaml"), "is a network, and says no grid"),
        (("tune", "examples/networks/alexnet.yaml"), "is a network, and says no grid"),
    ],
)
def test_files_of_another_kind_are_named(words: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    done = CliRunner().invoke(cli, list(words))
    assert isinstance(done.exception, InputError) and said in str(done.exception)
