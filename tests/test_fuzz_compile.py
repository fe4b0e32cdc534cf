"""Whatever is written in a layer file: a module that is right on every rank, or a refusal with a way out."""

from __future__ import annotations

import random
from typing import Any

import pytest
from sampling import draws

from convgen.compiler import compile_layer
from convgen.errors import InputError
from convgen.spec.reader import layer_from_dict
from convgen.verify.check import check

BATCHES, CASES = draws(7), 12
LETTERS = ("N", "D", "H", "W", "C", "F", "G")
ALGORITHMS = {
    "auto": LETTERS,
    "sample": ("N",),
    "spatial": ("N", "H", "W"),
    "stationary-x": ("N", "W", "C"),
    "stationary-y": ("N", "W", "F"),
    "stationary-w": ("N", "W", "C", "F"),
    "integrated": ("N", "W", "F"),
    "stationary-z": LETTERS,
}
ROLES = ("N", "C", "F", "G", "D", "H", "W", "none")


def draw(rng: random.Random, name: str) -> dict[str, Any]:
    """A layer file's content that looks like one; about half of them can't work."""
    dims = rng.choice((1, 2, 2, 3))
    groups = rng.choice((1, 1, 1, 2, 4))
    channels, filters = groups * rng.randint(1, 4), groups * rng.randint(1, 4)
    algorithm = rng.choice(list(ALGORITHMS)) if rng.random() < 0.5 else None
    letters = LETTERS if algorithm is None or rng.random() < 0.2 else ALGORITHMS[algorithm]
    axes = rng.sample(letters, rng.randint(1, min(3, len(letters))))
    layer: dict[str, Any] = {
        "name": name,
        "layer": f"conv{dims}d",
        "input": [rng.randint(1, 4), channels, *(rng.randint(3, 9) for _ in range(dims))],
        "out_channels": filters,
        "kernel_size": [rng.randint(1, 4) for _ in range(dims)],
        "stride": rng.choice((1, 1, 2, [rng.randint(1, 3) for _ in range(dims)])),
        "padding": rng.choice((0, 1, "valid", "same", [[rng.randint(0, 2), rng.randint(0, 2)] for _ in range(dims)])),
        "dilation": rng.choice((1, 1, 2)),
        "groups": groups,
        "bias": rng.random() < 0.4,
        "dtype": "float64",
        "memory_format": rng.choice(("contiguous", "contiguous", "contiguous", "channels_last")),
        "grid": {axis: rng.choice((1, 2, 2, 3)) for axis in axes},
        "options": {"hold_x": rng.choice(("gathered", "stored")), "sums": rng.choice(("ordered", "native"))},
    }
    if algorithm is not None:
        layer["algorithm"] = algorithm
        return layer
    layer["distribution"] = {
        "x": entries(rng, axes, 2 + dims),
        "w": entries(rng, axes, 2),
        "y": entries(rng, axes, 2 + dims),
    }
    phases = [p for p in ("forward", "backward_data", "backward_filter") if rng.random() < 0.5]
    if phases:
        layer["roles"] = {p: {a: rng.choice(ROLES) for a in axes if rng.random() < 0.9} for p in phases}
    return layer


def entries(rng: random.Random, axes: list[str], count: int) -> list[Any]:
    """Each axis on one dimension or on none, now and then on two."""
    lists: list[list[str]] = [[] for _ in range(count)]
    for axis in axes:
        for _ in range(rng.choice((0, *[1] * 20, 2))):
            lists[rng.randrange(count)].append(axis)
    return [("*" if not one else one[0] if len(one) == 1 else one) for one in lists]


@pytest.mark.parametrize("batch", range(BATCHES))
def test_a_module_that_is_right_or_a_refusal(batch: int) -> None:
    rng = random.Random(f"fuzz {batch}")
    right = refused = 0
    for case in range(CASES):
        content = draw(rng, f"fuzz_{batch}_{case}")
        try:
            compiled = compile_layer(layer_from_dict(content))
            compiled.module()
        except InputError as error:
            assert str(error).startswith("error: "), content
            assert error.hint, f"no way out: {error}\n{content}"
            refused += 1
            continue
        report = check(compiled)
        assert report.ok, (content, report)
        right += 1
    assert right, "no case compiled"
    assert refused, "no case was refused"
