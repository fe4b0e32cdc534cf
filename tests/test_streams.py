"""Streams: chunk after chunk as one shot, whose caches stay where they are and have their halos."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from functools import cache
from math import prod
from typing import Any

import pytest
import torch
from causal_vae import Vae, one_shot, seeded
from echo import Echo
from test_module_memory import Allocations
from torch import Tensor, nn

import convgen
from convgen import streams
from convgen.causal_vaes import adapter
from convgen.errors import InputError
from convgen.one_set import prepared
from convgen.packages import load_package
from convgen.parallel import how_of
from convgen.streams import Chunk, State, chunks, graphs
from convgen.verify.virtual import VirtualTransport, World

GRIDS = {"H=2": {"H": 2}, "W=2": {"W": 2}, "2x2": {"H": 2, "W": 2}, "N=2,H=3": {"N": 2, "H": 3}}
Ready = tuple[Any, Any, Any, dict[str, int]]


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONVGEN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def compiled(
    module: Any,
    first: tuple[Tensor, ...],
    steady: tuple[Tensor, ...],
    grid: str,
    forward: Any = None,
    open: Any = None,
) -> Ready:
    """A stream that is compiled, for many ranks of this process."""
    axes = GRIDS[grid]
    asked = graphs(module, first, steady, how_of(axes, None, "cpu", None, None), forward, open)
    return module, asked, prepared(asked, axes), axes


@cache
def decoder(grid: str, rows: tuple[int, int], each: int = 2) -> Ready:
    z = torch.zeros(1, 3, 1 + each, *rows, dtype=torch.float64)
    return compiled(seeded(), (z[:, :, :1],), (z[:, :, 1:],), grid)


def on_ranks(
    given: Ready, program: Callable[[Chunk, Chunk, VirtualTransport], Any], *, whole: bool = True
) -> list[Any]:
    """What each rank finds."""
    module, asked, packages, axes = given
    net = load_package(packages["first"][1], files=packages["first"][2])

    def of_rank(transport: VirtualTransport) -> Any:
        mesh = net.init_mesh("cpu", transport=transport)
        return program(*chunks(module, asked, packages, mesh, whole=whole), transport)

    return World(prod(axes.values())).run(of_rank)


def alive(name: str) -> int:
    gc.collect()
    return sum(type(one).__name__ == name for one in gc.get_objects())


def streamed(first: Chunk, steady: Chunk, z: Tensor, each: int) -> tuple[Tensor, State]:
    y, state = first(z[:, :, :1])
    made = [y]
    for start in range(1, z.shape[2], each):
        y, state = steady(z[:, :, start : start + each], state)
        made.append(y)
    return torch.cat(made, 2), state


@pytest.mark.parametrize(
    ("grid", "rows", "each", "count", "samples"),
    [
        ("H=2", (5, 6), 2, 2, 1), ("W=2", (5, 6), 2, 4, 3), ("2x2", (5, 6), 2, 1, 1), ("N=2,H=3", (5, 6), 2, 3, 3),
        ("H=2", (12, 3), 1, 4, 1), ("2x2", (2, 3), 3, 1, 2), ("2x2", (1, 1), 1, 2, 1),
    ],
)  # fmt: skip
def test_streams_are_what_one_shot_makes(grid: str, rows: tuple[int, int], each: int, count: int, samples: int) -> None:
    """In 2 to 5 chunks, of other numbers of samples than the compiled one. What ranks send for a chunk is what is said,
    without rows of frames that were there before, and no cache is gathered: each lies where its block and halo do."""
    given = decoder(grid, rows, each)
    vae, *_ = given
    z = torch.randn(samples, 3, 1 + each * count, *rows, dtype=torch.float64)
    with torch.no_grad():
        want = one_shot(vae, z)
        _, caches = vae(z[:, :, :1])
        _, caches = vae(z[:, :, 1:], caches)
    whole = {"a": caches["a"], "b": caches["b"], "time": caches["time"], "c.0": caches["c"][0]}

    def program(first: Chunk, steady: Chunk, transport: VirtualTransport) -> tuple[Any, ...]:
        y, state = streamed(first, steady, z[:, :, : 1 + each * (count - 1)], each)
        before = len(transport.sent)
        last, state = steady(z[:, :, 1 + each * (count - 1) :], state)
        moved = [one for one in transport.sent[before:] if one.collective != "all_gather"]  # of y
        net, mesh, again = steady.package.NET, steady.network._mesh, 0.0
        boxes = steady.both.boxes((samples,))
        for path, block in state.blocks.items():
            name = steady.both.inputs[path]
            where = net.region(name, mesh, batch=samples, halo=path in state.halos)
            again = max(again, float((block - whole[path][where]).abs().amax()) if block.numel() else 0.0)
            assert path in state.halos if name in boxes and min(rows) > 1 else (path == "time" or min(rows) == 1), path
        gathers = [one for one in transport.sent[before:] if one.collective == "all_gather"]
        sums = steady.bytes_sent(state), steady.bytes_sent()
        return torch.cat([y, last], 2), again, sum(one.bytes for one in moved), len(gathers), sums, state.bytes

    found = on_ranks(given, program)
    for y, off, _, gathers, (sent, resent), held in found:
        assert float((y - want).abs().max()) < 1e-12
        assert off < 1e-12
        if min(rows) > 1:  # else grids split little
            assert (gathers, sent < resent) == (1, True)
            assert held < sum(t.numel() * 8 for t in whole.values())
    if samples == 1 and min(rows) > 1:
        assert sum(moved for _, _, moved, *_ in found) == found[0][4][0]
        assert found[0][4][1] >= found[0][4][0] * (1 + 2 / (2 * each))


def test_one_stream_takes_any_size() -> None:
    """In 2 to 5 chunks, ragged and of few rows; a state is of the size of its chunks."""
    z = torch.zeros(1, 3, 3, 5, 6, dtype=torch.float64)
    given = compiled(seeded(), (z[:, :, :1],), (z[:, :, 1:],), "2x2", open={"z": {"H": 3, "W": 4}})
    shapes = [(5, 6, 1, 1), (12, 3, 2, 2), (2, 9, 4, 1), (7, 7, 3, 1)]
    videos = [torch.randn(n, 3, 1 + 2 * count, h, w, dtype=torch.float64) for h, w, count, n in shapes]
    with torch.no_grad():
        wanted = [one_shot(given[0], one) for one in videos]

    def program(first: Chunk, steady: Chunk, transport: VirtualTransport) -> list[str]:
        said: list[str] = []
        for one, want in zip([*videos, videos[0]], [*wanted, wanted[0]], strict=True):
            y, state = streamed(first, steady, one, 2)
            assert float((y - want).abs().max()) < 1e-12
            assert state.sizes == (one.shape[0], *one.shape[3:])
            with pytest.raises(InputError) as caught:
                steady(one[:, :, :2, :, :2], state)
            said.append(str(caught.value))
        return said

    for said in on_ranks(given, program):
        assert "the state before is of N=1, H=5, W=6, the chunk of N=1, H=5, W=2" in said[0]


def test_a_state_is_of_its_stream_and_may_be_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    given = decoder("H=2", (5, 6))
    z, pickled = torch.randn(1, 3, 5, 5, 6, dtype=torch.float64), dict[int, bytes]()

    def program(first: Chunk, steady: Chunk, transport: VirtualTransport) -> list[str]:
        said: list[str] = []

        def refused(kind: type[Exception], call: Callable[[], Any]) -> None:
            with pytest.raises(kind) as caught:
                call()
            said.append(str(caught.value))

        _, state = first(z[:, :, :1])
        a, _ = steady(z[:, :, 1:3], state)
        b, later = steady(z[:, :, 1:3], state)
        assert torch.equal(a, b)
        others = chunks(*given[:3], steady.network._mesh, whole=True)
        _, foreign = others[0](z[:, :, :1])
        refused(InputError, lambda: steady(z[:, :, 1:3], foreign))
        refused(InputError, lambda: steady(z[:, :, 1:3].repeat(2, 1, 1, 1, 1), state))
        refused(InputError, lambda: steady(z[:, :, 1:3]))
        refused(InputError, lambda: steady(z[:, :, 1:3], State))
        refused(RuntimeError, lambda: steady(z[:, :, 1:3], later if transport.rank else state))
        c, _ = steady(z[:, :, 1:3], state)  # nothing was lost
        assert torch.equal(a, c)
        raw = pickled[transport.rank] = pickle.dumps(state)
        for same in (copy.copy(state), copy.deepcopy(state), pickle.loads(raw)):
            assert repr(same) == repr(state) and len(raw) < 2 * state.bytes + 10_000
            assert torch.equal(steady(z[:, :, 1:3], same)[0], a)
        return said

    first, *rest = on_ranks(given, program)
    assert "is of another stream" in first[0]
    assert "the state before is of N=1, the chunk of N=2" in first[1]
    assert "the last argument of a later chunk is the state before it, got a Tensor" in first[2]
    assert "got a type" in first[3]
    assert "states: state 1 on ranks [0], state 3 on ranks [1]" in first[4]
    monkeypatch.setattr(streams, "_KEYS", {})  # as in another process
    with pytest.raises(InputError, match="a state of Vae is of a stream that this process doesn't have"):
        pickle.loads(pickled[0])
    assert all(one[4] == first[4] for one in rest)


@pytest.mark.parametrize("whole", [True, False])
def test_bytes_of_a_chunk_are_foreseen_and_its_steps_made_ready(whole: bool) -> None:
    """Within a hundredth of the storages that a call makes; no step is made in a call of a size that is warm."""
    z = torch.zeros(1, 3, 3, 5, 6, dtype=torch.float64)
    module, asked, packages, _ = compiled(seeded(), (z[:, :, :1],), (z[:, :, 1:],), "H=2", open={"z": {"H": 3, "W": 4}})
    net = load_package(packages["first"][1], files=packages["first"][2])
    sizes, z = {"H": 32, "W": 20}, torch.randn(1, 3, 5, 32, 20, dtype=torch.float64)
    for rank in range(2):
        first, steady = chunks(module, asked, packages, net.init_mesh("cpu", transport=Echo(rank, 2)), whole=whole)
        for chunk in (first, steady):
            chunk.warm_up([sizes])
            assert chunk.peak_bytes(**sizes) > chunk.peak_bytes()
            for call in (lambda chunk=chunk: chunk.warm_up([{"K": 3}]), lambda chunk=chunk: chunk.peak_bytes(K=3)):
                with pytest.raises(ValueError, match="sizes= are of N, H, W; got K"):
                    call()
        for again in (False, True):  # tables are made once
            state: Any = None
            for k, part in enumerate((z[:, :, :1], z[:, :, 1:3], z[:, :, 3:])):
                chunk = steady if k else first
                x = part if whole else chunk.package.scatter("z", part, first.network._mesh)
                held = [*chunk.network.parameters(), *chunk.network.buffers(), *(state.blocks.values() if k else ())]
                ready = alive("Linked")
                with Allocations([x, *(getattr(t, "_block", t).detach() for t in held)]) as mode:
                    y, state = chunk(x, *([state] if k else []), **({} if whole or k else {"sizes": sizes}))
                assert alive("Linked") == ready
                if again:
                    foreseen = chunk.peak_bytes(**sizes)
                    assert abs(foreseen - mode.peak) <= 0.01 * mode.peak, (rank, k, foreseen, mode.peak)
                del y


def test_both_graphs_have_one_set_of_weights() -> None:
    given = decoder("2x2", (5, 6))
    vae, z = given[0], torch.randn(2, 3, 3, 5, 6, dtype=torch.float64)
    torch.manual_seed(4)
    other = Vae().double().eval()
    with torch.no_grad():
        want = one_shot(other, z)

    def program(first: Chunk, steady: Chunk, transport: VirtualTransport) -> tuple[float, bool]:
        a, b = (dict(one.network.named_parameters()) for one in (first, steady))
        assert a.keys() == b.keys() == dict(vae.named_parameters()).keys()
        assert all(a[n]._block.data_ptr() == b[n]._block.data_ptr() for n in a)
        assert [*first.weights.state_dict()] == [*vae.state_dict()]
        assert sum(1 for _ in first.weights.parameters()) == len(a)
        first.weights.load_full(other.state_dict())
        y, _ = streamed(first, steady, z, 2)
        full = first.weights.full_state_dict()
        with pytest.raises(KeyError, match="unknown more"):
            first.weights.load_full({**other.state_dict(), "more": z})
        return float((y - want).abs().max()), all(torch.equal(full[n], t) for n, t in other.state_dict().items())

    assert all(far < 1e-12 and same for far, same in on_ranks(given, program))


def test_blocks_in_and_out() -> None:
    given = decoder("W=2", (5, 6))
    z = torch.randn(1, 3, 3, 5, 6, dtype=torch.float64)
    with torch.no_grad():
        want = one_shot(given[0], z)

    def program(first: Chunk, steady: Chunk, transport: VirtualTransport) -> float:
        mesh, net = first.network._mesh, steady.package
        _, state = first(first.package.scatter("z", z[:, :, :1], mesh))
        y, _ = steady(net.scatter("z", z[:, :, 1:], mesh), state)
        (name,) = [n for n in steady.network.call.outputs if n.endswith("0") and "." not in n]
        return float((net.gather(name, y, mesh) - want[:, :, 1:]).abs().max())

    assert max(on_ranks(given, program, whole=False)) < 1e-12


class Behind(nn.Module):
    """Its caches are copies of the last frames that it takes and that it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(2, 2, (2, 1, 1))

    def forward(self, x: Tensor, caches: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        taken, made = caches or (torch.zeros_like(x[:, :, :1]),) * 2
        y = self.conv(torch.cat([taken, x], 2)) + made
        return y, (x[:, :, -1:].clone(), y[:, :, -1:].clone())


def test_blocks_may_be_written_over_before_the_next_chunk() -> None:
    torch.manual_seed(0)
    module, x = Behind().double().eval(), torch.randn(1, 2, 2, 6, 5, dtype=torch.float64)
    given = compiled(module, (x[:, :, :1],), (x[:, :, 1:],), "H=2")
    with torch.no_grad():
        want, _ = module(x[:, :, 1:], module(x[:, :, :1])[1])

    def program(first: Chunk, steady: Chunk, transport: VirtualTransport) -> float:
        mesh, net = first.network._mesh, steady.package
        block, later = (net.scatter("x", one, mesh) for one in x.split(1, 2))
        y, state = first(block)
        block.copy_(later)
        y.zero_()
        y, _ = steady(block, state)
        (name,) = [n for n in steady.network.call.outputs if n.endswith("0") and "." not in n]
        return float((net.gather(name, y, mesh) - want).abs().max())

    assert max(on_ranks(given, program, whole=False)) < 1e-12


class Ahead(nn.Module):
    """Its cache is what it makes, whose rows nobody has fetched when a chunk ends."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.after = nn.Conv3d(2, 2, (2, 3, 3), padding=(0, 1, 1)), nn.Conv3d(2, 2, 1)

    def forward(self, x: Tensor, caches: Tensor | None = None) -> tuple[Tensor, Tensor]:
        before = torch.zeros_like(x[:, :, :1]) if caches is None else caches
        y = torch.tanh(self.after(self.conv(torch.cat([before, x], 2))))
        return y, y[:, :, -1:]


def test_rows_that_would_have_to_be_sent_for_a_state_alone_are_not() -> None:
    torch.manual_seed(0)
    module, x = Ahead().double().eval(), torch.randn(1, 2, 4, 6, 5, dtype=torch.float64)
    given = compiled(module, (x[:, :, :2],), (x[:, :, 2:],), "H=2")
    with torch.no_grad():
        y, kept = module(x[:, :, :2])
        want = torch.cat([y, module(x[:, :, 2:], kept)[0]], 2)

    def program(first: Chunk, steady: Chunk, transport: VirtualTransport) -> tuple[float, Any, bool]:
        a, state = first(x[:, :, :2])
        b, state = steady(x[:, :, 2:], state)
        return (
            float((torch.cat([a, b], 2) - want).abs().max()),
            state.halos,
            steady.bytes_sent(state) == steady.bytes_sent(),
        )

    for far, halos, all_of_it in on_ranks(given, program):
        assert far < 1e-12
        assert (halos, all_of_it) == ((), True)


def test_what_is_no_stream_is_refused() -> None:
    x = torch.zeros(1, 2, 2, 4, 4)

    def refused(text: str, module: nn.Module, forward: Any = None) -> None:
        with pytest.raises(InputError, match=text):
            convgen.stream(module, (x,), (x,), {"H": 1}, forward=forward)

    class Grows(nn.Module):
        def forward(self, x: Tensor, caches: Any = None) -> Any:
            both = x if caches is None else torch.cat([caches["x"], x], 2)
            return both, {"x": both}

    class Ends(nn.Module):
        def forward(self, x: Tensor, caches: Any = None) -> Any:
            return x, (x if caches is None else None,)

    class One(nn.Module):
        def forward(self, x: Tensor, caches: Any = None) -> Any:
            return x

    class AutoencoderKLHunyuanVideo(nn.Module):
        pass

    refused(r"its forward takes no caches: \(self, input", nn.Conv3d(2, 2, 1))
    refused(r"the cache x is \[1, 2, 2, 4, 4\] torch.float32 after the first chunk, and \[1, 2, 4, 4, 4\]", Grows())
    refused("the cache 0 is .* after the first chunk, and none after the next", Ends())
    refused("its forward gives a tensor", One())
    refused("AutoencoderKLHunyuanVideo has no caches from chunk to chunk", AutoencoderKLHunyuanVideo(), "decode")
    refused("no stream is known of decode of a One", One(), "decode")
    assert adapter(type("AutoencoderKLWan", (nn.Module,), {})(), "encode").__name__ == "encode_wan"
