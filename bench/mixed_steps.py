"""Twenty steps of training in mixed precision on virtual ranks beside the module on one process, as a table.

    PYTHONPATH=build/zoo python bench/mixed_steps.py [--steps 20] [--only ResNet] [--mix "autocast to bfloat16"]
    python bench/mixed_steps.py --only kernels    # two convolutions of a GPU's package, in Triton's interpreter

Models of the zoo (torchvision's ResNet-18, MONAI's U-Net of images, timm's ConvNeXt, diffusers' autoencoder with
attention) under autocast, with norms of another type, and with numbers of another type. The first columns: how
far a unit in the last place of inputs takes the module's own losses (the root of the mean square of relative
differences) and parameters (relative to how far training moves them). A column a grid: how far its ranks are, in these
units. tests/steps_on_ranks.py says how units are drawn. Exit code 1: types of outputs, gradients, parameters or buffers
aren't torch's, ranks differ, or are more than LIMIT units off. `not repeated`: the module's own two runs differ. A
model that isn't there is left out.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from options import options
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from steps_on_ranks import LIMIT, MIXES, Steps, WithKernels
from zoo import MODELS
from zoo.makers import Made, Make

from convgen.spec.text import parse_grid


def resnet() -> Made:
    """What residual branches add is small at first: else a unit of bfloat16 takes parameters as far as steps do."""
    module, _ = MODELS["resnet18"]()
    for name, p in module.named_parameters():
        if name.endswith("bn2.weight"):
            nn.init.constant_(p, 0.2)
    return module, (4, 3, 64, 64)


NAMES: dict[str, Make] = {
    "ResNet-18": resnet,
    "U-Net": MODELS["monai_unet2d"],
    "ConvNeXt": MODELS["timm_convnext"],
    "autoencoder": MODELS["kl_mid_attention"],
    "kernels": lambda: (WithKernels(), (2, 8, 8, 9)),
}
GRIDS = ("N=2", "H=2", "C=2", "N=2,H=2")


def main() -> None:
    asked = options(__doc__, steps=20, draws=8, only="", mix="")
    torch.set_num_threads(1)
    wrong, most = list[str](), 0.0
    print(f"| model | types | losses | parameters | {' | '.join(GRIDS)} |\n|---|---|---|---|{'---|' * len(GRIDS)}")
    for model, make in NAMES.items():
        for mixed, mix in MIXES.items():
            if asked.only not in model or asked.mix not in mixed or (model == "kernels" and not mix.autocast):
                continue
            torch.manual_seed(0)
            try:
                module, shape = make()
            except ImportError as error:
                print(f"{model} is left out: {error}")
                break
            steps = Steps(module, shape, mix, asked.steps, asked.draws, kernels=model == "kernels")
            said = "" if steps.is_repeated else ", not repeated"
            cells = list[str]()
            for grid in GRIDS:
                far, fault = steps.check(parse_grid(grid, "N=2", "grid"))
                losses, parameters = far.losses / steps.unit.losses, far.parameters / steps.unit.parameters
                cells.append(f"{losses:.2f}, {parameters:.2f}{fault and f' WRONG: {fault}'}")
                most = max(most, far.units(steps.unit))
                wrong += [f"{model}, {mixed}, {grid}: {fault}"] if fault else []
            unit = f"{steps.unit.losses:.1e} | {steps.unit.parameters:.1e}"
            print(f"| {model} | {mixed}{said} | {unit} | {' | '.join(cells)} |", flush=True)
    print(f"\nat most {most:.2f} units, {LIMIT} are allowed; {len(wrong)} wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
