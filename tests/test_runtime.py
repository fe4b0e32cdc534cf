"""templates/runtime by itself: where ranks' pieces lie against the algebra's index sets, what conversions move against
slices of the whole tensor, and what of it a module gets.
"""

from __future__ import annotations

import ast
import builtins
import itertools
import random
from typing import Any

import pytest
import torch
from generate import random_layout
from modules import Case, draw, on_gpu
from runtime_parts import ROOT, layer_of, layout_of
from sampling import draws

from convgen.algebra.layout import Layout as Stored
from convgen.compiler import compile_layer
from convgen.emit.paste import shared_runtime
from convgen.emit.runtime import NETWORK_PARTS, PARTS, imported, names_of, runtime
from convgen.spec.reader import layer_from_dict
from convgen.verify.virtual import VirtualTransport, World

from runtime.clipping import clip_grad_norm_  # isort: skip
from runtime.conversions import (  # isort: skip
    all_gather, all_reduce, consecutive, copy_parts, flat, pack, rearrange, reduce_scatter, take, within,
)  # fmt: skip
from runtime.here import Here, frame_at, held_at
from runtime.layout import common, ith_part
from runtime.mesh import Place, coordinates, members

# ---- Where pieces lie ----------------------------------------------------------------------------------------------


def boxes(found: Any) -> list[Any]:
    """Boxes, a tuple a rank; an empty interval may lie anywhere."""
    return [tuple((int(lo), int(hi)) if lo < hi else "empty" for lo, hi in box) for box in found]


@pytest.mark.parametrize("gpu", [False, True], ids=["padded", "virtual"])
def test_pieces_lie_where_the_algebra_says(gpu: bool) -> None:
    for seed in range(draws(120)):
        case = draw(100 + seed, most=12)
        case = on_gpu(case) if gpu else case
        layer, batch = layer_of(case), case.layer.conv.batch
        for layout in case.schedule.types().values():
            ours = layout_of(case, layout)
            for at, by_algebra in ((frame_at, case.space.frame(layout)), (held_at, case.space.held(layout))):
                found = [at(layer, ours, p, batch) for p in range(case.layer.grid.ranks)]
                assert boxes(found) == boxes(by_algebra), f"{at.__name__} of {layout} in\n{case}"


def test_ranks_lie_where_the_grid_says() -> None:
    for seed in range(draws(40)):
        case = draw(seed, most=24)
        layer, grid = layer_of(case), case.layer.grid
        for position in range(grid.ranks):
            at = coordinates(layer, position)
            assert at == {axis: int(grid.coordinates[axis][position]) for axis in grid.names}
            for count in range(len(grid.names) + 1):
                for axes in itertools.combinations(grid.names, count):
                    assert members(layer, position, axes) == tuple(grid.group(position, axes))


def test_blocks_cover_an_interval_in_order() -> None:
    for extent, parts in itertools.product(range(14), range(1, 7)):
        cut = [ith_part(3, 3 + extent, parts, i) for i in range(parts)]
        assert [lo for lo, _ in cut] == [3, *(hi for _, hi in cut[:-1])]
        assert cut[-1][1] == 3 + extent
        sizes = [hi - lo for lo, hi in cut]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] - sizes[-1] <= 1


def test_common_elements_of_boxes() -> None:
    rng = random.Random(0)
    for _ in range(300):
        a, b = (tuple(tuple(sorted(rng.choices(range(6), k=2))) for _ in range(2)) for _ in range(2))
        elements = [set(itertools.product(*(range(lo, hi) for lo, hi in box))) for box in (a, b)]
        assert set(itertools.product(*(range(lo, hi) for lo, hi in common(a, b)))) == elements[0] & elements[1]


# ---- What conversions move -----------------------------------------------------------------------------------------


def whole(case: Case, tensor: str) -> torch.Tensor:
    shape = layer_of(case).whole_shape(layout_of(case, Stored(tensor, ((),) * len(case.layer.conv.dims(tensor)))), 0)
    shape = (case.layer.conv.batch, *shape[1:]) if tensor in ("x", "y") else shape
    return torch.randn(shape, dtype=case.dtype, generator=torch.Generator().manual_seed(0))


def piece(value: torch.Tensor, box: Any, case: Case) -> torch.Tensor:
    """A rank's part of a whole tensor, in memory of its own."""
    inside = value[tuple(slice(lo, max(lo, hi)) for lo, hi in box)]
    return inside.contiguous(memory_format=layer_of(case).format("bias" if value.dim() == 1 else "x")).clone()


def pairs(count: int) -> Any:
    """Random layouts of a tensor, from and to; a case, the tensor, and both."""
    seed = 0
    while count:
        seed, rng = seed + 1, random.Random(seed)
        case = draw(30000 + seed, least=2, most=8)
        tensor = rng.choice(("x", "w", "y"))
        src, dst = (random_layout(rng, case.layer.conv, case.layer.grid, tensor) for _ in range(2))
        yield case, tensor, src, dst
        count -= 1


def on_ranks(case: Case, program: Any) -> None:
    layer, ranks = layer_of(case), tuple(range(case.layer.grid.ranks))

    def run(end: VirtualTransport) -> None:
        place = Place("test", ranks, end.rank, end, None, set())
        program(Here(layer, place, case.layer.conv.batch))

    World(len(ranks)).run(run)


def test_exchanges_move_what_is_wanted() -> None:
    """Between any two layouts, over all axes."""
    for case, tensor, src, dst in pairs(draws(60)):
        value, a, b = whole(case, tensor), layout_of(case, src), layout_of(case, dst)

        def program(here: Here, given: Any = (case, value, a, b)) -> None:
            case, value, a, b = given
            got = rearrange("t", "exchange", piece(value, here.frame(a), case), a, b, case.layer.grid.names, here)
            assert torch.equal(got, piece(value, here.frame(b), case)), f"{a} to {b} of\n{case}"

        on_ranks(case, program)


def test_gathers_and_sums_over_what_is_split() -> None:
    """all_gather from a layout to copies; reduce_scatter and all_reduce of an addend a rank; take is the way back."""
    for case, tensor, src, _ in pairs(draws(60)):
        value, split = whole(case, tensor), layout_of(case, src)
        axes = tuple(a for a in case.layer.grid.names if any(a in d for d in src.axes))
        copies = layout_of(case, Stored(tensor, ((),) * len(src.axes)))

        def program(
            here: Here,
            case: Case = case,
            value: Any = value,
            split: Any = split,
            copies: Any = copies,
            axes: Any = axes,
        ) -> None:
            mine = piece(value, here.frame(split), case)
            got = all_gather("t", mine, split, copies, axes, here)
            assert torch.equal(got, value)
            assert torch.equal(take(got, copies, split, here), mine)
            group = here.members(axes)
            addend = piece(value, here.frame(copies), case) * (1 + group.index(here.place.me))
            total = sum(range(1, 1 + len(group)))
            torch.testing.assert_close(reduce_scatter("t", addend, copies, split, axes, here), mine * total)
            torch.testing.assert_close(all_reduce("t", addend, copies, copies, axes, here), value * total)

        on_ranks(case, program)


def test_packing_and_unpacking_undo_each_other() -> None:
    for case, tensor, src, _ in pairs(draws(60)):
        layer, layout, value = layer_of(case), layout_of(case, src), whole(case, tensor)
        value = value.contiguous(memory_format=layer.format(tensor))
        pieces = tuple(dict.fromkeys(frame_at(layer, layout, p, value.shape[0]) for p in range(case.layer.grid.ranks)))
        outer = tuple((0, n) for n in value.shape[: len(src.axes)])
        packed = pack(value, outer, pieces, tensor, layer)
        assert torch.equal(packed, torch.cat([flat(within(value, outer, p), layer) for p in pieces]))
        if consecutive(pieces, outer, tensor, layer):
            assert torch.equal(packed, flat(value, layer))
        back = torch.zeros_like(value)
        copy_parts(packed, back, outer, pieces, tensor, layer, unpack=True)
        covered = len(pieces) and sum(layer.size(p, tensor) for p in pieces) == value.numel()
        assert torch.equal(back, value) or not covered


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_clipping_takes_complex_gradients_whole(norm_type: float) -> None:
    """As torch's own does: by magnitudes, not by real parts."""
    generator = torch.Generator().manual_seed(3)
    ours, torchs = ([torch.nn.Parameter(torch.zeros(5, dtype=k)) for k in (torch.cfloat, torch.float)] for _ in "ab")
    for a, b in zip(ours, torchs, strict=True):
        a.grad = torch.randn(5, dtype=a.dtype, generator=generator)
        b.grad = a.grad.clone()
    norms = clip_grad_norm_(ours, 0.5, norm_type), torch.nn.utils.clip_grad_norm_(torchs, 0.5, norm_type)
    assert float(norms[0]) == pytest.approx(float(norms[1]))
    assert all(torch.allclose(a.grad, b.grad) for a, b in zip(ours, torchs, strict=True) if a.grad is not None)


# ---- What a module gets --------------------------------------------------------------------------------------------

SPATIAL = {
    "name": "halo",
    "layer": "conv2d",
    "input": [2, 32, 8, 8],
    "out_channels": 32,
    "kernel_size": 3,
    "padding": 1,
}
SAMPLE = {**SPATIAL, "name": "sample", "grid": {"N": 2}, "algorithm": "sample"}
SPATIAL = {**SPATIAL, "grid": {"H": 2}, "algorithm": "spatial"}


def test_a_module_gets_what_it_needs_and_no_more() -> None:
    samples, halos = (names_of(compile_layer(layer_from_dict(spec)).module())[1] for spec in (SAMPLE, SPATIAL))
    exchanged = {"rearrange", "missing", "PaddedWindow", "Window", "input_rows", "output_rows", "common"}
    assert exchanged <= halos
    assert not exchanged & samples
    assert "all_reduce" in samples & halos
    assert not {"reduce_scatter", "exchange_rim"} & (samples | halos)
    on_gpu = compile_layer(layer_from_dict({**SPATIAL, "target": "cuda:sm_90"})).module()
    assert {"exchange_rim", "Window", "check_local"} <= names_of(on_gpu)[1]
    assert not {"rearrange", "PaddedWindow", "are_small", "aten_forward"} & names_of(on_gpu)[1]


@pytest.mark.parametrize("beside", [False, True], ids=["pasted", "beside"])
def test_every_name_is_defined_and_every_import_used(beside: bool) -> None:
    """Of layers of all kinds, and of the runtime as a file."""
    specs = [{**s, "target": t} for s in (SAMPLE, SPATIAL) for t in ("cpu", "cuda:sm_90", "hip:gfx942", "sw26010")]
    specs += [{**SPATIAL, "bias": True, "memory_format": "channels_last", "dtype": "float16"}]
    shared = shared_runtime() if beside else None
    sources = [compile_layer(layer_from_dict(spec)).module(shared) for spec in specs]
    for source in [*sources, *([shared.text] if shared else [])]:
        tree = ast.parse(source)
        nodes = list(ast.walk(tree))
        taken = {i.name for i in imported(n for n in nodes if isinstance(n, ast.stmt))} | {"annotations"}
        ours = [n for n in nodes if isinstance(n, ast.ImportFrom) and (n.level or "_convgen" in (n.module or ""))]
        taken |= {a.name for n in ours for a in n.names}
        named, own = names_of(source)
        assert not named - taken - own - set(dir(builtins)) - {"__file__", "__name__", "__package__"}
        public = {"Block", "Group", "TorchTransport", "Transport", "clip_grad_norm_"}
        unused = {i.name for i in imported(tree.body)} - named - public
        assert not unused, f"{unused} in\n{source[:2000]}"


def test_parts_import_those_before_them() -> None:
    every = (*PARTS, *NETWORK_PARTS)
    for i, part in enumerate(every):
        tree = ast.parse((ROOT / f"templates/runtime/{part}.py").read_text(encoding="utf-8"))
        used = [n.module for n in tree.body if isinstance(n, ast.ImportFrom) and n.level]
        assert set(used) <= set(every[:i]), part
    files = {path.stem for path in (ROOT / "templates/runtime").glob("*.py")}
    assert files == {*every, "__init__"}


def test_no_name_is_defined_in_two_parts() -> None:
    """They are put together in one file."""
    owners: dict[str, set[str]] = {}
    for statement in runtime().statements:
        for name in statement.names:
            owners.setdefault(name, set()).add(statement.part)
    assert not {name: parts for name, parts in owners.items() if len(parts) > 1}
