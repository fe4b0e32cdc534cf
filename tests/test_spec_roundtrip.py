"""Random valid layers, and random damage to their files: a Layer that survives writing, or an InputError."""

from __future__ import annotations

import json
import random
from io import StringIO
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML
from sampling import draws

from convgen.algebra.conv import PHASES, SPATIAL_NAMES
from convgen.errors import InputError
from convgen.spec import layer as constants
from convgen.spec.layer import Layer
from convgen.spec.placement import algorithm_letters
from convgen.spec.reader import layer_from_dict, layer_to_dict
from convgen.spec.yaml import parse_yaml

sizes = st.integers(1, 3)
# What can be written in UTF-8; asked for by that name, hypothesis takes seconds to find it.
encodable = st.characters(exclude_categories=("Cs",))
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True, alphabet=encodable).map(lambda s: s + "1")


def each(draw: st.DrawFn, values: st.SearchStrategy[int], dims: int) -> Any:
    return draw(st.one_of(values, st.lists(values, min_size=dims, max_size=dims)))


@st.composite
def layer_dicts(draw: st.DrawFn) -> dict[str, Any]:
    """The layer file's keys with values that can work; optional keys come and go."""
    dims = draw(st.integers(1, 3))
    letters = SPATIAL_NAMES[dims]
    groups = draw(sizes)
    data: dict[str, Any] = {
        "name": draw(names),
        "layer": f"conv{dims}d",
        "input": [draw(sizes), groups * draw(sizes), *(draw(st.integers(20, 99)) for _ in letters)],
        "out_channels": groups * draw(sizes),
        "kernel_size": each(draw, st.integers(1, 5), dims),
    }
    pairs = st.lists(st.lists(st.integers(0, 4), min_size=2, max_size=2), min_size=dims, max_size=dims)
    lists = st.lists(st.integers(0, 4), min_size=dims, max_size=dims)
    optional: dict[str, Any] = {
        "stride": each(draw, sizes, dims),
        "padding": draw(st.one_of(st.integers(0, 4), lists, pairs, st.sampled_from(["same", "valid"]))),
        "dilation": each(draw, sizes, dims),
        "bias": draw(st.booleans()),
        "dtype": draw(st.sampled_from(constants.DTYPES)),
        "memory_format": draw(st.sampled_from(["contiguous", "channels_last"][: 1 + (dims > 1)])),
        "target": draw(st.sampled_from(["cpu", "cuda", "cuda:sm_90", "hip:gfx942", "sw26010"])),
        # ruamel writes ":0" without quotes into a flow mapping, and does not read that.
        "machine": draw(
            st.text(st.characters(categories=("L", "N", "P", "Zs")), min_size=1).filter(
                lambda text: not text.startswith(":")
            )
        ),
        "options": draw(
            st.fixed_dictionaries(
                {},
                optional={
                    "hold_x": st.sampled_from(["gathered", "stored"]),
                    "sums": st.sampled_from(["ordered", "native"]),
                    "kernels": st.dictionaries(st.sampled_from(PHASES), st.sampled_from(["aten", "gemm BP=16"])),
                },
            )
        ),
    }
    if groups > 1:
        data["groups"] = groups
    data |= {key: value for key, value in optional.items() if draw(st.booleans())}
    if data.get("padding") == "same":
        data["stride"] = 1
    data |= draw(placements(letters))
    order = draw(st.permutations(list(data)))
    return {key: data[key] for key in order}


@st.composite
def placements(draw: st.DrawFn, letters: tuple[str, ...]) -> dict[str, Any]:
    """A grid with an algorithm, with an explicit layout, or with nothing."""
    algorithm = draw(st.sampled_from((None, None, *constants.ALGORITHM_NAMES)))
    known = st.sampled_from(algorithm_letters(algorithm, letters)) if algorithm and algorithm != "auto" else names
    axes = draw(st.lists(known, min_size=1, max_size=4, unique=True))
    data: dict[str, Any] = {"grid": {axis: draw(sizes) for axis in axes}}
    if algorithm:
        return data | {"algorithm": algorithm}
    if draw(st.booleans()):
        return data
    tensors = {"x": 2 + len(letters), "w": 2, "y": 2 + len(letters)}
    data["distribution"] = {tensor: draw(entries(axes, count)) for tensor, count in tensors.items()}
    roles = st.sampled_from(("N", "C", "F", "G", *letters, "none", None))
    maps = st.dictionaries(st.sampled_from(axes), roles)
    if draw(st.booleans()):
        data["roles"] = {phase: draw(maps) for phase in draw(st.lists(st.sampled_from(PHASES), unique=True))}
    return data


@st.composite
def entries(draw: st.DrawFn, axes: list[str], count: int) -> list[Any]:
    split: list[list[str]] = [[] for _ in range(count)]
    for axis in draw(st.permutations(axes)):
        if (place := draw(st.integers(-1, count - 1))) >= 0:
            split[place].append(axis)
    one = [draw(st.sampled_from([found[0], found])) if len(found) == 1 else found for found in split]
    return [found or draw(st.sampled_from(["*", "none", None, []])) for found in one]


def yaml_of(data: dict[str, Any], flow: bool) -> str:
    yaml: Any = YAML(typ="safe", pure=True)
    yaml.default_flow_style = flow
    yaml.sort_base_mapping_type_on_output = False
    stream = StringIO()
    yaml.dump(data, stream)
    return stream.getvalue()


@settings(max_examples=draws(80))
@given(layer_dicts(), st.booleans())
def test_round_trip(data: dict[str, Any], flow: bool) -> None:
    layer = layer_from_dict(data)
    text = yaml_of(data, flow)
    document = parse_yaml(text, "f.yaml")
    assert document.data == data
    assert list(document.data) == list(data)
    assert layer_from_dict(document.data, document.source) == layer

    full = layer_to_dict(layer)
    assert full == eval(repr(full))
    assert layer_from_dict(full) == layer
    assert layer_to_dict(layer_from_dict(full)) == full
    for written in (yaml_of(full, flow), json.dumps(full)):
        assert layer_from_dict(parse_yaml(written).data) == layer
    for key, value in data.items():
        if isinstance(value, (bool, str)) or key in ("input", "groups", "out_channels", "grid"):
            assert full.get(key) == value or key == "padding"


@settings(max_examples=draws(100))
@given(layer_dicts())
def test_lines_are_those_of_the_text(data: dict[str, Any]) -> None:
    text = yaml_of(data, flow=False)
    lines = text.splitlines()
    for path, line in parse_yaml(text).source.lines.items():
        if path and isinstance(path[-1], str):
            assert path[-1] in lines[line - 1]


ODD = (
    "", "~", "true", "-1", "0", "3.0", "1e400", ".nan", "'", '"', "[", "]", "{", "}", "[]", "{}",
    "- ", ": ", "? ", "&a ",
    "*a",
    "!!str ", "!x ", "#", "|", ">", "%", "@", "`", "\t", "\n", "\r", "---\n", "...\n", "<<: ",
    "none", "*", "same", "0x7f",
    "99999999999", "9" * 30, "\\ud800", "\x00", "\x85", "\u2028", "\ufeff",
    "é", "𝔸", "N", "[[1, 2], [3, 4]]", "name: a\n",
    "roles: {}\n",
    "  ", "%YAML 1.1\n---\n", "!!python/name:os.system ", '"\\x', "'\\U00110000'", "{? }", "[,]", "- - - -",
)  # fmt: skip


def damaged(text: str, rng: random.Random) -> str:
    """A file after a few deletions, insertions, replacements and swaps of its parts."""
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(text) + 1)
        match rng.randrange(5):
            case 0:
                text = text[:at] + text[at + rng.randint(1, 12) :]
            case 1:
                text = text[:at] + rng.choice(ODD) + text[at:]
            case 2:
                line = rng.choice(text.splitlines() or [""])
                text = text.replace(line, line.split(":")[0] + ": " + rng.choice(ODD), 1)
            case 3:
                text = text[:at] + chr(rng.choice((rng.randrange(256), rng.randrange(0xD800)))) + text[at + 1 :]
            case _:
                lines = text.splitlines(keepends=True)
                rng.shuffle(lines)
                text = "".join(lines[: rng.randint(1, 99)])
    return text


def layer_or_refusal(text: str) -> Layer | InputError:
    try:
        document = parse_yaml(text, "f.yaml")
        layer = layer_from_dict(document.data, document.source)
    except InputError as error:
        assert error.where.startswith("f.yaml:")
        assert 1 <= int(error.where.removeprefix("f.yaml:")) <= 1 + len(text.splitlines())
        assert error.fact and error.hint
        assert all(line.isprintable() for line in str(error).split("\n"))
        assert len(str(error)) < 1000
        return error
    assert layer_from_dict(layer_to_dict(layer)) == layer
    return layer


@pytest.mark.slow
@settings(max_examples=draws(300))
@given(layer_dicts(), st.booleans(), st.integers(0, 2**32))
def test_damaged_files_are_read_or_refused(data: dict[str, Any], flow: bool, seed: int) -> None:
    rng = random.Random(seed)
    layer_or_refusal(damaged(yaml_of(data, flow), rng))


texts = st.text(encodable, max_size=5)
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), texts, st.sampled_from(ODD))
anything = st.recursive(scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=3))


@settings(max_examples=draws(300))
@given(layer_dicts(), st.data())
def test_odd_values_are_read_or_refused(data: dict[str, Any], choice: st.DataObject) -> None:
    """As above, past YAML: one value at any depth replaced by anything."""
    holder: Any = data
    key: Any = choice.draw(st.sampled_from(sorted(data)))
    while isinstance(holder[key], (dict, list)) and holder[key] and choice.draw(st.booleans()):
        holder = holder[key]
        key = choice.draw(st.sampled_from(sorted(holder) if isinstance(holder, dict) else range(len(holder))))
    value = choice.draw(anything)
    assume(value is not holder[key])
    holder[key] = value
    try:
        layer = layer_from_dict(data)
    except InputError as error:
        assert error.fact and error.hint
    else:
        assert layer_from_dict(layer_to_dict(layer)) == layer
