"""CSV files of layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from convgen.errors import InputError
from convgen.spec.layer import Layer
from convgen.spec.reader import layer_from_dict, layer_to_dict, read_csv

HEADER = "name,N,C,H,W,F,K,S,P,groups\n"
FOLDER = Path(__file__).parents[1] / "tuning" / "layers"


def read(tmp_path: Path, text: str, **options: Any) -> list[Layer]:
    path = tmp_path / "t.csv"
    path.write_text(text)
    return read_csv(path, **({"grid": {"N": 2}} | options))


def refuse(tmp_path: Path, text: str, **options: Any) -> tuple[str, str, str]:
    with pytest.raises(InputError) as caught:
        read(tmp_path, text, **options)
    return caught.value.fact, caught.value.where.removeprefix(str(tmp_path / "t.csv")), caught.value.hint


def test_rows_are_layers(tmp_path: Path) -> None:
    text = "# two layers\n" + HEADER + "conv1,256,3,227,226,96,11,4,0,1\n\n# half\nconv2,256,96,27,27,256,5,1,2,2\n"
    first, second = read(tmp_path, text, grid={"H": 2, "C": 2}, algorithm="stationary-x", dtype="bfloat16")
    assert layer_to_dict(first) == {
        "name": "conv1",
        "layer": "conv2d",
        "input": [256, 3, 227, 226],
        "out_channels": 96,
        "kernel_size": [11, 11],
        "stride": [4, 4],
        "padding": [[0, 0], [0, 0]],
        "dilation": [1, 1],
        "groups": 1,
        "bias": False,
        "dtype": "bfloat16",
        "memory_format": "contiguous",
        "grid": {"H": 2, "C": 2},
        "algorithm": "stationary-x",
        "target": "cpu",
        "options": {"hold_x": "gathered", "sums": "ordered"},
    }
    assert (second.conv.groups, second.conv.spatial[1].pad_hi) == (2, 2)
    assert second.source.where(("kernel_size",)) == f"{tmp_path}/t.csv:6"


def test_columns_in_any_order_and_no_groups(tmp_path: Path) -> None:
    (layer,) = read(tmp_path, "K, S, P, N, C, H, W, F, name\r\n3, 1, 1, 2, 4, 6, 8, 10, a\r\n", target="cuda:sm_90")
    assert (layer.name, layer.conv.filters, layer.conv.groups, layer.target.text) == ("a", 10, 1, "cuda:sm_90")
    assert layer.memory_format == "channels_last"  # a GPU's, where nobody says one
    row = HEADER + "a,2,4,6,8,10,3,1,1,1\n"
    for options in ({"target": "cuda"}, {}):
        (said,) = read(tmp_path, row, memory_format="contiguous", **options)
        assert said.made_for(layer.target).memory_format == "contiguous"


def test_names_become_identifiers(tmp_path: Path) -> None:
    row = ",1,1,4,4,1,1,1,0,1\n"
    layers = read(tmp_path, HEADER + "".join(name + row for name in ("res2a/x", "3x3", "class", '"a,b"', "torch")))
    assert [layer.name for layer in layers] == ["res2a_x", "_3x3", "class_", "a_b", "torch_layer"]
    fact, where, _ = refuse(tmp_path, HEADER + "a-b" + row + "a/b" + row)
    assert (fact, where) == ("the name 'a_b' stands twice, first on line 2", ":3")


@pytest.mark.parametrize(
    ("text", "fact", "where"),
    [
        ("", "the file is empty", ":1"),
        ("# only this\n", "the file is empty", ":1"),
        (HEADER, "the file holds no layers", ":1"),
        ("name,N,C,H,W,F,K,S\n", "column P is missing", ":1"),
        ("# x\nname,N,C,H,W,F,K,S,P,group\n", "unknown column 'group'", ":2"),
        ("name,N,N,H,W,F,K,S,P\n", "column N stands twice", ":1"),
        (HEADER + "a,1,1,4,4,1,1,1,0\n", "the row has 9 cells, the header 10", ":2"),
        (HEADER + "a,1,1,4,4,1,1,1,0,1\nb,1,1,4.0,4,1,1,1,0,1\n", "H is '4.0', not a whole number", ":3"),
        (HEADER + "a,1,1,-4,4,1,1,1,0,1\n", "H is '-4', not a whole number", ":2"),
        (HEADER + "a,1,1,,4,1,1,1,0,1\n", "H is '', not a whole number", ":2"),
        (HEADER + ",1,1,4,4,1,1,1,0,1\n", "a layer without a name", ":2"),
        (HEADER + "a,1,1,4,4,1,5,1,0,1\n", "H has no output", ":2"),
        (HEADER + "a,1,1,4,4,1,0,1,0,1\n", "kernel_size can't be 0", ":2"),
        (HEADER + "a,1,3,4,4,4,1,1,0,2\n", "groups 2 doesn't divide both C=3 and out_channels=4", ":2"),
        (HEADER + '"a"b,1,1,4,4,1,1,1,0,1\n', "not CSV", ":2"),
        (HEADER + '"a,1,1,4,4,1,1,1,0,1\n', "not CSV", ":2"),
    ],
)
def test_rows_refused(tmp_path: Path, text: str, fact: str, where: str) -> None:
    found = refuse(tmp_path, text)
    assert fact in found[0]
    assert found[1] == where
    assert found[2]


@pytest.mark.parametrize(
    ("options", "fact", "where"),
    [
        ({"grid": {}}, "grid has no axes", "--grid"),
        ({"grid": {"C": 2}, "algorithm": "sample"}, "no role for an axis named 'C'", "--grid"),
        ({"algorithm": "smaple"}, "algorithm can't be 'smaple'", "--algorithm"),
        ({"dtype": "int8"}, "dtype can't be 'int8'", "--dtype"),
        ({"target": "cuda:90"}, "target 'cuda:90' is unknown", "--target"),
    ],
)
def test_arguments_refused(tmp_path: Path, options: dict[str, Any], fact: str, where: str) -> None:
    found = refuse(tmp_path, HEADER + "a,1,1,4,4,1,1,1,0,1\n", **options)
    assert fact in found[0]
    assert found[1] == where


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.csv")), ids=lambda p: p.stem)
def test_networks_of_the_papers(path: Path) -> None:
    layers = read_csv(path, grid={"data": 2})
    lines = path.read_text().splitlines()
    assert len(layers) == len(lines) - 1 - sum(line.startswith("#") for line in lines)
    assert all(layer_from_dict(layer_to_dict(layer)) == layer for layer in layers)
