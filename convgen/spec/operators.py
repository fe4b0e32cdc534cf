"""Operators of ATen that a graph may name: functions of tensors, which leave the machine as it is.

Schemas and tags tell most: none of these operators changes an operand, gives anything but tensors, or takes storage or
a stream. What schemas don't tell is listed: operators that read files, address devices and their libraries, change how
a tensor is held, or give uninitialised memory. Operators that draw random numbers are refused where they are described
(aten/describe.py), as dropout and noise have rows of their own.
"""

from __future__ import annotations

import re
from typing import Any

from convgen.errors import InputError
from convgen.late import torch
from convgen.spec.text import shown

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,80}(?:\.[A-Za-z_][A-Za-z0-9_]{0,40})?", re.ASCII)
LISTED = {
    "reads a file": r"from_file",
    "is of a device or its library":
        r"_?pin_memory|.*(?:cuda|cudnn|miopen|mkldnn|mkl|mps|vulkan|xnnpack|nnpack|fbgemm|cslt|triton|metal|hpu|_to_cpu|"
        r"copy_from|weight_int\dpack|packed_sequence|flash_attention|efficient_attention|cufft)(?:_.*)?|_?to_.*copy_from",
    "changes how a tensor is held":
        r"_?resize.*|set(?:_data)?|data|_?lazy_clone|_?reshape_alias|_reshape_from_tensor|rename|align_.*|refine_names|"
        r"_fw_primal|_make_dual|_unpack_dual|_add_batch_dim|_remove_batch_dim|_index_put_impl|_foobar|_test_.*|"
        r"_make_dep_token|_assert_.*|_functional_assert.*|_print|sym_.*|_debug_.*|unflatten_dense_tensors",
    "is of sparse, quantized or nested tensors":
        r".*(?:sparse|nested|quant|_coo|_csr|_csc|_bsr|_bsc|jagged|padded|spdiags|choose_qparams).*|fake_.*|q_.*|int_repr|"
        r"s?smm|sspaddmm|hspmm|(?:crow|ccol|col|row|_)?_?indices|_?values|_?coalesce.*",
    "reads without looking at bounds": r"_unsafe_(?:masked_)?index.*",
    "gives memory as it lies": r"(?:new_)?empty(?!_like$).*|_efficientzerotensor",
}  # fmt: skip
_ODD_TYPES = re.compile(r"Storage|Stream|__torch__|Any|Future|Dimname")


def pure_operator(name: str, described: bool = False) -> Any:
    """An operator by its name in a graph.

    Args:
        described: whether rows compute it, so that the list doesn't matter.
    Raises:
        InputError: there is no such operator, or it does more than make tensors from tensors.
    """
    found: Any = None
    if NAME.fullmatch(name):
        packet, _, overload = name.partition(".")
        found = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
    if not isinstance(found, torch._ops.OpOverload):
        raise InputError(f"ATen has no operator {shown(name)}", hint="as torch.ops.aten names it: relu, add.Tensor")
    if why := impurity(found, described):
        raise InputError(f"{name} {why}, and a graph's operators make tensors of tensors", hint="another operator")
    return found


def impurity(operator: Any, described: bool = False) -> str:
    """What an operator does that none of a graph's may; "" if it is pure.

    Example:
        >>> impurity(torch.ops.aten.relu.default), impurity(torch.ops.aten.relu_.default)
        ('', 'changes an operand')
    """
    schema = operator._schema
    if schema.is_mutable:
        return "changes an operand"
    if not schema.returns or any(str(r.type) not in ("Tensor", "List[Tensor]") for r in schema.returns):
        return "gives what is no tensor"
    if any(_ODD_TYPES.search(str(a.type)) for a in schema.arguments):
        return "takes what no file holds"
    name = schema.name.removeprefix("aten::")
    if described:
        return ""
    return next((why for why, names in LISTED.items() if re.fullmatch(names, name)), "")
