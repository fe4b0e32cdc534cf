"""Generated modules on real processes: torch.distributed with gloo behind the seam, one process a rank.

Forked, so the ranks start in a tenth of a second. Numbers must be those of virtual ranks, bit by bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from generate import Problem, algorithm_problem
from modules import Case, Ran, assert_counted, assert_true, draw, make, with_dtype
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from convgen.algebra.conv import Conv, Spatial
from convgen.algebra.grid import Grid
from convgen.algebra.layout import Layout
from convgen.algebra.roles import Roles
from convgen.program.nodes import Convert
from convgen.spec.layer import Options
from convgen.verify.processes import ProcessFailed, how_to_start, run_processes, spawn
from convgen.verify.program import global_tensors, reference, run_rank
from convgen.verify.virtual import VirtualTransport, World

CONV = Conv(
    3, 5, 7, (Spatial("H", 7, kernel=3, pad_lo=1, pad_hi=1), Spatial("W", 5, kernel=3, pad_lo=1, pad_hi=1)), bias=True
)


def named(name: str, algorithm: str, grid: dict[str, int], conv: Conv = CONV, **changes: Any) -> Case:
    problem = algorithm_problem(algorithm, conv, Grid(tuple(grid.items())))
    return make(problem, name, random.Random(name), **changes)


def results(layer: Any, given: dict[str, Tensor], mesh: DeviceMesh) -> dict[str, Tensor]:
    """This rank's blocks of y, dx, dw and dbias."""
    return run_rank(layer, given, mesh, []).blocks


def test_how_processes_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forked, but where autograd has threads."""
    assert how_to_start() == "fork"
    monkeypatch.setattr(Path, "glob", lambda *_: [Path("/proc/self/comm"), Path(__file__).with_name("autograd.txt")])
    monkeypatch.setattr(Path, "read_text", lambda path: "pt_autograd_0\n" if path.suffix else "python\n")
    assert how_to_start() == "spawn"


def test_fresh_interpreters_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    case = named("fresh", "spatial", {"H": 2})
    given, path = global_tensors(case.layer), Path(case.module.__file__ or "")
    forked = run_processes(path, 2, given, 240.0)
    monkeypatch.setattr("convgen.verify.processes.how_to_start", lambda: "spawn")
    for one, other in zip(run_processes(path, 2, given, 240.0), forked, strict=True):
        assert one.sent == other.sent
        assert all(torch.equal(one.blocks[name], block) for name, block in other.blocks.items())


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("seed", range(4))
def test_processes_and_virtual_ranks_agree_bit_by_bit(seed: int, dtype: str) -> None:
    """Ordered sums are the same on every transport; so is what is counted. Blocks here are uneven, some empty."""
    number = 6000 + 100 * seed
    while True:
        case = draw(number, least=2, most=4)
        number += 1
        if case.layer.options.sums == "ordered" and any(case.volume().values()):
            break
    case = with_dtype(case, dtype)
    given = global_tensors(case.layer)

    def program(end: VirtualTransport) -> dict[str, Tensor]:
        return results(case.module, given, case.module.init_mesh(transport=end))

    virtual = World(case.layer.grid.ranks).run(program)
    real = run_processes(Path(case.module.__file__ or ""), case.layer.grid.ranks, given, 1800.0)
    for a, b in zip(virtual, real, strict=True):
        assert a.keys() == b.blocks.keys()
        assert all(torch.equal(a[name], b.blocks[name]) for name in a), str(case)
    steps = [s for phase in case.volume().values() for s in phase]
    for rank, one in enumerate(real):
        assert list(one.sent) == [(s["collective"], s["bytes_sent_per_rank"][rank]) for s in steps]


@pytest.mark.parametrize("algorithm", ["stationary-x", "stationary-y", "stationary-w", "spatial"])
def test_native_sums_and_uneven_blocks(algorithm: str) -> None:
    letters = {"stationary-x": "NC", "stationary-y": "HF", "stationary-w": "CF", "spatial": "HW"}[algorithm]
    name = f"native_{algorithm}".replace("-", "_")
    case = named(name, algorithm, dict.fromkeys(letters, 2), dtype="float64", options=Options(sums="native"))
    given = global_tensors(case.layer)
    ran = run_processes(Path(case.module.__file__ or ""), 4, given, 1800.0)
    assert_true(case, [Ran(one.blocks, ()) for one in ran], reference(CONV, given))


@pytest.mark.parametrize(("world", "ranks"), [(3, (1, 2)), (4, (2, 3)), (4, (3, 1)), (4, (3, 0, 2, 1))])
def test_part_of_the_world_in_any_order(world: int, ranks: tuple[int, ...]) -> None:
    """Ranks that are not on the mesh take no part, not even in making it."""
    letters = {"F": len(ranks)} if len(ranks) == 2 else {"C": 2, "F": 2}
    name = "part_" + "_".join(map(str, (world, *ranks)))
    case = named(name, "stationary-w" if "C" in letters else "stationary-y", letters, memory_format="channels_last")
    given = global_tensors(case.layer)
    case.module  # noqa: B018  imported before the fork

    def program(rank: int) -> Any:
        if rank not in ranks:
            return None
        mesh = case.module.init_mesh("cpu", ranks=ranks)
        blocks = results(case.module, given, mesh)
        return blocks, case.module.gather("y", blocks["y"], mesh), _counts()

    ran = spawn(program, world)
    mine = [ran[r] for r in ranks]
    assert [one is None for one in ran] == [r not in ranks for r in range(world)]
    truth = reference(CONV, given)
    assert_true(case, [Ran(blocks, ()) for blocks, _, _ in mine], truth, dict.fromkeys(truth, 1e-12))
    for _, y, _ in mine:
        torch.testing.assert_close(y.double(), truth["y"], rtol=1e-12, atol=1e-12)


def _counts() -> int:
    """Process groups of this process, the default one included."""
    return len(dist.distributed_c10d._world.pg_map)


def test_layers_share_groups_and_leave_the_default_group_alone() -> None:
    """Groups are made once for a set of ranks, whichever layer or mesh asks; nothing travels in the default group."""
    first = named("sharing_first", "stationary-w", {"C": 2, "F": 2})
    second = named("sharing_second", "stationary-w", {"F": 2, "C": 2})
    given = global_tensors(first.layer)
    cases = [first, second]
    modules = [case.module for case in cases]

    def program(rank: int) -> tuple[list[int], list[str]]:
        for module in modules:
            module.TOLD = 0  # bytes: nothing goes by sockets
        mesh = modules[0].init_mesh("cpu", ranks=range(4))
        used: list[str] = []
        for name in (
            "all_to_all_single",
            "all_gather_single",
            "all_gather_into_tensor",
            "all_reduce",
            "batch_isend_irecv",
        ):
            if hasattr(dist, name):
                setattr(dist, name, _watched(getattr(dist, name), used))
        dist.ProcessGroup.send = _watched_group(dist.ProcessGroup.send, used)  # type: ignore[method-assign]
        counts = [_counts()]
        for _ in range(2):
            for layer in modules:
                run_rank(layer, given, mesh, [])
                counts.append(_counts())
        run_rank(modules[1], given, modules[1].init_mesh("cpu", ranks=(0, 2, 1, 3)), [])
        return [*counts, _counts()], used

    for counts, used in spawn(program, 4):
        # The default group, one over C and one over F for the mesh, one for the messages that calls begin with; the
        # second layer and mesh add none.
        assert counts == [4, 4, 4, 4, 4, 4]
        assert used
        assert "default" not in used


def _watched(call: Callable[..., Any], used: list[str]) -> Callable[..., Any]:
    def watch(*args: Any, **options: Any) -> Any:
        group = options.get("group") or args[0][0].group
        used.append("default" if group is None or group is dist.group.WORLD else "own")
        return call(*args, **options)

    return watch


def _watched_group(send: Callable[..., Any], used: list[str]) -> Callable[..., Any]:
    def watch(group: Any, *args: Any) -> Any:
        used.append("default" if group is dist.group.WORLD else "own")
        return send(group, *args)

    return watch


def test_users_own_device_mesh() -> None:
    """Any DeviceMesh with the grid's names and sizes, its axes in any order, or a part of a larger mesh."""
    case = named("own_mesh", "stationary-y", {"N": 1, "F": 2})
    case.module  # noqa: B018
    given = global_tensors(case.layer)

    def program(rank: int) -> list[dict[str, Tensor]]:
        whole = DeviceMesh("cpu", torch.arange(4).view(2, 2, 1), mesh_dim_names=("pipe", "F", "N"))
        turned = whole["F", "N"]
        return [results(case.module, given, turned)]

    truth = reference(CONV, given)
    ran = spawn(program, 4)
    for pair in (ran[:2], ran[2:]):
        assert_true(case, [Ran(one[0], ()) for one in pair], truth, dict.fromkeys(truth, 1e-12))


def test_a_failed_process_is_reported_with_its_traceback() -> None:
    def program(rank: int) -> None:
        if rank == 1:
            raise ArithmeticError("on purpose")

    with pytest.raises(ProcessFailed, match=r"(?s)rank 1: Traceback.*ArithmeticError: on purpose"):
        spawn(program, 2, 1800.0)


def test_counted_on_processes_as_on_virtual_ranks() -> None:
    case = named("counted_both", "stationary-w", {"N": 1, "C": 2, "F": 2})
    given = global_tensors(case.layer)

    def program(end: VirtualTransport) -> Ran:
        mesh = case.module.init_mesh(transport=end)
        return Ran(results(case.module, given, mesh), tuple(end.sent))

    virtual = World(4).run(program)
    assert_counted(case, virtual)
    real = run_processes(Path(case.module.__file__ or ""), 4, given, 1800.0)
    assert [[(s.collective, s.bytes) for s in one.sent] for one in virtual] == [list(one.sent) for one in real]


def test_a_column_is_handed_over_without_gaps() -> None:
    """A slice one row wide flattens to a view with gaps; its elements arrive all the same."""
    conv = Conv(2, 4, 3, (Spatial("W", 2, kernel=1),))
    stored = {"x": Layout("x", ((), ("a",), ())), "w": Layout("w", ((), ())), "y": Layout("y", ((), ("a",), ("b",)))}
    roles = dict.fromkeys(("forward", "backward_data", "backward_filter"), Roles((("W", ("b",)),)))
    problem = Problem(conv, Grid((("a", 2), ("b", 2))), stored, roles)
    case = make(problem, "column", random.Random(0))
    assert [s.kind for s in case.schedule.forward if isinstance(s, Convert)][:2] == ["slice", "all_gather"]
    given = global_tensors(case.layer)
    ran = run_processes(Path(case.module.__file__ or ""), 4, given, 1800.0)
    assert_true(case, [Ran(one.blocks, ()) for one in ran], reference(conv, given))
