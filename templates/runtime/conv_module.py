# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false
# (what torch leaves untyped or private, and calls by another signature than it declares)
"""A layer as torch.nn.Module."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .blocks import Block
from .clipping import local
from .conversions import within
from .graphs import GraphedPhases
from .here import Here
from .layout import Layout
from .parameters import as_dtensor, as_held, convolve

if TYPE_CHECKING:
    from .layer import Layer


class ConvModule(torch.nn.Module):
    """The layer as a module: this rank has its blocks of `weight` and `bias`, filled by torch's default for the whole
    layer.

    Args:
        seed: the initialisation's; with it torch's own module, torch.nn.Conv2d or its like, draws the same numbers.
        parameters: dtensors, or Blocks where DTensor can't say the layout; or blocks: Blocks, for models that mix them
            with ordinary parameters in one optimizer, and for DDP or FSDP2 over ranks that hold copies.

    Under torch.device("meta") nothing is drawn: to_empty(device=...), then reset_parameters(seed) or load_full.
    """

    layer: ClassVar[Layer]
    weight: Tensor
    bias: Tensor | None

    def __init__(self, mesh: DeviceMesh, *, seed: int = 0, parameters: str = "dtensors") -> None:
        super().__init__()
        layer = self.layer
        if parameters not in ("dtensors", "blocks"):
            raise ValueError(f"{layer.name}: parameters= is dtensors or blocks, got {parameters!r}")
        self.mesh, self._key = mesh, layer.mesh_key(mesh)
        here = self._here()
        device = "meta" if torch.get_default_device().type == "meta" else layer.device
        for name, layout in layer.learnt.items():
            memory = layer.format(layout.tensor)
            mine = torch.empty(here.shape(layout), device=device, dtype=layer.dtype, memory_format=memory)
            dtensors = parameters == "dtensors"
            known = as_dtensor(mine, layout.tensor, mesh, here.batch, layer) if dtensors else None
            known = as_held(mine, name, layout, here) if known is None else known
            self.register_parameter(name, torch.nn.Parameter(known))
        if "bias" not in layer.learnt:
            self.register_parameter("bias", None)
        if device != "meta":
            self.reset_parameters(seed)

    def _here(self) -> Here:
        return self.layer.here(self._key, self.layer.batch)

    def forward(self, x: Tensor, batch: int | None = None) -> Tensor:
        batch = self.layer.batch if batch is None else batch
        return convolve(self.layer, x, self.weight, self.bias, self.mesh, self._key, batch)

    def graphed(self, x: Tensor, batch: int | None = None) -> GraphedPhases:
        """The module as CUDA graphs, one for forward and one for backward, for blocks like x; it is called as the
        module is. Every rank makes it, and drops it before its process group ends."""
        return GraphedPhases(self, x, batch)

    @torch.no_grad()
    def reset_parameters(self, seed: int = 0) -> None:
        """This rank's blocks of what torch.manual_seed(seed) and torch's own module draw."""
        generator = torch.Generator("cpu").manual_seed(seed)
        for name, layout in self.layer.learnt.items():
            local(getattr(self, name)).copy_(drawn(name, layout, self._here(), generator))

    @torch.no_grad()
    def load_full(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Take this rank's blocks of a whole weight, and of a bias if the layer has one."""
        if (bias is None) == ("bias" in self.layer.learnt):
            wanted = "weight and bias" if bias is None else "weight alone"
            raise TypeError(f"{self.layer.name}: load_full wants {wanted}")
        local(self.weight).copy_(self.layer.scatter("w", weight, self.mesh))
        if bias is not None:
            local(cast(Tensor, self.bias)).copy_(self.layer.scatter("bias", bias, self.mesh))

    def named_parameters(self, *args: Any, **how: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        if any(isinstance(p, Block) for p in self._parameters.values()):
            refuse_whole_state(self.layer.name)
        return super().named_parameters(*args, **how)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._key = self.layer.mesh_key(self.mesh)  # a copy's, or another process's

    def extra_repr(self) -> str:
        return self.layer.schedule.splitlines()[0].removeprefix("schedule ").removesuffix(" {")


def drawn(name: str, layout: Layout, here: Here, generator: torch.Generator) -> Tensor:
    """This rank's block of a parameter as torch draws it: all of its numbers are drawn, a million held at a time."""
    layer = here.layer
    fan_in = math.prod(layer.whole_shape(layer.stored["w"], here.batch)[1:])
    gain = math.sqrt(2.0 / (1 + math.sqrt(5) ** 2))  # as in kaiming_uniform_(a=sqrt(5)), torch's default
    bound = math.sqrt(3.0) * (gain / math.sqrt(fan_in)) if name == "weight" else 1 / math.sqrt(fan_in)
    whole, box = layer.whole_shape(layout, here.batch), here.frame(layout)
    memory = layer.format(layout.tensor)
    kept = torch.empty(here.shape(layout), dtype=layer.dtype, device="cpu", memory_format=memory)
    step = max(1, 2**20 // math.prod(whole[1:]))
    for lo in range(0, whole[0], step):
        hi = min(lo + step, whole[0])
        rows = torch.empty(hi - lo, *whole[1:], dtype=layer.dtype, device="cpu")
        rows.uniform_(-bound, bound, generator=generator)
        mine = (max(lo, box[0][0]), min(hi, box[0][1])), *box[1:]
        if mine[0][0] < mine[0][1]:
            within(kept, box, mine).copy_(within(rows, ((lo, hi), *((0, n) for n in whole[1 : len(box)])), mine))
    return kept


def refuse_whole_state(name: str, instead: str = 'layer.gather("w", m.weight, mesh)') -> None:
    """Refuse torch's get_model_state_dict and its like where they want whole tensors. torch has no protocol by which a
    tensor could tell them that it is a block, so the caller's frames are looked through for who asks."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
            getter = frame.f_code.co_name in ("get_state_dict", "get_model_state_dict", "get_optimizer_state_dict")
            if getter and getattr(frame.f_locals.get("options"), "full_state_dict", False):
                raise RuntimeError(
                    f"{name}: full_state_dict=True would give this rank's block of a parameter for the whole tensor, "
                    f"since DTensor can't say its layout; store with torch.distributed.checkpoint, or take {instead}"
                )
        frame = frame.f_back
