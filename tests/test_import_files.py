"""Graph files and files of tensors, there and back; and `convgen import`."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from convgen.commands.main import cli
from convgen.errors import InputError
from convgen.spec.extents import samples
from convgen.spec.graph import Call, Graph, Ref, Value
from convgen.spec.graph_file import constants_path, is_graph_file, read_constants, read_graph, write_graph
from convgen.spec.safetensors import read_tensors, tensors_bytes

N = samples()
ODD = ("%x", "N", "3*N", "%%", "null", "1e5", "a: b, {c}", "", "x\n", "0x1F", "no", "\u00e9", "-", "0.weight", "1.e5")


def odd_graph() -> Graph:
    x = Value(name="x", shape=(N, 3), dtype="float32")
    w = Value(name="0.w", shape=(3,), dtype="float64", init="fill:0.25")
    a, b = Value(name="a", shape=(N, 1), dtype="float32"), Value(name="b", shape=(samples(3), 0), dtype="int64")
    args = (Ref("x"), ODD, (Ref("0.w"), None), N, samples(7), True, 2**63 - 1, -3, 1e-05, 2.0, math.inf, -math.inf, ())
    return Graph(
        name="odd", source='a "b": {c}', modes=("train",), batch=2, inputs=(x,), parameters=(w,),
        buffers=(Value(name="n", shape=(), dtype="int64", init="given"),),
        constants=(Value(name="k", shape=(2, 3), dtype="bool"),),
        calls=(Call(op="odd.op", args=args, results=(a, None, b), module="m.0", kind="M"),
               Call(op="relu", args=(Ref("a"),), results=(Value(name="y", shape=(N,), dtype="bool"),), module="")),
        updates=(("n", "b"),), outputs=(("0", "y"), ("1.k", "a")), aliases=(("other", "0.w"),),
    )  # fmt: skip


def test_a_graph_is_read_back_as_it_was(tmp_path: Path) -> None:
    graph, file = odd_graph(), tmp_path / "odd.yaml"
    file.write_text(write_graph(graph), encoding="utf-8")
    back = read_graph(file, checked=False)  # the text alone: its operators are none
    assert back == graph and repr(back.calls) == repr(graph.calls)  # True is no 1 there
    assert write_graph(back) == write_graph(graph)
    assert is_graph_file(file) and not is_graph_file(tmp_path / "none") and not is_graph_file(__file__)
    tensors = {"k": torch.ones(2, 3, dtype=torch.bool), "n": torch.tensor(7)}
    constants_path(file).write_bytes(tensors_bytes(tensors))
    assert sorted(read_constants(file, graph)) == ["k", "n"]
    for wrong, fact in (
        ({"more": torch.zeros(1)}, "has 'more', for which"),
        ({"n": torch.tensor(7.0)}, r"a tensor \[\] float32 for n \[\] int64"),
        ({"k": torch.ones(3, 2, dtype=torch.bool)}, r"a tensor \[3, 2\] bool for k \[2, 3\] bool"),
    ):
        constants_path(file).write_bytes(tensors_bytes(tensors | wrong))
        with pytest.raises(InputError, match=fact):
            read_constants(file, graph)
    constants_path(file).write_bytes(tensors_bytes({"n": tensors["n"]}))
    with pytest.raises(InputError, match="no tensor for k"):
        read_constants(file, graph)


@pytest.mark.parametrize(
    ("old", "new", "fact", "at"),
    [
        ('"%a"]', '"%q"]', "'q' is no value that stands before", "- {make: y"),
        ("kind: M", "kin: M", "unknown key 'kin'", "- {make: [a"),
        ("make: y", "make: a", "a is made twice", "- {make: a,"),
        ("shape: [N]", "shape: [-1]", "a shape can't be [-1]", "- {make: y"),
        ("shape: [2, 3]", "shape: [2, N]", "k has an open size", "  k:"),
        ("init: fill:0.25", "init: some", "init can't be 'some'", "  0.w"),
        ("dtype: bool, module", "dtype: boo, module", "dtype can't be 'boo'", "- {make: y"),
        ("batch: 2", "batch: two", "batch can't be 'two'", "batch"),
        ("  n: b", "  m: b", "'m' is no buffer", "  m: b"),
        ("[a, null, b]", "[a, b]", "2 results, 3 shapes", "- {make: [a"),
        ("modes: [train]", "modes: [eval, train]", "modes can't be", "modes"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path: Path, old: str, new: str, fact: str, at: str) -> None:
    text = write_graph(odd_graph())
    assert text.count(old) == 1, old
    file = tmp_path / "odd.yaml"
    file.write_text(text := text.replace(old, new), encoding="utf-8")
    line = next(k for k, one in enumerate(text.splitlines(), 1) if one.strip().startswith(at.strip()))
    with pytest.raises(InputError) as caught:
        read_graph(file, checked=False)
    assert fact in caught.value.fact and caught.value.where == f"{file}:{line}" and caught.value.hint


def test_tensors_there_and_back(tmp_path: Path) -> None:
    kinds = (torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.int64, torch.uint8)
    tensors = {f"t{k}": torch.arange(6).reshape(2, 3).T.to(kind) for k, kind in enumerate(kinds)}
    tensors |= {"none": torch.zeros(0, 3), "one": torch.tensor(2.5)}
    file = tmp_path / "t.safetensors"
    file.write_bytes(raw := tensors_bytes(tensors))
    assert raw == tensors_bytes(dict(reversed(tensors.items()))) and int.from_bytes(raw[:8], "little") % 8 == 0
    back = read_tensors(file)
    assert list(back) == sorted(tensors)
    assert all(torch.equal(back[k], v) and back[k].dtype == v.dtype for k, v in tensors.items())


@pytest.mark.parametrize(
    ("header", "behind", "fact"),
    [
        ('{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}', 7, "a can't have bytes 0 to 8 of 7"),
        ('{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}', 9, "1 bytes are of no tensor"),
        ('{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}', 8, "a of shape [3] has 8 bytes"),
        ('{"a": {"dtype": "F9", "shape": [2], "data_offsets": [0, 8]}}', 8, "a can't be"),
        ('{"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}', 8, "a can't be"),
        ('{"a": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}', 4, "a can't be"),
        ('{"a": {"dtype": "BOOL", "shape": [1], "data_offsets": [0, 1]}}', 1, "truth values other than 0 and 1"),
        ('{"a": {"dtype": "U8", "shape": [1099511627776, 1099511627776, 0], "data_offsets": [0, 0]}}', 0, "overflow"),
        ('{"a": 3}', 0, "a can't be 3"),
        ('{"a": {}, "a": {}}', 0, "'a' stands in it twice"),
        ("[]", 0, "its header is no object"),
        ("[" * 100_000, 0, "recursion"),
        (
            '{"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},'
            ' "b": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]}}',
            3, "b can't have bytes 1 to 3 of 3, the one before ends at 2",
        ),
    ],
)  # fmt: skip
def test_torn_tensors(tmp_path: Path, header: str, behind: int, fact: str) -> None:
    """Each element's bytes are one tensor's, and none are left."""
    file = tmp_path / "t.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header.encode() + b"\7" * behind)
    with pytest.raises(InputError, match="no whole safetensors file") as refused:
        read_tensors(file)
    assert fact in refused.value.fact


SOURCE = """
from torch import nn
import torch
class Net(nn.Module):
    def __init__(self, c=3):
        super().__init__()
        self.conv = nn.Conv2d(c, 4, 3)
        self.shift = nn.Parameter(torch.randn(4, 1, 1))
    def forward(self, x, t):
        return torch.relu(self.conv(x) + self.shift) + t.view(-1, 1, 1, 1)
def broken():
    raise ValueError("no")
"""


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a_net_of_mine.py").write_text(SOURCE, encoding="utf-8")
    words = ["import", "a_net_of_mine:Net", "--input", "x=2,5,8,8", "--input", "t=2:int64", "--args", '{"c": 5}']
    done = CliRunner().invoke(cli, [*words, "-o", "net.yaml"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "training and evaluation, any number of samples N (from 2)" in done.stdout
    assert "wrote net.yaml" in done.stdout and "wrote net.constants.safetensors" in done.stdout
    graph = read_graph("net.yaml")
    assert (graph.name, graph.source) == ("Net", 'a_net_of_mine:Net {"c": 5}')
    torch.manual_seed(0)
    torch.nn.Conv2d(5, 4, 3)
    assert torch.equal(read_constants("net.yaml", graph)["shift"], torch.randn(4, 1, 1))
    listed = CliRunner().invoke(cli, ["network", "net.yaml"], catch_exceptions=False)
    assert listed.stdout.splitlines() == done.stdout.splitlines()[:-2]
    for wrong, fact in (
        (["import", "a_net_of_mine:Ne", "--input", "1,3"], "has no Ne"),
        (["import", "a_net_of_mine:broken", "--input", "1,3"], "ValueError: no"),
        (["import", "no_such_module:x", "--input", "1,3"], "can't import no_such_module"),
        (["import", "a_net_of_mine:Net", "--input", "1;3"], "is no shape"),
        (["import", "a_net_of_mine:Net", "--input", "1,3:float"], "dtype can't be"),
        ([*words, "--args", "c"], "--args is no JSON"),
    ):
        with pytest.raises(InputError, match=fact):
            CliRunner().invoke(cli, [*wrong, "-o", "other.yaml"], catch_exceptions=False)


def test_torchvision(tmp_path: Path) -> None:
    """Beside a torch that its C library can't load into, too."""
    if find_spec("torchvision") is None:
        pytest.skip("no torchvision")
    words = ["import", "torchvision.models:resnet18", "--input", "2,3,64,64", "-o", str(tmp_path / "r.yaml")]
    done = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert "20  batch_norm" in done.stdout and "any number of samples" in done.stdout
