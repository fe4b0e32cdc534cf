"""Running statistics that travel together: the same numbers to the last bit, in one message of a step of training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import permutations
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from free_networks import imported
from networks_on_ranks import with_passes
from test_networks_modes import WAYS, X, state
from test_networks_training import exported
from torch import Tensor, nn

from convgen.algebra.grid import Grid
from convgen.cost.network import volume
from convgen.errors import InputError
from convgen.network_compiler import CompiledNetwork, compile_network, compile_text
from convgen.operations.running import PartStatistics
from convgen.passes.bucket_statistics import BucketStatistics
from convgen.passes.chunk_collectives import ChunkCollectives
from convgen.plan.program.edited import read_text
from convgen.program.chunks import in_chunks
from convgen.program.flow import Start, Wait, forward
from convgen.program.network import Bucket, Program
from convgen.program.network_text import show
from convgen.program.norms import summed_statistics
from convgen.program.verify.flights import flight_faults, order_faults
from convgen.program.verify.network import faults
from convgen.spec.exported import graph_of
from convgen.verify.virtual import VirtualTransport, World

NORMS = 6  # of the ResNet
NORMED: dict[str, Callable[[nn.Module], Any]] = {"none": lambda model: None, **WAYS}


def compiled(grid: dict[str, int], statistics: str = "local", **options: Any) -> CompiledNetwork:
    graph, _ = exported(0.0)
    return compile_network(graph, Grid(tuple(grid.items())), statistics=statistics, **options)


def both(tmp_path: Path, grid: dict[str, int], statistics: str = "local", **options: Any) -> list[Any]:
    """Packages without and with the pass, and nothing else in flight."""
    one = compiled(grid, statistics, **options)
    some = with_passes(one), with_passes(one, BucketStatistics())
    assert not some[0].program.forward_buckets and some[1].program.forward_buckets
    return [imported(c.package().files, tmp_path / str(i)) for i, c in enumerate(some)]


def on_ranks(net: Any, program: Callable[[Any, Any, list[Any]], Any], start: Mapping[str, Tensor]) -> list[Any]:
    """`program(model, mesh, what is sent)` on virtual ranks, from this state."""

    def run(end: VirtualTransport) -> Any:
        mesh = net.init_mesh("cpu", transport=end)
        model = net.Network(mesh)
        model.load_full(dict(start))
        return program(model, mesh, end.sent)

    return World(prod(net.NET.grid.values())).run(run)


def after_a_step(net: Any, freeze: Callable[[nn.Module], Any]) -> Callable[..., Any]:
    """Output, gradients and state, and all that forward sent."""

    def program(model: Any, mesh: Any, sent: list[Any]) -> Any:
        model.train()
        freeze(model)
        x, before = net.scatter("x", X, mesh), len(sent)
        y = model(x)
        forth = [(s.collective, s.bytes) for s in sent[before:]]
        y.square().sum().backward()
        return y.detach(), model.full_gradients(), dict(model.full_state_dict()), forth

    return program


@pytest.mark.parametrize("way", NORMED)
@pytest.mark.parametrize(("grid", "statistics"), [({"N": 2}, "local"), ({"N": 2, "H": 2}, "spatial")], ids=str)
def test_not_a_bit_changes(grid: dict[str, int], statistics: str, way: str, tmp_path: Path) -> None:
    """Whichever batch norms are in evaluation; of those alone that are in training something travels."""
    nets = both(tmp_path, grid, statistics)
    one, other = (on_ranks(net, after_a_step(net, NORMED[way]), state()) for net in nets)
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a[:3], b[:3], rtol=0, atol=0)
        sums = [sum(kind == "all_reduce" for kind, _ in found[3]) for found in (a, b)]
        training = {"none": NORMS, "all": 0, "first": NORMS - 1, "containers": 1, "others": 1}[way]
        assert sums[0] - sums[1] == max(0, training - 1), sums
        assert sum(size for _, size in a[3]) == sum(size for _, size in b[3])


def test_what_is_sent_is_said() -> None:
    program = with_passes(compiled({"N": 2}), BucketStatistics()).program
    (bucket,) = program.forward_buckets
    assert len(bucket.steps) == NORMS
    said = [one for one in volume(program)["forward"] if one["step"] == bucket.name]
    assert [one["of"] for one in said] == [list(bucket.steps)]
    assert said[0]["bytes_sent_per_rank"] == [8 * 2 * sum(_channels(program))] * 2


def _channels(program: Program) -> list[int]:
    return [program.values[m.value].shape[1] for m in summed_statistics(program)]


def test_in_evaluation_nothing_travels(tmp_path: Path) -> None:
    _, net = both(tmp_path, {"N": 2})

    def program(model: Any, mesh: Any, sent: list[Any]) -> int:
        model.eval()
        x, before = net.scatter("x", X, mesh), len(sent)
        model(x)
        return len(sent) - before

    assert on_ranks(net, program, state()) == [0, 0]


def test_blocks_that_are_computed_again_send_them_once(tmp_path: Path) -> None:
    nets = both(tmp_path, {"N": 2}, again=("layer1", "layer2"))
    one, other = (on_ranks(net, after_a_step(net, NORMED["first"]), state()) for net in nets)
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a[:3], b[:3], rtol=0, atol=0)
    program = with_passes(compiled({"N": 2}, again=("layer1",)), BucketStatistics()).program
    names = [one["step"] for one in volume(program)["backward"]]
    assert not any("statistics" in name for name in names)


class Twice(nn.Module):
    """A batch norm that is called twice, another whose buffer is read behind it, and one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.shown, self.alone = nn.BatchNorm2d(3), nn.BatchNorm2d(3), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.alone(self.shown(self.one(self.one(x) * 2 + 1)))
        return y + self.shown.running_mean.view(1, 3, 1, 1)


def test_of_a_norm_that_is_called_twice_the_last_alone(tmp_path: Path) -> None:
    """And never what an operation behind it reads."""
    torch.manual_seed(1)
    module, x = Twice().double(), torch.randn(4, 3, 6, 5, dtype=torch.float64)
    one = compile_network(graph_of(module, (x,), name="twice")[0], Grid((("N", 2),)), statistics="local")
    some = [with_passes(one), with_passes(one, BucketStatistics())]
    (bucket,) = some[1].program.forward_buckets
    assert len(bucket.steps) == 2 and not any("shown" in step for step in bucket.steps)
    nets = [imported(c.package().files, tmp_path / str(i)) for i, c in enumerate(some)]

    def step(net: Any) -> Callable[..., Any]:
        def program(model: Any, mesh: Any, _: list[Any]) -> Any:
            y = model(net.scatter("x", x, mesh))
            return y.detach(), dict(model.full_state_dict())

        return program

    found, other = (on_ranks(net, step(net), module.state_dict()) for net in nets)
    torch.testing.assert_close(found, other, rtol=0, atol=0)


def test_they_travel_as_one_sum_or_by_chunks() -> None:
    """The pass that makes chunks leaves them, before and behind; those that are in chunks are no step of their own."""
    for passes in permutations((ChunkCollectives(2), BucketStatistics())):
        program = with_passes(compiled({"N": 2}), *passes).program
        assert [len(bucket.steps) for bucket in program.forward_buckets] == [NORMS] and not [*faults(program)]
    program = with_passes(compiled({"N": 2})).program
    rows = [*program.rows]
    first = next(i for i, row in enumerate(rows) if isinstance(row.bound.operation, PartStatistics))
    rows[first] = in_chunks(rows[first], program.grid, 2)
    assert rows[first].chunks is not None
    program = BucketStatistics().run(replace(program, rows=tuple(rows)))
    assert [len(bucket.steps) for bucket in program.forward_buckets] == [NORMS - 1] and not [*faults(program)]


# ---- Text, verifier ----


def program_of() -> Program:
    return with_passes(compiled({"N": 2}), BucketStatistics()).program


def read(text: str) -> Program:
    return compile_text(exported(0.0)[0], read_text(text, "edited.txt")).program


def test_a_text_is_read_back_and_edited() -> None:
    program = program_of()
    text = show(program)
    assert show(read(text)) == text
    lines = text.splitlines()
    wait = next(line for line in lines if line.strip().startswith("wait %statistics"))
    renewed = next(line for line in lines if "running_statistics" in line)
    early = [line for line in lines if line != renewed]
    early.insert(early.index(wait), renewed)
    for wrong in ([line for line in lines if line != wait], [line for line in lines if line != renewed], early):
        with pytest.raises(InputError):
            read("\n".join(wrong))


FAULTS: dict[str, Callable[[Bucket], Bucket]] = {
    "in 2 buckets": lambda b: replace(b, steps=(*b.steps, b.steps[0])),
    "is no sum of running statistics": lambda b: replace(b, steps=(*b.steps, "nothing")),
    "over ('N',) of float64": lambda b: replace(b, over=()),
    "of float32": lambda b: replace(b, dtype="float32"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bucket_that_is_wrong_is_found(fault: str) -> None:
    program = program_of()
    assert not [*flight_faults(program)] and not [*faults(program)] and BucketStatistics().run(program) is program
    (bucket,) = program.forward_buckets
    wrong = replace(program, forward_buckets=(FAULTS[fault](bucket),))
    assert any(fault in found for found in flight_faults(wrong))


def test_what_is_read_before_it_is_there_is_found() -> None:
    program = program_of()
    steps = [*forward(program)]
    at = next(i for i, s in enumerate(steps) if isinstance(s, Wait))
    late = [*steps[:at], *steps[at + 1 :], steps[at]]
    assert not [*order_faults(program, steps)]
    assert any("reads" in fault for fault in order_faults(program, late))
    assert any("never waited" in fault for fault in order_faults(program, [*steps[:at], *steps[at + 1 :]]))
    started = next(i for i, s in enumerate(steps) if isinstance(s, Start))
    assert started < at - 2  # and something is computed meanwhile


def test_statistics_of_the_whole_batch_need_none() -> None:
    program = compiled({"N": 2}, "global").program
    assert BucketStatistics().run(program) is program
