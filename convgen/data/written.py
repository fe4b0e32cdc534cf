"""Outputs into files by region: every rank writes its block, and of copies one rank alone."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import TYPE_CHECKING, Any

import torch

from convgen.data.chunks import Where, shares
from convgen.data.formats import is_scaled
from convgen.late import np

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh


def write(
    target: Any, net: Any, name: str, block: Tensor, mesh: DeviceMesh, *, at: int = 0, batch: int | None = None
) -> None:
    """Write this rank's block of an output to its region of an array that all ranks have open; every rank calls it.

    Ranks whose regions share a chunk of the array write one after the other, others at once; into a file that has one
    writer at a time (HDF5, NetCDF) each opens it in its turn. When it returns, all have written.

    Args:
        target: of the whole output's shape but for its samples, of which it may have more, and of a type that has the
            output's numbers, rounded where it is one of floats and none becomes infinite: anything that takes
            `target[slices] = block`, as arrays in mapped files, zarr's, and `open(..., "r+")` do; its `chunks` or
            `shards` are looked at.
        at: the sample of the target at which the first one of the batch goes.
        batch: the number of samples, where it is not the compiled one.

    Raises:
        Exception: a rank couldn't write; on all of them, with its words.
    """
    me: int = net.NET.place(mesh).me
    what, together, fault = f"write of {name}", False, None
    writers, moved = list[int](), list[Where]()
    try:
        boxes: list[Where] = net.NET.regions(name, mesh, batch=batch)
        writers = [k for k, box in enumerate(boxes) if box not in boxes[:k] and all(s.stop > s.start for s in box)]
        moved = _behind(at, net, name, boxes)
        _refuse_misfit(target, net, name, block, boxes[me], moved)
        together = _in_turns(target, [moved[k] for k in writers])
    except Exception as error:  # of this rank's file, perhaps
        fault = error
    facts = {"sample": f"{at}", "samples": f"{batch}", "in turns": together}  # as text: a number of numpy's is alike
    net.NET.agree(what, mesh, facts, fault)
    for turn in writers if together else (None,):
        try:
            if me in writers and turn in (None, me):
                target[moved[me]] = _of_torch(block)
                getattr(target, "flush", lambda: None)()
        except Exception as error:
            fault = error
        net.NET.agree(what, mesh, facts | {"turn": turn}, fault)


def _in_turns(target: Any, writers: Sequence[Where]) -> bool:
    """Whether ranks write one after the other.

    Raises:
        ValueError: the file is one that several processes can't have open.
    """
    library = type(target).__module__.partition(".")[0]
    mpi = library == "h5py" and target.file.driver == "mpio"
    if library in ("h5py", "netCDF4") and not mpi and len(writers) > 1:
        hint = "give convgen.data.open(path, name, 'r+'), which each rank opens in its turn"
        raise ValueError(
            f"{len(writers)} ranks write, and a file of {library} that several have open is spoilt; {hint}"
        )
    if getattr(target, "one_writer", False):
        return True
    return shares(getattr(target, "shards", None) or getattr(target, "chunks", None), writers)


def _behind(at: int, net: Any, name: str, boxes: Sequence[Where]) -> list[Where]:
    """Where blocks lie in an array whose sample `at` is the batch's first.

    Raises:
        ValueError: there is no such sample: a slice from below 0 would be another one, or none.
    """
    try:
        first = index(at)
    except TypeError:
        first = -1
    if first < 0:
        raise ValueError(f"{net.NAME}: at= is the number of a sample of the target, from 0 on, got {at!r}")
    if not boxes[0]:
        raise ValueError(f"{net.NAME}: {name} is one number, and a target has samples; gather gives it")
    return [(slice(b[0].start + first, b[0].stop + first), *b[1:]) for b in boxes]


def _refuse_misfit(target: Any, net: Any, name: str, block: Tensor, box: Where, moved: Sequence[Where]) -> None:
    if isinstance(target, torch.Tensor):
        raise TypeError(f"{net.NAME}: a target takes numpy's arrays, and a tensor doesn't; its .numpy() has its memory")
    wanted = tuple(s.stop - s.start for s in box)
    if tuple(block.shape) != wanted:
        raise ValueError(f"{net.NAME}: this rank's block of {name} is {wanted}, got {tuple(block.shape)}")
    least = tuple(max(s.stop for s in pairs) for pairs in zip(*moved, strict=True))
    shape = tuple(target.shape)
    if len(shape) != len(least) or shape[1:] != least[1:] or shape[0] < least[0]:
        raise ValueError(f"{net.NAME}: {name} goes up to {least}, and the target has shape {shape}")
    kind: Any = getattr(target, "dtype", None)
    if isinstance(kind, np.dtype) and not _has_numbers(kind, _of_torch(block), scales=_scales(target)):
        found = str(block.dtype).removeprefix("torch.")
        raise ValueError(f"{net.NAME}: {name} has numbers of {found} that a target of {kind} can't have")


def _scales(target: Any) -> bool:
    if type(target).__module__.startswith("netCDF4"):
        return is_scaled(target)
    return bool(getattr(target, "scales", False))


def _has_numbers(kind: Any, found: Any, *, scales: bool) -> bool:
    """Whether a type of numpy's has these numbers: whole types all of them, those of floats rounded ones."""
    if kind.kind not in "biufc" or scales or np.can_cast(found.dtype, kind):
        return True
    if found.dtype.kind == "c" and kind.kind != "c":
        return False
    with np.errstate(invalid="ignore", over="ignore"):  # of what is none of this type, as NaN
        made = found.astype(kind)
    if kind.kind in "fc":
        return bool((np.isinf(made) <= np.isinf(found)).all())
    return bool((made == found).all())


def _of_torch(block: Tensor) -> Any:
    """As numpy has it; bfloat16, which that lacks, as float32."""
    found = block.detach().cpu()
    return (found.float() if found.dtype == torch.bfloat16 else found).contiguous().numpy()  # pyright: ignore[reportUnknownMemberType]
