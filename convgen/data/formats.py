# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (what libraries of files leave untyped)
"""How each library opens what it writes: an array with a shape and slices. Each is imported when it is asked for."""

from __future__ import annotations

import os
from asyncio import gather
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from convgen.data.chunks import Chunk, Where, numbers_of
from convgen.errors import InputError, installing


@dataclass(frozen=True)
class Asked:
    """What is to be opened.

    Args:
        path: or a URL that fsspec knows.
        name: of an array in the file; None for the only one.
        mode: "r", or "r+" to write, too.
        fill: take an array's fill value where the file has nothing.
    """

    path: str
    name: str | None
    mode: str
    fill: bool

    @property
    def is_url(self) -> bool:
        return "://" in self.path

    def pick(self, names: Iterable[str]) -> str:
        """The array's name. Raises InputError: there is none of that name, or none is named and there are several."""
        there = sorted(names)
        if self.name in there:
            return str(self.name)
        if self.name is None and len(there) == 1:
            return there[0]
        said = f"no array {self.name!r}" if self.name is not None else f"{len(there)} arrays, and none is named"
        raise InputError(f"{self.path} has {said}", hint=f"one of {', '.join(there[:20])}" if there else "")

    def alone(self, array: Any) -> Any:
        """The array of a file that has one without a name. Raises InputError: one is named."""
        if self.name is not None:
            raise InputError(f"{self.path} has one array, without a name; {self.name!r} is named", hint="no name")
        return array

    def library(self, package: str) -> Any:
        """A module that is imported late. Raises InputError: it is not installed."""
        try:
            return import_module(package)
        except ModuleNotFoundError as error:
            if error.name != package:
                raise
            raise InputError(f"{self.path} needs {package}, which is not installed", hint=installing(package)) from None

    def source(self, stack: ExitStack) -> Any:
        """The path, or of a URL a file that is open for reading."""
        return stack.enter_context(self.library("fsspec").open(self.path, "rb")) if self.is_url else self.path


def all_there(_: Where) -> Iterator[Chunk]:
    """Of a format that has no missing chunks."""
    yield from ()


@dataclass(frozen=True)
class Held:
    """An array that is open.

    Args:
        array: with a shape, a dtype and slices by tuples.
        close: what is open.
        chunks, shards: extents of what is read at once, and written at once; None where there are none.
        absent: chunks (or shards) of a region that the file lacks, by number along each dimension.
        watched: the file whose change may change the array's shape.
        scales: whether numbers of a whole type stand for others here, by a scale and an offset.
    """

    array: Any
    close: Callable[[], object] = lambda: None
    chunks: tuple[int, ...] | None = None
    shards: tuple[int, ...] | None = None
    absent: Callable[[Where], Iterator[Chunk]] = all_there
    watched: str = ""
    scales: bool = False


def _npy(of: Asked) -> Held:
    return Held(of.alone(of.library("numpy").load(of.path, mmap_mode=of.mode)))


def _torch(of: Asked) -> Held:
    torch = of.library("torch")
    found = torch.load(of.path, map_location="cpu", mmap=True, weights_only=True)
    if isinstance(found, dict):
        return Held(found[of.pick(str(k) for k, t in found.items() if isinstance(t, torch.Tensor))])
    return Held(of.alone(found))


class _Slices:
    """A tensor of safetensors, whose slices tell shape and type by functions."""

    def __init__(self, of: Any) -> None:
        self._of, self.shape = of, tuple(of.get_shape())
        self.dtype = of[(slice(0, 0),) * len(self.shape)].dtype

    def __getitem__(self, where: Where) -> Any:
        return self._of[where]


def _safetensors(of: Asked) -> Held:
    with ExitStack() as stack:
        file = stack.enter_context(of.library("safetensors").safe_open(of.path, framework="pt"))
        return Held(_Slices(file.get_slice(of.pick(file.keys()))), stack.pop_all().close)


def _hdf5(of: Asked) -> Held:
    h5py = of.library("h5py")
    with ExitStack() as stack:
        file = stack.enter_context(h5py.File(of.source(stack), of.mode))
        names: list[str] = []
        file.visit(names.append)
        array = file[of.pick(n for n in names if isinstance(file[n], h5py.Dataset))]
        elsewhere = array.is_virtual or array.external
        if elsewhere and not of.fill:
            fact = f"{of.path}: {array.name} is of other files, where HDF5 takes its fill value for what they lack"
            raise InputError(fact, hint="missing='fill', or the other files themselves")

        def absent(region: Where) -> Iterator[Chunk]:
            if array.chunks is None:
                compact = array.id.get_create_plist().get_layout() == h5py.h5d.COMPACT
                yield from () if compact or array.id.get_offset() is not None else [(0,) * array.ndim]
                return
            for chunk in numbers_of(region, array.chunks):
                at = tuple(k * n for k, n in zip(chunk, array.chunks, strict=True))
                if array.id.get_chunk_info_by_coord(at).byte_offset is None:
                    yield chunk

        return Held(array, stack.pop_all().close, array.chunks, None, all_there if elsewhere else absent)


def _zarr(of: Asked) -> Held:
    zarr = of.library("zarr")
    if of.is_url:
        of.library("fsspec")
    store: Any = of.path
    if of.path.endswith(".zip"):
        if of.mode != "r":
            raise InputError(f"{of.path}: what is in a zip file is not written anew", hint="a folder")
        store = zarr.storage.ZipStore(of.path, mode="r")
    with zarr.config.set({"array.write_empty_chunks": True}):  # what is written is there when it is read
        found = zarr.open(store, mode=of.mode)
        if isinstance(found, zarr.Array):
            of.alone(found)
        else:
            nested = () if of.name is None or "/" not in of.name or of.name not in found else (of.name,)
            found = found[of.pick([*found.array_keys(), *nested])]
    folder = "" if of.is_url or not os.path.isdir(of.path) else os.path.join(of.path, found.path)
    metadata = (os.path.join(folder, one) for one in ("zarr.json", ".zarray")) if folder else ()
    return _of_zarr(found, found.store.close, next((one for one in metadata if os.path.exists(one)), ""))


def _of_zarr(array: Any, close: Callable[[], object], watched: str = "") -> Held:
    sync = import_module("zarr.core.sync").sync  # what stores have is asked asynchronously

    async def there(chunks: Sequence[Chunk]) -> list[bool]:
        path, key = array.store_path, array.metadata.encode_chunk_key
        return await gather(*[(path / key(chunk)).exists() for chunk in chunks])

    def absent(region: Where) -> Iterator[Chunk]:
        chunks = [*numbers_of(region, array.shards or array.chunks)]
        yield from [chunk for chunk, is_there in zip(chunks, sync(there(chunks)), strict=True) if not is_there]

    return Held(array, close, array.chunks, array.shards, absent, watched)


def _netcdf(of: Asked) -> Held:
    with ExitStack() as stack:
        file = stack.enter_context(of.library("netCDF4").Dataset(of.path, of.mode))
        if file.data_model.startswith("NETCDF3"):
            _refuse_truncated(of, file.data_model)
        groups, names = [file], dict[str, Any]()
        for group in groups:
            groups += group.groups.values()
            prefix = f"{group.path}/".lstrip("/")
            names |= {prefix + name: one for name, one in group.variables.items() if name not in group.dimensions}
        array = names[of.pick(names)]
        if of.fill:
            array.set_auto_mask(False)
        chunks = array.chunking()
        extents = tuple(chunks) if isinstance(chunks, list) else None
        return Held(array, stack.pop_all().close, extents, scales=is_scaled(array))


def is_scaled(variable: Any) -> bool:
    """Whether the library writes other numbers into a NetCDF variable than it is given, and reads them back."""
    return bool(variable.scale) and not {"scale_factor", "add_offset", "_Unsigned"}.isdisjoint(variable.ncattrs())


def _refuse_truncated(of: Asked, model: str) -> None:
    """Classic files, past whose ends the library reads zeros; scipy's reader maps all of them, or raises."""
    if model == "NETCDF3_64BIT_DATA":
        raise InputError(f"{of.path} is of {model}, past whose end zeros are read", hint="nccopy -k nc4, to NetCDF 4")
    try:
        of.library("scipy.io").netcdf_file(of.path, "r", mmap=False).close()
    except (ValueError, TypeError) as error:
        raise InputError(f"{of.path} ends too soon: {error}") from error


def _nifti(of: Asked) -> Held:
    return Held(of.alone(of.library("nibabel").load(of.path).dataobj))


def _tiff(of: Asked) -> Held:
    tifffile, zarr = of.library("tifffile"), of.library("zarr")
    with ExitStack() as stack:
        file = stack.enter_context(tifffile.TiffFile(of.source(stack)))
        series = {str(k): one for k, one in enumerate(file.series)}
        store = stack.enter_context(series[of.pick(series)].aszarr(level=0, read_only=True))
        return _of_zarr(zarr.open(store, mode="r"), stack.pop_all().close)


@dataclass(frozen=True)
class Format:
    """A kind of file.

    Args:
        opens: gives the array; read and written by what it gives where `writes` says so.
        urls: whether it is read behind a URL.
        one_writer: a file has one writer at a time, and then no reader: it is open while it is used, no longer.
    """

    opens: Callable[[Asked], Held]
    suffixes: tuple[str, ...]
    writes: bool = False
    urls: bool = False
    one_writer: bool = False


FORMATS = {
    "npy": Format(_npy, (".npy",), writes=True),
    "torch": Format(_torch, (".pt", ".pth")),
    "safetensors": Format(_safetensors, (".safetensors",)),
    "hdf5": Format(_hdf5, (".h5", ".hdf5", ".he5"), writes=True, urls=True, one_writer=True),
    "zarr": Format(_zarr, (".zarr", ".zarr.zip"), writes=True, urls=True),
    "netcdf": Format(_netcdf, (".nc", ".nc4"), writes=True, one_writer=True),
    "nifti": Format(_nifti, (".nii", ".nii.gz")),
    "tiff": Format(_tiff, (".tif", ".tiff"), urls=True),
}


def format_of(path: str, said: str | None) -> str:
    """The format's name, as it is said or by the path's suffix; a folder is Zarr's.

    Raises:
        InputError: it is none of these.
    """
    by_suffix = (n for n, one in FORMATS.items() if path.lower().rstrip("/").endswith(one.suffixes))
    name = said or next(by_suffix, "zarr" if os.path.isdir(path) else "")
    if name not in FORMATS:
        known = ", ".join(f"{n} ({' '.join(one.suffixes)})" for n, one in FORMATS.items())
        raise InputError(f"{path}: which format has it?" if not said else f"format {said!r}", hint=f"one of {known}")
    return name
