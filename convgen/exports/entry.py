"""Exports that are kept between runs: CACHE/exports/NAME_KEY, by the module's fingerprint. All of it is data.

| file | what |
|---|---|
| `graph.yaml` | the graph, as `convgen import` writes it |
| `call.json` | names of inputs and outputs, the containers of results, where tensors are from |
| `constants.pt` | constants, where there are some that the module does not hold |
"""

from __future__ import annotations

import dataclasses
import io
import json
import sys
import tempfile
from collections import OrderedDict, namedtuple
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from convgen.knobs import keep_exports
from convgen.package_cache import cached, kept, own_hash, put
from convgen.spec.containers import PLAIN, Node, Slot
from convgen.spec.exported import Exported
from convgen.spec.exported_examples import Arguments, Inputs, examples_of
from convgen.spec.exported_open import Opened
from convgen.spec.exported_state import state_of
from convgen.spec.graph import TFLOAT32, Graph
from convgen.spec.graph_edit import with_dtype
from convgen.spec.graph_file import read_graph, write_graph
from convgen.spec.names import identifier
from convgen.spec.source import Source

if TYPE_CHECKING:
    import torch
    from torch import Tensor

GRAPH, CALL, CONSTANTS = "graph.yaml", "call.json", "constants.pt"
CONTAINERS = {kind.__name__: kind for kind in (list, tuple, dict, OrderedDict)}


@dataclass(frozen=True)
class Answer:
    """A module's export: what it computes, and how it is called.

    Args:
        text: the graph's file.
        name: the graph's.
        inputs, outputs: names, in the graph's order.
        tensors, arguments, results, by_run: as in `Exported`.
        known: the graph, if it was just exported.
    """

    text: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    tensors: dict[str, Tensor]
    arguments: Arguments
    results: Any
    known: Graph | None = None
    by_run: bool = False

    @cached_property
    def graph(self) -> Graph:
        return self.known or _graph_of(self.text)

    def of_type(self, dtype: str) -> Answer:
        """The same answer with all its types of floats replaced by one.

        Raises:
            InputError: `dtype` is no type of floats.
        """
        import torch

        graph = with_dtype(self.graph, dtype)
        kind = getattr(torch, "float32" if dtype == TFLOAT32 else dtype)
        tensors = {n: t.to(kind) if t.is_floating_point() else t for n, t in self.tensors.items()}
        return replace(self, text=write_graph(graph), known=graph, tensors=tensors)


def answer_of(made: Exported) -> Answer:
    inputs, outputs = tuple(v.name for v in made.graph.inputs), tuple(name for name, _ in made.graph.outputs)
    text = write_graph(made.graph)
    return Answer(
        text, made.graph.name, inputs, outputs, made.tensors, made.arguments, made.results, made.graph, made.by_run
    )


def _graph_of(text: str) -> Graph:
    with tempfile.TemporaryDirectory(prefix="convgen-graph-") as work:
        path = Path(work) / GRAPH
        path.write_text(text, encoding="utf-8")
        return replace(read_graph(path, checked=False), source_file=Source())


@dataclass(frozen=True)
class Question:
    """A module to be exported, with its example inputs.

    Args:
        key: its fingerprint; "" if it has none, or none is wanted: then it is exported each time.
        why: if it has none, what can't be judged.
        opened: extents of inputs that are known at run time only (`exported`).
    """

    module: torch.nn.Module
    inputs: Inputs
    name: str | None
    key: str
    why: str = ""
    opened: Opened = field(default_factory=dict[str, Mapping[str, int]])

    @property
    def called(self) -> str:
        return identifier(self.name or type(self.module).__name__)

    @property
    def folder(self) -> Path:
        return cached(self.called, self.key[:20], "exports")

    def known(self) -> Answer | None:
        """The answer that the cache has."""
        files = kept(self.folder) if self.key else None
        return None if files is None else self._read(files)

    def _read(self, files: dict[str, bytes]) -> Answer | None:
        import torch

        said = json.loads(files[CALL])
        results = _tree_of(said["results"])
        if said["key"] != self.key or isinstance(results, _NoTree):
            return None
        held = state_of(self.module).tensors if "module" in said["tensors"].values() else {}
        raw = files.get(CONSTANTS)
        constants: dict[str, Tensor] = {} if raw is None else torch.load(io.BytesIO(raw), weights_only=True)
        tensors = {n: held[n].detach() if of == "module" else constants[n] for n, of in said["tensors"].items()}
        arguments = examples_of(self.module, self.inputs).call
        names = tuple(said["inputs"]), tuple(said["outputs"])
        return Answer(files[GRAPH].decode(), said["name"], *names, tensors, arguments, results)

    def keep(self, answer: Answer) -> None:
        """Put an answer into the cache, if it can be written as data and reads back equal."""
        import torch

        tree = _data_of(answer.results)
        back = _tree_of(tree)
        if not self.key or answer.by_run or isinstance(back, _NoTree) or repr(back) != repr(answer.results):
            return
        if _graph_of(answer.text) != answer.known:
            return
        held = state_of(self.module).tensors
        of = {name: "module" if _same(value, held.get(name)) else "file" for name, value in answer.tensors.items()}
        said = {"key": self.key, "name": answer.name, "inputs": answer.inputs, "outputs": answer.outputs}
        text = json.dumps({**said, "tensors": of, "results": tree}, indent=1)
        files = {GRAPH: answer.text.encode(), CALL: text.encode()}
        own = {n: t.detach().cpu().contiguous().clone() for n, t in answer.tensors.items() if of[n] == "file"}
        if own:
            raw = io.BytesIO()
            torch.save(own, raw)
            files[CONSTANTS] = raw.getvalue()
        put(self.folder, files)


def question_of(module: torch.nn.Module, inputs: Inputs, name: str | None, opened: Opened | None = None) -> Question:
    from convgen.exports.fingerprint import fingerprint

    if not keep_exports():
        return Question(module, inputs, name, "", "CONVGEN_EXPORTS=0", opened or {})
    said = [(a, sorted(dims.items())) for a, dims in sorted((opened or {}).items())]
    key, why = fingerprint((own_hash(), name, *([repr(said)] if said else [])), module, inputs)
    return Question(module, inputs, name, key, why, opened or {})


def _same(value: Tensor, other: Tensor | None) -> bool:
    """Whether two tensors are the same memory."""
    if other is None or (value.shape, value.dtype, value.stride()) != (other.shape, other.dtype, other.stride()):
        return False
    return value.device == other.device and value.data_ptr() == other.data_ptr()


# ---- Containers of results, as data ----


class _NoTree:
    """Stands for a container that can't be written as data, or whose class isn't loaded."""


def _data_of(tree: Any) -> Any:
    """A tree of containers as data that JSON takes; {} in the place of what JSON doesn't take."""
    if isinstance(tree, Slot):
        return {"slot": tree.name}
    if not isinstance(tree, Node):
        return {"plain": tree} if type(tree) in PLAIN else {}
    parts = [_data_of(one) for one in tree.parts]
    if CONTAINERS.get(getattr(tree.kind, "__name__", "")) is tree.kind and _is_data(tree.context):
        return {"kind": tree.kind.__name__, "context": tree.context, "parts": parts}
    if tree.kind is namedtuple:
        return {"tuple": _place_of(tree.context), "parts": parts}
    if dataclasses.is_dataclass(tree.kind) and _is_data(tree.context):
        return {"dataclass": _place_of(tree.kind), "context": tree.context, "parts": parts}
    return {}


def _tree_of(data: Any) -> Any:
    if "slot" in data:
        return Slot(data["slot"])
    if "plain" in data:
        return data["plain"]
    if "parts" not in data:
        return _NoTree()
    parts = tuple(_tree_of(one) for one in data["parts"])
    kind: Any = CONTAINERS.get(data.get("kind", ""))
    context = data.get("context")
    if "tuple" in data:
        kind, context = namedtuple, _class_at(data["tuple"])
        if not (isinstance(context, type) and issubclass(context, tuple) and hasattr(cast("Any", context), "_fields")):
            return _NoTree()
    elif "dataclass" in data:
        kind = _class_at(data["dataclass"])
        if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
            return _NoTree()
    if kind is None or any(isinstance(one, _NoTree) for one in parts):
        return _NoTree()
    return Node(kind, context, parts)


def _is_data(value: Any) -> bool:
    if type(value) is list:
        return all(map(_is_data, cast("Sequence[Any]", value)))
    return type(value) in PLAIN


def _place_of(kind: Any) -> list[str]:
    place = [str(kind.__module__), str(kind.__qualname__)]
    return place if _class_at(place) is kind else ["", ""]


def _class_at(place: Sequence[str]) -> Any:
    """A class of a module that is loaded."""
    value: Any = sys.modules.get(place[0])
    for part in place[1].split("."):
        value = getattr(value, part, None)
    return value
