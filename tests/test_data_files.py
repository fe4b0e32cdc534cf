"""Outputs that real processes write by region into files of libraries, and how chunks of a file lie to blocks."""

from __future__ import annotations

import json
from itertools import pairwise, product
from math import prod
from pathlib import Path
from random import Random
from typing import Any

import h5py
import netCDF4
import numpy as np
import pytest
import torch
import zarr
from click.testing import CliRunner
from sampling import draws
from test_data import compiled, ranks

import convgen.data
from convgen.commands.main import cli
from convgen.data.chunks import borders, serving, shares, straddling
from convgen.data.created import LEAST_BYTES, MOST_BYTES, fitting
from convgen.errors import InputError
from convgen.verify.processes import spawn
from convgen.verify.virtual import VirtualTransport, World

Where = tuple[slice, ...]
TRUTH = np.random.default_rng(1).standard_normal((8, 2, 9, 10)).astype(np.float32)


@pytest.mark.parametrize("grid", [{"W": 3}, {"N": 2, "H": 2}, {"C": 2}], ids=str)
def test_processes_write_files(tmp_path: Path, grid: dict[str, int]) -> None:
    """Two batches of an output into each format, made here or elsewhere, with chunks that ranks share and without."""
    net = compiled(tmp_path, grid)
    with netCDF4.Dataset(tmp_path / "there.nc", "w") as file:
        for d, n in zip("ncyx", TRUTH.shape, strict=True):
            file.createDimension(d, n)
        file.createVariable("mask", "f4", tuple("ncyx"), zlib=True, chunksizes=(3, 1, 4, 4))
    with h5py.File(tmp_path / "there.h5", "w") as file:
        file.create_dataset("mask", TRUTH.shape, "f4", chunks=(3, 1, 4, 4), compression="gzip")
    zarr.create_array(tmp_path / "there.zarr", shape=TRUTH.shape, dtype="f4", chunks=(1, 1, 2, 2), shards=(2, 2, 4, 4))
    zarr.create_array(tmp_path / "odd.zarr", shape=TRUTH.shape, dtype="f4", chunks=(3, 1, 4, 3))
    files = [("there.nc", "mask"), ("there.h5", "mask"), ("there.zarr", None), ("odd.zarr", None)]
    made = [("made.h5", None), ("made.h5", "samples/other"), ("made.zarr", None), ("group.zarr", "a")]
    made += [("group.zarr", "b"), ("made.npy", None)]

    def program(rank: int) -> str:
        mesh = net.init_mesh("cpu")
        there = [convgen.data.open(tmp_path / path, name, "r+") for path, name in files]
        there += [convgen.data.create(tmp_path / path, net, "0", mesh, samples=8, name=name) for path, name in made]
        for target in there:
            for at in (4, 0):
                convgen.data.write(
                    target, net, "0", net.block("0", torch.from_numpy(TRUTH[at : at + 4]), mesh), mesh, at=at
                )
        try:
            convgen.data.create(tmp_path / "made.zarr", net, "0", mesh)
        except (InputError, ValueError) as error:
            return str(error)
        return ""

    for refused in spawn(program, prod(grid.values())):
        assert "made.zarr: ContainsArrayError" in refused
    for path, name in (*files, *made):
        found = convgen.data.open(tmp_path / path, name if name or path != "made.h5" else "0")
        assert np.array_equal(np.asarray(found[()]), TRUTH), path
        chunks = found.shards or found.chunks
        if path in ("made.zarr", "group.zarr"):  # columns 4, 3 and 3 would have chunks of one
            assert shares(chunks, net.NET.regions("0", _mesh(net))) == (grid == {"W": 3})
        found.close()


def _mesh(net: Any) -> Any:
    """Of the first of so many ranks, of which nothing is sent."""
    return net.init_mesh("cpu", transport=VirtualTransport(World(prod(net.SPEC["grid"].values())), 0))


def test_what_is_refused_when_it_is_written(tmp_path: Path) -> None:
    """An HDF5 file that several ranks have open, a file that one rank can't open, one that is not as it is said."""
    net = compiled(tmp_path, {"H": 2})
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", (4, 2, 9, 10), "f4")
    zarr.create_array(tmp_path / "x.zarr", shape=(4, 2, 9, 10), dtype="f4", chunks=(4, 2, 9, 10))

    def written(end: VirtualTransport, what: str) -> str:
        mesh, path = net.init_mesh("cpu", transport=end), tmp_path / "x.zarr"
        with h5py.File(tmp_path / "x.h5", "r") as file:
            target: Any = {
                "raw": lambda: file["x"],
                "gone": lambda: convgen.data.open(path if end.rank else tmp_path / "y.zarr", None, "r+"),
                "only read": lambda: convgen.data.open(path),
                "other": lambda: convgen.data.open(tmp_path / "x.npy", None, "r+"),
            }[what]()
            try:
                convgen.data.write(target, net, "0", net.block("0", torch.zeros(4, 2, 9, 10), mesh), mesh)
            except (InputError, OSError, RuntimeError, ValueError) as error:
                return str(error)
            return ""

    np.save(tmp_path / "x.npy", np.zeros((4, 2, 9, 11), np.float32))
    for what, words in (
        ("raw", "2 ranks write, and a file of h5py that several have open is spoilt"),
        ("gone", "y.zarr can't be opened: FileNotFoundError"),
        ("only read", "x.zarr: ValueError"),
        ("other", "the target has shape (4, 2, 9, 11)"),
    ):
        for said in World(2).run(lambda end, what=what: written(end, what)):
            assert words in said

    def created(end: VirtualTransport, path: str, how: dict[str, Any]) -> str:
        try:
            convgen.data.create(tmp_path / path, net, "0", net.init_mesh("cpu", transport=end), **how)
        except (InputError, ValueError) as error:
            return str(error)
        return ""

    for path, how, words in (
        ("x.npy", {}, "x.npy: FileExistsError"),
        ("new.npy", {"name": "a"}, "new.npy has one array, without a name"),
        ("x.h5", {"name": "x"}, "x.h5: ValueError"),
        ("x.nii", {}, "nifti is not made here"),
        ("new.h5", {"dtype": "float33"}, "new.h5: TypeError"),
    ):
        for said in ranks({"H": 2}).run(lambda end, path=path, how=how: created(end, path, how)):
            assert words in said, said


def tiled(draw: Random, shape: tuple[int, ...]) -> list[Where]:
    """Blocks of any sizes that tile an array, some of them empty, some as copies on two ranks."""
    cuts = [sorted([0, n, *draw.choices(range(n + 1), k=draw.randint(0, 3))]) for n in shape]
    blocks = [tuple(slice(a, b) for a, b in at) for at in product(*map(pairwise, cuts))]
    return blocks * draw.randint(1, 2)


def test_chunks_and_blocks_by_brute_force() -> None:
    """Which chunks regions touch and straddle, and which extents serve, by looking at every element."""
    for number in range(draws(150)):
        draw = Random(f"chunks {number}")
        shape = tuple(draw.randint(1, 7) for _ in range(draw.randint(1, 3)))
        blocks = tiled(draw, shape)
        halo = draw.randint(0, 2)
        reads = [
            tuple(slice(max(0, s.start - halo), min(n, s.stop + halo)) for s, n in zip(b, shape, strict=True))
            if all(s.stop > s.start for s in b) else b for b in blocks
        ]  # fmt: skip
        chunks = tuple(draw.randint(1, n + 1) for n in shape)

        def touched(region: Where, chunks: tuple[int, ...]) -> set[tuple[int, ...]]:
            return {
                tuple(i // n for i, n in zip(at, chunks, strict=True))
                for at in product(*[range(s.start, s.stop) for s in region])
            }

        def straddle(chunks: tuple[int, ...], blocks: list[Where] = blocks) -> int:
            of: dict[tuple[int, ...], set[str]] = {}
            for b in blocks:
                for chunk in touched(b, chunks):
                    of.setdefault(chunk, set()).add(str(b))
            return sum(len(those) > 1 for those in of.values())

        found = straddling(shape, chunks, 4, reads, blocks)
        assert found.count == straddle(chunks)
        assert found.total == len(touched(tuple(slice(0, n) for n in shape), chunks))
        for share, region in zip(found.shares, reads, strict=True):
            assert share.chunks == len(touched(region, chunks))
            assert share.chunk_bytes == 4 * share.chunks * prod(chunks)
            assert share.region_bytes == 4 * prod(s.stop - s.start for s in region)
        serves = {n for n in product(*[range(1, n + 1) for n in shape]) if not straddle(n)}
        assert found.serving == serving(blocks, shape) in serves
        for n in serves:  # the largest: along each dimension others divide it, where it has a border
            for d, inside in enumerate(borders(blocks, shape)):
                assert not inside or found.serving[d] % n[d] == 0
        assert straddling(shape, None, 4, reads, blocks).count == 0


def test_extents_of_chunks_that_are_made() -> None:
    """Those of blocks, where that serves and is neither tiny nor huge."""

    def halves(n: int, *sizes: int) -> list[Where]:
        return [(slice(0, 2), slice(a, b), slice(0, n)) for a, b in pairwise([0, *sizes])]

    assert fitting(halves(512, 256, 512), (2, 512, 512), 4) == (1, 256, 512)
    assert fitting(halves(512, 171, 342, 512), (2, 512, 512), 4) == (1, 171, 512)
    assert fitting(halves(512, 3, 5, 7), (2, 7, 512), 4) == (2, 3, 512)  # exact ones would be of a row, 2 KiB
    assert LEAST_BYTES > 2 * 512 * 4
    assert fitting([(slice(0, 4), slice(0, 4)), (slice(4, 8), slice(0, 4))], (8, 4), 4) == (4, 4)
    assert fitting([(slice(0, 3), slice(0, 4)), (slice(3, 5), slice(0, 4))], (5, 4), 4) == (1, 4)
    large = fitting(halves(3 * 10**4, 9000, 18000), (2, 18000, 3 * 10**4), 8)
    assert large[0] == 1 and 9000 % large[1] == 0 and MOST_BYTES / 4 < prod(large) * 8 <= MOST_BYTES


def chunks_of(*words: object) -> Any:
    """What `convgen chunks --json` says, or how it refuses."""
    done = CliRunner().invoke(cli, ["chunks", *map(str, words), "--json"])
    return str(done.exception) if isinstance(done.exception, InputError) else json.loads(done.stdout)


def test_the_command_says_what_ranks_read(tmp_path: Path) -> None:
    """Of a batch and of a sample, with halos and without: what the chunks are that ranks' regions touch."""
    layer = tmp_path / "layer.yaml"
    layer.write_text(
        "name: small\nlayer: conv2d\ninput: [5, 2, 9, 10]\nout_channels: 2\nkernel_size: 3\npadding: 1\n"
        "grid: {N: 2, H: 2}\nalgorithm: spatial\n"
    )
    zarr.create_array(tmp_path / "x.zarr", shape=(7, 2, 9, 10), dtype="f4", chunks=(2, 2, 3, 10))
    np.save(tmp_path / "one.npy", np.zeros((9, 10, 2)))
    found = chunks_of(tmp_path / "x.zarr", layer)
    regions = [[[a, b], [0, 2], [c, d], [0, 10]] for (c, d), (a, b) in product(((0, 5), (5, 9)), ((0, 3), (3, 5)))]
    assert sorted(one["region"] for one in found["shares"]) == sorted(regions)
    assert found["serving"] == [1, 2, 5, 10] and found["numbers"] == [[1], [], [1], []] and found["total"] == 9
    assert found["straddling"] == 9 - 2 * 2  # chunks of samples 2 and 3, and of rows 3 to 5
    of_rank: Any = {
        str(one["region"]): (one["chunks"], one["region_bytes"], one["chunk_bytes"]) for one in found["shares"]
    }
    assert of_rank[str(regions[0])] == (4, 4 * 3 * 2 * 5 * 10, 4 * 4 * 2 * 2 * 3 * 10)
    wide = chunks_of(tmp_path / "x.zarr", layer, "--halo")
    assert {str(one["region"][2]) for one in wide["shares"]} == {"[0, 6]", "[4, 9]"}
    assert wide["serving"] == found["serving"] and wide["straddling"] == found["straddling"]
    one = chunks_of(tmp_path / "one.npy", layer, "--dims", "2,0,1")
    assert sorted(share["region"] for share in one["shares"])[2:] == [
        [[0, 2], [0, 5], [0, 10]],
        [[0, 2], [5, 9], [0, 10]],
    ]
    assert sum(share["chunk_bytes"] for share in one["shares"]) == 8 * 2 * 9 * 10
    for words, said in (
        ((tmp_path / "x.zarr::a", layer), "x.zarr"),
        ((tmp_path / "one.npy", layer), "has shape [9, 10, 2], and x is ['N', 2, 9, 10]"),
        ((tmp_path / "one.npy", layer, "--dims", "2,a"), "--dims 2,a"),
        ((tmp_path / "x.zarr", layer, "--value", "z"), "no value 'z'"),
        ((tmp_path / "x.zarr", layer, "--value", "0", "--halo"), "halo=True is of inputs"),
    ):
        assert said in chunks_of(*words)
    text = CliRunner().invoke(cli, ["chunks", str(tmp_path / "x.zarr"), str(layer)]).stdout
    assert "5 of 9 chunks straddle" in text and "chunks of [1, 2, 5, 10] serve" in text
