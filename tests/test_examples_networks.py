"""Examples of networks: under torchrun, a few steps each, losses as on one process to the digits shown; and on virtual
ranks, at small widths, outputs and gradients as on one device."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from networks_on_ranks import check, draw_parameters, imported, random_input
from sampling import ALL
from torch import nn

from convgen.verify.processes import spawn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
RUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
SHORT = ("examples/unet3d.py", "--steps", "2", "--grid")


def python(*words: object, **environment: str) -> str:
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def forked(ranks: int) -> str:
    """What the first of so many processes prints that are forked: started anew, each takes seconds to import."""
    from examples import unet3d

    def program(_: int) -> str:
        dist.init_process_group = dist.destroy_process_group = lambda *_: None  # there is one
        sys.argv, text = [*SHORT, f"D={ranks}"], StringIO()
        with redirect_stdout(text):
            unet3d.main()
        return text.getvalue()

    return spawn(program, ranks)[0]


def losses(text: str) -> list[tuple[str, str]]:
    return re.findall(r"^ +\d+ +(\d\.\d{4}) +(\d\.\d{4})$", text, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.skipif(not ALL, reason="make demo runs it; make check here")
def test_the_classifier_trains_as_on_one_process(tmp_path: Path) -> None:
    file, saved = tmp_path / "small_resnet.yaml", tmp_path / "trained.pt"
    python("-m", "convgen", "import", "examples.resnet:small_resnet", "--input", "8,3,32,32", "-o", file)
    python("-m", "convgen", "compile", file, "--grid", "H=2,N=2", "-o", tmp_path)
    options = ("--package", tmp_path / "small_resnet", "--steps", 3, "--save", saved)
    found = losses(python(*RUN, 4, "examples/train_resnet.py", *options))
    assert len(found) == 3 and all(ours == one for ours, one in found)
    from examples.resnet import small_resnet

    small_resnet().load_state_dict(torch.load(saved, weights_only=True))


def decoder() -> nn.Module:
    from examples.vae_decoder import Decoder

    return Decoder(8)


def convnext() -> nn.Module:
    from examples.convnext import small_convnext

    return small_convnext(5, (4, 6), drop=0.0)


@pytest.mark.parametrize(("made", "shape"), [(decoder, (1, 4, 5, 3)), (convnext, (3, 3, 20, 24))])
def test_rows_that_the_grid_does_not_divide(made: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    module = made().double()
    draw_parameters(module)
    found = check(imported(module, random_input(shape)), {"H": 2, "W": 2})
    assert found.right, found


@pytest.mark.slow
def test_the_unet_trains_as_on_one_process(tmp_path: Path) -> None:
    text = forked(2) if not ALL else python(*RUN, 4, *SHORT, "D=2,H=2", CONVGEN_CACHE=str(tmp_path))
    found = losses(text)
    assert len(found) == 2 and all(ours == one for ours, one in found)
    assert re.search(r"forward [\d,]+, backward [\d,]+", text)


@pytest.mark.slow
@pytest.mark.skipif(not ALL, reason="starts processes; make check here")
def test_latents_of_five_sizes_are_decoded_as_by_one_process() -> None:
    said = python(*RUN, 2, "examples/decode.py", "--grid", "H=2", "--width", "8")
    assert len(re.findall(r", 0 of [\d,]+ bytes differ$", said, re.MULTILINE)) == 5, said
