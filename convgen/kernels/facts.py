# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false, reportUnknownParameterType=false
# (triton has no types)
"""Facts of what a kernel compiles to, found without a GPU: registers, spills, shared memory, matrix instructions,
loads, its loop.

A launch is recorded by running the module's own launching function on tensors without memory, so that what is compiled
is what will run: the same arguments, specialised as Triton specialises them. Triton's wheel has all
assemblers that this takes.
"""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from convgen.errors import InternalError
from convgen.kernels.bound import Bound, bound_of, resident
from convgen.kernels.epilogues import keeps, operands
from convgen.kernels.estimate import data_sheet
from convgen.kernels.load import load_text
from convgen.kernels.loops import Loop, matrix_loop
from convgen.kernels.problem import Problem
from convgen.kernels.prologues import VECTORS, Before
from convgen.kernels.source import Kernel, kernel_module
from convgen.kernels.torch_types import TORCH_DTYPES
from convgen.operations.convolution import MAKES, READS
from convgen.spec.target import Target

POINTER = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
}
_OPTIONS = ("num_warps", "num_stages")
_compiled: dict[Any, Facts] = {}


@dataclass(frozen=True, slots=True)
class Facts:
    """Static resources of one compiled kernel.

    Attributes:
        registers: how many a thread has. spill_bytes: what a thread stores to memory for want of registers.
        shared_bytes: what a program takes.
        matrix_instructions: how many the text has (mma, wgmma, tcgen05.mma or mfma), however often they run.
        widest_global_load_bytes: the widest access of one thread; a tensor copy counts as 16.
        loop: the one with the matrix instructions; None where there is none, no assembler to ask, or nobody asked.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    matrix_instructions: int
    widest_global_load_bytes: int
    loop: Loop | None = None

    def as_dict(self) -> dict[str, int]:
        """Its numbers; the loop's are in bounds."""
        return {name: n for name, n in asdict(self).items() if name != "loop"}


@dataclass(frozen=True)
class Launch:
    """One kernel call: the Triton function, its grid, its arguments in order, its constants and options."""

    function: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]

    @property
    def name(self) -> str:
        return self.function.fn.__name__


def launches(kernel: Kernel, problem: Problem) -> list[Launch]:
    """The launches of a kernel for one rank's problem."""
    module = load_text(kernel_module([kernel]))
    found: list[Launch] = []

    def record(function: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        found.append(Launch(function, grid, args, constants))

    run, module.launch = module.launch, record  # type: ignore[attr-defined]
    p = problem
    dtype, elements = TORCH_DTYPES[p.dtype], p.elements
    x = torch.empty(elements["x"] * p.x_parts, dtype=dtype, device="meta")
    w = torch.empty(elements["w"] * p.x_parts * p.y_parts, dtype=dtype, device="meta")
    y = torch.empty(elements["y"] * p.y_parts, dtype=dtype, device="meta")
    rows = (tuple(d.x for d in p.dims), tuple(d.y for d in p.dims), tuple(d.below for d in p.dims))
    sizes = module.Sizes(p.batch, *rows, p.channels, p.filters, p.groups)
    of = {"x": x, "w": w, "y": y}
    tensors = [of[t] for t in READS[p.phase]]
    tensors += [torch.empty(p.groups * p.filters * p.y_parts, dtype=dtype, device="meta")] if p.bias else []
    for _, kind in operands(p.epilogue):
        elements = of[MAKES[p.phase]].numel() if kind == "element" else 3 * p.groups * p.filters
        tensors.append(torch.empty(elements, dtype=dtype, device="meta"))
    tensors += [torch.empty_like(y)] if keeps(p.epilogue) else []
    out = of[MAKES[p.phase]]
    rim: list[Any] = []
    if p.rim is not None:
        boxes = torch.empty((p.rim, 1 + 2 * len(p.dims)), dtype=torch.int64, device="meta")
        own = [d.y if p.phase == "backward_data" else d.x for d in p.dims]
        rim = [module.Rim(x, boxes, tuple(n for rows in own for n in (0, rows)), _thin_boxes(p.rim, own))]
    before = () if p.before is None else (_given(p.before, of["y" if p.phase == "backward_data" else "x"], p), 1e-5)
    try:
        getattr(module, p.phase)(*tensors, out, sizes, *rim, *before)
    finally:
        module.launch = run  # type: ignore[attr-defined]
    return found


def _given(before: Before, read: torch.Tensor, p: Problem) -> tuple[Any, ...]:
    """A norm's arguments: vectors, tensors that lie as the activation does, and the number of elements of each
    channel."""
    channels = p.filters if p.phase == "backward_data" else p.channels
    wide = torch.empty(3 * channels, dtype=torch.float32, device="meta")
    of = {"found": wide, "total": p.pixels} | dict.fromkeys(VECTORS, wide[:channels])
    return tuple(of.get(name, read) for name in before.tensors)


def _thin_boxes(count: int, own: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Boxes of one row on both sides of a block's first dimension, `count` of them."""
    rest = own[1:]
    return tuple((0, own[0] if i % 2 else -1, *(0 for _ in rest), 1, *rest) for i in range(count))


def facts(launch: Launch, target: Target, loops: bool = False) -> Facts:
    """Compile a launch for a target; with `loops` also find its loop, for which it is disassembled.

    Raises:
        InternalError: the compiler refuses it; the text has its reason.
    """
    signature, values, attributes = specialised(launch)
    options = {name: launch.constants[name] for name in _OPTIONS if name in launch.constants}
    options["enable_fp_fusion"] = True  # as modules launch them; Triton's default changes with its version
    key = (
        launch.function.src,
        str(target),
        *(str(sorted(d.items(), key=str)) for d in (signature, values, options)),
        str(attributes),
        loops,
    )
    if key not in _compiled:
        source = ASTSource(launch.function, signature, values, attributes)
        gpu = GPUTarget(target.kind, target.arch, target.warp)
        try:
            _compiled[key] = _compile(source, gpu, options, loops)
        except Exception as error:
            raise InternalError(f"{launch.name} does not compile for {target}: {error}") from error
    return _compiled[key]


def specialised(launch: Launch) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int, ...], list[list[Any]]]]:
    """Types, constants and alignments of the arguments, as Triton's launcher would find them."""
    signature: dict[str, str] = {}
    values: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    names = launch.function.arg_names
    given = dict(zip(names, launch.args, strict=False))
    given |= {n: v for n, v in launch.constants.items() if n not in _OPTIONS}
    constant = {p.name for p in launch.function.params if p.is_constexpr}
    any_number = {p.name for p in launch.function.params if p.do_not_specialize}
    for i, name in enumerate(names):
        value = given[name]
        if name in constant or value is None or (isinstance(value, int) and value == 1 and name not in any_number):
            signature[name], values[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = POINTER[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and name not in any_number:
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:  # a tensor descriptor
            block = ",".join(map(str, value.block_shape))
            signature[name] = f"tensordesc<{POINTER[value.base.dtype][1:]}[{block}]>"
    return signature, values, attributes


def _compile(source: Any, gpu: GPUTarget, options: dict[str, int], loops: bool) -> Facts:
    log = io.StringIO()
    knobs: Any = getattr(triton, "knobs")  # noqa: B009
    # The assembler's log has registers and spills; it is only there when nothing comes from the cache.
    with knobs.nvidia.scope(), knobs.compilation.scope(), contextlib.redirect_stdout(log):
        knobs.nvidia.dump_ptxas_log = True
        knobs.compilation.always_compile = True
        kernel: Any = triton.compile(source, target=gpu, options=options)
    if gpu.backend == "hip":
        return _read_amd(kernel.asm["amdgcn"], kernel.metadata.shared)
    found = _read_nvidia(kernel.asm["ptx"], log.getvalue(), kernel.metadata.shared)
    return replace(found, loop=_loop(kernel.asm["cubin"], knobs) if loops and found.matrix_instructions else None)


def _loop(cubin: bytes, knobs: Any) -> Loop | None:
    """The loop of an assembled kernel, by the disassembler of Triton's wheel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    return matrix_loop(done.stdout) if done.returncode == 0 else None


def _read_nvidia(ptx: str, log: str, shared: int) -> Facts:
    registers = re.findall(r"Used (\d+) registers", log)
    spilled = re.findall(r"(\d+) bytes spill stores", log)
    if not registers or not spilled:
        raise InternalError(f"ptxas's log does not say what it used: {log[:200]!r}")
    loads = [int(n, 0) for n in re.findall(r"cp\.async\.c[ag]\.shared\.global\s+\[[^\]]*\], \[[^\]]*\], (\w+)", ptx)]
    for vector, bits in re.findall(r"ld\.global[\w.:]*?(?:\.v(\d))?\.[bfsu](\d+)", ptx):
        loads.append(int(vector or 1) * int(bits) // 8)
    loads += [16] * len(re.findall(r"cp\.async\.bulk\.tensor\.\dd\.shared::\w+\.global", ptx))
    matrix = len(re.findall(r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)\b", ptx))
    return Facts(int(registers[-1]), int(spilled[-1]), shared, matrix, max(loads, default=0))


def _read_amd(text: str, shared: int) -> Facts:
    def number(name: str) -> int:
        return max((int(n) for n in re.findall(rf"\.{name}:\s+(\d+)", text)), default=0)

    widths = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "ushort": 2, "short": 2, "ubyte": 1}
    loads = [
        widths[kind]
        for kind in re.findall(r"(?:global|buffer)_load_(dwordx4|dwordx3|dwordx2|dword|ushort|short|ubyte)\b", text)
    ]
    loads += [2] * len(re.findall(r"(?:global|buffer)_load_(?:short|ushort|sbyte|ubyte)_d16", text))
    matrix = len(re.findall(r"\bv_mfma_", text))
    return Facts(number("vgpr_count"), number("vgpr_spill_count") * 4, shared, matrix, max(loads, default=0))


def records(layer: str, kernels: Sequence[Kernel]) -> Iterator[dict[str, Any]]:
    """A record for every kernel that a layer's ranks launch (docs/kernels.md), ranks that are alike together."""
    for kernel in kernels:
        ranks: dict[Problem, list[int]] = {}
        for rank, problem in enumerate(kernel.problems):
            ranks.setdefault(problem, []).append(rank)
        seen: dict[tuple[Any, ...], dict[str, Any]] = {}
        for problem, alike in ranks.items():
            for launch in launches(kernel, problem):
                found = facts(launch, kernel.target, loops=True)
                tiles = {n: v for n, v in launch.constants.items() if n not in _OPTIONS}
                key = (launch.name, found, tuple(sorted(tiles.items())))
                if key in seen:
                    seen[key]["ranks"] += alike
                    continue
                seen[key] = {
                    "layer": layer,
                    "name": launch.name,
                    "phase": problem.phase,
                    "family": kernel.config.family if launch.name == kernel.name else "sum",
                    "config": tiles | {n: launch.constants[n] for n in _OPTIONS if n in launch.constants},
                    **found.as_dict(),
                    "loop": _loop_record(found.loop),
                    "bound": _bound_record(bound(kernel, problem, launch, found)),
                    "ranks": list(alike),
                }
        yield from seen.values()


def bound(kernel: Kernel, problem: Problem, launch: Launch, found: Facts) -> Bound | None:
    """The bound of a kernel's launch for a rank's problem; None for the sum behind it, and without a rate.

    Memory and launches are those of tuning/machines.
    """
    if launch.name != kernel.name:
        return None
    device = data_sheet(kernel.target, problem.dtype)
    rates = {"bytes_per_s": device.bytes_per_s, "floor_s": device.floor_s}
    held = resident(found.registers, found.shared_bytes, kernel.config.warps, kernel.target)
    return bound_of(problem, kernel.config, found.loop, kernel.target, **rates, programs=held)


def _loop_record(loop: Loop | None) -> dict[str, Any] | None:
    if loop is None:
        return None
    return {
        "instructions": loop.instructions,
        **loop.by_class,
        "narrowest_copy_bytes": loop.narrowest_copy,
        "exposed": loop.exposed,
    }


def _bound_record(b: Bound | None) -> dict[str, Any] | None:
    if b is None:
        return None
    return {
        "programs": b.programs,
        "waves": b.waves,
        "steps": b.steps,
        "step_bytes": b.step_bytes,
        "needed_matrix_cycles": b.matrix_cycles,
        **{f"{name}_cycles": n for name, n in b.step_cycles.items()},
        "share": b.share,
        "share_by_issue": b.share_by_issue,
        "useful": b.useful,
        "limit": b.limit,
        **{f"{name}_us": us for name, us in b.times_us.items()},
        "ideal_us": b.ideal_us,
        "us": b.us,
    }
