"""Ranks that call something else than the others: all raise the same words, and nothing else has moved."""

from __future__ import annotations

import copy
import os
import shutil
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fault_cases import GUARD_S, NEVER_S, fault_layer, told, watch
from modules import Case
from torch import Tensor, nn
from torch.autograd import forward_ad

import convgen
from convgen.packages import load_package, runtime_of
from convgen.verify.processes import spawn


class Small(nn.Module):
    """A convolution, a norm, a head."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.head = nn.Linear(channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).relu().mean((2, 3)))


class Other(Small):
    """The same under another name, and wider."""

    def __init__(self) -> None:
        super().__init__(6)


X = torch.arange(8 * 2 * 6 * 6, dtype=torch.float64).view(8, 2, 6, 6).div(100).sin()
LAYER = fault_layer("enveloped", "stationary-x", {"C": 2})


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVGEN_CACHE", str(tmp_path / "cache"))


def small(kind: type[Small] = Small) -> Small:
    torch.manual_seed(0)
    return kind().double()


def package(ranks: int, kind: type[Small] = Small) -> Any:
    return convgen.from_torch(small(kind), (X,), {"N": ranks})


Said = Callable[[], Any]


def cases_of(net: Any, other: Any, rank: int, ranks: int) -> dict[str, tuple[Said, str]]:
    """By what differs on the last rank: the call, on a model of its own, and what all say of it."""
    mesh, odd = net.init_mesh("cpu", timeout=NEVER_S), rank == ranks - 1
    x = net.scatter("x", X, mesh)
    most, last = str(list(range(ranks - 1))), str([ranks - 1])

    def model(**how: Any) -> Any:
        return net.Network(mesh, **how)

    def samples() -> Any:
        fewer = X[: len(X) - ranks]
        return model()(net.scatter("x", fewer if odd else X, mesh), batch=len(fewer) if odd else len(X))

    def mode() -> Any:
        return model().train(not odd)(x)

    def frozen() -> Any:
        made = model()
        made.conv.bias.requires_grad_(not odd)
        return made(x)

    def gradients() -> Any:
        made = model()
        with torch.set_grad_enabled(not odd):
            return made(x)

    def inputs() -> Any:
        return model()(x.clone().requires_grad_(odd))

    def fault() -> Any:
        return model()(x.float() if odd else x)

    def entry() -> Any:
        made = model()
        y = made(x)
        return net.gather("output", y, mesh) if odd else made(x)

    def instances() -> Any:
        first, second = model(), model()
        return (second if odd else first)(x)

    def models() -> Any:
        mine, theirs = model(), other.Network(mesh)
        return (theirs if odd else mine)(x)

    def state() -> Any:
        made = model()
        whole = small().state_dict()
        if odd:
            whole["conv.weight"] += 1
        return made.load_full(whole)

    def whole_state() -> Any:
        made = model()
        return made.full_gradients() if odd else made.full_state_dict()

    def clipped() -> Any:
        made = model()
        made(x).sum().backward()
        return net.clip_grad_norm_(made.parameters(), 2.0 if odd else 1.0)

    def ungraded() -> Any:
        made = model()
        made(x).sum().backward()
        if odd:
            made.head.bias.grad = None
        return net.clip_grad_norm_(made.parameters(), 1.0)

    def autocast() -> Any:
        made = model()
        with torch.autocast("cpu", torch.bfloat16, enabled=odd):
            return made(x)

    def kinds() -> Any:
        return net.gather("x", x.float() if odd else x, mesh)

    def unchecked() -> Any:
        os.environ["CONVGEN_AGREE"] = "0" if odd else "1"
        try:
            return model()(x)
        finally:
            os.environ["CONVGEN_AGREE"] = "1"

    differ, calls = "Small: ranks differ in forward, nothing was computed: ", "Small: ranks are in different calls, "
    return {
        "samples": (samples, f"{differ}samples: {len(X)} on ranks {most}, {len(X) - ranks} on ranks {last}"),
        "mode": (mode, f"{differ}mode: train on ranks {most}, eval on ranks {last}"),
        "frozen": (frozen, f"{differ}frozen parameters: none on ranks {most}, conv.bias on ranks {last}"),
        "gradients": (gradients, f"{differ}gradients: on on ranks {most}, off on ranks {last}"),
        "inputs": (inputs, f"{differ}inputs that require gradients: none on ranks {most}, x on ranks {last}"),
        "fault": (fault, "Small: x is torch.float64, got torch.float32"),
        "kinds": (kinds, f"gather of x, nothing was computed: type: torch.float64 on ranks {most}, torch.float32 on"),
        "entry": (entry, f"{calls}nothing was computed: forward of instance"),
        "instances": (instances, f"{calls}nothing was computed: forward of instance"),
        "models": (models, "the ranks of this mesh don't run the same module, nothing was computed: ranks"),
        "state": (state, "Small: ranks differ in load_full, nothing was computed: values of the state: "),
        "whole state": (whole_state, f"{calls}nothing was computed: full_state_dict of instance"),
        "clipped": (clipped, f"clip_grad_norm_, nothing was computed: max_norm: 1.0 on ranks {most}, 2.0 on"),
        "ungraded": (ungraded, f"by number: none on ranks {most}, [5] on ranks {last}"),
        "autocast": (autocast, f"autocast: nothing on ranks {most}, torch.bfloat16 on ranks {last}"),
        "unchecked": (unchecked, f"check their calls or not: on on ranks {most}, off (CONVGEN_AGREE=0) on"),
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_what_differs_is_told_to_all_before_anything_moves(ranks: int) -> None:
    net, other = package(ranks), package(ranks, Other)

    def program(rank: int) -> dict[str, tuple[str, str]]:
        found: dict[str, tuple[str, str]] = {}
        for what, (call, wanted) in cases_of(net, other, rank, ranks).items():
            found[what] = told(call), wanted
        return found

    ran = spawn(program, ranks, GUARD_S)
    for what, (text, wanted) in ran[0].items():
        assert wanted in text, (what, text)
        texts = {one[what][0].replace(f"ranks {[ranks - 1]} refused their arguments, nothing was computed: Small: ", "")
                 .replace("clip_grad_norm_: ", "").replace("Other: ", "Small: ") for one in ran}  # fmt: skip
        assert len(texts) == 1, (what, texts)


@pytest.mark.slow
def test_nothing_moves_where_ranks_differ() -> None:
    net = package(2)

    def program(rank: int) -> tuple[str, list[tuple[str, str]]]:
        mesh = net.init_mesh("cpu", timeout=NEVER_S)
        model, x = net.Network(mesh).train(rank == 0), net.scatter("x", X, mesh)
        seen = watch(runtime_of(net))
        return told(lambda: model(x)), seen

    for text, seen in spawn(program, 2, GUARD_S):
        assert "mode: train on ranks [0], eval on ranks [1]" in text
        assert not seen


@pytest.mark.slow
def test_an_edited_network_on_one_rank(tmp_path: Path) -> None:
    """Code is compared, not what it says of itself."""
    net = package(2)
    folder = tmp_path / "edited" / "Small"
    shutil.copytree(Path(net.__file__).parent, folder)
    text = (folder / "network.py").read_text()
    assert "relu" in text
    (folder / "network.py").write_text(text.replace("relu", "sigmoid", 1) + "# edited\n")
    edited = load_package(folder)

    def program(rank: int) -> str:
        mine = edited if rank else net
        mesh = mine.init_mesh("cpu", timeout=NEVER_S)
        return told(lambda: mine.Network(mesh)(mine.scatter("x", X, mesh)))

    texts = spawn(program, 2, GUARD_S)
    assert texts[0] == texts[1]
    assert "don't run the same module, nothing was computed: ranks [0]: Small " in texts[0]


@pytest.mark.slow
def test_copies_are_told_apart() -> None:
    """A deepcopy is another instance on all ranks, and goes on as its origin does; one rank's alone changes nothing."""
    net = package(2)

    def program(rank: int) -> list[str]:
        mesh = net.init_mesh("cpu", timeout=NEVER_S)
        model, x = net.Network(mesh), net.scatter("x", X, mesh)
        if rank:
            copy.deepcopy(model)
        first, second = copy.deepcopy(model), copy.deepcopy(model)
        made = [m(x) for m in (model, first, second)]
        assert torch.equal(made[0], made[1])
        return [told(lambda: (first if rank else model)(x)), told(lambda: (second if rank else first)(x))]

    for one, two in spawn(program, 2, GUARD_S):
        assert "forward of instance 1 on ranks [0], forward of copy 1 of instance 1 on ranks [1]" in one
        assert "forward of copy 1 of instance 1 on ranks [0], forward of copy 2 of instance 1 on ranks [1]" in two


@pytest.mark.slow
def test_layers_that_differ() -> None:
    def program(rank: int) -> list[str]:
        return [told(call) for call in layer_calls(LAYER, rank)]

    one, two = spawn(program, 2, GUARD_S)
    assert one == two
    begin = "RuntimeError: enveloped: ranks "
    assert (
        one[0]
        == f"{begin}differ in conv, nothing was computed: requires gradients: w on ranks [0], nothing on ranks [1]"
    )
    assert one[1] == f"{begin}are in different calls, nothing was computed: conv on ranks [0], gather of x on ranks [1]"


@pytest.mark.slow
def test_what_is_no_block_on_one_rank_is_told_to_all() -> None:
    """Before a layer's op runs: a parameter in the place of another, of activations; what torch would take to no check
    of the op's, as a tensor without memory; no number of samples; of a network no tensor at all."""
    net = package(2)

    def program(rank: int) -> list[str]:
        module = LAYER.module
        mesh = module.init_mesh("cpu", timeout=NEVER_S)
        m, whole = module.Conv(mesh, parameters="blocks"), module.LAYER.extents("x", module.LAYER.batch)
        x = module.scatter("x", torch.zeros(whole, dtype=torch.float64), mesh)
        place = net.init_mesh("cpu", timeout=NEVER_S)
        mine, network = net.scatter("x", X, place), net.Network(place)
        state = network.full_state_dict()
        return [
            told(lambda: module.conv(x, m.bias if rank else m.weight, m.bias, mesh=mesh)),
            told(lambda: module.gather("x", m.weight if rank else x, mesh)),
            *(told(lambda other=other: m(other if rank else x)) for other in no_blocks(x)),
            *(told(lambda other=other: module.gather("x", other if rank else x, mesh)) for other in no_blocks(x)),
            told(lambda: m(x, 2.5 if rank else None)),
            told(lambda: module.gather("x", x, mesh, batch="8" if rank else None)),
            told(lambda: module.gather("z" if rank else "x", x, mesh)),
            told(lambda: torch.func.jvp(m, (x,), (x,)) if rank else m(x)),
            told(lambda: forward_mode(lambda: module.gather("x", x, mesh), rank)),
            told(lambda: net.Network(place)(None if rank else mine)),
            *(told(lambda other=other: network(other if rank else mine)) for other in no_blocks(mine)),
            *(told(lambda other=other: net.gather("x", other if rank else mine, place)) for other in no_blocks(mine)),
            told(lambda: net.gather("z" if rank else "x", mine, place)),
            told(lambda: forward_mode(lambda: net.gather("x", with_tangent(mine) if rank else mine, place), rank)),
            told(lambda: net.gather("x", mine, place, batch=2.5 if rank else None)),
            *(told(lambda n=n: network(mine, batch=n if rank else None)) for n in no_numbers()),
            *(told(lambda h=h: network(mine, halo=h if rank else ())) for h in (5, [["x"]], torch.tensor(1.0))),
            told(lambda: network.take_from("no" if rank else network)),
            told(lambda: torch.func.jvp(network, (mine,), (mine,)) if rank else network(mine)),
            *(told(lambda other=other: network.load_full(other if rank else state)) for other in no_states(state)),
        ]

    one, two = spawn(program, 2, GUARD_S)
    for mine, theirs in zip(one, two, strict=True):
        kind, _, words = theirs.partition(": ")
        assert (kind in ("ValueError", "TypeError", "RuntimeError") and "enveloped" in words) or "Small" in words
        name = words.partition(":")[0].strip("'")
        assert mine == f"ValueError: {name}: ranks [1] refused their arguments, nothing was computed: {words}"


def no_blocks(x: torch.Tensor) -> list[Any]:
    """What an op of torch's would not be called with, or would be with other code."""
    with warnings.catch_warnings(action="ignore"):  # torch's, that one of these layouts is an older one
        nested = [torch.nested.nested_tensor([*x], layout=layout) for layout in (torch.jagged, torch.strided)]
    return [x.to("meta"), x.to_sparse(), *nested, torch.nn.UninitializedBuffer(), x.numpy(), [x], 1.0]


def no_numbers() -> list[Any]:
    return ["8", 2.5, torch.tensor(2.5), np.array(8.5)]


def forward_mode(call: Any, rank: int) -> Any:
    with forward_ad.dual_level() if rank else nullcontext():
        return call()


def with_tangent(x: torch.Tensor) -> Any:
    return forward_ad.make_dual(x, x)


def no_states(state: dict[str, torch.Tensor]) -> list[Any]:
    first = next(iter(state))
    others = torch.zeros(7), state[first].to("meta"), "no"
    return [{}, None, {**state, "another": torch.zeros(1)}, *({**state, first: other} for other in others)]


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [("a", 2.0), (1.0, 0.0), (None, 2.0), (10**400, 2.0)])
def test_a_norm_that_is_none_on_one_rank_is_told_to_all(wrong: tuple[Any, float]) -> None:
    def program(rank: int) -> str:
        module = LAYER.module
        m = module.Conv(module.init_mesh("cpu", timeout=NEVER_S))
        return told(lambda: module.clip_grad_norm_(m.parameters(), *(wrong if rank else (1.0, 2.0))))

    one, two = spawn(program, 2, GUARD_S)
    words = two.partition(": ")[2]
    assert one == f"ValueError: clip_grad_norm_: ranks [1] refused their arguments, nothing was computed: {words}"


@pytest.mark.slow
def test_an_error_without_words_is_told_by_its_kind() -> None:
    net = package(2)

    class Silent(dict[str, torch.Tensor]):
        def __contains__(self, name: object) -> bool:
            raise AssertionError

    def program(rank: int) -> str:
        network = net.Network(net.init_mesh("cpu", timeout=NEVER_S))
        state = network.full_state_dict()
        return told(lambda: network.load_full(Silent(state) if rank else state))

    one, two = spawn(program, 2, GUARD_S)
    assert two == "AssertionError: "
    assert one.endswith("ranks [1] refused their arguments, nothing was computed: AssertionError")


def test_a_state_that_reads_like_a_dict_is_loaded() -> None:
    net = package(1)

    class Reads:
        _metadata = None

        def __init__(self, state: dict[str, torch.Tensor]) -> None:
            self.state = state

        def __contains__(self, name: str) -> bool:
            return name in self.state

        def __getitem__(self, name: str) -> torch.Tensor:
            return self.state[name]

        def __iter__(self) -> Any:
            return iter(self.state)

        def items(self) -> Any:
            return self.state.items()

    def program(_: int) -> bool:
        mesh = net.init_mesh("cpu", timeout=NEVER_S)
        one, other = net.Network(mesh, seed=0), net.Network(mesh, seed=1)
        other.load_full(Reads(one.full_state_dict()))
        return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))

    assert spawn(program, 1, GUARD_S) == [True]


def layer_calls(case: Case, rank: int) -> list[Said]:
    module = case.module
    mesh = module.init_mesh("cpu", timeout=NEVER_S)
    x = torch.zeros(*module.LAYER.whole_shape(module.LAYER.stored["x"], module.LAYER.batch), dtype=torch.float64)
    m, block = module.Conv(mesh), module.scatter("x", x, mesh)
    w, bias = (p.to_local().detach() for p in (m.weight, m.bias))
    return [
        lambda: module.conv(block, w.clone().requires_grad_(rank == 0), bias, mesh=mesh),
        lambda: module.gather("x", block, mesh) if rank else module.conv(block, w, bias, mesh=mesh),
    ]


@pytest.mark.slow
def test_samples_of_each_rank_where_whole_tensors_are_wanted() -> None:
    """The habit of DDP: refused at the first call and at each hundredth, and so is what one rank leaves out."""

    def program(rank: int) -> list[str]:
        def model() -> Any:
            return convgen.parallelize(small(), (X,), {"N": 2}, "sample")

        found = [told(lambda: model()(X[rank * 4 :][:4])), told(lambda: model()(X[rank:]))]
        found += [told(lambda: model()(*[X][rank:])), told(lambda: model()(X if rank else X.float()))]
        long = model().eval()
        with torch.no_grad():
            found += [told(lambda: long(X[:2])) for _ in range(99)]
            found.append(told(lambda: long(X[rank:][:2])))
        return found

    one, two = spawn(program, 2, GUARD_S)
    differ = "RuntimeError: Small: ranks differ in forward, nothing was computed: "
    assert one[0] == two[0]
    assert one[0].startswith(f"{differ}values of inputs: x [4, 2, 6, 6] float64 ")
    assert "parallelize(..., whole=False) takes and gives each rank's blocks" in one[0]
    assert one[1] == two[1]
    assert one[1].startswith(f"{differ}samples: 8 on ranks [0], 7 on ranks [1]")
    assert one[2].startswith("ValueError: Small: ranks [1] refused their arguments, nothing was computed: "), one[2]
    assert one[2].endswith(two[2].partition(": ")[2]), two[2]  # line by line
    assert two[3].startswith("ValueError: Small: ranks [0] refused their arguments, nothing was computed: "), two[3]
    assert set(one[4:103]) == {"went on"}
    assert one[103].startswith(f"{differ}values of inputs: x [2, 2, 6, 6] float64 "), one[103]


# ---- CONVGEN_COMPARE=k ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_copies_that_have_parted_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second call; by parameters and buffers, by gathered outputs, and by the first row with a NaN."""
    net = package(2)
    monkeypatch.setenv("CONVGEN_COMPARE", "2")

    def program(rank: int) -> list[str]:
        mesh = net.init_mesh("cpu", timeout=NEVER_S)
        x = net.scatter("x", X, mesh)

        def model(change: Callable[[Any], None] | None = None) -> Any:
            made = net.Network(mesh)
            if change is not None:
                with torch.no_grad():
                    change(made)
            return made

        def weight(made: Any) -> None:
            made.head.weight.to_local()[0, 0] += rank

        def statistics(made: Any) -> None:
            made.norm.running_var.to_local()[1] += rank

        def twice(made: Any, given: Tensor = x) -> list[str]:
            return [told(lambda: made(given)) for _ in range(2)]

        found = [*twice(model()), *twice(model(weight)), *twice(model(statistics))]
        broken = x.clone()
        broken[0, 0, 0, 0] = float("nan") if rank else 0.0
        found += twice(model().eval(), broken)

        def infinite(made: Any) -> None:
            made.head.bias.to_local()[:] = float("nan")

        return found + twice(model(infinite).eval())

    one, two = spawn(program, 2, GUARD_S)
    assert one == two
    assert one[:3] == one[4:5] * 3 == one[6:7] * 3 == one[8:9] * 3 == ["went on"] * 3
    parted = (
        "RuntimeError: Small: copies of {} have parted, first of the parameters and buffers: of its block {} ranks [0]"
    )
    assert one[3].startswith(parted.format("head.weight", [(0, 3), (0, 4)]))
    assert one[5].startswith(parted.format("norm.running_var", [(0, 4)]))
    assert one[7].startswith("RuntimeError: Small: the first NaN of this call: rank 1: row %"), one[7]
    assert one[7].endswith(", whose operands have one")
    assert one[9].count("whose operands have none") == 0, one[9]
    assert "rank 0: row %head" in one[9] and "rank 1: row %head" in one[9]
