"""The parameters of the tests that DistConv publishes, and the layers that it gets wrong without an error, all right?

    python bench/distconv_published.py [kind ...] [--cube 64] [--share 0.1]

Kinds are files of github.com/LBANN/DistConv's tests (basic, strides, splitting, periodic, transposed, channels_last,
with_ddp), LBANN's tests of unlike extents of kernels (unlike), and layers that it takes without an error and gets wrong
on 4 ranks (wrong). Every combination of their parameters, on their grids; splitting on 3x3 ranks too. Their extent of
64 on three dimensions is 16 here unless --cube says another. In float64 on virtual ranks, beside the module on one
device: outputs at most 1e-9 off, gradients of inputs and parameters and buffers 1e-8, bytes sent as VOLUME has them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from distconv_cases import KINDS


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []], help=f"of {', '.join(KINDS)}; by default all")
    parser.add_argument("--cube", type=int, default=16, help="extent of three dimensions")
    parser.add_argument("--share", type=float, default=1.0, help="of the cases, by chance")
    asked = parser.parse_args(arguments)
    torch.set_default_dtype(torch.float64)
    bad, draw = 0, Random("share")
    print(f"{'kind':14} cases  wrong   outputs  dx       dw       buffers")
    for kind in asked.kinds or KINDS:
        cases = [c for c in KINDS[kind](asked.cube) if draw.random() < asked.share]
        most, found = [0.0] * 4, list[str]()
        for case in cases:
            where = f"{case.name}, {','.join(f'{a}={n}' for a, n in case.grid.items())}"
            try:
                errors = case.check()
            except Exception as error:
                found.append(f"{where}: {type(error).__name__}: {str(error)[:300]}")
                continue
            each = (errors.outputs, errors.inputs, errors.parameters, errors.buffers)
            most = [max(a, b) for a, b in zip(most, each, strict=True)]
            if not errors.right:
                found.append(f"{where}: {errors}")
        print(f"{kind:14} {len(cases):5}  {len(found):5}   " + "  ".join(f"{e:.1e}" for e in most), flush=True)
        print("".join(f"  {text}\n" for text in found), end="", flush=True)
        bad += len(found)
    print(f"{bad} wrong or refused")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
