"""What each family of kernels compiles to on other GPUs than sm_90, and why it doesn't where it does not.

    python bench/kernel_targets.py [--targets cuda:sm_80 cuda:sm_90 hip:gfx942] [--dtypes bfloat16 float32]

Layers of networks, on ranks that split channels four ways, in all three phases: each family that takes such a problem
compiles its default for the target. Of the launches that hold products: how many there are, how many spill registers,
have no matrix instruction where the family's have, or read less than 16 bytes at once at their widest. Then, by target
and family, problems that it takes on sm_90 and not there, and why. No GPU: nothing is timed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import product

from options import options

from convgen.errors import InternalError
from convgen.kernels.facts import Facts, facts, launches
from convgen.kernels.families import FAMILIES, GpuFamily, aten, depthwise
from convgen.kernels.partition import local_problem
from convgen.kernels.problem import Problem
from convgen.kernels.source import Kernel
from convgen.resources import data_file
from convgen.spec.reader import read_csv
from convgen.spec.target import Target, read_target

LAYERS = {
    "resnet50": ("conv1", "res2a_branch2b", "res3b_branch2a", "res4b_branch2c", "res5a_branch2b"),
    "vgg16": ("conv2_1",),
}
WAYS = 4
SM_90 = read_target("cuda:sm_90").known()
PHASES = ("forward", "backward_data", "backward_filter")


def problems(dtypes: list[str]) -> Iterator[Problem]:
    for network, names in LAYERS.items():
        layers = read_csv(data_file("tuning", "layers", f"{network}.csv"), grid={"N": 1}, algorithm="sample")
        for layer, dtype, phase in product((one for one in layers if one.name in names), dtypes, PHASES):
            p = local_problem(layer.conv, "channel", WAYS, phase, dtype)  # type: ignore[arg-type]
            yield p or local_problem(layer.conv, "sample", WAYS, phase, dtype)  # type: ignore[arg-type, misc]


def compiled(p: Problem, family: GpuFamily, target: Target) -> Facts:
    """Of the launch that holds the products."""
    kernel = Kernel((p,), family.default(p, target), target)
    (main,) = [one for one in launches(kernel, p) if one.name == kernel.name]
    return facts(main, target)


def main() -> None:
    asked = options(__doc__, targets=["cuda:sm_80", "cuda:sm_90", "hip:gfx942"], dtypes=["bfloat16", "float32"])
    some = list(problems(asked.dtypes))
    refused: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    head = ("launches", "spill", "no matrices", "narrow", "registers")
    print(f"{'target':<11} {'family':<10} " + " ".join(f"{word:>11}" for word in head))
    for name in asked.targets:
        target = read_target(name).known()
        for family in FAMILIES:
            if family.NAME == aten.NAME:
                continue
            found: list[Facts] = []
            for p in some:
                if (why := family.refusal(p, target)) is not None:
                    refused[name, family.NAME][why] += family.refusal(p, SM_90) is None
                    continue
                try:
                    found.append(compiled(p, family, target))
                except InternalError as error:
                    refused[name, family.NAME][f"compiler: {str(error).splitlines()[0][:100]}"] += 1
            if found:
                spilled = sum(one.spill_bytes > 0 for one in found)
                plain = sum(not one.matrix_instructions for one in found) if family.NAME != depthwise.NAME else 0
                narrow = sum(one.widest_global_load_bytes < 16 for one in found)
                most = max(one.registers for one in found)
                counts = (len(found), spilled, plain, narrow, most)
                print(f"{name:<11} {family.NAME:<10} " + " ".join(f"{n:>11}" for n in counts), flush=True)
    for (name, family), reasons in refused.items():
        for why, times in (+reasons).most_common():
            print(f"{name} {family}: {times} of {len(some)} problems: {why}")


if __name__ == "__main__":
    main()
