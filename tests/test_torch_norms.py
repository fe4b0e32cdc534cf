"""Numbers of whole parameters; torch's own clipping, and one optimizer, of lists that mix all kinds; on processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from test_torch_parameters import case_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch_cases import EVEN, backward_ours, backward_whole, layer, on_processes, single

from convgen.algebra.conv import Conv
from convgen.verify.virtual import VirtualTransport, World

INF = float("inf")
# Two filters on four ranks: two of these have nothing of the weight.
FEW = layer("stationary-y", "F4", Conv(4, 6, 2, EVEN.spatial, bias=True))
NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": lambda p: p.norm(),
    "norm 1": lambda p: p.norm(1),
    "norm 3.5": lambda p: p.norm(3.5),
    "norm inf": lambda p: p.norm(INF),
    "norm -inf": lambda p: p.norm(-INF),
    "norm -1": lambda p: p.norm(-1),
    "how many are not 0": lambda p: p.norm(0),
    "norm of doubles": lambda p: torch.linalg.vector_norm(p, dtype=torch.float64),
    "sum": lambda p: p.sum(),
    "sum of twice": lambda p: (p * 2).sum(),
    "sum of squares": lambda p: p.pow(2).sum().sqrt(),
    "mean": lambda p: p.detach().abs().mean(),
    "mean of all": lambda p: p.square().sum() / p.numel(),
    "largest": lambda p: p.abs().max(),
    "smallest": lambda p: p.min(),
    "largest by dimensions": lambda p: p.amax(tuple(range(p.dim()))),
    "kept": lambda p: p.detach().amin(tuple(range(p.dim())), keepdim=True),
    "finite": lambda p: p.isfinite().all(),
    "nan": lambda p: p.isnan().any(),
    "positive": lambda p: (p > 0).sum(),
    "not zero": lambda p: p.detach().count_nonzero(),
    "foreach": lambda p: torch._foreach_norm([torch.ones(3, dtype=p.dtype), p.detach()], 3)[1],
}


@pytest.mark.parametrize("kind", ["ragged", "empty", "blocks", "grouped", "copied blocks"])
def test_numbers_of_blocks_are_those_of_the_whole(kind: str) -> None:
    """And so are their gradients, which are Blocks; all ranks have the same bits."""
    case, parameters = (FEW, "blocks") if kind == "empty" else case_of(kind)
    m, whole = case.module, single(case)
    truths: dict[tuple[str, str], tuple[Tensor, Tensor | None]] = {}
    for name in ("weight", "bias"):
        for what, number in NUMBERS.items():
            whole.zero_grad()
            p = getattr(whole, name)
            made = number(p)
            if made.requires_grad:
                made.backward()
            truths[name, what] = made.detach(), None if p.grad is None else p.grad.clone()

    def program(rank: int) -> list[Any]:
        mesh = m.init_mesh("cpu")
        ours, found = m.Conv(mesh, parameters=parameters), list[Any]()
        for (name, what), (truth, gradient) in truths.items():
            ours.zero_grad()
            p = getattr(ours, name)
            made = NUMBERS[what](p)
            assert type(made) is Tensor, what
            torch.testing.assert_close(made.detach(), truth, rtol=1e-12, atol=0, msg=lambda s, w=what: f"{w}: {s}")
            found.append(made.tolist())
            if gradient is not None:
                made.backward()
                assert isinstance(p.grad, m.Block), what
                wholly = m.gather({"weight": "dw", "bias": "dbias"}[name], p.grad, mesh)
                torch.testing.assert_close(wholly, gradient, rtol=1e-12, atol=0, msg=lambda s, w=what: f"{w}: {s}")
        if ours.weight.shape != ours.weight.held.whole:
            with pytest.raises(
                RuntimeError, match=r"the gradient of mean\(\) would be divided by what this rank holds"
            ):
                ours.weight.mean()
        assert ours.weight.numel() == whole.weight.numel()
        return found

    assert len({str(found) for found in on_processes(program, 4)}) == 1


MIXES: dict[str, Sequence[str]] = {
    "all": ("dtensors", "blocks", "ragged", "copies", "mixed"),
    "dtensors": ("dtensors",),
    "blocks": ("blocks",),
    "copied blocks": ("copied blocks", "grouped"),
}


@pytest.mark.parametrize("mix", MIXES)
def test_torchs_own_clipping_of_any_mix(mix: str) -> None:
    """One list of ordinary parameters, one without a gradient among them, and of these kinds, on several meshes:
    norms and clipped gradients are those of one device, in every order and way of torch's."""
    cases = [case_of(kind) for kind in MIXES[mix]]

    def extra() -> nn.Module:
        torch.manual_seed(4)
        made = nn.Linear(3, 5, dtype=torch.float64)
        made(torch.ones(2, 3, dtype=torch.float64)).square().sum().backward()
        made.register_parameter("unused", nn.Parameter(torch.ones(3)))
        return made

    def all_whole() -> list[nn.Module]:
        wholes = [single(case, i) for i, (case, _) in enumerate(cases)]
        for (case, _), whole in zip(cases, wholes, strict=True):
            backward_whole(whole, case)
        return [*wholes, extra()]

    def clipped(wholes: list[nn.Module], clip: Callable[[list[nn.Parameter]], Any]) -> tuple[Any, list[nn.Module]]:
        return clip([p for m in wholes for p in m.parameters()]), wholes

    ways: dict[str, Callable[[list[nn.Parameter]], Any]] = {"value": lambda ps: clip_grad_value_(ps, 0.01)}
    for norm_type in (2.0, 1.0, INF):
        for foreach in (None, True, False):
            ways[f"{norm_type} {foreach}"] = lambda ps, n=norm_type, f=foreach: clip_grad_norm_(ps, 0.5, n, foreach=f)
    ways["in two"] = in_two
    truths = {way: clipped(all_whole(), clip) for way, clip in ways.items()}

    def program(rank: int) -> None:
        meshes = [case.module.init_mesh("cpu") for case, _ in cases]
        for way, clip in ways.items():
            for order in (1, -1):
                ours = [
                    c.module.Conv(mesh, seed=i, parameters=p)
                    for i, ((c, p), mesh) in enumerate(zip(cases, meshes, strict=True))
                ]
                for (case, _), one, mesh in zip(cases, ours, meshes, strict=True):
                    backward_ours(one, case, mesh)
                plain = extra()
                norm = clip([p for m in (*ours, plain) for p in m.parameters()][::order])
                truth, wholes = truths[way]
                if truth is not None:
                    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
                    torch.testing.assert_close(norm, truth, rtol=1e-12, atol=0)
                for (case, _), one, whole, mesh in zip(cases, ours, wholes[:-1], meshes, strict=True):
                    for name, tensor in (("dw", "weight"), ("dbias", "bias")):
                        got = case.module.gather(name, getattr(one, tensor).grad, mesh)
                        torch.testing.assert_close(got, getattr(whole, tensor).grad, rtol=1e-12, atol=1e-15)
                torch.testing.assert_close(plain.weight.grad, wholes[-1].weight.grad, rtol=1e-12, atol=1e-15)

    on_processes(program, 4)


def in_two(parameters: list[nn.Parameter]) -> Tensor:
    norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
    clip_grads_with_norm_(parameters, 0.5, norm)
    return norm


def test_a_foreach_norm_sends_one_message_for_each_set_of_ranks() -> None:
    """Of five Blocks on two sets of ranks two, whatever the rest; one that is not finite is refused on all ranks."""
    cases = [case_of(kind)[0] for kind in ("blocks", "copied blocks")]

    def program(end: VirtualTransport) -> int:
        ours = list[nn.Module]()
        for case in cases:
            mesh = case.module.init_mesh("cpu", transport=end)
            ours.append(case.module.Conv(mesh, parameters="blocks"))
            backward_ours(ours[-1], case, mesh)
        parameters = [p for one in ours for p in one.parameters()]
        before, blocks = len(end.sent), [p.grad for p in parameters]
        torch._foreach_norm([blocks[0], torch.ones(2, dtype=torch.float64), *blocks])
        sent = len(end.sent) - before
        if end.rank == 3:
            blocks[0].to_local().fill_(INF)
        with pytest.raises(RuntimeError, match="is non-finite, so it cannot be clipped"):
            clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)
        return sent

    assert World(4).run(program) == [2] * 4


def test_one_optimizer_for_blocks_and_ordinary_parameters() -> None:
    """AdamW's foreach step of one list, clipped by torch, is one device's."""
    case, _ = case_of("blocks")

    def step(conv: nn.Module, head: nn.Module, backward: Callable[[], Any]) -> None:
        optimizer = torch.optim.AdamW([*conv.parameters(), *head.parameters()], lr=0.05, foreach=True)
        for _ in range(3):
            optimizer.zero_grad()
            backward()
            head(torch.ones(2, 3, dtype=torch.float64)).square().sum().backward()
            clip_grad_norm_([*conv.parameters(), *head.parameters()], 0.5, foreach=True)
            optimizer.step()

    def head() -> nn.Module:
        torch.manual_seed(4)
        return nn.Linear(3, 5, dtype=torch.float64)

    whole, theirs, m = single(case), head(), case.module
    step(whole, theirs, lambda: backward_whole(whole, case))

    def program(rank: int) -> None:
        mesh = m.init_mesh("cpu")
        ours, mine = m.Conv(mesh, parameters="blocks"), head()
        step(ours, mine, lambda: backward_ours(ours, case, mesh))
        torch.testing.assert_close(m.gather("w", ours.weight, mesh), whole.weight.detach(), rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(mine.weight, theirs.weight, rtol=1e-11, atol=1e-11)

    on_processes(program, 4)


def test_a_block_that_is_the_whole_tensor_takes_any_operation_but_its_pieces_do_not() -> None:
    case = layer("stationary-w", "N2", EVEN)

    def program(rank: int) -> None:
        mesh = case.module.init_mesh("cpu")
        weight = case.module.Conv(mesh, parameters="blocks").weight.detach()
        plain = weight.to_local()
        torch.testing.assert_close(weight.flatten(1) @ weight.flatten(1).mT, plain.flatten(1) @ plain.flatten(1).mT)
        torch.testing.assert_close(weight.mean((1, 2, 3)), plain.mean((1, 2, 3)))
        torch.testing.assert_close(torch.cat([weight.view(-1), weight.view(-1)])[3:9], plain.view(-1)[3:9])
        with pytest.raises(RuntimeError, match="take blocks for whole tensors"):
            torch.rand_like(weight)  # each rank would draw its own
        with pytest.raises(RuntimeError, match="take blocks for whole tensors"):
            weight.chunk(2)[rank].median()  # a piece is one rank's, as FSDP2 cuts them

    on_processes(program, 2)
