# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportIncompatibleMethodOverride=false
# (what torch leaves untyped, and calls by another signature than it declares)
"""A network's convolutions on a GPU, by a package's kernels instead of ATen's, and their gradients."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from convgen.operations.convolution import MAKES, READS, LocalConvolution, Phase
from convgen.operations.fused import Fused
from convgen.operations.offered import offered
from convgen.operations.rimmed import Rimmed, RimPlaces, to_parts
from convgen.operations.row import At, Epilogue

from .blocks import Unmapped
from .tf32 import takes_tf32
from .travel import CHANNELS_LAST

if TYPE_CHECKING:
    from .last_steps import Later


class ByProducts:
    """Two modules of float32 kernels; the one whose products are TF32's runs where torch's switch for convolutions says
    so."""

    def __init__(self, float32: Any, tf32: Any) -> None:
        self.float32, self.tf32 = float32, tf32

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tf32 if takes_tf32("convolutions") else self.float32, name)


class LocalKernels:
    """The kernels of a local convolution, one function for each phase.

    Args:
        module: holds the kernels.
        last: whether they take tensors with channels last in memory.
        rim: the activation, x or y, that they read as a block and boxes around it; "" for none.
    """

    def __init__(self, module: Any, local: LocalConvolution, last: bool, rim: str = "") -> None:
        self.module, self.local, self.last, self.rim = module, local, last, rim
        self.parts = {name: n for name, n in (("x", local.x_parts), ("y", local.y_parts)) if n > 1}
        xs, ys, *_ = zip(*local.dims, strict=True)
        each = {"x": local.channels * math.prod(xs), "y": local.filters * math.prod(ys)}
        self.sample = {name: local.groups * n for name, n in each.items()}  # elements of one sample
        self.format = CHANNELS_LAST[len(local.dims) + 2] if last else torch.contiguous_format

    def at(self, local: LocalConvolution) -> LocalKernels:
        """The same kernels for other extents."""
        return LocalKernels(self.module, local, self.last, self.rim)

    def __call__(self, phase: Phase, *operands: Any) -> Tensor:
        if not self.rim:
            operands = tuple([t.whole() if isinstance(t, Rimmed) else t for t in operands])
        if any(isinstance(t, Rimmed) for t in operands):  # then the row says its gradient itself, or needs none
            return self.made(phase, *operands)
        return Convolved.apply(self, phase, *operands)

    def made(self, phase: Phase, *operands: Any) -> Tensor:
        """The result of a phase's kernel; the first operand is an activation."""
        samples = self.samples(phase, operands[0])
        out = self.empty(phase, samples, operands[0])
        if not all(t.numel() for t in (*operands, out)):
            return out.zero_()
        given, rims = self.given(phase, *operands)
        getattr(self.module, phase)(*given, out, self.sizes(self.module, samples), *rims)
        return out

    def given(self, phase: Phase, *operands: Any) -> tuple[list[Tensor], list[Any]]:
        """Tensors as kernels take them, and the boxes around one of them, if the kernels read such."""
        rim = self.rim if (phase == "backward_data") == (self.rim == "y") else ""
        operands = tuple([_as_read(t, n == rim) for t, n in zip(operands, READS[phase], strict=True)])
        counts = [self.parts.get(name, 1) for name in READS[phase]]
        whole = [t.own if isinstance(t, Rimmed) else t for t in operands]
        # Zeros in the place of a gradient that nothing gives come as a tensor.
        tensors = [self.dense(to_parts(t, n) if n > 1 < t.dim() else t) for t, n in zip(whole, counts, strict=True)]
        return tensors, [self._rim(t) for t in operands if isinstance(t, Rimmed)]

    def _rim(self, of: Rimmed) -> Any:
        around, buffer = of.around, of.rim.detach()
        buffer = buffer.clone() if buffer.data_ptr() % 16 else buffer
        return self.module.Rim(buffer, around.table(buffer.device), around.own, around.lines)

    def samples(self, phase: Phase, activation: Any) -> int:
        """The number of samples of the activation that a phase reads first."""
        return activation.shape[0] if len(activation.shape) > 1 else activation.numel() // self.sample[READS[phase][0]]

    def empty(self, phase: Phase, samples: int, like: Any) -> Tensor:
        """Memory for a phase's result of so many samples; flat where its channels lie in parts."""
        c, made = self.local, MAKES[phase]
        xs, ys, taps, *_ = zip(*c.dims, strict=True)
        if made in self.parts:
            return torch.empty(samples * self.sample[made], dtype=like.dtype, device=like.device)
        shapes = {
            "x": (samples, c.groups * c.channels, *xs),
            "w": (c.groups * c.filters, c.channels, *taps),
            "y": (samples, c.groups * c.filters, *ys),
        }
        there = offered(shapes["w"], like) if made == "w" else None
        if there is not None and there.is_contiguous(memory_format=self.format):
            return there
        return torch.empty(shapes[made], dtype=like.dtype, device=like.device, memory_format=self.format)

    def sizes(self, module: Any, samples: int) -> Any:
        """A kernel's Sizes, for so many samples."""
        c = self.local
        xs, ys, _, _, _, below = zip(*c.dims, strict=True)
        return module.Sizes(samples, xs, ys, below, c.channels // c.x_parts, c.filters // c.y_parts, c.groups)

    def dense(self, tensor: Tensor) -> Tensor:
        """A tensor as kernels take it: it begins at a multiple of 16 bytes, which a view of a larger one may not do."""
        memory = self.format if tensor.dim() > 1 else torch.contiguous_format
        tensor = tensor.detach().contiguous(memory_format=memory)
        return tensor.clone() if tensor.data_ptr() % 16 else tensor


def _as_read(operand: Any, rimmed: bool) -> Any:
    """An operand as a kernel reads it: if `rimmed`, a block and the boxes around it, of which there may be none; else
    one tensor."""
    if isinstance(operand, Rimmed):
        return operand if rimmed else operand.whole()
    if not rimmed:
        return operand
    window = [(0, n) for n in operand.shape]
    return Rimmed(operand, operand.new_empty(0), RimPlaces(window, window, ()))


class OfAnyExtents:
    """Kernels of convolutions that differ in extents alone; each kernel takes any extents as arguments.

    Attributes:
        made: the kernels, by the convolution that each was compiled, and perhaps tuned, for and by the activation that
            it reads with boxes around it.
    """

    def __init__(self) -> None:
        self.made: dict[tuple[LocalConvolution, str], Any] = {}
        self.at = functools.lru_cache(1024)(self._at)

    def _at(self, local: LocalConvolution, rim: str) -> Any:
        """The kernel for these extents: the one that was made for the nearest number of pixels, of those that read
        boxes around this activation if there are any."""

        def apart(one: tuple[LocalConvolution, str]) -> tuple[bool, float]:
            return one[1] != rim, abs(_doublings(one[0]) - _doublings(local))

        return self.made[min(self.made, key=apart)].at(local)


def _doublings(local: LocalConvolution) -> float:
    """How often 1 is doubled to reach the pixels of x times the pixels of y: kernels' sizes are compared by ratio."""
    return math.log2(max(1, math.prod(d[0] for d in local.dims) * math.prod(d[1] for d in local.dims)))


class EpilogueKernel:
    """A forward kernel that does what follows the convolution before it writes.

    Args:
        module: holds the kernel; `plain`: the convolution's own kernels.
        keeps: whether the convolution's sum may be asked for, too.
    """

    def __init__(self, module: Any, plain: LocalKernels, keeps: bool) -> None:
        self.module, self.plain, self.keeps = module, plain, keeps

    def at(self, local: LocalConvolution) -> EpilogueKernel:
        """The same kernel for other extents."""
        return EpilogueKernel(self.module, self.plain.at(local), self.keeps)

    def __call__(self, fused: Fused, at: At, between: Tensor | None, *operands: Any) -> Any:
        x, *others = operands
        if isinstance(x, Rimmed):
            return ConvolvedThen.apply(self, fused, at, x, between, x.stands, *others)
        return ConvolvedThen.apply(self, fused, at, None, between, x, *others)

    def made(self, keep: bool, *operands: Any) -> tuple[Tensor, Tensor | None]:
        """The result of x, w and the steps' operands; and the sum before the steps, if it is to be kept."""
        made, before, _ = self.launched(keep, *operands)
        return made, before

    def launched(self, keep: bool, *operands: Any) -> tuple[Tensor, Tensor | None, Any]:
        """What `made` gives, and whatever else the kernel makes."""
        samples = self.plain.samples("forward", operands[0])
        made = self.plain.empty("forward", samples, operands[0])
        before = torch.empty_like(made) if keep else None
        x, w, *others = operands
        given, rims = self.plain.given("forward", x, w)
        given += [self.plain.dense(t) if t.shape == made.shape else t.detach().reshape(-1).contiguous() for t in others]
        given += [made if before is None else before] if self.keeps else []
        return made, before, self.module.forward(*given, made, self.plain.sizes(self.module, samples), *rims)


class Tiles(NamedTuple):
    """Moments by tiles of pixels.

    Attributes:
        parts: each tile's mean and sum of squared deviations, [tiles, 2, channels].
        counts: each tile's number of pixels; samples are slowest.
        by_sample: whether a tile has pixels of one sample alone.
    """

    parts: Tensor
    counts: Tensor
    by_sample: bool


class MomentsKernel(EpilogueKernel):
    """A forward kernel, with steps behind the convolution or none, that also makes moments of its result.

    Args:
        by_sample: whether a tile has pixels of one sample alone.
    """

    def __init__(self, module: Any, plain: LocalKernels, keeps: bool, by_sample: bool = False) -> None:
        super().__init__(module, plain, keeps)
        self.by_sample = by_sample

    def with_moments(self, *operands: Any) -> tuple[Tensor, Tiles]:
        made, _, (parts, counts) = self.launched(False, *operands)
        return made, Tiles(parts, counts, self.by_sample)

    def differentiated(self, fused: Fused, at: At, between: Tensor | None, *operands: Any) -> tuple[Tensor, Tiles]:
        """What `with_moments` gives, where torch keeps a graph of it."""
        made, parts, counts = self(fused, at, between, *operands)
        return made, Tiles(parts, counts, self.by_sample)


class BehindNorm:
    """A product's kernel that does a batch norm's last step on what it reads, and also writes the step's result.

    Args:
        module: with the kernel; `plain`: the convolution's own kernels.
        by_sample: whether a tile of which forward makes moments has pixels of one sample alone.
    """

    def __init__(self, module: Any, plain: LocalKernels, by_sample: bool = False) -> None:
        self.module, self.plain, self.by_sample = module, plain, by_sample

    def with_moments(self, x: Later, w: Tensor) -> tuple[Tensor, Tiles]:
        """Write what x has left to make, and convolve it; the result, and moments of it."""
        out = self.plain.empty("forward", len(x.made), x.made)
        parts, counts = self._launched(self.module.forward, x, w, out)
        return out, Tiles(parts, counts, self.by_sample)

    def back(self, dy: Later, w: Tensor, *before: Tensor) -> Tensor:
        """Write what dy has left to make, and make the convolved operand's gradient of it; `before` is added to
        that."""
        out = self.plain.empty("backward_data", len(dy.made), dy.made)
        self._launched(self.module.backward_data, dy, w, *before, out)
        return out

    def _launched(self, run: Any, of: Later, *tensors: Tensor) -> Any:
        *given, out = tensors
        sizes = self.plain.sizes(self.module, len(of.made))
        return run(*[self.plain.dense(t) for t in (of.read, *given)], out, sizes, of.given, of.eps)


class ConvolvedThen(Unmapped):
    """A convolution and what follows it. Where rows of their own make the gradients of x and w, they read the gradient
    of `between`: a tensor in the shape of the convolution's result, without its values. Where x is rimmed, the tensor
    in x's place has no values either."""

    @staticmethod
    def forward(
        ctx: Any, kernel: EpilogueKernel, fused: Fused, at: At, rimmed: Rimmed | None, between: Tensor | None,
        *operands: Any,
    ) -> Any:  # fmt: skip
        wanted = ctx.needs_input_grad[4:]
        operands = operands if rimmed is None else (rimmed, *operands[1:])
        made, before, moments = kernel.launched(kernel.keeps and any(wanted), *operands)
        ctx.kernel, ctx.fused, ctx.at = kernel, fused, at
        x, w, *others = operands
        ctx.shapes, ctx.around, rim = [t.shape for t in others], None, None
        if isinstance(x, Rimmed):
            x, rim, ctx.around = x.own, x.rim, x.around
        kept = (x, rim) if wanted[2] else (None, None)
        ctx.save_for_backward(*kept, w if wanted[1] else None, *((made,) if before is None else (before, *others)))
        if moments is None:
            return made
        ctx.mark_non_differentiable(*moments)
        return made, *moments

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dmade: Tensor, *_: Any) -> Any:
        x, rim, w, kept, *others = ctx.saved_tensors
        x = x if rim is None else Rimmed(x, rim, ctx.around)
        between, wants_x, wants_w, *wanted = ctx.needs_input_grad[4:]
        if ctx.kernel.keeps:
            with torch.enable_grad():
                leaves = [kept.detach().requires_grad_()]
                leaves += [t.detach().requires_grad_(asked) for t, asked in zip(others, wanted, strict=True)]
                made = ctx.fused.behind(ctx.at, leaves[0], None, None, *leaves[1:])
                asked = [t for t in leaves if t.requires_grad]
                found = iter(torch.autograd.grad(made, asked, dmade))
            dsum, *dothers = [next(found) if t.requires_grad else None for t in leaves]
        else:
            dsum, dothers = ctx.fused.summed_back(dmade, kept, ctx.shapes, wanted)
        dx = ctx.kernel.plain.made("backward_data", dsum, w) if wants_x else None
        dw = ctx.kernel.plain.made("backward_filter", dsum, x) if wants_w else None
        return None, None, None, None, dsum if between else None, dx, dw, *dothers


class MaskKernel:
    """A backward-data kernel that doesn't write dx, but the gradient of the value that elementwise steps made x of.

    Args:
        module: holds the kernel; `plain`: the convolution's own kernels; `steps`: the elementwise steps.
    """

    def __init__(self, module: Any, plain: LocalKernels, steps: Epilogue) -> None:
        self.module, self.plain, self.steps = module, plain, steps

    def at(self, local: LocalConvolution) -> MaskKernel:
        """The same kernel for other extents."""
        return MaskKernel(self.module, self.plain.at(local), self.steps)

    def __call__(self, x: Tensor, of: Tensor, w: Tensor) -> Tensor:
        return ThenConvolved.apply(self, x, of, w)

    def back(self, dy: Tensor, w: Tensor, x: Tensor) -> Tensor:
        """The gradient of the value that x was made of."""
        out = self.plain.empty("backward_data", len(dy), dy)
        if not all(t.numel() for t in (dy, w, out)):
            return out.zero_()
        sizes = self.plain.sizes(self.module, len(dy))
        self.module.backward_data(*[self.plain.dense(t) for t in (dy, w, x)], out, sizes)
        return out


class ThenConvolved(Unmapped):
    """A convolution of x whose gradient goes to the value that x was made of."""

    @staticmethod
    def forward(ctx: Any, kernel: MaskKernel, x: Tensor, of: Tensor, w: Tensor) -> Tensor:
        ctx.kernel = kernel
        ctx.save_for_backward(x, w)
        return kernel.plain.made("forward", x, w)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, w = ctx.saved_tensors
        _, _, wants_x, wants_w = ctx.needs_input_grad
        dx = ctx.kernel.back(dy, w, x) if wants_x else None
        return None, None, dx, ctx.kernel.plain.made("backward_filter", dy, x) if wants_w else None


class Convolved(Unmapped):
    """A phase done by its kernel; its gradients are the other phases of the same convolution."""

    @staticmethod
    def forward(ctx: Any, kernels: LocalKernels, phase: Phase, *operands: Tensor) -> Tensor:
        ctx.kernels, ctx.phase = kernels, phase
        ctx.save_for_backward(*operands)
        return kernels.made(phase, *operands)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dmade: Tensor) -> Any:
        tensors = dict(zip(READS[ctx.phase], ctx.saved_tensors, strict=True)) | {MAKES[ctx.phase]: dmade}
        wants = dict(zip(READS[ctx.phase], ctx.needs_input_grad[2:], strict=True))
        found: dict[str, Tensor] = {}
        for phase, made in MAKES.items():
            if wants.get(made):
                found[made] = ctx.kernels.made(phase, *[tensors[t] for t in READS[phase]])
        return None, None, *[found.get(t) for t in READS[ctx.phase]]
