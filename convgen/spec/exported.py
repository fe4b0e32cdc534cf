"""Graphs from PyTorch: any module that torch.export can trace, as calls of ATen's operators.

The program is decomposed with an empty table. What is left is functional, and new values of buffers are among its
results. The number of samples stays open where every size is a multiple of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from convgen.errors import InputError, Note
from convgen.spec.containers import register_all
from convgen.spec.exported_autocast import mark_autocast
from convgen.spec.exported_batch_norm import cumulative_averages
from convgen.spec.exported_checks import without_checks
from convgen.spec.exported_complex import unknown_operators
from convgen.spec.exported_dropout import in_place_dropouts, written_noise
from convgen.spec.exported_examples import Arguments, Examples, Inputs, examples_of
from convgen.spec.exported_finer import finer, run_whole
from convgen.spec.exported_functions import OwnGradient, written_gradients
from convgen.spec.exported_instance_norm import write_running_statistics
from convgen.spec.exported_lost import LostError, Numbers, nothing_lost, refuse_counts, refuse_hooks, with_numbers
from convgen.spec.exported_masks import compute_masked
from convgen.spec.exported_modes import same_but_for_flags
from convgen.spec.exported_names import result_names
from convgen.spec.exported_no_grad import changes_detached, detach_regions, detached_in_autocast, inference_as_no_grad
from convgen.spec.exported_noise import write_noise
from convgen.spec.exported_numbers import as_settings, run_as_it_stands
from convgen.spec.exported_open import Opened, Symbols, samples_of, symbols_of
from convgen.spec.exported_recurrent import first_steps
from convgen.spec.exported_refusals import failed, first_line, lost, unfixed, untraced, without_graphs
from convgen.spec.exported_results import other_names, results_of
from convgen.spec.exported_shared import drop_other_names, rename_those_of_graphs
from convgen.spec.exported_sides import Side, needless
from convgen.spec.exported_state import GIVEN, State, as_pairs, dtype_name, modules_of, state_of
from convgen.spec.exported_trial import least_sizes
from convgen.spec.exported_types import Asks, Compared, PartedError, asking
from convgen.spec.exported_updates import in_order
from convgen.spec.exported_walk import FixedError, Found, Walk
from convgen.spec.extents import LETTERS, Condition
from convgen.spec.graph import LOW, Graph, Value, refs
from convgen.spec.graph_edit import eval_graph, pruned, renamed, same_calls
from convgen.spec.names import identifier
from convgen.spec.text import number_of

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram, ShapesCollection

FINER = 3  # how often decompositions are decomposed


class Exported(NamedTuple):
    """What a module computes.

    Args:
        tensors: by name, constants, and parameters and buffers whose `init` is `given`.
        arguments: what calls take.
        results: the tree (spec/containers.py) of a call's results; slots have the numbers of the graph's outputs.
        by_run: whether a run of the module on values has told which buffers are settings.
    """

    graph: Graph
    tensors: dict[str, torch.Tensor]
    arguments: Arguments
    results: Any
    by_run: bool = False


def graph_of(module: torch.nn.Module, example_inputs: Inputs, **how: Any) -> tuple[Graph, dict[str, torch.Tensor]]:
    """The graph that a module computes, and the tensors that no initialisation makes.

    Args:
        module, example_inputs, how: as in `exported`.
    Raises:
        InputError: as in `exported`.
    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU())
        >>> graph, _ = graph_of(net, (torch.zeros(4, 3, 9, 9),))
        >>> [call.op for call in graph.calls], graph.calls[-1].results[0].shape
        (['conv2d', 'relu'], (Extent(tree='N'), 8, 7, 7))
    """
    return exported(module, example_inputs, **how)[:2]


def exported(
    module: torch.nn.Module,
    example_inputs: Inputs,
    *,
    name: str | None = None,
    source: str = "",
    training: bool | None = None,
    remark: Callable[[str], None] | None = None,
    opened: Opened | None = None,
) -> Exported:
    """The graph that a module computes, and how it is called.

    Args:
        module: traced as it stands; its mode and its values stay as they are.
        example_inputs: the arguments, by place, by name, or both, as (args, kwargs): tensors, or containers, whose
            parts are inputs such as batch_image and xs_0. The first tensor's extent 0 is the number of samples, and so
            is that of every other tensor that equals it. Numbers, texts and None become part of the graph.
        name: the graph's; by default that of the module's class.
        source: where the module is from, for people.
        training: True: the graph of training, which is that of evaluation too if they differ only by flags of batch
            norms and by dropouts; False: that of evaluation; None: that of the module's mode.
        remark: is told why the number of samples is fixed, if it is.
        opened: inputs' extents that are known at run time only: by letter, T, D, H or W, the dimension's number.
    Raises:
        InputError: torch.export can't trace the module, or the module does what can't be right: it draws random numbers
            other than dropout's and noise, changes its arguments, computes with complex numbers or without gradients.
    """
    name = identifier(name or type(module).__name__)
    refuse_hooks(module, name)
    examples = examples_of(module, example_inputs, opened or {})
    made = _Made(module, examples, state_of(module), name, source, remark or (lambda _: None))
    training = module.training if training is None else training
    found = made.graph(training)
    both = found._replace(graph=replace(found.graph, modes=("train", "eval")))
    if not training:
        return found
    if made.evaluates_alike():
        return both
    try:
        other = made.graph(False)
    except InputError:
        return found
    evaluated = eval_graph(found.graph)
    alike = same_calls(evaluated, other.graph, lambda a, b: _same(found.tensors[a], other.tensors[b]))
    if not (alike and repr(found.results) == repr(other.results)):
        return found
    why = dict(other.graph.asks)  # a mode in which nothing asks for types is the same under autocast
    asks = tuple((low, said or why.pop(low, "")) for low, said in found.graph.asks) or other.graph.asks
    return both._replace(graph=replace(both.graph, asks=asks))


@dataclass
class _Made:
    """Exports of one module, with what is remembered between them."""

    module: torch.nn.Module
    examples: Examples
    state: State
    name: str
    source: str
    remark: Callable[[str], None]
    traced: tuple[ExportedProgram, Examples, ShapesCollection | None] | None = None  # the last, with its arguments
    evaluated: tuple[ExportedProgram, bool] | None = None  # evaluation's trace, and whether its samples are open
    numbers: tuple[str, ...] = ()  # buffers that are settings of modules
    asks: Asks = field(default_factory=Asks)
    said: tuple[tuple[str, str], ...] = ()  # of the types that it asks for (Graph.asks)
    bounds: dict[bool, list[Condition]] = field(default_factory=dict[bool, "list[Condition]"])  # by training or not
    needless: dict[bool, list[Condition]] = field(default_factory=dict[bool, "list[Condition]"])  # likewise

    def evaluates_alike(self) -> bool:
        """Whether the last traced program, of training, is that of evaluation too; False if that is unsure."""
        if self.traced is None:
            return False
        program, examples, dynamic = self.traced
        with _mode(self.module, False):
            try:
                self.evaluated = self.trace(examples, dynamic), dynamic is not None
                return not self.asks.of(program) and same_but_for_flags(program, self.evaluated[0])
            except _ExportError:
                return False

    def graph(self, training: bool) -> Exported:
        """The graph of one mode, with an open number of samples if that works."""
        with _mode(self.module, training):
            try:
                return self.open_or_fixed(training)
            except _ExportError as error:
                args, keywords = self.examples.arguments
                ran = run_as_it_stands(self.module, args, keywords)
                if ran.error is not None:
                    raise failed(self.name, ran.error, self.module) from ran.error
                unknown = register_all(ran.result)  # dataclasses that torch.export doesn't know
                if unknown or (ran.numbers and not self.numbers):
                    self.numbers = ran.numbers
                    with suppress(_ExportError):
                        return self.open_or_fixed(training)
                raise untraced(self.name, error.of, self.module) from error

    def open_or_fixed(self, training: bool) -> Exported:
        try:
            several = self.examples.doubled() if self.examples.batch == 1 else self.examples
            program = self.export(several, training, several.dynamic_shapes())
            return self.read_finer(program, training, self.examples.open)
        except (FixedError, _ExportError) as error:
            why = str(error)
            if self.examples.opened:
                said = ", ".join(sorted({a for dims in self.examples.opened.values() for a in dims}))
                raise InputError(f"{self.name}: {said} can't be open: {why}", hint="fewer open extents") from None
        try:
            read = self.read_finer(self.export(self.examples, training, None), training, ())
        except FixedError as error:
            raise unfixed(self.name, str(error), error.place) from None
        if training or not self.module.training:
            self.remark(f"the number of samples is fixed, {self.examples.batch}: {why}")
        return read

    def trace(self, examples: Examples, dynamic: ShapesCollection | None, low: str = "") -> ExportedProgram:
        """The program without the autocast around the call, or under autocast of a type."""
        try:
            program, changed = self._traced(examples, dynamic, low)
            if changed:  # by the first call alone, as what a module keeps of a size, or by each
                with with_numbers(self.module, changed):
                    refuse_counts(self._traced(examples, dynamic, low)[1])
        except LostError as error:
            raise lost(self.name, error, self.module, error.hint) from None
        return program

    def _traced(
        self, examples: Examples, dynamic: ShapesCollection | None, low: str
    ) -> tuple[ExportedProgram, Numbers]:
        """The program, and numbers of Python's that forward has changed."""
        import torch

        args, keywords = examples.arguments
        try:
            with (
                warnings.catch_warnings(),
                without_graphs(),
                torch.enable_grad(),  # else regions without gradients look as what is around them
                torch.autocast("cpu", getattr(torch, low or "bfloat16"), enabled=bool(low)),
                torch.autocast("cuda", enabled=False),
                first_steps(),
                written_gradients(),
                inference_as_no_grad(),
                cumulative_averages(self.module),
                without_checks(),
                as_settings(self.module, self.numbers),
                _lists(self.module),
                asking(self.module, self.asks),
                nothing_lost(self.module) as changed,
                detached_in_autocast(self.module),
            ):
                warnings.simplefilter("ignore")  # torch warns about its own insides
                shapes = cast("dict[str, Any] | None", dynamic)  # torch leaves its own ShapesCollection out
                made = torch.export.export(self.module, args, keywords, dynamic_shapes=shapes, strict=False)
                return made, changed
        except OwnGradient as error:
            hint = "a forward that autograd can derive, with .detach() where no gradient is to pass"
            raise InputError(f"{self.name}: {error}", hint=hint) from None
        except LostError:
            raise
        except Exception as error:  # whatever the module raises
            raise _ExportError(error) from error

    def asked(self, traced: ExportedProgram, low: str) -> tuple[str, str]:
        """Note which types the source gets under autocast of a type; gives the type, and why that can't be said."""
        assert self.traced is not None
        try:
            Compared(traced, self.trace(*self.traced[1:], low), low).note()
        except PartedError as error:
            return low, f"the source asks for a type, and computes otherwise under it{error}"
        except (_ExportError, InputError) as error:
            return low, f"the source asks for a type, and can't be traced under it: {error}"
        return low, ""

    def export(self, examples: Examples, training: bool, dynamic: ShapesCollection | None) -> ExportedProgram:
        known, self.evaluated = self.evaluated, None
        again = known is not None and not training and known[1] == (dynamic is not None)
        traced = known[0] if known is not None and again else self.trace(examples, dynamic)
        self.traced = traced, examples, dynamic
        self.said = tuple(self.asked(traced, low) for low in LOW) if self.asks.of(traced) else ()
        return self.functional(traced, training)

    def functional(self, traced: ExportedProgram, training: bool) -> ExportedProgram:
        lost = training and changes_detached(traced)
        lost = (not detach_regions(traced) and training) or lost
        write_running_statistics(traced)
        drop_other_names(traced)
        mark_autocast(traced)
        self.state.traced.update(rename_those_of_graphs(traced))
        try:
            with warnings.catch_warnings(), first_steps():
                warnings.simplefilter("ignore")
                program = cast("ExportedProgram", cast("Any", traced).run_decompositions({}))
                compute_masked(program)
                write_noise(program)
                for _ in range(FINER):
                    program = finer(program, unknown_operators(program)) or program
        except Exception as error:
            raise _ExportError(error) from error
        if lost:
            fact = f"{self.name} changes a tensor without gradients (torch.no_grad, or what detach() gives)"
            hint = "--eval; or a copy of it, .detach().clone()"
            raise InputError(f"{fact}, which torch.export loses in training", hint=hint)
        return program

    def read_finer(self, program: ExportedProgram, training: bool, opened: Sequence[str]) -> Exported:
        """The graph; calls that run whole are decomposed further as long as fewer run whole then."""
        best = self.read(program, training, opened)
        try:
            left = run_whole(best.graph)
            for _ in range(FINER):
                smaller = finer(program, left) if left else None
                if smaller is None:
                    break
                read, program = self.read(smaller, training, opened), smaller
                before, left = len(left), run_whole(read.graph)
                if len(left) < before or not left:
                    best = read
        except Exception:  # whatever a decomposition needs that the graph lacks
            return best
        return best

    def read(
        self, program: ExportedProgram, training: bool, opened: Sequence[str], known_symbols: Symbols | None = None
    ) -> Exported:
        names, inputs, constants = self.placeholders(program)
        known = (*inputs, *(v.name for v in (*self.state.parameters, *self.state.buffers)))
        _check_names((*known, *(k for k in constants if k not in known)))
        smooth = {k for k, v in inputs.items() if v.is_floating_point()}
        smooth |= {v.name for v in self.state.parameters if "float" in v.dtype}
        pairs = frozenset(v.name for v in (*self.state.parameters, *self.state.buffers) if v.pairs)
        pairs |= {k for k, v in constants.items() if v.is_complex()}
        constants = {k: as_pairs(v) for k, v in constants.items()}
        letters = self.examples.letters
        if known_symbols is not None:
            symbols = known_symbols
        elif letters and opened:
            symbols = symbols_of(program, inputs, letters, self.name)
            self.drop_needless(program, training, symbols)
            symbols.conditions += self.least(program, symbols)
        else:
            symbols = samples_of(program, {k: inputs[k] for k in opened})
        walk = Walk(names, symbols.letters, smooth, pairs)
        for node in program.graph.nodes:
            walk.read(node)
        outputs, results, updates = results_of(program, walk.known, self.state, self.name)
        outputs = other_names(outputs, known)
        if updates and not training:
            raise InputError(f"{self.name} changes {next(iter(updates))} in evaluation", hint="in training only")
        found = _checked(
            in_place_dropouts(written_noise(walk.found)), [*outputs.values(), *updates.values()], self.name
        )
        state = (*self.state.parameters, *self.state.buffers)
        given = (_value(k, v, walk) for k, v in (inputs | constants).items())
        found, updates, outputs = in_order(found, updates, outputs, (*given, *state), smooth)
        whole: Any = self.module
        leaves = [path for path, one in whole.named_modules() if not any(True for _ in one.children())]
        calls = [(one.call, one.visit) for one in found]
        new = result_names(calls, leaves, [*outputs.values()], [*updates.items()], (*known, *constants))

        def named(name: str) -> str:
            return new.get(name, name)

        read = {name for call, _ in calls for arg in call.args for name in refs(arg)}
        constants = {k: v for k, v in constants.items() if k in read or k in outputs.values()}
        buffers = tuple(v for v in self.state.buffers if v.name not in self.state.hidden)
        graph = Graph(
            name=self.name,
            source=self.source,
            modes=("train",) if training else ("eval",),
            batch=self.examples.batch,
            open=tuple((a, symbols.sizes[a]) for a in LETTERS if a in symbols.sizes),
            conditions=tuple(symbols.conditions),
            inputs=tuple(_value(k, v, walk) for k, v in inputs.items()),
            parameters=self.state.parameters,
            buffers=buffers,
            constants=tuple(_value(k, v, walk) for k, v in sorted(constants.items())),
            calls=tuple(renamed(call, named) for call, _ in calls),
            updates=tuple((buffer, named(name)) for buffer, name in updates.items()),
            outputs=tuple((key, named(name)) for key, name in outputs.items()),
            aliases=self.state.aliases,
            modules=modules_of(self.module),
            asks=tuple((low, why or next(iter(walk.lost), "")) for low, why in self.said),
        )
        given = [v.name for v in (*self.state.parameters, *buffers) if v.init == GIVEN]
        tensors = {k: self.state.tensors[k].detach() for k in given} | constants
        return Exported(graph, tensors, self.examples.call, results, bool(self.numbers))

    def drop_needless(self, program: ExportedProgram, training: bool, symbols: Symbols) -> None:
        """Drop conditions on whose other side the graph is the same; tried once for each mode."""
        mode = self.module.training
        if mode not in self.needless:
            here = self.read(program, training, (), symbols)

            def trace(sizes: Mapping[str, int]) -> Side:
                examples = self.examples.of_sizes(sizes, symbols.follows)
                try:
                    other = self.functional(self.trace(examples, examples.dynamic_shapes()), training)
                except _ExportError as error:
                    raise RuntimeError(str(error)) from error
                found = symbols_of(other, self.placeholders(other)[1], self.examples.letters, self.name)
                there = self.read(other, training, (), found)
                alike = same_calls(here.graph, there.graph, lambda a, b: _same(here.tensors[a], there.tensors[b]))
                return Side(alike, found.conditions)

            own = {"N": max(2, self.examples.batch), **symbols.sizes}
            self.needless[mode] = needless(symbols.conditions, own, trace)
        symbols.conditions[:] = [c for c in symbols.conditions if c not in self.needless[mode]]

    def least(self, program: ExportedProgram, symbols: Symbols) -> list[Condition]:
        """Lower bounds of sizes, tried once for each mode."""
        if self.module.training not in self.bounds:
            self.bounds[self.module.training] = least_sizes(program, self.module, self.examples, symbols)
        return self.bounds[self.module.training]

    def placeholders(
        self, program: ExportedProgram
    ) -> tuple[dict[str, str], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Names of placeholders; inputs and constants by name, the inputs as the program has them."""
        nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
        left = iter(self.examples.values)
        names: dict[str, str] = {}
        inputs: dict[str, torch.Tensor] = {}
        constants: dict[str, torch.Tensor] = {}
        for spec in program.graph_signature.input_specs:
            kind, target, placeholder = spec.kind.name, spec.target or "", spec.arg.name
            if kind == "USER_INPUT":
                name = next(left)
                if name not in self.examples.tensors:
                    continue
                inputs[name] = nodes[placeholder].meta["val"]
            elif kind in ("PARAMETER", "BUFFER"):
                name = self.state.of_traced(target)
                if name in self.state.hidden:
                    constants[name] = self.state.tensors[name].detach()
            elif kind == "CONSTANT_TENSOR":
                name = target
                constants[name] = cast("torch.Tensor", program.constants[target]).detach()
            else:
                raise InputError(f"{self.name} reads {target or placeholder}, no tensor ({kind})", hint="tensors")
            names[placeholder] = name
        return names, inputs, constants


class _ExportError(Exception):
    """torch.export raised this error."""

    def __init__(self, of: Exception) -> None:
        super().__init__(first_line(of))
        self.of = of


def _value(name: str, tensor: torch.Tensor, walk: Walk) -> Value:
    return Value(name=name, shape=tuple(walk.size(n) for n in tensor.shape), dtype=dtype_name(tensor))


def _check_names(names: Sequence[str]) -> None:
    for k, name in enumerate(names):
        if name in names[:k]:
            fact = f"{name} is an input and a parameter, buffer or constant"
            raise InputError(fact, hint="another name for forward's argument")


def _checked(found: Sequence[Found], needed: Iterable[str], name: str) -> list[Found]:
    """The calls on which needed values depend.

    Raises:
        InputError: some of them can't be right; each is named.
    """
    kept = pruned([one.call for one in found], needed)
    left = [replace(one, call=call) for one, call in zip(found, kept, strict=True) if call is not None]
    wrong = [one for one in left if one.problem]
    if wrong:
        said = dict.fromkeys(
            f"{one.call.module or name} ({one.call.kind}): {one.call.op} {one.problem}" for one in wrong
        )
        notes = tuple(Note("module", text) for text in list(said)[:8])
        fact = f"{name} has {number_of(len(wrong), 'operator')} that can't be right on many ranks"
        raise InputError(fact, notes=notes, hint="--eval, where it computes without them; or nn.Dropout")
    return left


@contextmanager
def _mode(module: torch.nn.Module, training: bool) -> Generator[None]:
    """The module in training or evaluation; afterwards each of its modules has its own mode again."""
    before = [(one, one.training) for one in module.modules()]
    if module.training != training:
        module.train(training)
    try:
        yield
    finally:
        for one, mode in before:
            one.training = mode


@contextmanager
def _lists(module: torch.nn.Module) -> Generator[None]:
    """Afterwards modules hold the same lists, with the same content: torch.export leaves copies in their place, which
    other modules that hold these lists don't see."""
    held: list[tuple[Any, str, list[Any], list[Any]]] = [
        (one, name, value, [*value])
        for one in module.modules()
        for name, value in vars(one).items()
        if type(value) is list  # pyright: ignore[reportUnknownArgumentType]
    ]
    try:
        yield
    finally:
        for one, name, value, inside in held:
            value[:] = inside
            vars(one)[name] = value


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    import torch

    return a.dtype == b.dtype and torch.equal(a, b)
