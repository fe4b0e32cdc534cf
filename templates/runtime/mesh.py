# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (what torch leaves untyped or private, and calls by another signature than it declares)
"""Where this rank is on a mesh."""

from __future__ import annotations

import itertools
import math
import os
import weakref
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .transport import TorchTransport, Transport, default_timeout, shared

places: dict[str, Place] = shared.setdefault("places", {})
shared.setdefault("meshes", weakref.WeakSet())


class Place(NamedTuple):
    """A rank on a mesh: its coordinates, and the transport to the others."""

    key: str
    ranks: tuple[int, ...]  # global ranks in grid order
    me: int  # position in it
    transport: Transport
    world: weakref.ref[Any] | None  # the default process group when the mesh was first seen; torch owns it
    known: dict[Any, int]  # by code and instance: how many calls have begun here


def coordinates(layer: OnGrid, position: int) -> dict[str, int]:
    """Coordinates of a position in grid order; the last axis varies fastest."""
    return _coordinates(tuple(layer.grid.items()), position)


def members(layer: OnGrid, position: int, axes: tuple[str, ...]) -> tuple[int, ...]:
    """Positions of the ranks that differ from this one only along `axes`, in grid order."""
    return _members(tuple(layer.grid.items()), position, axes)


# Kept by the grid, not by rows: rows come and go with the sizes that are known at run time only.


@cache
def _coordinates(grid: tuple[tuple[str, int], ...], position: int) -> dict[str, int]:
    at: dict[str, int] = {}
    for axis, ranks in reversed(grid):
        position, at[axis] = divmod(position, ranks)
    return {axis: at[axis] for axis, _ in grid}


@cache
def _members(grid: tuple[tuple[str, int], ...], position: int, axes: tuple[str, ...]) -> tuple[int, ...]:
    at = _coordinates(grid, position)
    return tuple(
        other
        for other in range(math.prod(ranks for _, ranks in grid))
        if all(there == at[a] for a, there in _coordinates(grid, other).items() if a not in axes)
    )


class OnGrid:
    """A layer or a network, which runs on a mesh."""

    name: str
    grid: dict[str, int]
    device: str

    def init_mesh(
        self,
        device_type: str | None = None,
        *,
        ranks: Sequence[int] | None = None,
        transport: Transport | None = None,
        timeout: float | None = None,
        process_group: Any = None,
    ) -> DeviceMesh:
        """A DeviceMesh with the grid's axes, in order, size-1 axes included.

        Args:
            device_type: by default the one that the module was compiled for.
            ranks: which ranks of the world, in grid order; all of them by default. With it only those ranks call.
            transport: carries the collectives instead of torch.distributed.
            timeout: seconds after which a collective gives up, by default torch.distributed's, or the group's.
            process_group: whose ranks these are, instead of `ranks`.
        """
        device_type, grid, name = device_type or self.device, self.grid, self.name
        count = math.prod(grid.values())
        if process_group is not None:
            if ranks is not None or transport is not None:
                raise ValueError(f"{name}: process_group= says which ranks these are: without ranks= and transport=")
            if not isinstance(process_group, dist.ProcessGroup):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ValueError(f"{name}: rank {dist.get_rank()} is not in the process group that it gives")
            ranks = dist.get_process_group_ranks(process_group)
            limit = default_timeout(self.device, process_group) if timeout is None else None
            timeout = limit.total_seconds() if limit else timeout
        if transport is None and not dist.is_initialized():
            raise RuntimeError(f"{name}: init_mesh needs torch.distributed.init_process_group first, as under torchrun")
        world = transport.size if transport is not None else dist.get_world_size()
        chosen = tuple(range(world)) if ranks is None else tuple(int(r) for r in ranks)
        if len(chosen) != count or len(set(chosen)) != count or not all(0 <= r < world for r in chosen):
            said = f"ranks= names {len(chosen)} of a world of {world}: {chosen}"
            said = f"the world has {world}, so name some with ranks=" if ranks is None else said
            raise ValueError(f"{name}: the grid {grid} has {count} ranks, but {said}")
        layout, names = torch.tensor(chosen, device="cpu").view(*grid.values()), tuple(grid)
        if transport is not None:
            if transport.rank not in chosen:
                raise ValueError(f"{name}: rank {transport.rank} is not on this mesh: {chosen}")
            mesh = DeviceMesh(device_type, layout, mesh_dim_names=names, _init_backend=False, _rank=transport.rank)
            vars(mesh)["_dim_group_names"] = NoGroups()
            # DTensor's caches know meshes by what they say, this among it: no thread's, so no mesh of torch's is equal.
            vars(mesh)["_thread_id"] = -1
            key = f"transport {next(shared.setdefault('counter', itertools.count()))} rank {transport.rank}"
            places[key] = Place(key, chosen, chosen.index(transport.rank), transport, None, {})
            vars(mesh)["_convgen_key"] = key
            # torch.compile shows a copy of the mesh, which is known by what it says of itself while this one lives.
            content = what_it_says(self, mesh)
            places[content] = places[key]
            weakref.finalize(mesh, forget, content, places[key])
            return mesh
        if dist.get_rank() not in chosen:
            return DeviceMesh(device_type, layout, mesh_dim_names=names, _init_backend=False)
        if self.device == device_type == "cuda" and not torch.cuda.is_initialized():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", dist.get_rank())) % torch.cuda.device_count())
        # Made here, by these ranks alone and with this timeout: torch's own would take the whole world and 30 minutes.
        end, me = torch_transport(timeout, self.device, name), chosen.index(dist.get_rank())
        groups = [end.process_group([chosen[p] for p in members(self, me, (axis,))]) for axis in names]
        if len(chosen) > 1:
            end.meeting(tuple(sorted(chosen)))
        mesh = DeviceMesh.from_group(groups, device_type, mesh=layout, mesh_dim_names=names)
        join(self, mesh, end)
        return mesh


def forget(content: str, place: Place) -> None:
    """Forget a mesh that is gone, unless another one that says the same of itself has come since."""
    if places.get(content) is place:
        del places[content]


class NoGroups(list[str]):
    """Stands where torch looks for the process groups of a mesh's dimensions, if the mesh runs on a transport of its
    own."""

    def __getitem__(self, i: Any) -> Any:
        raise RuntimeError(
            "this mesh runs on transport=, so it has no torch process groups, which DTensor's own collectives and "
            "get_group want; gather, scatter, conv and clip_grad_norm_ of the generated module do without"
        )


def in_grid_order(layer: OnGrid, mesh: DeviceMesh) -> tuple[int, ...]:
    """Ranks of a mesh in this grid's order; the mesh may have the axes in another."""
    names = mesh.mesh_dim_names or ()
    return tuple(mesh.mesh.permute([names.index(axis) for axis in layer.grid]).flatten().tolist())


def what_it_says(layer: OnGrid, mesh: DeviceMesh) -> str:
    """What a mesh says of itself, in this grid's order: alike on all its ranks, or on none."""
    names, at = mesh.mesh_dim_names or (), mesh.get_coordinate()
    where = at and [at[names.index(axis)] for axis in layer.grid]
    return f"{mesh.device_type} {layer.grid} {in_grid_order(layer, mesh)} at {where}"


def join(layer: OnGrid, mesh: DeviceMesh, end: TorchTransport | None = None) -> Place:
    """The place of this rank on a mesh of torch.distributed, made when the mesh is first seen, or has another end."""
    ranks, key = in_grid_order(layer, mesh), what_it_says(layer, mesh)
    if not dist.is_initialized():
        if key in places:
            return places[key]
        raise RuntimeError(f"{layer.name}: the mesh needs torch.distributed.init_process_group first (torchrun)")
    world, rank = weakref.ref(dist.group.WORLD), dist.get_rank()
    if key not in places or places[key].world != world or end not in (None, places[key].transport):
        if rank not in ranks:
            raise ValueError(f"{layer.name}: rank {rank} is not on this mesh: {ranks}")
        end = end or torch_transport(None, layer.device, layer.name)
        places[key] = Place(key, ranks, ranks.index(rank), end, world, {})
    return places[key]


def torch_transport(timeout: float | None, device: str, maker: str) -> TorchTransport:
    """Meshes of the same world with the same timeout share one transport, and through it their groups."""
    world = weakref.ref(dist.group.WORLD)
    wanted = timedelta(seconds=timeout) if timeout else default_timeout(device)
    ends: list[Any] = [p.transport for p in places.values() if p.world == world]
    alike = [e for e in ends if getattr(e, "timeout", None) == wanted and getattr(e, "device", device) == device]
    return alike[0] if alike else TorchTransport(wanted, device, maker)


def transport_of(mesh: DeviceMesh) -> Transport:
    """The transport of collectives among the ranks of any mesh, a layer's or not."""
    place = places.get(getattr(mesh, "_convgen_key", ""))
    if place is None:
        ranks, world = sorted(mesh.mesh.flatten().tolist()), weakref.ref(dist.group.WORLD)
        place = next((p for p in places.values() if sorted(p.ranks) == ranks and p.world == world), None)
    return torch_transport(None, mesh.device_type, "convgen") if place is None else place.transport


def place_key(layer: OnGrid, mesh: DeviceMesh) -> str:
    """The key by which the ops find this rank's place on a mesh."""
    if not isinstance(mesh, DeviceMesh):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"{layer.name}: mesh= wants a DeviceMesh (init_mesh makes one), got {type(mesh).__name__}")
    axes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    if axes != layer.grid:
        raise ValueError(f"{layer.name}: the mesh has axes {axes}, this layer's grid is {layer.grid}")
    if mesh.device_type != layer.device:
        raise ValueError(f"{layer.name}: this module is for {layer.device}, the mesh for {mesh.device_type}")
    key, ranks = getattr(mesh, "_convgen_key", ""), in_grid_order(layer, mesh)
    if key not in places:
        return join(layer, mesh).key
    place = places[key]
    if place.ranks != ranks:  # made by a module whose grid has these axes in another order
        key = f"{key} as {tuple(layer.grid)}"
        places[key] = place._replace(key=key, ranks=ranks, me=ranks.index(place.ranks[place.me]))
    return key
