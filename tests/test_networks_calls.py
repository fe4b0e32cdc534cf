"""Calls of what parallelize gives: arguments, containers, weights, seeds, copies, against the module."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import convgen
from convgen import parallel
from convgen.errors import InputError
from convgen.spec.exported import graph_of
from convgen.verify.processes import spawn

GRID: Any = ({"N": 2}, "sample")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVGEN_CACHE", str(tmp_path / "cache"))


def data(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return make().double()


def refused(match: str, call: Callable[[], Any]) -> None:
    with pytest.raises(InputError, match=match):
        call()


# ---- Arguments ----


class Arguments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 4)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0, *more: Tensor, flag: bool = False, **rest: Any
    ) -> Tensor:
        y = self.a(x) * scale
        y = y if mask is None else y * mask
        for one in more:
            y = y + one
        return -y if flag else y


@pytest.mark.slow
def test_every_argument_is_bound() -> None:
    module, x, m = seeded(Arguments), data(4, 3), data(4, 4, seed=1)

    def program(rank: int) -> None:
        def made(*examples: Any) -> Any:
            return convgen.parallelize(module, examples, *GRID)

        def right(model: Any, *args: Any, **keywords: Any) -> None:
            torch.testing.assert_close(model(*args, **keywords), module(*args, **keywords), rtol=1e-12, atol=1e-12)

        model = made(x)
        right(model, x)
        right(model, x, None, 1.0, flag=False)
        right(model, x=x, scale=1.0)
        left = "the example inputs left it at its default"
        refused(rf"mask=a tensor of shape \(4, 4\), but {left} .*, None", lambda: model(x, m))
        refused(rf"mask=a tensor .* {left}(.|\n)*'mask': \.\.\.", lambda: model(x, mask=m))
        refused(rf"scale=7.0, but {left} .*, 1.0", lambda: model(x, scale=7.0))
        refused(rf"flag=True, but {left} .*, False", lambda: model(x, flag=True))
        refused(rf"more=a tuple, but {left}", lambda: model(x, None, 1.0, m))
        refused(rf"rest=a dict, but {left}", lambda: model(x, other=3))
        refused("does not take these arguments: missing .*'x'", lambda: model(scale=1.0))
        refused("x is None, but a tensor in the example inputs", lambda: model(None))
        refused("x is a list, but a tensor", lambda: model(x.tolist()))

        model = made((x, m), {"scale": 7.0, "flag": True})
        right(model, x, m, 7.0, flag=True)
        right(model, scale=7.0, mask=m, x=x, flag=True)
        refused("left out, mask is None, but a tensor in the example inputs", lambda: model(x, scale=7.0, flag=True))
        refused("left out, scale=1.0, but 7.0 of the example inputs is built in", lambda: model(x, m, flag=True))
        refused("scale=7, but 7.0 of", lambda: model(x, m, 7, flag=True))
        refused("flag=1, but True of", lambda: model(x, m, 7.0, flag=1))
        refused("scale=a tensor of shape", lambda: model(x, m, x[0, 0], flag=True))

        model: Any = convgen.parallelize(module, {"x": x, "mask": None, "scale": 1.0}, *GRID)
        right(model, x)  # what was traced is the default
        refused("mask=a tensor", lambda: model(x, m))
        model = made(x, m, 2.0, m, m + 1)
        right(model, x, m, 2.0, m - 1, m)
        refused("more has 1 part, 2 in the example inputs", lambda: model(x, m, 2.0, m))
        refused(r"samples: x has 4, mask has 3, more_0 has 4", lambda: model(x, m[:3], 2.0, m, m))

    spawn(program, 2)


def test_examples_that_do_not_fit_are_refused() -> None:
    module, x = Arguments().double(), data(4, 3)
    refused("the example inputs are a tensor", lambda: graph_of(module, x))  # type: ignore[arg-type]
    refused(r"takes any keyword \(\*\*rest\)", lambda: graph_of(module, ((x,), {"other": 3})))
    refused("input scale is a dtype", lambda: graph_of(module, {"x": x, "scale": torch.float64}))
    refused("does not take the inputs: missing .*'x'", lambda: graph_of(module, {"mask": x}))


# ---- Containers ----


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Batch:
    image: Tensor
    weight: Tensor | None = None
    scale: float = 2.0


@dataclasses.dataclass
class Made:
    loss: Tensor
    parts: list[Any]
    note: str | None = None


class Output(OrderedDict[str, Any]):
    """As libraries of models have them: a dict whose keys are attributes, which torch knows."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


pytree.register_pytree_node(
    Output, lambda made: ([*made.values()], [*made]), lambda values, keys: Output(zip(keys, values, strict=True))
)


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.weight = nn.Linear(3, 4), nn.Parameter(torch.ones(4))

    def forward(self, batch: dict[str, Any], xs: list[Any], one: Batch, pair: Pair | None = None) -> Any:
        y = self.a(batch["image"] + xs[0]) * one.scale * self.weight + self.a(one.image)
        if pair is not None:
            y = y * pair.first + len(pair.second)
        return {
            "weight": y,  # as a parameter is called
            "list": [y + 1, None, (y + 2,), []],
            "pair": Pair(y * 2, Pair(batch["n"], "text")),
            "made": Made(y.square().mean(), [y, True, 1.5]),
            "output": Output(last=y - 1, batch=xs[0]),
            3: xs[1]["deep"] * 2,
            "3": None,
            "a": {"b": y * 3},
            "a.b": y * 4,
        }


def containers() -> tuple[Any, ...]:
    batch, xs = {"image": data(4, 3), "n": 5}, [data(4, 3, seed=1), {"deep": data(4, 2, seed=2)}, "mode"]
    return batch, xs, Batch(data(4, 3, seed=3))


def equal(mine: Any, truth: Any) -> None:
    """The same containers, with values that are."""
    assert type(mine) is type(truth)
    if dataclasses.is_dataclass(truth):
        equal(vars(mine), vars(truth))
    elif isinstance(truth, dict):
        assert [*mine] == [*truth]
        equal([*mine.values()], [*truth.values()])
    elif isinstance(truth, (list, tuple)):
        assert len(mine) == len(truth)
        for a, b in zip(mine, truth, strict=True):
            equal(a, b)
    elif isinstance(truth, Tensor):
        torch.testing.assert_close(mine, truth, rtol=1e-12, atol=1e-12)
    else:
        assert mine == truth


class One(nn.Module):
    """What a function of a tensor gives."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.a, self.function = nn.Linear(3, 3), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.a(x))


@dataclasses.dataclass
class Late:
    """Of which torch is told when it is met."""

    y: Tensor
    size: int


@pytest.mark.slow
def test_containers_are_the_sources() -> None:
    module, given = seeded(Containers), containers()
    shapes: list[Callable[[Tensor], Any]] = [
        lambda y: [y, (y, [y])],
        lambda y: {"output": y},
        lambda y: {1: y, 0: y[:, :2]},
        lambda y: (None, y, y.shape[1], y.shape[0]),
        lambda y: Late(y, 3),
        lambda y: Pair(y, None),
    ]

    def program(rank: int) -> None:
        model: Any = convgen.parallelize(module, given, *GRID)
        equal(model(*given), module(*given))
        batch, xs, one = given
        assert model._inputs == ("batch_image", "xs_0", "xs_1_deep", "one_image")
        equal(model(xs=xs, one=one, batch=batch), module(*given))
        refused("batch has image, but image, n in the", lambda: model({"image": batch["image"]}, xs, one))
        refused("batch has n, image, but image, n", lambda: model(dict(reversed([*batch.items()])), xs, one))
        refused("batch.n=6, but 5 of the", lambda: model(batch | {"n": 6}, xs, one))
        refused("xs is a tuple, but a list in", lambda: model(batch, tuple(xs), one))
        refused("xs has 2 parts, 3 in", lambda: model(batch, xs[:2], one))
        refused("xs.0 is None, but a tensor", lambda: model(batch, [None, *xs[1:]], one))
        refused("xs.1 is None, but a dict", lambda: model(batch, [xs[0], None, "mode"], one))
        refused("xs.2='other', but 'mode' of", lambda: model(batch, [*xs[:2], "other"], one))
        refused("one has image, weight, scale, but image, scale", lambda: model(batch, xs, Batch(xs[0], xs[0])))
        refused("one.scale=3.0, but 2.0", lambda: model(batch, xs, Batch(xs[0], None, 3.0)))
        refused("one is a tensor of shape", lambda: model(batch, xs, xs[0]))
        refused("pair=a Pair, but the example inputs left", lambda: model(*given, Pair(xs[0], [])))

        two = Pair(data(4, 1, seed=5), ["a", None])
        model = convgen.parallelize(module, (given, {"pair": two}), *GRID)
        equal(model(*given, pair=two), module(*given, pair=two))
        refused("pair is a tuple, but a Pair", lambda: model(*given, tuple(two)))

        for function in shapes:
            small, x = seeded(functools.partial(One, function)), data(4, 3)
            equal(convgen.parallelize(small, (x,), *GRID)(x), small(x))

    spawn(program, 2)


def test_packages_have_flat_names() -> None:
    net = convgen.from_torch(Containers().double(), containers(), "N=2")
    assert net.Network._inputs == ("batch_image", "xs_0", "xs_1_deep", "one_image")
    assert {
        "weight_out", "list.0", "list.2.0", "pair.first", "made.loss", "made.parts.0", "output.last", "output.batch",
        "3", "a.b", "a.b_",
    } <= set(net.VALUES)  # fmt: skip


# ---- Weights and seeds ----


class Drawn(nn.Module):
    """Dropout, and buffers of several dtypes; one is in no state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop = nn.Linear(3, 40), nn.Dropout(0.5)
        self.register_buffer("count", torch.randint(100, (5,)))
        self.register_buffer("chosen", torch.rand(40) > 0.5)
        self.register_buffer("fixed", torch.randn(40), persistent=False)
        self.register_buffer("number", torch.randn(()))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.where(self.chosen, self.a(x), self.fixed) * self.count.sum() + self.number
        return self.drop(y)


@pytest.mark.slow
def test_weights_and_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "exported", functools.cache(parallel.exported))  # of one module many times
    first, x = seeded(Drawn), data(4, 3)

    def program(rank: int) -> None:
        module = seeded(Drawn, rank)
        refused(
            r"ranks \[1\] have other weights than that of rank 0(.|\n)*weights=\'rank 0\'",
            lambda: convgen.parallelize(module, (x,), *GRID),
        )
        refused("weights can't be 'mine'", lambda: convgen.parallelize(module, (x,), *GRID, weights="mine"))
        own = copy.deepcopy(module.state_dict())
        for kind in ("dtensors", "blocks"):
            model: Any = convgen.parallelize(module, (x,), *GRID, weights="rank 0", parameters=kind)
            state = model.full_state_dict()
            equal({n: state[n] for n in own}, dict(first.state_dict()))
            model.eval()
            equal(model(x), copy.deepcopy(first).eval()(x))
            assert ("Block" in type(model.a.weight).__name__) == (kind == "blocks")
            model.reset_parameters()
            assert torch.equal(model.full_state_dict()["count"], first.count)
        equal(dict(module.state_dict()), dict(own))  # the rank's own module is as it was
        other = ["same", "rank 0"][rank]
        refused(
            "weights= is 'same' on rank 0, another on ranks",
            lambda: convgen.parallelize(first, (x,), *GRID, weights=other),
        )
        wide = nn.Linear(3, 4 + rank).double()
        refused(r"ranks \[1\] have other programs", lambda: convgen.parallelize(wide, (x,), *GRID, weights="rank 0"))

        def drawn(**how: Any) -> Tensor:
            return convgen.parallelize(first, (x,), *GRID, **how)(x).detach()

        for given in (rank, None if rank else 3):
            refused(r"seed= is [03] on rank 0, (1|None) on rank 1", lambda given=given: drawn(seed=given))
        refused("seed can't be -1", lambda: drawn(seed=-1))
        torch.manual_seed(1 + rank)  # that of the first rank counts
        one, next_one, after = drawn(), drawn(), torch.rand(1)
        torch.manual_seed(1)
        again = drawn()
        torch.manual_seed(1 + rank)
        torch.randint(2**62, ()), torch.randint(2**62, ())
        assert torch.equal(one, again) and not torch.equal(one, next_one) and torch.equal(after, torch.rand(1))
        torch.manual_seed(2)
        assert not torch.equal(one, drawn())
        before = torch.get_rng_state()
        assert torch.equal(drawn(seed=7), drawn(seed=7)) and not torch.equal(one, drawn(seed=7))
        convgen.parallelize(nn.Linear(3, 4).double() if rank < 0 else first.a, (x,), *GRID)  # draws nothing
        assert torch.equal(before, torch.get_rng_state())

    spawn(program, 2)


@pytest.mark.slow
def test_four_ranks_take_the_first_ones_weights() -> None:
    """In pieces: a parameter is larger than one."""
    x = data(4, 3, 6, 6)

    def program(rank: int) -> list[Tensor]:
        from convgen import agreement

        agreement.PIECE = 1000
        module = seeded(lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)), rank)
        model: Any = convgen.parallelize(module, (x,), {"N": 2, "H": 2}, None, weights="rank 0")
        return [model(x).detach(), model.full_state_dict()["1.running_mean"]]

    module = seeded(lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)))
    truth = module(x).detach()
    for y, mean in spawn(program, 4):
        equal([y, mean], [truth, module[1].running_mean])


@pytest.mark.slow
def test_a_process_group_is_what_the_mesh_is_made_of() -> None:
    x = data(4, 3)

    def program(rank: int) -> None:
        group = dist.new_group([1, 2])
        if rank:
            module, first = (seeded(lambda: nn.Linear(3, 4), seed) for seed in (rank, 1))
            model: Any = convgen.parallelize(module, (x,), *GRID, process_group=group, weights="rank 0")
            equal(model(x), first(x))
            mesh = model._mesh
            assert mesh.mesh.tolist() == [1, 2]
            equal(convgen.parallelize(first, (x,), mesh, "sample")(x), first(x))
            refused("a mesh is given", lambda: convgen.parallelize(first, (x,), mesh, process_group=group))

    spawn(program, 3)


# ---- Copies ----


@pytest.mark.slow
def test_copies_hooks_and_compile(tmp_path: Path) -> None:
    module, given = seeded(Containers), containers()

    def program(rank: int) -> None:
        truth = module(*given)
        convgen.parallelize(nn.Linear(3, 4).double(), (data(4, 3),), *GRID, weights="rank 0")  # another package first
        for kind in ("dtensors", "blocks"):
            model: Any = convgen.parallelize(module, given, *GRID, parameters=kind)
            calls: list[Any] = []
            before = model.register_forward_pre_hook(lambda _, args, calls=calls: calls.append(args))
            after = model.register_forward_hook(lambda _, __, made, calls=calls: calls.append(made))
            made = model(*given)
            equal(made, truth)
            assert calls[0][0] is given[0] and calls[1] is made
            before.remove(), after.remove()
            averaged = torch.optim.swa_utils.AveragedModel(model)
            averaged.update_parameters(model)
            for made in (copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model)), averaged):
                equal(made(*given), truth)
            assert type(copy.deepcopy(model)) is type(model) and "Containers" in str(model)
            other = copy.deepcopy(model)
            with torch.no_grad():
                other.weight.mul_(2)
            equal(model(*given), truth)
            other.compile(backend="eager")
            torch.testing.assert_close(
                other(*given)["weight"] + 0, 2 * truth["weight"] - seeded(Containers).a(given[2].image)
            )
            (tmp_path / f"{kind} {rank}").write_bytes(pickle.dumps(model))
            whole: Any = convgen.parallelize(module, given, *GRID, parameters=kind, whole=False)
            (tmp_path / f"net {kind} {rank}").write_bytes(pickle.dumps(whole))

    def another(rank: int) -> None:
        for kind in ("dtensors", "blocks"):
            model = pickle.loads((tmp_path / f"{kind} {rank}").read_bytes())
            equal(model(*given), module(*given))
            model(*given)["made"].loss.backward()
            assert model.full_gradients().keys() == dict(module.named_parameters()).keys()
            net = pickle.loads((tmp_path / f"net {kind} {rank}").read_bytes())
            equal(dict(net.full_state_dict()), dict(module.state_dict()))

    def lost(rank: int) -> None:
        with pytest.raises(InputError, match=r"the pickled model's package is not there: neither .*cache"):
            pickle.loads((tmp_path / f"blocks {rank}").read_bytes())

    spawn(program, 2)
    spawn(another, 2)
    shutil.rmtree(tmp_path / "cache")
    spawn(lost, 1)
