"""The example of volumes in files: what is written, training and predictions beside one process's, restarts, an address
limit; and the mesh model from a file."""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from sampling import ALL
from scripts import bench_script

from convgen.spec.exported import graph_of
from convgen.spec.graph_file import write_graph
from convgen.verify.processes import ProcessFailed, spawn

zarr = pytest.importorskip("zarr")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
EXTENT, STEPS = 12, 8


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from examples.volume import write_volumes

    folder = tmp_path_factory.mktemp("volumes")
    write_volumes(folder, EXTENT, 5)  # blocks straddle chunks
    return folder


def test_numbers_are_functions_of_their_places(files: Path) -> None:
    """Of any region they are those of the whole, and a file has them."""
    from examples.volume import numbers

    draw = Random(2)
    for name, first, count in (("train", 0, 4), ("validate", 4, 1)):
        group: Any = zarr.open_group(files / name, mode="r")
        for sample in range(count):
            cuts = [sorted(draw.sample(range(EXTENT + 1), 2)) for _ in range(3)]
            region = tuple(slice(*cut) for cut in cuts)
            whole = numbers(first + sample, (slice(0, EXTENT),) * 3, EXTENT)
            part = numbers(first + sample, region, EXTENT)
            for one, all_of_it, array in zip(
                part, whole, (group["image"][sample, 0], group["label"][sample]), strict=True
            ):
                assert np.array_equal(one, all_of_it[region]) and np.array_equal(array, all_of_it)
            assert 0 < whole[1].mean() < 0.5


@pytest.mark.slow
def test_ranks_train_and_predict_as_one_process(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, through a checkpoint into the network that predicts; ranks read their regions and no more."""
    monkeypatch.setenv("CONVGEN_CACHE", str(tmp_path / "cache"))
    from examples import volume

    script = bench_script("volume")
    wanted = script.losses_of_one(files, 2, 1, STEPS)

    def program(_: int) -> tuple[list[float], int, int]:
        training = volume.begun(volume.original(2, 1).double(), files, "D=2", 1, STEPS // 4)
        losses = [loss for _, _, loss in training.steps(STEPS // 4)]
        dcp.save({"state": training.state}, checkpoint_id=tmp_path / str(STEPS))
        options = argparse.Namespace(width=2, levels=1, folder=files, grid="H=2", checkpoints=tmp_path)
        volume.predict(options, lambda _: None)
        return losses, training.loader.blocks.bytes_read, script.bytes_of_regions(training)

    for losses, read, region in spawn(program, 2):
        assert np.allclose(losses, wanted, rtol=1e-12, atol=0)
        assert read == STEPS * region

    one = volume.Ball(volume.UNet3d(2, 1))
    state = one.state_dict()

    def alone(_: int) -> dict[str, torch.Tensor]:
        dcp.load({"state": {"model": state}}, checkpoint_id=tmp_path / str(STEPS))
        return state

    one.load_state_dict(spawn(alone, 1)[0])
    group: Any = zarr.open_group(files / "validate", mode="r")
    with torch.no_grad():
        truth = one(torch.from_numpy(group["image"][:]))
    assert np.allclose(group["ball"][:], truth.numpy(), atol=1e-5)


def run(*words: object, **environment: str) -> str:
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not ALL, reason="make check starts interpreters")
def test_torchrun_restarts_from_the_last_checkpoint(files: Path, tmp_path: Path) -> None:
    """Rank 1 kills itself in the second epoch, behind the fifth step; the checkpoint is of the fourth."""
    restarts = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "--max-restarts", 1)
    small = ("examples/volume.py", "train", files, "--grid", "D=2", "--width", 2, "--levels", 1)
    own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "CONVGEN_CACHE": str(tmp_path / "cache")}
    text = run(*restarts, *small, "--checkpoints", tmp_path / "kept", "--kill", 1, **own)
    steps = re.findall(r"step +(\d+)  loss (\S+)", text)
    assert [int(step) for step, _ in steps] == [1, 2, 3, 4, 5, 5, 6, 7, 8]
    assert "goes on behind step 4" in text and steps[4] == steps[5]


@pytest.mark.slow
def test_ranks_train_where_one_process_has_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within half of what one process and what a rank needs: bench/volume.py, of a small network."""
    from examples.volume import write_volumes

    monkeypatch.setenv("CONVGEN_CACHE", str(tmp_path / "cache"))
    script = bench_script("volume")
    write_volumes(tmp_path / "small", 8, 4)
    write_volumes(tmp_path / "large", 40, 20)
    options = argparse.Namespace(width=4, levels=1, folder=tmp_path, grid="D=2", steps=4, limit=0)
    (wanted,) = spawn(lambda _: script.run_of_one(options), 1)
    one, rank = (script.said(options, tmp_path / "large", grid) for grid in ("N=1", "D=2"))
    options.limit = int(one + rank) // 2

    def limited(run: Any) -> Any:
        ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD: large blocks go back to the system at once
        return run(options)

    with pytest.raises(ProcessFailed, match="DefaultCPUAllocator: can't allocate memory"):
        spawn(lambda _: limited(script.run_of_one), 1)
    for found in spawn(lambda _: limited(script.run_of_rank), 2):
        assert np.allclose(found["losses"], wanted["losses"], rtol=1e-12, atol=0)
        assert (
            found["read"] == found["region"] and 0.7 * rank < found["peak"] < 1.3 * rank
        )  # Python's share is large here


@pytest.mark.slow
def test_the_mesh_model_from_a_file() -> None:
    off, rounding, read, whole = bench_script("mesh_from_file").compared(2, 4)
    assert off < 1e-10 + 100 * rounding < 1e-6 and [4 * n for n in read] == [whole] * 4


def test_examples_that_no_process_holds() -> None:
    """Of one number, expanded: the graph is that of others of the shape, and 2^40 elements take no memory."""

    def text(extent: int, dense: bool) -> str:
        given = torch.zeros(()).expand(1, 1, *(extent,) * 3)
        graph, _ = graph_of(torch.nn.Conv3d(1, 2, 3), (given.clone() if dense else given,), name="net")
        return write_graph(graph)

    assert text(8, dense=True) == text(8, dense=False)
    assert str(2**13) in text(2**13, dense=False)
