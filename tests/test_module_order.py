"""The order in which generated modules post point-to-point messages: none that NCCL's streams could hang in."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from generate import algorithm_problem
from in_order import InOrder
from modules import Case, assert_true, draw, make, run
from sampling import draws
from torch import Tensor

from convgen.algebra.conv import Conv, Spatial
from convgen.algebra.grid import Grid
from convgen.compiler import compile_layer
from convgen.spec.reader import read_layer
from convgen.spec.target import CPU
from convgen.verify.program import global_tensors, reference

FILES = sorted((Path(__file__).resolve().parent.parent / "examples").glob("*.yaml"))
MODES = [
    pytest.param("pairs", True, id="as NCCL"),
    pytest.param("one", True, id="one stream"),
    pytest.param("pairs", False, id="pairs, one after the other"),
    pytest.param("one", False, id="one stream, one after the other"),
]
# Those of example layers whose modules send point to point; the others have collectives of torch's alone.
EXCHANGING = {"causal_1d", "depthwise", "integrated", "spatial_2x2", "stem", "sw26010_rows", "transposed", "volume_3d"}


def example(file: Path) -> Case:
    """An example's layer in float64 on a CPU, under a name of its own."""
    layer = replace(read_layer(str(file)), dtype="float64", target=CPU, name=f"{file.stem}_in_order")
    layer = replace(layer, options=replace(layer.options, core_groups=type(layer.options)().core_groups))
    made = compile_layer(layer)
    return Case(made.layer, made.choice.stored, made.choice.roles)


def messages(case: Case, streams: str, batched: bool, ranks: list[int] | None = None) -> int:
    """Run on ranks whose streams are in order, with right results; how many messages were posted."""
    given = global_tensors(case.layer)
    world = InOrder(case.module, case.layer.grid.ranks, streams, batched)
    ran = run(case, given, world=world, ranks=ranks)
    assert_true(case, ran, reference(case.layer.conv, given))
    return world.posts.get("message", 0)


@pytest.mark.parametrize(("streams", "batched"), MODES)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_examples(file: Path, streams: str, batched: bool) -> None:
    assert bool(messages(example(file), streams, batched)) == (file.stem in EXCHANGING)


@pytest.mark.parametrize(("streams", "batched"), MODES)
def test_any_layer(streams: str, batched: bool) -> None:
    """Halos, rearrangements and uneven all_gathers, the ranks of the mesh in any order."""
    seen, seed = 0, 52000
    while seen < draws(12):
        case, seed = draw(seed, least=2), seed + 1
        order = random.Random(seed).sample(range(case.layer.grid.ranks), case.layer.grid.ranks)
        seen += messages(case, streams, batched, order) > 0


# ---- An order that hangs -------------------------------------------------------------------------------------------


def receives_first(module: Any, *, batched: bool) -> type[Any]:
    """The module's transport, but all receives are posted, and then all sends."""

    class ReceivesFirst(module.TorchTransport):
        def _send_and_receive(self, sends: list[Tensor], receives: list[Tensor], group: Any) -> None:
            dist, me = module.dist, group.ranks.index(self.rank)
            receives[me].copy_(sends[me])
            handle = self.process_group(group.ranks)
            todo = [(dist.irecv, part, peer) for part, peer in zip(receives, group.ranks, strict=True)]
            todo += [(dist.isend, part, peer) for part, peer in zip(sends, group.ranks, strict=True)]
            todo = [one for one in todo if one[2] != self.rank and one[1].numel()]
            if batched:
                work = dist.batch_isend_irecv([dist.P2POp(*one, handle) for one in todo]) if todo else []
            else:
                work = [post(part, peer, group=handle) for post, part, peer in todo]
            for one in work:
                one.wait()

    return ReceivesFirst


ROWS = Conv(2, 3, 4, (Spatial("H", 9, kernel=3, pad_lo=1, pad_hi=1), Spatial("W", 8, kernel=3, pad_lo=1, pad_hi=1)))
HALOS = make(algorithm_problem("spatial", ROWS, Grid((("H", 2), ("W", 2)))), "halos_in_order", random.Random(0))


@pytest.mark.parametrize("streams", ["pairs", "one"])
@pytest.mark.parametrize("batched", [False, True])
def test_receives_before_sends_hang(streams: str, batched: bool) -> None:
    """Every rank comes to a receive that its peer would only send after a receive of its own."""
    world = InOrder(HALOS.module, 4, streams, False, receives_first(HALOS.module, batched=batched))
    with pytest.raises(
        RuntimeError, match=r"every rank waits: rank 0 is at message 1 -> 0.*rank 1 is at message 0 -> 1"
    ):
        run(HALOS, global_tensors(HALOS.layer), world=world)


def test_a_batch_that_runs_together_hides_it() -> None:
    """As does NCCL's grouping: the order of posts is the second of two reasons why ours can't hang."""
    given = global_tensors(HALOS.layer)
    for streams in ("pairs", "one"):
        world = InOrder(HALOS.module, 4, streams, True, receives_first(HALOS.module, batched=True))
        assert_true(HALOS, run(HALOS, given, world=world), reference(ROWS, given))


def test_without_a_peer_every_rank_waits() -> None:
    """The fake itself: who waits for a rank that has ended is told so, at once."""
    group: dict[str, Any] = {}

    def program(end: Any) -> None:
        dist = HALOS.module.dist
        group[str(end.rank)] = dist.new_group([0, 1], timeout=None, use_local_synchronization=True)
        if end.rank == 0:
            dist.irecv(torch.zeros(1), 1, group=group["0"]).wait()

    with pytest.raises(RuntimeError, match="every rank waits: rank 0 is at message 1 -> 0"):
        InOrder(HALOS.module, 2).run(program)


# ---- The message that calls begin with -----------------------------------------------------------------------------


@pytest.mark.parametrize("defers", [False, True])
def test_ranks_that_differ_on_streams(defers: bool) -> None:
    """On a GPU the message goes on beside the work and is read before the call's result is given away; elsewhere it is
    read before anything moves. Both refuse, on all ranks."""
    module, given = HALOS.module, global_tensors(HALOS.layer)

    def program(end: Any) -> str:
        end.defers = defers
        mesh = module.init_mesh("cpu", transport=end)
        local = {name: module.scatter(name, value, mesh) for name, value in given.items()}
        local["w"].requires_grad_(end.rank == 0)
        with pytest.raises(RuntimeError) as refused:
            module.conv(local["x"], local["w"], local.get("bias"), mesh=mesh)
        return str(refused.value)

    world = InOrder(module, HALOS.layer.grid.ranks)
    said = world.run(program)
    assert len(set(said)) == 1
    assert "ranks differ in conv, nothing was computed: requires gradients: w on ranks [0], nothing on" in said[0]
    assert bool(world.posts.get("message")) == defers
