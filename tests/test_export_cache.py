"""Exports are kept: whatever an export may depend on is in the fingerprint, or there is none; one rank exports."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from convgen import parallel
from convgen.errors import InputError
from convgen.exports.entry import Question, answer_of, question_of
from convgen.exports.fingerprint import fingerprint
from examples.resnet import small_resnet


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVGEN_CACHE", str(tmp_path / "cache"))


# ---- What changes a fingerprint ----

HELPER = (
    "import torch\nfrom torch.nn import functional as F\nSCALE = 2.0\ndef helped(x):\n    return F.relu(x) * SCALE\n"
)
SOURCE = """
import dataclasses, functools, math, torch
import torch.nn.functional as F
from torch import nn
import export_helper
from export_helper import helped
LEVEL = 3
TABLE = {"a": [1, 2]}
def makes(k):
    def scaled(x):
        return x * k
    return scaled
SCALED = makes(2)
class Meta(type):
    factor = 2
@dataclasses.dataclass
class Config:
    width: int = 4
    def double(self):
        return self.width * 2
class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
    def forward(self, x, power=2):
        return self.lin(x) ** power
class Net(nn.Module):
    bias = 1.0
    def __init__(self):
        super().__init__()
        self.part, self.drop, self.norm = Part(), nn.Dropout(0.1), nn.BatchNorm1d(4)
        self.other = nn.Linear(4, 4)
        self.config, self.table, self.steps = Config(), [1, 2], {"one": 1}
        self.shift = torch.arange(4.0)
        self.register_buffer("hidden", torch.ones(4), persistent=False)
        self.register_buffer("held", torch.ones(4))
    def extra(self, x):
        return x + self.bias + self.config.double()
    @property
    def gain(self):
        return 1.5
    def forward(self, x, flag=False):
        y = helped(self.norm(self.drop(self.part(x)))) + export_helper.SCALE * math.pi
        y = SCALED(self.extra(y)) * LEVEL + abs(TABLE["a"][0]) + self.shift + self.hidden * self.held
        y = y * self.gain + self.other(x)
        return torch.relu(y) + len([k for k in self.table if k]) if not flag else y
def make():
    torch.manual_seed(0)
    return Net()
def inputs():
    return (torch.zeros(3, 4),)
"""


def source(*changes: str) -> Any:
    """SOURCE and HELPER as modules, new ones each time; a change is `old -> new`."""
    text, helper = SOURCE, HELPER
    for change in changes:
        old, _, new = change.partition(" -> ")
        assert (old in text) + (old in helper) == 1, change
        text, helper = text.replace(old, new), helper.replace(old, new)
    for name, one in (("export_helper", helper), ("export_source", text)):
        sys.modules[name] = module = types.ModuleType(name)
        module.__file__ = f"/nowhere/{name}.py"
        exec(compile(one, module.__file__, "exec", dont_inherit=True), vars(module))
    return sys.modules["export_source"]


def seen(home: Any, change: Callable[[Any], object] = lambda module: None, inputs: Any = None) -> tuple[str, str]:
    module = home.make()
    change(module)
    return fingerprint("test", module, home.inputs() if inputs is None else inputs)


@pytest.fixture(scope="module")
def before() -> Iterator[str]:
    key, why = seen(source())
    assert key, why
    yield key
    del sys.modules["export_source"], sys.modules["export_helper"]


TEXTS = (
    "LEVEL = 3 -> LEVEL = 4", "LEVEL = 3 -> LEVEL = 3.0", "[1, 2]} -> [2, 2]}", "SCALE = 2.0 -> SCALE = 2.5",
    "F.relu(x) * SCALE -> F.relu(x) / SCALE", "F.relu(x) -> F.gelu(x)", "makes(2) -> makes(3)", "power=2 -> power=3",
    "** power -> * power", "bias = 1.0 -> bias = 2.0", "width: int = 4 -> width: int = 5", "width * 2 -> width * 3",
    "Dropout(0.1) -> Dropout(0.2)", "return 1.5 -> return 1.25", "flag=False -> flag=None", "math.pi -> math.e",
    "BatchNorm1d(4) -> BatchNorm1d(4, eps=1e-3)", "torch.arange(4.0) -> torch.arange(4.0) * 2",
    "self.table, self.steps = Config(), [1, 2] -> self.table, self.steps = Config(), [1, 3]",
    '"hidden", torch.ones(4) -> "hidden", torch.zeros(4)', "if k] -> if k > 1]", "torch.relu(y) -> torch.tanh(y)",
    '"held", torch.ones(4) -> "held", torch.ones(4, dtype=torch.float64)',
    "nn.Linear(4, 4)\n    def -> nn.Linear(4, 4, False)\n    def",
    "class Part(nn.Module): -> class Base(nn.Module):\n    pass\nclass Part(Base):",
)  # fmt: skip


@pytest.mark.parametrize("change", TEXTS)
def test_code_and_constants_count(before: str, change: str) -> None:
    assert seen(source(change))[0] != before


SAME = (
    "LEVEL = 3 -> # a comment\nLEVEL = 3",
    "def extra(self, x): -> def unused(self, x):\n        return open(x)\n    def extra(self, x):",
    "self.other(x) -> self.other(x)  # on another line\n",
    "torch.manual_seed(0) -> torch.manual_seed(1)",  # weights, and running statistics, are not read
    '"held", torch.ones(4) -> "held", torch.zeros(4)',
)


@pytest.mark.parametrize("change", SAME)
def test_what_no_export_reads_does_not_count(before: str, change: str) -> None:
    assert seen(source(change))[0] == before


def hooked(module: Any) -> None:
    module.part.register_forward_hook(lambda _, __, y: y + 1)


def tied(module: Any) -> None:
    module.other.weight = module.part.lin.weight


def parametrized(module: Any) -> None:
    nn.utils.parametrizations.weight_norm(module.other)


OBJECTS: dict[str, Callable[[Any], object]] = {
    "an attribute": lambda m: setattr(m, "bias", 3.0),
    "an attribute of a part": lambda m: setattr(m.norm, "momentum", 0.2),
    "a hook": hooked,
    "forward of one": lambda m: setattr(m, "forward", types.MethodType(lambda self, x: x, m)),
    "eval": lambda m: m.eval(),
    "a part in eval": lambda m: m.norm.eval(),
    "frozen": lambda m: m.other.weight.requires_grad_(False),
    "tied": tied,
    "an alias": lambda m: setattr(m, "again", m.other),
    "parametrized": parametrized,
    "another part": lambda m: setattr(m, "other", nn.Sequential(nn.Linear(4, 4))),
    "a dtype": lambda m: m.double(),
    "a stride": lambda m: setattr(m.other, "weight", nn.Parameter(m.other.weight.detach().t())),
    "another object's field": lambda m: setattr(m.config, "width", 7),
    "a parameter's attribute": lambda m: setattr(m.other.weight, "mark", 1),
    "a persistent one": lambda m: m._non_persistent_buffers_set.clear(),
}


@pytest.mark.parametrize("what", OBJECTS)
def test_what_objects_hold_counts(before: str, what: str) -> None:
    assert seen(source(), OBJECTS[what])[0] != before


INPUTS: dict[str, Any] = {
    "a shape": (torch.zeros(2, 4),),
    "a dtype": (torch.zeros(3, 4, dtype=torch.float64),),
    "a stride": (torch.zeros(4, 3).t(),),
    "a flag": (torch.zeros(3, 4), False),
    "another flag": (torch.zeros(3, 4), True),
    "a number for it": (torch.zeros(3, 4), 1),
    "by name": {"x": torch.zeros(3, 4)},
    "a container": ([torch.zeros(3, 4)],),
}


def test_inputs_count(before: str) -> None:
    home = source()
    found = [seen(home, inputs=one)[0] for one in INPUTS.values()]
    assert len({before, *found}) == len(INPUTS) + 1 and all(found)
    assert seen(home, inputs=(torch.ones(3, 4),))[0] == before  # values don't


def settings(name: str) -> Any:
    match name:
        case "a default dtype":
            return torch.set_default_dtype, torch.float64, torch.float32
        case "deterministic":
            return torch.use_deterministic_algorithms, True, False
        case "the fast path":
            return torch.backends.mha.set_fastpath_enabled, False, True
        case _:
            return torch.set_grad_enabled, False, True


@pytest.mark.parametrize("name", ["a default dtype", "deterministic", "the fast path", "no gradients"])
def test_settings_count(before: str, name: str) -> None:
    change, on, off = settings(name)
    module = source().make()
    change(on)
    try:
        assert fingerprint("test", module, (torch.zeros(3, 4, dtype=torch.float32),))[0] not in (before, "")
    finally:
        change(off)


def test_autocast_counts(before: str) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert seen(source())[0] not in (before, "")


class Other(nn.Module):
    forward = None  # type: ignore[assignment]


PATCHES: dict[str, tuple[Any, str, Any]] = {
    "a function": (torch.nn.functional, "relu", lambda x, inplace=False: x.tanh()),
    "torch's other function": (torch.nn.functional, "linear", torch.nn.functional.bilinear),
    "torch's function for torch's": (torch.nn.functional, "batch_norm", torch.nn.functional.instance_norm),
    "a partial one": (torch.nn.functional, "gelu", __import__("functools").partial(torch.nn.functional.leaky_relu)),
    "torch's top": (torch, "relu", lambda x: x.tanh()),
    "a method": (nn.Linear, "forward", lambda self, x: x),
    "another's method": (nn.ReLU, "forward", nn.GELU.forward),
    "a tensor's": (torch.Tensor, "tanh", lambda self: self),
    "a call": (nn.Module, "__call__", lambda self, x: x),
    "a class": (torch.nn.modules.activation, "ReLU", type("ReLU", (nn.Module,), {"forward": lambda self, x: -x})),
    "a bound method": (torch.nn.functional, "softmax", Other().extra_repr),
    "a module": (torch.nn.modules.activation, "F", types.ModuleType("F")),
    "a built-in": (__import__("builtins"), "abs", lambda x: 7),
    "Python's": (__import__("math"), "pi", 3.0),
}


@pytest.mark.parametrize("what", PATCHES)
def test_what_is_put_into_torch_counts(before: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    home = source()
    with monkeypatch.context() as patch:
        patch.setattr(*PATCHES[what], raising=False)
        key, _ = seen(home)
    assert key != before


# ---- What has none ----

UNKNOWN = (
    "math.pi -> float(open('/etc/hostname').fileno())",
    "math.pi -> eval('1.0')",
    "math.pi -> __import__('time').time()",
    "math.pi -> time.time()\nimport time",
    "math.pi -> float(os.environ.get('X', 1))\nimport os",
    "math.pi -> random.random()\nimport random",
    "math.pi -> torch.initial_seed()",
    "math.pi -> torch.distributed.get_rank()",
    "math.pi -> id(self)",
    "math.pi -> hash('a')",
    "math.pi -> x.data_ptr()",
    "math.pi -> float(kept(torch) is not None)\ndef kept(home): return home",
    "math.pi -> LOCK.locked()\nimport threading\nLOCK = threading.Lock()",
    "math.pi -> next(NUMBERS)\nNUMBERS = iter([1.0])",
    "math.pi -> float(torch.get_num_threads())",
    "math.pi -> torch.ops.convgen_tests.scale(x)",
    "math.pi -> STATE.value\nimport contextvars\nSTATE = contextvars.ContextVar('S')",
)
IMPORTS = "y = helped -> import {0}\n        y = {0}.{1} + helped"


@torch.library.custom_op("convgen_tests::scale", mutates_args=())
def scale(x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.parametrize("change", UNKNOWN)
def test_what_cannot_be_judged_has_no_fingerprint(change: str) -> None:
    head, _, more = change.partition("\n")
    home = source(head)
    exec(more, vars(home))
    key, why = seen(home)
    assert not key and why


def test_imports_within_functions() -> None:
    assert seen(source(IMPORTS.format("cmath", "pi")))[0]
    for name in (("export_of_nothing", "x"), ("random", "random()"), ("os", "environ")):
        key, why = seen(source(IMPORTS.format(*name)))
        assert not key and why, name


def test_a_module_of_the_users_that_is_imported_within_a_function() -> None:
    change = "y = helped -> import export_helper as other\n        y = other.SCALE + helped"
    one = seen(source(change))[0]
    assert one and one != seen(source(change, "SCALE = 2.0 -> SCALE = 4.0"))[0]


class Odd(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "value", [torch.zeros(2).as_subclass(Odd), torch.zeros(2, 2).to_sparse(), torch.Generator(), iter([]), {object()}]
)
def test_objects_that_cannot_be_judged(value: Any) -> None:
    module = nn.Linear(2, 2)
    module.held = value
    key, why = fingerprint("test", module, (torch.zeros(2, 2),))
    assert not key and why


WRITTEN = """
import dataclasses, torch, typing
from torch import nn
class Odd(nn.Linear):
    @property
    def weight(self):
        return self.given * 2
    @weight.setter
    def weight(self, value):
        self.given = value
@dataclasses.dataclass
class Given:
    x: torch.Tensor
    scale: float = dataclasses.field(default=1.0, metadata={"unit": 1})
def make():
    return Odd(4, 4)
def inputs():
    return (torch.zeros(2, 4),)
def fields():
    class Net(nn.Module):
        def forward(self, given):
            return given.x * given.scale * dataclasses.fields(given)[1].metadata["unit"]
    return Net()
"""


def test_what_torch_asks_of_a_subclass_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A property that only torch's own forward reads; what a dataclass says of its fields, and what torch is told."""
    keys: set[str] = set()
    for change in ("", "* 2 -> * 3", '"unit": 1 -> "unit": 2', "default=1.0 -> default=2.0"):
        old, _, new = change.partition(" -> ")
        monkeypatch.setitem(sys.modules, "export_written", home := types.ModuleType("export_written"))
        text = WRITTEN.replace(old, new) if change else WRITTEN
        exec(compile(text, "/nowhere/export_written.py", "exec", dont_inherit=True), vars(home))
        own = fingerprint("test", home.make(), home.inputs())[0]
        given = fingerprint("test", home.fields(), (home.Given(torch.zeros(2, 4)),))
        assert own and given[0], given[1]
        keys |= {own, given[0]}
    assert len(keys) == 2 + 3  # each change is of one of the two


def test_modes_of_torch() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    module, x = nn.ReLU(), torch.zeros(2, 2)
    with TorchDispatchMode():
        assert not fingerprint("test", module, (x,))[0]


# ---- Other processes ----

MODELS = """
import sys, torch
from torch import nn
from examples.resnet import small_resnet
from convgen.exports.fingerprint import fingerprint
norm = nn.utils.parametrizations.weight_norm
class Sets(nn.Module):
    names = {"alpha", "beta", "gamma"}
    def forward(self, x):
        return x * 2 if "alpha" in {"alpha", "beta", "delta"} and "beta" in self.names else x
x = torch.zeros(2, 3, 8)
for module, one in (
    (small_resnet(), torch.zeros(2, 3, 32, 32)),
    (nn.LSTM(8, 4, 2), x),
    (nn.TransformerEncoderLayer(8, 2), x),
    (norm(nn.Linear(8, 8)), x),
    (nn.MultiheadAttention(8, 2), (x, x, x)),
    (Sets(), x),
):
    print(*fingerprint("test", module, one if type(one) is tuple else (one,)))
"""


def test_another_process_has_the_same(tmp_path: Path) -> None:
    path = tmp_path / "models.py"
    path.write_text(MODELS)
    found = [
        subprocess.check_output([sys.executable, path], text=True, env={**os.environ, "PYTHONHASHSEED": seed})
        for seed in ("1", "77")
    ]
    first, second = (text.splitlines() for text in found)
    assert first == second and all(len(line.strip()) == 64 for line in first) and len({*first}) == 6


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x - 1


def test_an_export_changes_nothing() -> None:
    """So that a second network of a process is found whether or not the first one was exported, or could be."""
    module, x = small_resnet(), torch.zeros(2, 3, 32, 32)
    key, _ = fingerprint("test", module, (x,))
    answer_of(parallel._exported(Question(nn.Linear(3, 3), (torch.zeros(2, 3),), None, "")))
    assert key and fingerprint("test", module, (x,))[0] == key
    with pytest.raises(InputError):
        parallel._exported(Question(Branching(), (torch.zeros(2, 3),), None, ""))
    assert key and fingerprint("test", module, (x,))[0] == key


# ---- What is kept is what an export gives ----


class Pair(NamedTuple):
    first: Any
    second: Any


class Containers(nn.Module):
    """Dropout, a norm, a tied weight, constants, a table that no state dict has, containers, an argument in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm, self.drop = nn.Linear(6, 6), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.1)
        self.b.weight = self.a.weight
        self.scale, self.shift = nn.Parameter(torch.rand(6)), torch.arange(6.0)
        self.register_buffer("table", torch.arange(6.0) / 3, persistent=False)

    def forward(self, batch: dict[str, Any], power: float = 2.0) -> Any:
        y = self.drop(self.norm(self.a(batch["x"]))) * self.scale + self.shift + self.table
        return [Pair(self.b(y) ** power, None), {"a": (y, 3, "text")}, OrderedDict(b=y - torch.tensor([1.0] * 6))]


def random_module(draw: Random) -> tuple[nn.Module, Tensor]:
    """A chain of layers with options of its own."""
    layers: list[nn.Module] = []
    c = draw.choice((2, 4))
    start = c
    for _ in range(draw.randint(2, 5)):
        f, share = draw.choice((2, 4, 6)), draw.choice((0.1, 0.5))
        match draw.randrange(7):
            case 0:
                how = {"stride": draw.randint(1, 2), "groups": draw.choice((1, 2)), "bias": draw.random() < 0.5}
                layers.append(nn.Conv2d(c, f, 3, padding=1, **how))  # type: ignore[arg-type]
                c = f
            case 1:
                layers.append(nn.BatchNorm2d(c, momentum=draw.choice((share, None)), affine=draw.random() < 0.5))
            case 2:
                layers.append(nn.GroupNorm(2, c, eps=draw.choice((1e-5, 1e-3))))
            case 3:
                layers.append(draw.choice((nn.ReLU(), nn.GELU(), nn.LeakyReLU(draw.random()), nn.PReLU())))
            case 4:
                layers.append(nn.Dropout(share))
            case 5:
                layers.append(nn.AvgPool2d(2, ceil_mode=draw.random() < 0.5))
            case _:
                layers.append(nn.utils.parametrizations.weight_norm(nn.Conv2d(c, c, 1)))
    return nn.Sequential(*layers).train(draw.random() < 0.7), torch.zeros(draw.randint(2, 3), start, 16, 16)


def assert_kept(make: Callable[[], tuple[nn.Module, Any]]) -> None:
    """The answer that was kept for a module is the export of another with other weights, in every bit."""
    torch.manual_seed(0)
    module, inputs = make()
    question = question_of(module, inputs, None)
    assert question.key, question.why
    assert question.known() is None
    question.keep(answer_of(parallel._exported(Question(module, inputs, None, ""))))
    torch.manual_seed(1)
    other, inputs = make()
    found = question_of(other, inputs, None).known()
    truth = answer_of(parallel._exported(Question(other, inputs, None, "")))
    assert found is not None and found.text == truth.text and found.graph == truth.graph
    assert (found.inputs, found.outputs, found.name) == (truth.inputs, truth.outputs, truth.name)
    assert repr((found.results, found.arguments)) == repr((truth.results, truth.arguments))
    assert [*found.tensors] == [*truth.tensors]
    for name, value in truth.tensors.items():
        assert found.tensors[name].dtype == value.dtype and torch.equal(found.tensors[name], value), name


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_containers_and_constants_are_kept(mode: str) -> None:
    assert_kept(lambda: (Containers().train(mode == "train"), ({"x": torch.zeros(3, 6)}, 3.0)))


@pytest.mark.parametrize("seed", range(8))
def test_random_modules_are_kept(seed: int) -> None:
    def make() -> tuple[nn.Module, Any]:
        module, x = random_module(Random(seed))
        return module, (x,)

    assert_kept(make)


def test_another_key_has_another_answer() -> None:
    """Random modules that differ have other fingerprints, those that are made alike the same."""
    found: dict[str, str] = {}
    for seed in range(25):
        module, x = random_module(Random(seed))
        key, why = fingerprint("test", module, (x,))
        said = f"{module} {x.shape} {module.training} {[(n, p.shape) for n, p in module.named_parameters()]}"
        assert key and found.setdefault(key, said) == said, why
    assert len(found) == len({*found.values()})


class Unsaid:
    """A container of somebody's."""

    def __init__(self, y: Tensor) -> None:
        self.y = y


class GivesUnsaid(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return Unsaid(x + 1)


def test_results_that_are_no_data_are_not_kept(tmp_path: Path) -> None:
    from torch.utils import _pytree as pytree

    if Unsaid not in pytree.SUPPORTED_NODES:
        pytree.register_pytree_node(
            Unsaid, lambda one: ([one.y], None), lambda ys, _: Unsaid(*ys), serialized_type_name="tests.Unsaid"
        )
    module, inputs = GivesUnsaid(), (torch.zeros(2, 3),)
    question = question_of(module, inputs, None)
    question.keep(answer_of(parallel._exported(Question(module, inputs, None, ""))))
    assert question.key and question.known() is None and not (tmp_path / "cache" / "exports").exists()
