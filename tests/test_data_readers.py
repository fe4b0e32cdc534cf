"""Every reader on files that its library wrote: regions, workers, what is truncated, changed, missing or odd."""

from __future__ import annotations

import gc
import importlib
import pickle
import re
import shutil
import threading
import weakref
from contextlib import nullcontext
from pathlib import Path
from random import Random
from typing import Any

import fsspec
import h5py
import netCDF4
import nibabel
import numpy as np
import pytest
import tifffile
import torch
import zarr
from library_files import WRITERS, Array
from sampling import cases_of, draws
from test_data import compiled
from test_regions import read_region
from torch import Tensor
from torch.utils.data import DataLoader

import convgen.data
from convgen.data import Batches, Blocks, FileArray, write
from convgen.data.chunks import straddling
from convgen.data.opened import _OPEN
from convgen.errors import InputError
from convgen.verify.virtual import VirtualTransport, World


def drawn(draw: Random, kind: str) -> Array:
    """Numbers of any shape, whose type the kind of file has."""
    dims = draw.randint(2 if kind == "tiff" else 1, 3)
    size = [draw.randint(2, 20) for _ in range(dims)]
    of_kind = {"tiff": "u2 f4 i1", "nifti": "i2 f4 f8 u1", "netcdf_classic": "i2 i4 f4 f8", "netcdf": "f4 f8 i2"}.get(
        kind, "f4 f8 i2 u1 i8"
    )
    values = np.random.default_rng(draw.randrange(2**32)).integers(-100, 100, size)
    return values.astype(draw.choice(of_kind.split()))


def region(draw: Random, shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Ragged, whole or empty along each dimension."""
    ends = [sorted(draw.choices(range(n + 1), k=2)) if draw.random() < 0.8 else (0, n) for n in shape]
    return tuple(slice(a, b) for a, b in ends)


def read(array: Any, where: tuple[slice, ...]) -> Tensor:
    return read_region(array, where, "x", torch.float64)


@pytest.mark.parametrize("kind", WRITERS)
def test_random_regions(tmp_path: Path, kind: str) -> None:
    """What lies at a region is what lies there in the whole, also with other orders of dimensions and new ones."""
    for number in range(draws(8)):
        draw, folder = Random(f"{kind} {number}"), tmp_path / str(number)
        folder.mkdir()
        x = drawn(draw, kind)
        path, name = WRITERS[kind](folder, x, draw)
        dims: Any = draw.sample(range(x.ndim), x.ndim)
        for _ in range(draw.randint(0, 2)):
            dims.insert(draw.randint(0, len(dims)), None)
        dims = draw.choice((dims, None))
        whole = torch.from_numpy(x.astype(np.float64))
        if dims is not None:
            whole = whole.permute([d for d in dims if d is not None])[
                tuple(None if d is None else slice(None) for d in dims)
            ]
        array = convgen.data.open(path, name, dims=dims)
        assert array.shape == tuple(whole.shape) and array.dtype.itemsize == x.dtype.itemsize
        assert array.chunks is None or len(array.chunks) == len(array.shape)
        for _ in range(12):
            where = region(draw, array.shape)
            assert torch.equal(read(array, where), whole[where])
        assert torch.equal(torch.as_tensor(np.asarray(array[()]).astype(np.float64)), whole)
        array.close()


@pytest.mark.parametrize("kind", WRITERS)
def test_what_is_truncated_is_never_read_as_numbers(tmp_path: Path, kind: str) -> None:
    """Cut anywhere, before it is opened or while it is open, a file is refused by name; or what is asked is there."""
    refused = 0
    for number in range(8):
        draw, folder = Random(f"truncated {kind} {number}"), tmp_path / str(number)
        folder.mkdir()
        x = drawn(draw, kind)
        path, name = WRITERS[kind](folder, x, draw)
        whole, everything = torch.from_numpy(x.astype(np.float64)), tuple(slice(0, n) for n in x.shape)
        opened = convgen.data.open(path, name)
        assert torch.equal(read(opened, everything), whole)
        file = (
            path if path.is_file() else max((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
        )
        with file.open("r+b") as there:
            there.truncate(draw.choice((0, 7, file.stat().st_size // 2, file.stat().st_size - 1)))
        for array in (opened, convgen.data.open(path, name)):
            try:
                found = read(array, everything)
            except (InputError, RuntimeError) as error:
                refused += 1
                assert str(path) in str(error)
            else:
                assert torch.equal(found, whole)
            array.close()
    assert refused >= 8  # the last bytes may pad or describe


@pytest.mark.parametrize("kind", WRITERS)
def test_a_file_that_changes_its_shape(tmp_path: Path, kind: str) -> None:
    """While it is open: refused by name, with both shapes."""
    x = np.arange(6 * 8, dtype=np.int16 if kind in ("nifti", "tiff") else np.float32).reshape(6, 8)
    path, name = WRITERS[kind](tmp_path, x, Random(kind))
    array = convgen.data.open(path, name)
    assert array[0:2].shape == (2, 8)
    (tmp_path / "new").mkdir()
    other, _ = WRITERS[kind](tmp_path / "new", x.reshape(8, 6), Random(kind))  # with the same choices
    if path.is_dir():
        shutil.rmtree(path)
    other.rename(path)
    with pytest.raises(
        OSError, match=r"x\.[\w.]+.*: it is \(8, 6\) of .*, and was \(6, 8\) of .* when it was first opened"
    ):
        array[0:2]


def test_workers_open_files_anew(tmp_path: Path) -> None:
    """Forked of a process that has files open and has read of them, workers read what it reads; bytes are counted."""
    net, draw = compiled(tmp_path, {"H": 2}), Random(8)
    image = np.random.default_rng(0).integers(0, 99, (9, 2, 9, 10)).astype(np.float32)
    for kind, writer in WRITERS.items():
        folder = tmp_path / kind
        folder.mkdir()
        path, name = writer(folder, image, draw)
        array = convgen.data.open(path, name)
        assert np.array_equal(np.asarray(array[2:3])[0], image[2])

        def made(end: VirtualTransport, array: FileArray = array) -> Blocks:
            return Blocks({"image": array}, net, net.init_mesh("cpu", transport=end))

        _, blocks = World(2).run(made)
        order = [*Batches(9, 4, shuffle=True)]
        loaded = DataLoader(
            blocks, batch_size=None, sampler=Batches(9, 4, shuffle=True), num_workers=2, multiprocessing_context="fork"
        )
        for batch, samples in zip(loaded, order, strict=True):
            assert torch.equal(batch["image"], torch.from_numpy(image[[*samples], :, 5:]))
            assert batch.bytes_read == 4 * 2 * 4 * 10 * 4
        assert np.array_equal(np.asarray(array[1:2])[0], image[1])
        assert np.array_equal(np.asarray(pickle.loads(pickle.dumps(array))[8:])[0], image[8])


def test_a_file_for_each_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NIfTI volumes, whose dimensions are turned; of many files few are open at once."""
    monkeypatch.setattr("convgen.data.opened.MOST_OPEN", 3)
    net = compiled(tmp_path, {"N": 2, "H": 2})
    image = np.random.default_rng(0).integers(0, 99, (9, 2, 9, 10)).astype(np.float32)
    for k, one in enumerate(image):
        nibabel.save(nibabel.Nifti1Image(one.transpose(), np.eye(4)), tmp_path / f"{k}.nii.gz")
        with h5py.File(tmp_path / f"{k}.h5", "w") as file:
            file["x"] = one
    for suffix, dims in ((".nii.gz", (2, 1, 0)), (".h5", None)):

        def program(end: VirtualTransport, suffix: str = suffix, dims: Any = dims) -> int:
            arrays = [convgen.data.open(tmp_path / f"{k}{suffix}", dims=dims) for k in range(9)]
            mesh = net.init_mesh("cpu", transport=end)
            blocks = Blocks({"image": arrays}, net, mesh, halo="image")
            for batch in blocks.loader(4, shuffle=True):
                where = net.region("image", mesh, halo=True)
                assert torch.equal(batch["image"], torch.from_numpy(image[[*batch.samples]])[where])
            return blocks.bytes_read

        read_by = World(4).run(program)
        assert sum(read_by) == 8 * 2 * (9 + 4) * 10 * 4  # of nine rows, and two more on both sides
        assert len(_OPEN) <= 3


def test_an_array_that_is_forgotten_while_another_is_read(tmp_path: Path) -> None:
    """Python may find out in any thread, as in that of a library which the reader waits for: nobody waits there."""
    np.save(tmp_path / "x.npy", np.arange(9))
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = np.arange(9)
    forgotten: Any = convgen.data.open(tmp_path / "x.h5")
    assert forgotten[3:4] == 3
    forgotten.itself, seen = forgotten, weakref.ref(forgotten)  # a circle, which no count finds
    del forgotten
    other = convgen.data.open(tmp_path / "x.npy")
    with other._used("r"):
        elsewhere = threading.Thread(target=gc.collect, daemon=True)
        elsewhere.start()
        elsewhere.join(60)
        assert not elsewhere.is_alive() and seen() is None
    assert other[2:3] == 2  # and closes the other
    with h5py.File(tmp_path / "x.h5", "r+") as file:
        file["x"][0] = 1


def bytes_of_reads() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize("kind", ["zarr", "hdf5", "tiff", "netcdf"])
def test_bytes_that_are_read(tmp_path: Path, kind: str) -> None:
    """Of a file of 8 MB this process reads the chunks that a region has elements of, and little beside them."""
    x, chunks = np.random.default_rng(0).random((4, 512, 512)), (1, 128, 512)
    path = tmp_path / {"zarr": "x.zarr", "hdf5": "x.h5", "tiff": "x.tif", "netcdf": "x.nc"}[kind]
    if kind == "zarr":
        zarr.create_array(path, data=x, chunks=chunks, compressors=None)
    elif kind == "hdf5":
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=x, chunks=chunks)
    elif kind == "tiff":
        tifffile.imwrite(path, x, photometric="minisblack", metadata=None, rowsperstrip=128, compression="zlib")
    else:
        with netCDF4.Dataset(path, "w") as file:
            for d, n in zip("abc", x.shape, strict=True):
                file.createDimension(d, n)
            file.createVariable("x", "f8", tuple("abc"), chunksizes=chunks)[...] = x
    where = (slice(0, 3), slice(100, 200), slice(0, 512))
    array = convgen.data.open(path)
    assert array.chunks == chunks
    looked = straddling(array.shape, array.chunks, 8, [where], [where])
    before = bytes_of_reads()
    part = array[where]
    bytes_read = bytes_of_reads() - before
    assert np.array_equal(part, x[where]) and looked.shares[0].chunk_bytes == 3 * 2 * 2**19
    least = 0.8 if kind == "tiff" else 1  # compressed
    assert least * 3 * 2**20 <= bytes_read <= 3 * 2**20 + 2**18


def test_files_behind_urls(tmp_path: Path) -> None:
    """By fsspec: Zarr's, HDF5 and TIFF; what others say of a URL is refused."""
    draw = Random(3)
    x = np.arange(5 * 18 * 20, dtype=np.uint16).reshape(5, 18, 20)
    for kind in ("zarr_folder", "hdf5", "tiff"):
        path, name = WRITERS[kind](tmp_path, x, draw)
        memory = fsspec.filesystem("memory")
        memory.put(str(path), f"/{path.name}", recursive=True)
        for url in (f"file://{path}", f"memory://{path.name}"):
            array = convgen.data.open(url, name)
            assert np.array_equal(array[1:4, 3:, 19:20], x[1:4, 3:, 19:20]), url
            array.close()
        with pytest.raises(InputError, match=rf"memory://nowhere{path.suffix}.* can't be opened"):
            convgen.data.open(f"memory://nowhere{path.suffix}").shape  # noqa: B018
    with pytest.raises(InputError, match="behind a URL files are read of hdf5, zarr, tiff"):
        convgen.data.open("memory://x.nii")
    with pytest.raises(InputError, match=r"mode 'r\+'"):
        convgen.data.open("memory://x.zarr", mode="r+")


@pytest.mark.parametrize("number", cases_of(12, "missing chunks"))
def test_missing_chunks(tmp_path: Path, number: int) -> None:
    """A region with a chunk that the file lacks is refused, unless the fill value is asked for; others are read."""
    draw = Random(f"missing {number}")
    shape, kind = tuple(draw.randint(2, 9) for _ in range(3)), draw.choice(("zarr", "sharded", "hdf5", "one"))
    chunks = tuple(draw.randint(1, n) for n in shape)
    there = np.zeros(shape, dtype=bool)
    boxes = [
        tuple(slice(k * n, (k + 1) * n) for k, n in zip(at, chunks, strict=True))
        for at in np.ndindex(*[-(-s // n) for s, n in zip(shape, chunks, strict=True)])
    ]
    written = [box for box in boxes if draw.random() < 0.6]
    path = tmp_path / ("x.h5" if kind in ("hdf5", "one") else "x.zarr")
    if path.suffix == ".h5":
        with h5py.File(path, "w") as file:
            made = file.create_dataset("x", shape, "f4", chunks=chunks if kind == "hdf5" else None, fillvalue=7)
            written = written if kind == "hdf5" else draw.choice(([], boxes))
            for box in written:
                made[box] = 1
    else:
        inner: Any = {"chunks": (1, 1, 1), "shards": chunks} if kind == "sharded" else {"chunks": chunks}
        made = zarr.create_array(path, shape=shape, dtype="f4", fill_value=7, zarr_format=3, **inner)
        for box in written:
            made[box] = 1
    for box in written:
        there[box] = True
    strict, filled = convgen.data.open(path), convgen.data.open(path, missing="fill")
    for _ in range(12):
        where = region(draw, shape)
        touched = [box for box in boxes if there[where].size and np.any(_marked(shape, box)[where])]
        assert torch.equal(read(filled, where), torch.from_numpy(np.where(there, 1.0, 7.0))[where])
        if all(there[box].all() for box in touched):
            assert bool((read(strict, where) == 1).all())
        else:
            with pytest.raises(RuntimeError, match=r"x\.(h5|zarr): chunk \(.*\) is not there, .*missing='fill'"):
                read(strict, where)


def _marked(shape: tuple[int, ...], box: tuple[slice, ...]) -> Array:
    found = np.zeros(shape, dtype=bool)
    found[box] = True
    return found


def test_what_other_formats_lack(tmp_path: Path) -> None:
    """NetCDF's elements that nobody wrote are masked; a sparse TIFF lacks tiles; HDF5's may be in other files."""
    with netCDF4.Dataset(tmp_path / "x.nc", "w") as file:
        file.createDimension("a", 6)
        file.createVariable("x", "f4", ("a",))[:4] = 1
    array = convgen.data.open(tmp_path / "x.nc")
    assert bool((read(array, (slice(0, 4),)) == 1).all())
    with pytest.raises(ValueError, match="1 elements are missing"):
        read(array, (slice(2, 5),))
    assert float(read(convgen.data.open(tmp_path / "x.nc", missing="fill"), (slice(4, 5),))) > 9e36
    tiles = [np.ones((1, 16, 16), np.uint8), None]
    tifffile.imwrite(
        tmp_path / "x.tif", iter(tiles), shape=(16, 32), dtype=np.uint8, tile=(16, 16), photometric="minisblack",
        compression="zlib", metadata=None,
    )  # fmt: skip
    array = convgen.data.open(tmp_path / "x.tif")
    assert bool((read(array, (slice(0, 16), slice(3, 16))) == 1).all())
    with pytest.raises(RuntimeError, match=r"x.tif: chunk \(0, 1\) is not there"):
        read(array, (slice(0, 1), slice(0, 17)))
    with h5py.File(tmp_path / "x.h5", "w") as file:
        layout = h5py.VirtualLayout((4,), "f4")
        layout[:] = h5py.VirtualSource(str(tmp_path / "nowhere.h5"), "x", (4,))
        file.create_virtual_dataset("x", layout, fillvalue=3)
    with pytest.raises(InputError, match=r"x\.h5: /x is of other files"):
        convgen.data.open(tmp_path / "x.h5").shape  # noqa: B018
    assert read(convgen.data.open(tmp_path / "x.h5", missing="fill"), (slice(0, 4),)).tolist() == [3.0] * 4


def test_scaled_and_odd_types(tmp_path: Path) -> None:
    """Scaled numbers are what they mean; what the input's type can't have is refused."""
    volume = np.random.default_rng(0).random((4, 5, 6)) * 1000
    image = nibabel.Nifti1Image(volume, np.eye(4))
    image.set_data_dtype(np.int16)
    nibabel.save(image, tmp_path / "x.nii.gz")
    array = convgen.data.open(tmp_path / "x.nii.gz", dims=(None, 2, 1, 0))
    wanted = np.asarray(nibabel.load(tmp_path / "x.nii.gz").dataobj).transpose(2, 1, 0)[None]
    assert array.shape == (1, 6, 5, 4) and array.dtype == np.int16
    assert np.array_equal(np.asarray(read(array, tuple(slice(0, n) for n in array.shape))), wanted)
    with netCDF4.Dataset(tmp_path / "x.nc", "w") as file:
        file.createDimension("a", 3)
        made = file.createVariable("x", "i2", ("a",))
        made.scale_factor, made.add_offset = 0.5, 100.0
        made[:] = [100.5, 99, 101]
    assert read(convgen.data.open(tmp_path / "x.nc"), (slice(0, 3),)).tolist() == [100.5, 99, 101]
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["text"], file["complex"] = ["a", "b"], np.ones(2, np.complex64)
        file["pair"] = np.zeros(2, [("a", "f4"), ("b", "f4")])
        file["half"] = np.array([1, 1.5])
    for name, kind in (
        ("text", torch.float32),
        ("pair", torch.float32),
        ("complex", torch.float32),
        ("half", torch.int64),
    ):
        with pytest.raises(ValueError, match="wanted"):
            read_region(convgen.data.open(tmp_path / "x.h5", name), (slice(0, 2),), "x", kind)


def test_numbers_are_written_where_a_scale_stands_for_them(tmp_path: Path) -> None:
    """A NetCDF variable of whole numbers without a scale is as any target of these; nothing is written that it can't
    have."""
    net = compiled(tmp_path, {"H": 2})
    for scale, fits in ((None, False), (0.5, True)):
        with netCDF4.Dataset(tmp_path / "y.nc", "w") as file:
            for name, extent in zip("ncab", (4, 2, 9, 10), strict=True):
                file.createDimension(name, extent)
            made = file.createVariable("y", "i2", tuple("ncab"))
            if scale is not None:
                made.scale_factor = scale
            made[:] = np.zeros((4, 2, 9, 10))

        def program(end: VirtualTransport) -> None:
            mesh = net.init_mesh("cpu", transport=end)
            block = torch.full([s.stop - s.start for s in net.region("0", mesh)], 1.5)
            write(convgen.data.open(tmp_path / "y.nc", mode="r+"), net, "0", block, mesh)

        with nullcontext() if fits else pytest.raises((RuntimeError, ValueError), match="a target of int16 can't have"):
            World(2).run(program)
        with netCDF4.Dataset(tmp_path / "y.nc") as file:
            assert (np.asarray(file["y"][:]) == (1.5 if fits else 0)).all()


def test_a_rank_that_cannot_open_its_file(tmp_path: Path) -> None:
    """All ranks raise when blocks are made, and when a file becomes shorter in the middle of an epoch; by its name."""
    net = compiled(tmp_path, {"H": 2})
    image = np.zeros((8, 2, 9, 10), np.float32)
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
        np.save(tmp_path / str(rank) / "x.npy", image)
    shorter = tmp_path / "1" / "x.npy"

    def program(end: VirtualTransport, names: tuple[str, str], cut: bool = False) -> None:
        mesh = net.init_mesh("cpu", transport=end)
        array = convgen.data.open(tmp_path / str(end.rank) / names[end.rank])
        for _ in Blocks({"image": array}, net, mesh).loader(4):
            if cut and end.rank == 1:
                shorter.write_bytes(shorter.read_bytes()[:200])

    for names, words in (
        (("x.npy", "y.npy"), "y.npy"),
        (("x.npy", "x.npy"), "x.npy can't be opened: ValueError: mmap"),
    ):
        reached: list[str] = []

        def told(end: VirtualTransport, names: tuple[str, str] = names, reached: list[str] = reached) -> None:
            try:
                program(end, names, cut=names[1] == "x.npy")
            except (InputError, RuntimeError, ValueError) as error:
                reached.append(str(error))

        World(2).run(told)
        assert len(reached) == 2 and all(words in one for one in reached)


def test_what_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((2, 3)))
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["a"], file["g/b"] = np.zeros(2), np.zeros(2)
    (tmp_path / "x.h6").write_bytes((tmp_path / "x.h5").read_bytes())
    zarr.create_array(tmp_path / "one.zarr", data=np.zeros((2, 3)))
    torch.save([1, 2], tmp_path / "list.pt")
    np.savez(tmp_path / "several.npz", a=np.zeros(3))
    (tmp_path / "several.npz").rename(tmp_path / "several.npy")
    assert convgen.data.open(tmp_path / "x.h6", "a", format="hdf5").shape == (2,)
    for arguments, how, words in (
        (("x.dat",), {}, "which format has it?"),
        (("x.npy",), {"format": "png"}, "format 'png'"),
        (("x.npy",), {"missing": 0}, "missing=0"),
        (("x.npy", None, "w"), {}, "mode 'w'"),
        (("x.pt", None, "r+"), {}, "mode 'r+'"),
        (("x.npy",), {"dims": (0, 0)}, "has shape (2, 3), and dims=(0, 0)"),
        (("x.h5",), {}, "has 2 arrays, and none is named"),
        (("x.h5", "c"), {}, "has no array 'c'"),
        (("x.npy", "c"), {}, "x.npy has one array, without a name; 'c' is named"),
        (("one.zarr", "c"), {}, "one.zarr has one array, without a name"),
        (("y.h5", "c"), {}, "y.h5::c can't be opened: FileNotFoundError"),
        (("list.pt",), {}, "list.pt has a list, which is no array"),
        (("several.npy",), {}, "several.npy has a NpzFile, which is no array"),
    ):
        path, *rest = arguments
        with pytest.raises(InputError, match=re.escape(words)):
            convgen.data.open(tmp_path / path, *rest, **how).shape  # type: ignore[arg-type]  # noqa: B018
    array = convgen.data.open(tmp_path / "x.npy")
    for where in (0, (slice(0, 2, 2),), (slice(0, 1),) * 3):
        with pytest.raises(TypeError, match="slices for its 2 dimensions"):
            array[where]


def test_a_library_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused by name, with what installs it."""

    def missing(name: str, package: str | None = None) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(importlib.import_module("convgen.data.formats"), "import_module", missing)
    for file, package in (
        ("x.h5", "h5py"), ("x.zarr", "zarr"), ("x.nc", "netCDF4"), ("x.nii", "nibabel"), ("x.tif", "tifffile"),
        ("x.safetensors", "safetensors"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=rf"{file} needs {package}, which .*\n.*install {package}, or .*\[data\]"):
            convgen.data.open(file).shape  # noqa: B018
