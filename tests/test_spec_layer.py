"""Layer files: defaults, the meaning of values, and each refusal with its line."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from convgen.algebra.algorithms import ALGORITHMS as ROWS
from convgen.errors import InputError, Note
from convgen.spec import layer as constants
from convgen.spec.form import LayerForm
from convgen.spec.layer import Distribution, Layer, Options
from convgen.spec.placement import algorithm_letters
from convgen.spec.reader import layer_from_dict, layer_to_dict, locate, read_layer
from convgen.spec.source import Source
from convgen.spec.target import read_target
from convgen.spec.yaml import parse_yaml

BASE = {
    "name": "res5a",  # line 1
    "layer": "conv2d",
    "input": "[8, 64, 14, 15]",  # 3
    "out_channels": "96",
    "kernel_size": "3",  # 5
    "grid": "{N: 2, C: 2}",
}
STORED = 'distribution: {x: [N, C, "*", none], w: ["*", C], y: [N, C, null, []]}\n'


def read(extra: str = "", **changed: str) -> Layer:
    """A layer of BASE with values changed; changed keys that BASE lacks follow from line 7, then `extra`."""
    text = "".join(f"{key}: {value}\n" for key, value in (BASE | changed).items() if value != "-")
    document = parse_yaml(text + extra, "f.yaml")
    return layer_from_dict(document.data, document.source)


def refuse(extra: str = "", **changed: str) -> InputError:
    with pytest.raises(InputError) as caught:
        read(extra, **changed)
    assert caught.value.hint, str(caught.value)
    return caught.value


def pads(layer: Layer) -> list[tuple[int, int]]:
    return [(s.pad_lo, s.pad_hi) for s in layer.conv.spatial]


def test_defaults() -> None:
    layer = read()
    assert (layer.name, layer.kind, layer.dtype, layer.memory_format) == ("res5a", "conv2d", "float32", "contiguous")
    assert (layer.algorithm, layer.distribution, layer.roles) == ("auto", None, ())
    assert (layer.target.text, layer.machine, layer.options) == ("cpu", None, Options())
    conv = layer.conv
    assert (conv.batch, conv.channels, conv.filters, conv.groups, conv.bias) == (8, 64, 96, 1, False)
    assert [(s.name, s.extent, s.kernel, s.stride, s.dilation) for s in conv.spatial] == [
        ("H", 14, 3, 1, 1),
        ("W", 15, 3, 1, 1),
    ]
    assert pads(layer) == [(0, 0), (0, 0)]
    assert layer.grid.axes == (("N", 2), ("C", 2))
    assert layer.source.where(("grid", "C")) == "f.yaml:6"


@pytest.mark.parametrize("kind", ["conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d"])
@pytest.mark.parametrize("target", ["cpu", "cuda", "hip:gfx942", "sw26010"])
def test_memory_format_is_the_targets_where_none_is_said(kind: str, target: str) -> None:
    """Channels last on a GPU, whether the file names the target or a command does; what a file says stays."""
    flat = "1d" in kind
    extents = {"1d": "[8, 64, 14]", "2d": "[8, 64, 14, 15]", "3d": "[8, 64, 14, 15, 16]"}[kind[-2:]]
    wanted = "channels_last" if target[:2] in ("cu", "hi") and not flat else "contiguous"
    given = {"layer": kind, "input": extents}
    named, moved = read(**given, target=target), read(**given).made_for(read_target(target))
    assert named.memory_format == moved.memory_format == wanted and moved == named
    assert named.made_for(read_target("cpu")).memory_format == "contiguous"
    for said in ("contiguous", *(["channels_last"] * (not flat))):
        layer = read(**given, memory_format=said)
        assert layer.made_for(read_target(target)).memory_format == layer.memory_format == said
        assert read(**given, memory_format=said, target=target).memory_format == said
    assert layer_from_dict(layer_to_dict(named)).made_for(read_target("cpu")).memory_format == wanted  # it says so now


def test_every_key(tmp_path: Path) -> None:
    path = tmp_path / "l.yaml"
    path.write_text(
        "name: l\nlayer: conv3d\ninput: [2, 6, 5, 6, 7]\nout_channels: 4\nkernel_size: [1, 2, 3]\nstride: [1, 2, 1]\n"
        "padding: [[0, 1], [2, 0], [1, 1]]\ndilation: 2\ngroups: 2\nbias: true\ndtype: bfloat16\n"
        "memory_format: channels_last\ngrid: {b: 3, a: 1}\nalgorithm: auto\ntarget: cuda:sm_90\nmachine: pod\n"
        "options: {hold_x: stored, sums: native}\n"
    )
    layer = read_layer(path)
    assert [s.name for s in layer.conv.spatial] == ["D", "H", "W"]
    assert pads(layer) == [(0, 1), (2, 0), (1, 1)]
    assert (layer.conv.groups, layer.conv.bias, layer.dtype) == (2, True, "bfloat16")
    assert (layer.target.text, layer.machine, layer.options) == ("cuda:sm_90", "pod", Options("stored", "native"))
    assert layer.source.file == str(path)


@pytest.mark.parametrize(
    ("padding", "kernel", "dilation", "want"),
    [
        ("2", "3", "1", [(2, 2), (2, 2)]),
        ("[0, 3]", "3", "1", [(0, 0), (3, 3)]),
        ("[[1, 2], [0, 3]]", "3", "1", [(1, 2), (0, 3)]),
        ("valid", "3", "1", [(0, 0), (0, 0)]),
        ("same", "3", "1", [(1, 1), (1, 1)]),
        ("same", "[4, 1]", "1", [(1, 2), (0, 0)]),
        ("same", "[2, 4]", "3", [(1, 2), (4, 5)]),
    ],
)
def test_padding(padding: str, kernel: str, dilation: str, want: list[tuple[int, int]]) -> None:
    layer = read(padding=padding, kernel_size=kernel, dilation=dilation)
    assert pads(layer) == want
    if padding == "same":
        assert [s.out for s in layer.conv.spatial] == [14, 15]


def test_distribution_and_roles() -> None:
    text = "roles:\n  backward_filter: {C: null, N: G}\n  forward: {}\n"
    layer = read(STORED + text, grid="{N: 2, C: 2, D: 1}")
    assert layer.algorithm is None
    assert layer.distribution == Distribution(x=(("N",), ("C",), (), ()), w=((), ("C",)), y=(("N",), ("C",), (), ()))
    assert layer.roles == (("forward", ()), ("backward_filter", (("C", "none"), ("N", "G"))))
    nested = read('distribution: {x: ["*", [C, N], "*", "*"], w: ["*", "*"], y: ["*", "*", "*", "*"]}\n')
    assert nested.distribution and nested.distribution.x[1] == ("C", "N")


def test_order_of_axes_is_kept() -> None:
    assert read(grid="{b: 2, a: 3, c: 1}").grid.names == ("b", "a", "c")
    layer = read(STORED + "roles: {forward: {C: none, N: none}}\n")
    assert layer.roles == (("forward", (("C", "none"), ("N", "none"))),)


@pytest.mark.parametrize("target", ["cpu", "cuda", "cuda:sm_80", "cuda:sm_100", "hip", "hip:gfx90a", "sw26010"])
def test_targets(target: str) -> None:
    assert read(target=target).target.text == target


def test_a_target_answers_for_itself() -> None:
    kinds = {text: read_target(text) for text in ("cpu", "cuda:sm_80", "hip", "sw26010")}
    assert [t.pads_virtually for t in kinds.values()] == [False, True, True, True]
    assert [t.reads_parts for t in kinds.values()] == [False, True, True, False]
    assert [t.device for t in kinds.values()] == ["cpu", "cuda", "cuda", "cpu"]
    assert (
        kinds["hip"] == read_target("hip:gfx942") and str(kinds["hip"]) == "hip:gfx942" and kinds["hip"].text == "hip"
    )
    assert kinds["sw26010"].dtypes == ("float64", "float32") and kinds["cpu"].dtypes == tuple(constants.DTYPES)
    assert read(target="cuda:sm_70").target.kind == "cuda"  # it has schedules and a price, if no kernels
    for text, hint in (("cuda:sm_70", "cuda:sm_80"), ("hip:gfx908", "hip:gfx90a"), ("sw26010", "convgen sw26010 conv")):
        with pytest.raises(InputError) as caught:
            read_target(text).known()
        assert hint in caught.value.hint


def test_letters_are_those_of_the_table() -> None:
    assert algorithm_letters("sample", ("H", "W")) == ("N", "G")
    assert algorithm_letters("spatial", ("W",)) == ("N", "W", "G")
    assert algorithm_letters("stationary-x", ("H", "W")) == ("N", "H", "W", "C", "G")
    assert algorithm_letters("stationary-y", ("D", "H", "W")) == ("N", "D", "H", "W", "F", "G")
    assert algorithm_letters("stationary-w", ("H", "W")) == ("N", "H", "W", "C", "F", "G")
    assert algorithm_letters("integrated", ("H", "W")) == ("N", "H", "W", "F", "G")
    assert read(algorithm="stationary-w", grid="{H: 2, G: 1, F: 3}").grid.ranks == 6


def test_choices_of_the_form_are_those_of_the_layer() -> None:
    fields = LayerForm.model_fields
    assert get_args(fields["dtype"].annotation) == constants.DTYPES
    assert ("auto", *ROWS) == constants.ALGORITHM_NAMES


TYPES: list[tuple[dict[str, str], str, int, str]] = [
    ({"strides": "2"}, "unknown key 'strides'", 7, "stride; keys of a layer are name, layer"),
    ({"Kernel": "2"}, "unknown key 'Kernel'", 7, "kernel_size"),
    ({"kernel_size": "'3'"}, "kernel_size can't be '3', text", 5, "an integer from 1 to 2**31 - 1, or a list"),
    ({"kernel_size": "3.0"}, "kernel_size can't be 3.0, a number with a point", 5, "an integer"),
    ({"kernel_size": "[3, true]"}, "kernel_size[1] can't be true, a truth value", 5, "an integer"),
    ({"kernel_size": "-"}, "kernel_size is missing", 1, "kernel_size: an integer"),
    ({"grid": "-"}, "grid is missing", 1, "grid: a mapping of axis name to ranks"),
    ({"stride": "0"}, "stride can't be 0", 7, "from 1"),
    ({"stride": "[1, -1]"}, "stride[1] can't be -1", 7, "from 1"),
    ({"stride": ""}, "stride can't be nothing", 7, "an integer"),
    ({"bias": "1"}, "bias can't be 1, an integer", 7, "true or false"),
    ({"bias": "yes"}, "bias can't be 'yes', text", 7, "true or false"),
    ({"layer": "Conv2D"}, "layer can't be 'Conv2D'", 2, "conv2d; conv1d, conv2d, conv3d, conv_transpose1d, "),
    ({"dtype": "flaot32"}, "dtype can't be 'flaot32'", 7, "float32; "),
    ({"algorithm": "stationary_x"}, "algorithm can't be 'stationary_x'", 7, "stationary-x; "),
    ({"padding": "sam"}, "padding can't be 'sam'", 7, "same; "),
    ({"padding": "-1"}, "padding can't be -1", 7, "from 0"),
    ({"padding": "[1, [1, 2]]"}, "padding[1] can't be [1, 2]", 7, "[lo, hi]"),
    ({"padding": "[[1, 2], [3]]"}, "padding[1] can't be [3]", 7, "[lo, hi]"),
    ({"padding": "[[1, 2], [3, -4]]"}, "padding[1][1] can't be -4", 7, "from 0"),
    ({"groups": "0"}, "groups can't be 0", 7, "divides C and out_channels"),
    ({"input": "[8, 64, 14, 0]"}, "input[3] can't be 0", 3, "integers from 1"),
    ({"input": "[2147483648, 64, 14, 15]"}, "input[0] can't be 2147483648", 3, "2**31 - 1"),
    ({"out_channels": "[3]"}, "out_channels can't be [3]", 4, "an integer"),
    ({"name": "true"}, "name can't be true, a truth value", 1, "a Python identifier"),
    ({"grid": "[2]"}, "grid can't be [2]", 6, "mapping"),
    ({"grid": "{N: 0}"}, "grid.N can't be 0", 6, "mapping"),
    ({"grid": "{N: two}"}, "grid.N can't be 'two', text", 6, "mapping"),
    ({"options": "{holdx: stored}"}, "unknown key 'holdx' in options", 7, "hold_x; "),
    ({"options": "{hold_x: store}"}, "options.hold_x can't be 'store'", 7, "stored; gathered or stored"),
    ({"machine": "3"}, "machine can't be 3, an integer", 7, "text"),
    ({"target": "[cpu]"}, "target can't be ['cpu']", 7, "cuda[:sm_NN]"),
    ({"distribution": "{x: [N], w: [1, 2]}"}, "distribution.w[0] can't be 1, an integer", 7, "axis"),
    ({"distribution": "{x: [], w: []}"}, "distribution.y is missing", 7, "y: a list"),
    ({"distribution": "{x: [], w: [], y: [], z: []}"}, "unknown key 'z' in distribution", 7, "x, w, y"),
]


@pytest.mark.parametrize(("changed", "fact", "line", "hint"), TYPES)
def test_wrong_types_and_keys(changed: dict[str, str], fact: str, line: int, hint: str) -> None:
    error = refuse(**changed)
    assert error.fact.startswith(fact)
    assert error.where == f"f.yaml:{line}"
    assert hint in error.hint


VALUES: list[tuple[dict[str, str], str, int, str]] = [
    ({"kernel_size": "[3]"}, "kernel_size has length 1, conv2d has spatial dimensions H, W", 5, "a list of 2"),
    ({"dilation": "[1, 1, 1]"}, "dilation has length 3", 7, "one number"),
    ({"padding": "[1]"}, "padding has length 1", 7, "[[1, 1], [1, 1]]"),
    ({"padding": "[[1, 2]]"}, "padding has length 1", 7, "[[1, 1], [1, 1]]"),
    ({"padding": "same", "stride": "[1, 2]"}, "padding same with stride [1, 2]", 7, "padding: [[1, 1], [1, 1]]"),
    (
        {"padding": "same", "kernel_size": "2147483647", "dilation": "9"},
        "padding same of 19327352814 rows",
        7,
        "smaller",
    ),
    ({"input": "[8, 64, 14]"}, "input has 3 extents, conv2d takes 4", 3, "input: [N, C, H, W]"),
    ({"layer": "conv3d"}, "input has 4 extents, conv3d takes 5", 3, "input: [N, C, D, H, W]"),
    (
        {"kernel_size": "[3, 20]", "dilation": "2", "padding": "1"},
        "W has no output: 15 rows + padding 1 + 1 = 17, the kernel spans 39 (dilation 2)",
        5,
        "kernel_size up to 9 or 24 rows of padding",
    ),
    ({"kernel_size": "15"}, "H has no output: 14 rows", 5, "kernel_size up to 14 or 1 rows"),
    ({"padding": "2147483647"}, "H has 4294967306 rows of output", 7, "less padding"),
    ({"groups": "5"}, "groups 5 doesn't divide both C=64 and out_channels=96", 7, "groups: 2 or 4 or 8 or 16"),
    ({"groups": "64"}, "groups 64 doesn't divide both", 7, "groups: 16 or 32"),
    ({"input": "[2147483647, 2147483647, 14, 15]"}, "x has 2147483647*2147483647*14*15 =", 3, "smaller"),
    ({"padding": "[[0, 2147483000], [0, 2147483000]]"}, "y has 8*96*", 3, "smaller"),
    ({"memory_format": "channels_last", "layer": "conv1d", "input": "[8, 64, 14]"}, "conv1d has no", 7, "contiguous"),
    ({"target": "gpu"}, "target 'gpu' is unknown", 7, "cuda:sm_90"),
    ({"target": "cuda:90"}, "target 'cuda:90' is unknown", 7, "cuda:sm_90"),
    ({"target": '"cpu\\n"'}, "target 'cpu\\n' is unknown", 7, "cpu"),
    ({"machine": "''"}, "machine is empty", 7, "remove the line"),
    ({"name": "class"}, "name 'class' is a Python keyword", 1, "name: class_"),
    ({"name": "3x3"}, "name '3x3' is not a Python identifier", 1, "name: _3x3"),
    ({"name": "res/5"}, "name 'res/5' is not a Python identifier", 1, "name: res_5"),
    ({"name": "torch"}, "a layer named torch would hide the package torch", 1, "torch_layer"),
    ({"name": "a" * 101}, "has 101 characters, more than 100", 1, "name: a"),
    ({"grid": "{}"}, "grid has no axes", 6, "grid: {N: 2}"),
    ({"grid": "{none: 2}"}, "'none' can't name an axis: layouts use the word", 6, "data"),
    ({"grid": "{partial: 2}"}, "'partial' can't name an axis", 6, "data"),
    ({"grid": "{for: 2}"}, "'for' can't name an axis: it is a Python keyword", 6, "data"),
    ({"grid": "{'*': 2}"}, "'*' can't name an axis", 6, "data"),
    ({"grid": "{a-b: 2}"}, "'a-b' can't name an axis", 6, "data"),
    ({"grid": "{a: 65537}"}, "grid has 65537 ranks, more than 65536", 6, "65536"),
    ({"grid": "{a: 512, b: 129}"}, "grid has 512*129 = 66048 ranks, more than 65536", 6, "65536"),
    ({"grid": "{" + ", ".join(f"a{i}: 1" for i in range(17)) + "}"}, "grid has 17 axes", 6, "one rank"),
    (
        {"algorithm": "stationary-x", "grid": "{N: 2, F: 1}"},
        "algorithm stationary-x on conv2d has no role for an axis named 'F'",
        6,
        "axes N, H, W, C, G; or algorithm stationary-y, stationary-w, integrated, auto",
    ),
    ({"algorithm": "sample", "grid": "{H: 2}"}, "algorithm sample on conv2d has no role", 6, "axes N, G"),
    ({"algorithm": "spatial", "grid": "{D: 2}"}, "algorithm spatial on conv2d has no role", 6, "axes N, H, W, G"),
    ({"algorithm": "spatial", "grid": "{data: 2}"}, "no role for an axis named 'data'", 6, "or algorithm auto"),
    ({"roles": "{forward: {N: N}}"}, "roles without distribution", 7, "add distribution"),
    ({"roles": "{}"}, "roles without distribution", 7, "add distribution"),
    ({"algorithm": "auto", "roles": "{}"}, "algorithm auto beside roles", 8, "remove algorithm, or roles"),
]


@pytest.mark.parametrize(("changed", "fact", "line", "hint"), VALUES)
def test_values_that_cannot_work(changed: dict[str, str], fact: str, line: int, hint: str) -> None:
    error = refuse(**changed)
    assert fact in error.fact
    assert error.where == f"f.yaml:{line}"
    assert hint in error.hint


@pytest.mark.parametrize(
    ("extra", "fact", "line", "hint"),
    [
        ("algorithm: auto\n", "algorithm auto beside distribution", 7, "remove algorithm, or distribution"),
        ("roles:\n  foward: {N: N}\n", "unknown key 'foward' in roles", 9, "forward; keys in roles are"),
        ("roles:\n  forward:\n    N: N\n    Q: C\n", "axis 'Q' of roles.forward is not in the grid", 11, "N, C"),
        ("roles:\n  forward:\n    N: D\n", "conv2d has no role 'D', given to axis 'N'", 10, "N, C, F, G, H, W, none"),
        ("roles:\n  forward:\n    N: n\n", "conv2d has no role 'n', given to axis 'N'", 10, "N, C, F"),
        ("roles:\n  forward:\n    N: 3\n", "roles.forward.N can't be 3, an integer", 10, "a mapping of axis to N"),
        ("roles: {forward: [N]}\n", "roles.forward can't be ['N']", 8, "a mapping of axis"),
    ],
)
def test_roles_refused(extra: str, fact: str, line: int, hint: str) -> None:
    error = refuse(STORED + extra)
    assert fact in error.fact
    assert error.where == f"f.yaml:{line}"
    assert hint in error.hint


@pytest.mark.parametrize(
    ("x", "fact", "hint"),
    [
        ('[N, C, "*"]', "distribution.x has 3 entries, x has 4 dimensions to split", "N, C, H, W"),
        ('[N, c, "*", "*"]', "axis 'c' of distribution.x is not in the grid", "C; the grid's axes are N, C"),
        ('[N, ["*"], "*", "*"]', "axis '*' of distribution.x is not in the grid", '"*" for no axis'),
        ('[N, [C, N], "*", "*"]', "axis 'N' stands twice in distribution.x", "once"),
        ('[N, [C, C], "*", "*"]', "axis 'C' stands twice in distribution.x", "once"),
    ],
)
def test_distributions_refused(x: str, fact: str, hint: str) -> None:
    text = f'distribution:\n  w: ["*", "*"]\n  x:\n    {x}\n  y: ["*", "*", "*", "*"]\n'
    error = refuse(text)
    assert fact in error.fact
    assert error.where == ("f.yaml:9" if "entries" in fact else "f.yaml:10")
    assert hint in error.hint


def test_several_mistakes_are_one_error_that_counts_the_others() -> None:
    error = refuse(foo="1", stride="0", dilation="[1, 0]", grid="-")
    assert str(error).splitlines()[:2] == [
        "error: unknown key 'foo'  (f.yaml:6)",
        "  also    3 more mistakes: stride, dilation[1], grid",
    ]


@pytest.mark.parametrize("data", [None, [], "x", {1: 2}, {"name": float("nan")}, {"grid": {1: 2}}, {"input": (1, 2)}])
def test_plain_data_that_is_no_layer(data: Any) -> None:
    with pytest.raises(InputError) as caught:
        layer_from_dict(data)
    assert caught.value.where == ""


def test_locate_fills_in_what_deeper_layers_leave_open() -> None:
    source = Source("f.yaml", {(): 1, ("grid",): 4, ("grid", "chan"): 5})
    error = InputError("fact", ("grid", "chan"), (Note("layer", "conv2d", ("layer",)), Note("axis", "2 ranks")))
    assert locate(error, source) is error
    assert error.where == "f.yaml:5"
    assert error.located == {("layer",): "f.yaml:1"}
    assert locate(error, Source("other.yaml")).where == "f.yaml:5"
    assert locate(InputError("fact"), Source()).where == ""
