"""What is said of a module or factory that can't be imported: the line of a person's own code, and what would work."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

import convgen
from convgen.commands.main import cli
from convgen.errors import InputError

# A line of forward, what is said of it, and a part of what would work.
LINES = {
    "if x.sum() > 0: x = x + 1": ("which branch is taken depends on the values of a tensor", "torch.where(condition"),
    "x = x + 1 if x.max() > 0 else x": ("which branch is taken depends", "torch.where(condition"),
    "while x.abs().max() > 1: x = x / 2": ("how often a loop runs depends", "a fixed number of steps"),
    "for _ in range(int(x.max().item())): x = x + 1": ("how often a loop runs depends", "a fixed number of steps"),
    "x = x * x.mean().item()": ("an argument depends on the values of a tensor", "a tensor in its place"),
    "x = x * float(x.sum())": ("a number depends on the values of a tensor", "a tensor in its place"),
    "x = x + x.nonzero().float().mean()": ("depends on the values of a tensor", "of a size known in advance"),
    "x = x * len(x.unique())": ("a number depends on the values of a tensor", "a tensor in its place"),
    "x = torch.unique(x)": ("depends on the values of a tensor", "of a size known in advance"),
    "x = x[:, :, : x.sum().int().item()]": ("depends on the values of a tensor", "of a size known in advance"),
    "x = x[:, :, : int(x.sum())]": ("where a slice begins or ends depends on", "a mask of fixed size"),
    "x = torch.from_numpy(x.detach().numpy() * 2)": ("a tensor becomes an array of numpy's", "torch's own functions"),
    'print(f"{x.mean():.3f}")': ("what is written depends on the values of a tensor", "with .shape in the place"),
    "raise ValueError('7 rows wanted')": ("fails on these inputs: 7 rows wanted", "inputs that the module takes"),
}

NETWORK = """
import torch
from torch import nn

class Block(nn.Module):
    def forward(self, x):
        y = x
        {}
        return x + y

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), Block()))

    def forward(self, x):
        return self.backbone(x)
"""
AT = 8  # the line that is put in


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    return tmp_path


def imported(factory: str, *words: str) -> Result:
    command = ["import", factory, "--input", "2,3,8,8", "-o", "net.yaml", *words]
    return CliRunner().invoke(cli, command)


def refused(factory: str, *words: str) -> str:
    done = imported(factory, *words)
    assert isinstance(done.exception, InputError), done.output
    assert done.stdout == "" and not re.search("graph|torch", done.stderr)  # nothing of torch's beside it
    assert not Path("net.yaml").exists()
    return str(done.exception)


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
def test_what_depends_on_data_is_said_with_its_line(line: str, folder: Path) -> None:
    (folder / "net.py").write_text(NETWORK.format(line))
    fact, hint = LINES[line]
    lines = refused("net.py:Net").splitlines()
    assert lines[0].startswith("error: ") and fact in lines[0]
    assert lines[1] == f"  at      net.py:{AT}, in forward"
    assert lines[2] == "  module  backbone.1.1 (Block)"
    shown = [one.split(None, 2 if ">" in one else 1)[-1].strip() for one in lines[3:6]]
    assert shown == ["y = x", line, "return x + y"] and lines[4].lstrip().startswith(f">    {AT}  ")
    assert lines[-1].startswith("  try     ") and hint in lines[-1]
    assert len(lines) <= 8


def test_the_other_door_says_the_same() -> None:
    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if x.sum() > 0 else x

    with pytest.raises(InputError, match="which branch is taken") as caught:
        convgen.from_torch(nn.Sequential(nn.ReLU(), Branch()), (torch.zeros(2, 3, 8, 8),))
    where, inside = (note.text for note in caught.value.notes[:2])
    assert "test_import_refusals.py:" in where and inside == "1 (Branch)"


def test_what_cant_be_right_is_said_with_its_line(folder: Path) -> None:
    (folder / "net.py").write_text(NETWORK.format("x = x + torch.randint_like(x, 3)"))
    assert f"draws random numbers, net.py:{AT}" in refused("net.py:Net")


FACTORIES = """
import torch
from torch import nn

def helper():
    return nn.Conv2d(3, 4)

def fails():
    return helper()

def wants(channels, rows=3):
    return nn.Conv2d(3, channels, rows)

def number():
    return 3

def right():
    print("made")
    return nn.Conv2d(3, 4, 3)

model = nn.ReLU()
three = 3
"""


def test_factories_of_a_file(folder: Path) -> None:
    (folder / "mine.py").write_text(FACTORIES)
    said = refused("mine.py:fails")
    assert "mine.py:fails failed: TypeError: Conv2d.__init__() missing" in said
    assert "  at      mine.py:6, in helper" in said and ">    6      return nn.Conv2d(3, 4)" in said
    assert "missing a required argument: 'channels'" in (said := refused("mine.py:wants"))
    assert "--args '{\"channels\": ...}'" in said and "takes   (channels, rows=3)" in said
    assert "mine.py:number gives one of int, no torch.nn.Module" in refused("mine.py:number")
    assert "mine.py:model is a module, not what makes one" in refused("mine.py:model")
    assert "mine.py:three is one of int, and can't be called" in refused("mine.py:three")
    assert "try     fails" in refused("mine.py:fail")
    assert "there is no file min.py" in (said := refused("min.py:right")) and "mine.py" in said
    assert "names no factory" in refused("mine.py")
    done = imported("mine.py:wants", "--args", '{"channels": 2}')
    assert done.exit_code == 0, done.output


def test_what_a_factory_prints_is_no_result(folder: Path) -> None:
    (folder / "below").mkdir()
    (folder / "below" / "mine.py").write_text(FACTORIES)
    done = imported("below/mine.py:right")
    assert done.exit_code == 0 and done.stderr == "made\n" and "made" not in done.stdout
    assert "source: mine.py:right\n" in (folder / "net.yaml").read_text()  # not where it lies


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("broken", "def net(:\n    pass\n", ("SyntaxError: invalid syntax", "at      broken.py:1")),
        ("wants", "import no_such_package_here\n", ("No module named 'no_such_package_here'", "at      wants.py:1")),
        ("divides", "\nx = 1 / 0\n", ("ZeroDivisionError: division by zero", "at      divides.py:2, in <module>")),
    ],
)
def test_files_that_dont_run(name: str, text: str, said: tuple[str, str], folder: Path) -> None:
    (folder / f"{name}.py").write_text(textwrap.dedent(text))
    for where in (name, f"{name}.py"):
        message = refused(f"{where}:net")
        assert all(part in message for part in said), message


def test_a_module_that_isnt_there(folder: Path) -> None:
    (folder / "mine.py").write_text(FACTORIES)
    said = refused("mina:right")
    assert "can't import mina: ModuleNotFoundError" in said and "mine" in said and "pip install mina" in said
