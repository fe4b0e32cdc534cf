"""What a step moves: launches and bytes read and written by a rank of a network for a GPU, beside plain torch's.

    python bench/step_traffic.py [--networks resnet50 ...] [--grid N=2] [--batch 16] [--statistics local]
    python bench/step_traffic.py --inference ...

A step is forward, the same sum of outputs, and backward. Nothing is computed: tensors are on torch's `meta` device,
where each call of ATen and each Triton launch is recorded. Plain torch runs the module on the share of one rank,
channels last; it sends nothing, so what packs, adds and unpacks messages is a line of its own. bench/aten_kernels.py
says, with its sources, what a call launches on a GPU and how often it reads and writes its operands. A Triton launch
reads an operand once, and again for each wave of programs where what programs between two readings of it read doesn't
fit half of L2. `least` has each activation and gradient written once, and read once for each pass that must see all of
it. Copies that change the order in memory have a column, and who makes them lines below. ResNet-50 and ConvNeXt are
torchvision's, decoders those of diffusers.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from aten_kernels import COPIES, NOTHING, Counted, changes_format, counted, size, tensors
from options import options
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from convgen.algebra.grid import Grid
from convgen.network_compiler import compile_network
from convgen.operations.convolution import MAKES, READS
from convgen.packages import files_of, forget_package, kernel_modules, load_package, runtime_of
from convgen.spec.exported import graph_of
from convgen.spec.graph_edit import with_dtype
from convgen.spec.target import read_target
from convgen.verify.virtual import World

L2_BYTES = 50 << 20  # of an H100 (its data sheet)
SM_90 = read_target("cuda:sm_90")
KINDS = (
    "convolutions", "norms", "elementwise", "pooling", "copies", "reductions", "products", "other kernels", "messages",
)  # fmt: skip
ADDS = ("add_pieces", "add_doubles")  # kernels of what ranks have sent
MESSAGES = ("Bucket.", "come", "Packing.", "begin", "gathered")
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class Traffic:
    """What was recorded, by kind."""

    def __init__(self) -> None:
        self.kinds: dict[str, Counter[str]] = defaultdict(Counter)
        self.calls: dict[str, Counter[str]] = defaultdict(Counter)
        self.formats: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()  # bytes, by who makes them

    def add(self, name: str, one: Counted) -> None:
        for table, key in ((self.kinds, one.kind), (self.calls, name)):
            table[key].update(launches=one.launches, moved=one.moved, least=one.least)

    def total(self, what: str) -> int:
        return sum(c[what] for c in self.kinds.values())

    @property
    def launches(self) -> int:
        return self.total("launches")

    @property
    def moved(self) -> int:
        """Bytes."""
        return self.total("moved")


class Recorder(TorchDispatchMode):
    """Calls of ATen while it is entered, of this thread.

    Args:
        maker: of a copy that changes the format, who makes it.
    """

    def __init__(self, traffic: Traffic, maker: Callable[[], str]) -> None:
        super().__init__()
        self.traffic, self.maker = traffic, maker
        self.thread = threading.get_ident()
        self._sums: set[Any] = set()  # storages of sums, which may be rectified
        self._held: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, named = func.overloadpacket.__name__, kwargs or {}
        if name == "batch_norm_update_stats":
            made: Any = tuple(args[0].new_empty(args[0].shape[1], dtype=torch.float32) for _ in range(2))
        elif name == "convolution_backward":
            made = _gradients(*args)
        elif name in ("native_batch_norm", "native_batch_norm_backward"):  # whose results lie otherwise on `meta`
            of = args[name.endswith("backward")]
            made = tuple(torch.empty_like(of) if k == 0 else t for k, t in enumerate(func(*args, **named)))
        else:
            made = func(*args, **named)
        if name in ("convolution", "max_pool2d_with_indices") and isinstance(args[0], Tensor):  # as a GPU's
            last = (
                LAST.get(args[0].dim()) if any(map(_is_last, args[:2] if name == "convolution" else args[:1])) else None
            )
            if last is not None:
                lying = [torch.empty_like(t, memory_format=last) for t in (made if isinstance(made, tuple) else [made])]
                made = tuple(lying) if isinstance(made, tuple) else lying[0]
        given_back = args[0] if name == "_foreach_copy_" else made
        several: list[Any] = [*given_back] if isinstance(given_back, (tuple, list)) else [given_back]
        given = list(tensors([*args, *named.values()]))
        held = {t.untyped_storage()._cdata for t in given}
        fresh = any(isinstance(t, Tensor) and t.untyped_storage()._cdata not in held for t in several)
        results = [t if isinstance(t, Tensor) else None for t in several]
        there = any(t is not None and t.is_meta and t.numel() for t in results)
        if name in NOTHING or not there or not (fresh or func._schema.is_mutable):
            return made
        self._record(name, args, results)
        return made

    def _record(self, name: str, args: Sequence[Any], made: Sequence[Any]) -> None:
        if of_transport():  # which stands for what moves messages, as nothing does for plain torch
            return
        of_sum = False
        if name in ("add", "add_", "relu_", "relu"):
            of = args[0].untyped_storage()._cdata
            if "add" in name or of in self._sums:
                self._sums.add(made[0].untyped_storage()._cdata)
                self._held.append(made[0].untyped_storage())
        elif name == "threshold_backward":
            of_sum = args[1].untyped_storage()._cdata in self._sums
        if name == "convolution":
            self._brought(args[:2], made[0])
        elif name == "convolution_backward":
            self._brought(args[:3], args[1])
        if name in COPIES:
            self.traffic.copies[self.maker()] += 2 * sum(map(size, made))
        source = args[1] if name == "copy_" else args[0] if name in ("clone", "_to_copy") else None
        packs = self.maker().startswith(MESSAGES)
        if isinstance(source, Tensor) and changes_format(source, made[0]) and not packs:
            self.traffic.formats[self.maker()] += 1
        one = counted(name, args, made, of_sum)
        one = replace(one, kind="messages") if packs else one
        self.traffic.add(name, one)

    def _brought(self, given: Sequence[Tensor], like: Tensor) -> None:
        """Operands in the format in which cuDNN convolves."""
        if any(_is_last(t) for t in (*given, like)):
            for t in given:
                if not _is_last(t):
                    self.traffic.formats["ATen's convolution"] += 1
                    self.traffic.add("clone", Counted("copies", 1, 2 * size(t), 0))


def _is_last(t: Any) -> bool:
    return isinstance(t, Tensor) and t.dim() in LAST and t.is_contiguous(memory_format=LAST[t.dim()])


def _gradients(dy: Tensor, x: Tensor, w: Tensor, *rest: Any) -> tuple[Any, ...]:
    """As a GPU makes them: like what they are of."""
    wants = rest[-1]
    memory = LAST[x.dim()] if x.dim() in LAST and (_is_last(x) or _is_last(w)) else torch.contiguous_format
    dx, dw = (
        torch.empty_like(t, memory_format=memory) if want else None for t, want in zip((x, w), wants, strict=False)
    )
    return dx, dw, w.new_empty(dy.shape[1]) if wants[2] else None


def of_transport() -> bool:
    """Whether a transport of virtual ranks copies what it brings."""
    frame: Any = sys._getframe()
    while frame is not None and not frame.f_code.co_filename.endswith("virtual.py"):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name not in ("body", "run")


def in_all_reduce() -> bool:
    """Whether a transport of virtual ranks makes a whole sum on each of them."""
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_result":
        frame = frame.f_back
    return frame is not None and frame.f_locals["kind"] == "all_reduce"


def plain_maker() -> str:
    return "plain torch"


def maker_in(folder: Path) -> str:
    """The innermost function of a package that is running."""
    frame: Any = sys._getframe()
    while frame is not None and not frame.f_code.co_filename.startswith(str(folder)):
        frame = frame.f_back
    return "torch" if frame is None else frame.f_code.co_qualname


@contextmanager
def one_attention(record: Callable[[str, Counted], None]) -> Iterator[None]:
    """Attention as one launch that reads its operands once, and one for its gradients."""

    class Attend(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            ctx.save_for_backward(q, k, v)
            made = q.new_empty((*q.shape[:-1], v.shape[-1]))
            once = sum(map(size, (q, k, v, made)))
            record("attention", Counted("products", 1, once, once))
            return made

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
            made = tuple(t.new_empty(t.shape) for t in ctx.saved_tensors)
            once = size(dy) * 2 + sum(map(size, (*ctx.saved_tensors, *made)))  # y, too
            record("attention_backward", Counted("products", 1, once, once))
            return made

    def attend(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
        return Attend.apply(q, k, v)

    with patch.object(nn.functional, "scaled_dot_product_attention", attend):
        yield


def loss_of(made: Any) -> Tensor:
    several = list(made.values()) if isinstance(made, dict) else made if isinstance(made, (tuple, list)) else [made]
    return sum(t.sum() for t in several if t.is_floating_point() and t.requires_grad)  # type: ignore[return-value]


def plain(module: nn.Module, shapes: Sequence[Sequence[int]], *, training: bool, dtype: torch.dtype) -> Traffic:
    """Of a module as it stands, channels last."""
    traffic = Traffic()
    model = module.to("meta", dtype).train(training)
    for t in (*model.parameters(), *model.buffers()):
        if t.dim() in LAST:
            t.data = t.data.to(memory_format=LAST[t.dim()])
    xs = [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]
    xs = [x.to(memory_format=LAST[x.dim()]) if x.dim() in LAST else x for x in xs]
    xs = [x.requires_grad_(training) for x in xs]
    with nullcontext() if training else torch.no_grad(), Recorder(traffic, plain_maker):
        with one_attention(traffic.add):
            made = model(*xs)
        if training:
            loss_of(made).backward()
    return traffic


# ---- A package on no device ----


class Kernels:
    """Triton launches of the rank that is recorded."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self.operands: dict[int, list[tuple[str, Tensor]]] = {}

    def phase(self, run: Callable[..., Any], phase: Any, *given: Any, **named: Any) -> Any:
        tensors_of = [t for t in given if isinstance(t, Tensor)]  # sizes and rims are behind them
        names = [*READS[phase], *["with"] * (len(tensors_of) - 3), MAKES[phase]]
        me = threading.get_ident()
        self.operands[me] = [*zip(names, tensors_of, strict=True)]
        try:
            return run(*given, **named)
        finally:
            self.operands.pop(me)

    def launch(self, function: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        recorder, me = self.recorder, threading.get_ident()
        if recorder is None or recorder.thread != me or not prod(grid):
            return
        once: dict[tuple[Any, int], int] = {}
        for t in (getattr(a, "base", a) for a in args):
            if isinstance(t, Tensor):
                where = t.untyped_storage()._cdata, t.storage_offset()
                once[where] = max(once.get(where, 0), t.numel() * t.element_size())
        name = function.fn.__name__
        moved = sum(once.values())
        if name in ADDS and constants["PIECES"] > 2 and in_all_reduce():
            moved //= constants["PIECES"]  # a rank adds its part, and gathers those of others
        kind = "convolutions" if me in self.operands else "norms" if "norm" in name else "other kernels"
        kind = "messages" if name in ADDS else kind
        if me in self.operands and not name.endswith(("_blocks", "_result", "_sum")):  # a product
            moved += self._again(grid, self.operands[me])
        recorder.traffic.add(name, Counted(kind, 1, moved, 0))

    def _again(self, grid: tuple[int, ...], operands: list[tuple[str, Tensor]]) -> int:
        """Bytes that are read anew, as L2 has lost them.

        Programs of all columns of a row of tiles follow each other, and so do those of all tiles of a filter
        gradient's piece of the pixels: the activations that they share have to last so long. Weights last from one
        row of tiles to the next.
        """
        sizes = {n: size(t) for n, t in operands}
        waves = -(-prod(grid) // SM_90.processors)
        if "w" in sizes and operands[-1][0] == "w":  # of which pieces are on the last dimension of the grid
            piece = (sizes["x"] + sizes["y"]) // max(1, grid[-1])
            rounds = -(-prod(grid[:-1]) // SM_90.processors)
            return (sizes["x"] + sizes["y"]) * (rounds - 1) if piece > L2_BYTES // 2 else 0
        return sizes["w"] * (waves - 1) if sizes["w"] > L2_BYTES // 2 else 0


@contextmanager
def on_no_device(package: Any, kernels: Kernels) -> Iterator[None]:
    """Where a package runs on `meta` tensors, and its launches are recorded."""
    runtime = runtime_of(package)
    with ExitStack() as stack:
        put: Callable[..., Any] = lambda of, name, value: stack.enter_context(patch.object(of, name, value))  # noqa: E731
        put(package.NET, "device", "meta")
        for module in kernel_modules(package):
            put(module, "launch", kernels.launch)
            for phase in READS:
                if hasattr(module, phase):
                    put(module, phase, partial(kernels.phase, getattr(module, phase), phase))
        # What `meta` tensors have no values for.
        put(torch, "is_autocast_enabled", lambda *_: False)
        put(torch, "autocast", lambda *_, **__: nullcontext())
        shares = lambda self, ranks, dtype: (torch.empty(len(ranks), dtype=dtype, device="meta"), 2.0)  # noqa: E731
        put(runtime.Stand, "shares", shares)
        if hasattr(runtime, "Attention"):
            put(runtime.Attention, "has_vjp", lambda *_: False)  # as on a GPU
        yield


def packaged(package: Any, folder: Path, *, training: bool) -> Traffic:
    """Of the first rank of a package, in its second step: in the first one tables are made, and sizes are learnt."""
    traffic, kernels, ranks = Traffic(), Kernels(), prod(package.NET.grid.values())

    def step(end: Any) -> None:
        mesh, net = package.init_mesh("meta", transport=end), package.NET
        network = package.Network(mesh, parameters="blocks").train(training)
        given = [
            package.scatter(name, torch.empty(net.split(name, net.batch).extents, dtype=getattr(torch, kind)), mesh)
            for name, kind in zip(network._inputs, network._types, strict=True)
        ]
        given = [t.to(memory_format=LAST[t.dim()]) if t.dim() in LAST else t for t in given]
        given = [t.detach().requires_grad_(training) if t.is_floating_point() else t for t in given]
        for found in (Traffic(), Traffic() if end.rank else traffic):
            recorder = Recorder(found, partial(maker_in, folder))
            kernels.recorder = recorder if found is traffic else kernels.recorder
            with recorder, nullcontext() if training else torch.no_grad():
                made = network(*given)
                if training:
                    loss_of(made).backward()
            for t in (*network.parameters(), *given):
                t.grad = None

    def of_first(name: str, one: Counted) -> None:
        if kernels.recorder is not None and kernels.recorder.thread == threading.get_ident():
            traffic.add(name, one)

    with on_no_device(package, kernels), one_attention(of_first):
        World(ranks).run(step)
    return traffic


def compiled(
    module: nn.Module, shapes: Sequence[Sequence[int]], grid: Mapping[str, int], statistics: str, dtype: str,
    *, training: bool,
) -> Traffic:  # fmt: skip
    """Of a rank of a module's package."""
    graph, constants = graph_of(module.train(training), tuple(torch.zeros(*shape) for shape in shapes))
    one = compile_network(with_dtype(graph, dtype), Grid(tuple(grid.items())), statistics=statistics, target=SM_90)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / one.graph.name
        path.mkdir()
        for name, data in files_of(one, constants).items():
            (path / name).write_bytes(data)
        package = load_package(path)
        try:
            return packaged(package, path, training=training)
        finally:
            forget_package(package)


# ---- Networks ----


def torchvision_model(name: str, n: int, rows: int) -> tuple[nn.Module, list[int]]:
    from zoo.makers import vision

    make = vision(name, (n, 3, rows, rows))
    return make()[0], [n, 3, rows, rows]


def unet(n: int, rows: int) -> tuple[nn.Module, list[int]]:
    """Of [U-Net]'s four levels with batch norms."""

    def both(c: int, f: int) -> nn.Sequential:
        made = [[nn.Conv2d(i, f, 3, padding=1, bias=False), nn.BatchNorm2d(f), nn.ReLU(inplace=True)] for i in (c, f)]
        return nn.Sequential(*made[0], *made[1])

    class UNet(nn.Module):
        def __init__(self, width: int = 32, levels: int = 4) -> None:
            super().__init__()
            widths = [width << k for k in range(levels)]
            self.down = nn.ModuleList(both(c, f) for c, f in zip((3, *widths), widths, strict=False))
            pairs = list(zip(widths[1:], widths[:-1], strict=True))[::-1]
            self.rise = nn.ModuleList(nn.ConvTranspose2d(c, f, 2, 2) for c, f in pairs)
            self.up = nn.ModuleList(both(2 * f, f) for _, f in pairs)
            self.head = nn.Conv2d(width, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            kept: list[Tensor] = []
            for k, down in enumerate(self.down):
                x = down(nn.functional.max_pool2d(x, 2) if k else x)
                kept.append(x)
            for rise, up, skip in zip(self.rise, self.up, kept[-2::-1], strict=True):
                x = up(torch.cat([rise(x), skip], 1))
            return self.head(x)

    return UNet(), [n, 3, rows, rows]


def kl_decoder(n: int, rows: int, widths: tuple[int, ...] = (128, 256, 512, 512)) -> tuple[nn.Module, list[int]]:
    """AutoencoderKL's decoder, by default at the widths of Stable Diffusion's; `rows` of the image."""
    from diffusers.models.autoencoders.vae import Decoder

    ups = ("UpDecoderBlock2D",) * 4
    decoder = Decoder(4, 3, up_block_types=ups, block_out_channels=widths, layers_per_block=2)
    return decoder, [n, 4, rows // 8, rows // 8]


def wan_decoder(n: int, rows: int) -> tuple[nn.Module, list[int]]:
    """Wan's decoder of one latent frame; `rows` of the image."""
    from diffusers.models.autoencoders.autoencoder_kl_wan import WanDecoder3d

    return WanDecoder3d(dim=96, z_dim=16), [n, 16, 1, rows // 8, rows // 8]


NETWORKS: dict[str, Callable[[int, int], tuple[nn.Module, list[int]]]] = {
    "resnet50": partial(torchvision_model, "resnet50"),
    "convnext_tiny": partial(torchvision_model, "convnext_tiny"),
    "unet": unet,
    "kl_decoder": kl_decoder,
    "wan_decoder": wan_decoder,
}


def shares(shape: Sequence[int], grid: Mapping[str, int]) -> list[int]:
    """One rank's part of an input with channels second."""
    letters = "NC" + "DHW"[-(len(shape) - 2) :]
    return [n // grid.get(a, 1) if a != "C" else n for a, n in zip(letters, shape, strict=True)]


def table(name: str, plainly: Traffic, ours: Traffic) -> Iterator[str]:
    yield f"{name:18} plain: launches      MB    least    convgen: launches      MB  formats"
    for kind in KINDS:
        a, b = plainly.kinds[kind], ours.kinds[kind]
        if a["launches"] or b["launches"]:
            yield (
                f"  {kind:20} {a['launches']:12} {a['moved'] / 1e6:7.0f} {a['least'] / 1e6:8.0f}"
                f" {b['launches']:20} {b['moved'] / 1e6:7.0f}"
            )
    least = plainly.total("least")
    yield (
        f"  {'all':20} {plainly.launches:12} {plainly.moved / 1e6:7.0f} {least / 1e6:8.0f} {ours.launches:20}"
        f" {ours.moved / 1e6:7.0f} {sum(ours.formats.values()):8} (plain {sum(plainly.formats.values())})"
    )
    alone = ours.moved - ours.kinds["messages"]["moved"]
    yield (
        f"  without messages, of plain's bytes {alone / plainly.moved:.2f}, of the least {alone / max(1, least):.2f};"
        f" with them {ours.moved / plainly.moved:.2f}, {ours.moved / max(1, least):.2f}"
    )
    for maker, count in ours.formats.most_common():
        yield f"    {count:4} changes of format by {maker}"


def main() -> None:
    args = options(
        __doc__,
        networks=(["resnet50"], f"of {', '.join(NETWORKS)}"),
        grid="N=2", batch=(16, "samples of a rank"), rows=224, statistics="local", dtype="bfloat16",
        inference=False, calls=(False, "also by call and kernel"),
    )  # fmt: skip
    grid = {a: int(n) for a, n in (part.split("=") for part in args.grid.split(","))}
    for name in args.networks:
        module, shape = NETWORKS[name](args.batch * grid.get("N", 1), args.rows)
        training = not args.inference
        ours = compiled(module, [shape], grid, args.statistics, args.dtype, training=training)
        share = shares(shape, grid)
        plainly = plain(module, [share], training=training, dtype=getattr(torch, args.dtype))
        print("\n".join(table(name, plainly, ours)))
        for maker, moved in ours.copies.most_common(5):
            print(f"    {moved / 1e6:9.1f} MB of copies by {maker}")
        if args.calls:
            for which, found in (("plain", plainly), ("convgen", ours)):
                for call, c in sorted(found.calls.items(), key=lambda item: -item[1]["moved"]):
                    print(f"    {which:8} {call:40} {c['launches']:6} {c['moved'] / 1e6:9.1f} MB")


if __name__ == "__main__":
    main()
