"""The layer file's form: its keys, their types and defaults (README, A layer file). What values mean: build.py.

A key's description is what messages say would work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from convgen.errors import InputError, Note
from convgen.spec.layer import ALGORITHM_NAMES
from convgen.spec.names import did_you_mean
from convgen.spec.source import KeyPath
from convgen.spec.target import WRITTEN
from convgen.spec.text import kind, number_of, one_line, shown

MAX_SIZE = 2**31 - 1

Size: TypeAlias = Annotated[int, Field(ge=1, le=MAX_SIZE)]
Rows: TypeAlias = Annotated[int, Field(ge=0, le=MAX_SIZE)]
Pair: TypeAlias = Annotated[list[Rows], Field(min_length=2, max_length=2)]
Shares: TypeAlias = Annotated[list[Rows], Field(min_length=1)]
Split: TypeAlias = str | dict[str, Shares]
Entry: TypeAlias = Split | list[Split] | None
AxisRoles: TypeAlias = dict[str, str | None]

_SIZE = "an integer from 1 to 2**31 - 1"
_EACH = f"{_SIZE}, or a list with one per spatial dimension"
_ENTRIES = 'a list with an axis, "*", none, a list of axes, or {axis: [sizes of blocks]} per dimension'
_KERNEL = "text, a local kernel as convgen tune prints it"
_ROLES = "a mapping of axis to N, C, F, G, D, H, W or none"


def _algorithm(name: str) -> str:
    if name not in ALGORITHM_NAMES:
        raise ValueError(name)
    return name


class _Form(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class KernelsForm(_Form):
    forward: str | None = Field(default=None, description=_KERNEL)
    backward_data: str | None = Field(default=None, description=_KERNEL)
    backward_filter: str | None = Field(default=None, description=_KERNEL)


class OptionsForm(_Form):
    hold_x: Literal["gathered", "stored"] = Field(default="gathered", description="gathered or stored")
    sums: Literal["ordered", "native"] = Field(default="ordered", description="ordered or native")
    kernels: KernelsForm | None = Field(
        default=None, description="a mapping with forward, backward_data, backward_filter or some of them"
    )
    core_groups: int = Field(default=1, ge=1, le=4, description="an integer from 1 to 4; target sw26010 only")
    plan: Literal["model", "trial"] = Field(default="model", description="model or trial; target sw26010 only")


class DistributionForm(_Form):
    x: list[Entry] = Field(description=f"{_ENTRIES}: N, C, spatial")
    w: list[Entry] = Field(description=f"{_ENTRIES}: F, C; of conv_transpose C, F")
    y: list[Entry] = Field(description=f"{_ENTRIES}: N, F, spatial")


class RolesForm(_Form):
    forward: AxisRoles | None = Field(default=None, description=_ROLES)
    backward_data: AxisRoles | None = Field(default=None, description=_ROLES)
    backward_filter: AxisRoles | None = Field(default=None, description=_ROLES)


class LayerForm(_Form):
    name: str = Field(description="text, a Python identifier")
    layer: Literal["conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"] = Field(
        description="conv1d, conv2d, conv3d, conv_transpose1d, conv_transpose2d or conv_transpose3d"
    )
    input: list[Size] = Field(description="a list [N, C, spatial...] of integers from 1 to 2**31 - 1")
    out_channels: Size = Field(description=_SIZE)
    kernel_size: Size | list[Size] = Field(description=_EACH)
    stride: Size | list[Size] = Field(default=1, description=_EACH)
    padding: Rows | Literal["same", "valid"] | list[Rows] | list[Pair] = Field(
        default=0, description="an integer from 0, a list of them or of [lo, hi] per spatial dimension, same, or valid"
    )
    output_padding: Rows | list[Rows] | None = Field(
        default=None, description="an integer from 0, or a list with one per spatial dimension; conv_transpose only"
    )
    dilation: Size | list[Size] = Field(default=1, description=_EACH)
    groups: Size = Field(default=1, description=f"{_SIZE} that divides C and out_channels")
    bias: bool = Field(default=False, description="true or false")
    dtype: Literal["float64", "float32", "tfloat32", "bfloat16", "float16"] = Field(
        default="float32", description="float64, float32, tfloat32, bfloat16 or float16"
    )
    memory_format: Literal["contiguous", "channels_last"] | None = Field(
        default=None, description="contiguous or channels_last"
    )
    grid: dict[str, Size | Shares] = Field(
        description="a mapping of axis name to ranks, e.g. {N: 2, C: 2}, or to a share for each, e.g. {H: [3, 5]}"
    )
    algorithm: Annotated[str, AfterValidator(_algorithm)] | None = Field(
        default=None, description=f"{', '.join(ALGORITHM_NAMES[:-1])} or {ALGORITHM_NAMES[-1]}"
    )
    distribution: DistributionForm | None = Field(default=None, description="a mapping with x, w and y")
    roles: RolesForm | None = Field(
        default=None, description="a mapping with forward, backward_data, backward_filter or some of them"
    )
    target: str = Field(default="cpu", description=WRITTEN)
    machine: str | None = Field(default=None, description="text, a machine's name or file")
    options: OptionsForm = Field(
        default=OptionsForm(),
        description="a mapping with hold_x, sums, kernels; for sw26010 also core_groups and plan",
    )


_INNER: dict[str, type[_Form]] = {"options": OptionsForm, "distribution": DistributionForm, "roles": RolesForm}
_SEVERAL = ("kernel_size", "stride", "padding", "output_padding", "dilation", "distribution")


def fill_form(data: object) -> LayerForm:
    """The form that a mapping fills in.

    Raises:
        InputError: for the first thing wrong (unknown keys come first); a note counts the others.
    """
    if not isinstance(data, dict):
        raise InputError(f"a layer is a mapping, not {kind(data)}", hint="write 'key: value' a line")
    try:
        return LayerForm.model_validate(data)
    except ValidationError as error:
        found = error.errors(include_url=False)
    mistakes: dict[str, tuple[tuple[int, bool], InputError]] = {}
    for item in sorted(found, key=lambda item: item["type"] != "extra_forbidden"):
        mistake = _mistake(cast("dict[object, Any]", data), item["type"], item["loc"])
        key = str(item["loc"][0]) if item["loc"] else ""
        # A value that fits none of several types has a mistake for each: the one of the type it fits best says most.
        fit = (len(mistake.path), not item["type"].endswith("_type")) if key in _SEVERAL else (0, False)
        if key not in mistakes or fit > mistakes[key][0]:
            mistakes[key] = fit, mistake
    first, *others = (mistake for _, mistake in mistakes.values())
    if others:
        keys = ", ".join(label(other.path) for other in others[:6]) + (", ..." if len(others) > 6 else "")
        first.notes = (Note("also", f"{number_of(len(others), 'more mistake')}: {keys}"),)
    raise first


def label(path: Sequence[str | int]) -> str:
    """A key path as messages print it.

    Example:
        >>> label(("distribution", "x", 2))
        'distribution.x[2]'
    """
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else ("." if text else "") + one_line(part, 40)
    return text


def _mistake(data: dict[object, Any], problem: str, loc: Sequence[str | int]) -> InputError:
    """One of pydantic's errors in convgen's words."""
    if problem == "missing":
        hint = f"{loc[-1]}: {_description(loc)}"
        return InputError(f"{label(loc)} is missing", tuple(loc), hint=hint)
    if problem in ("extra_forbidden", "invalid_key") or "[key]" in loc:
        *within, key = (part for part in loc if part != "[key]")
        return _unknown(within, key)
    path, value = _walk(data, loc)
    fact = f"{label(path)} can't be {shown(value)}{_why(value, problem)}"
    return InputError(fact, path, hint=f"{label(path[:1])}: {_try(path, value)}")


def _unknown(within: Sequence[str | int], key: str | int) -> InputError:
    place = f" in {label(within)}" if within else ""
    form = LayerForm if not within else _INNER.get(str(within[0]))
    if not isinstance(key, str) or form is None:
        return InputError(f"key {shown(key)}{place} is not text", tuple(within), hint="names are text")
    known = tuple(form.model_fields)
    hint = did_you_mean(key, known, f"keys{place or ' of a layer'} are {', '.join(known)}")
    return InputError(f"unknown key {shown(key)}{place}", (*within, key), hint=hint)


def _walk(data: object, loc: Sequence[str | int]) -> tuple[KeyPath, object]:
    """The part of a location that leads into the data (pydantic adds names of types), and the value there."""
    path: KeyPath = ()
    for part in loc:
        if isinstance(data, dict):
            entries = cast("dict[object, object]", data)
            if part not in entries:
                continue
            data = entries[part]
        elif isinstance(data, list) and isinstance(part, int):
            data = cast("list[object]", data)[part]
        else:
            continue
        path = (*path, part)
    return path, cast("object", data)


def _why(value: object, problem: str) -> str:
    if (
        problem in ("int_type", "string_type", "bool_type")
        and not isinstance(value, (list, dict))
        and value is not None
    ):
        return f", {kind(value)}"
    return ""


def _description(path: Sequence[str | int]) -> str:
    form = _INNER.get(str(path[0])) if len(path) > 1 else None
    field = (form or LayerForm).model_fields.get(str(path[1 if form else 0]))
    return (field.description if field else None) or "remove it"


def _try(path: KeyPath, value: object) -> str:
    text = _description(path)
    if isinstance(value, str) and " or " in text:
        return did_you_mean(value, text.replace(",", " ").split(), text)
    return text
