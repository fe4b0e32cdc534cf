"""`convgen tune` and what `convgen compile` makes of its databases, as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result

from convgen.commands.inputs import compile_files
from convgen.commands.main import cli
from convgen.compiler import compile_layer
from convgen.errors import InputError
from convgen.kernels.choose import misfit
from convgen.kernels.config import parse_config
from convgen.kernels.families import family
from convgen.spec.reader import read_layer
from convgen.spec.target import read_target
from convgen.tune.candidates import candidates, source_of
from convgen.tune.database import Ceilings, Entry, update
from convgen.tune.device import Device, this_cpu, versions
from convgen.tune.key import key_of
from convgen.tune.lookup import remembered
from convgen.tune.modelled import COMPILED
from convgen.tune.trials import Trial, append, read_trials, trials_path
from convgen.tune.wanted import of_layers, of_partitions
from convgen.verify.check import check

pytestmark = pytest.mark.usefixtures("forked", "brief")

LAYER = """name: layer
layer: conv2d
input: [4, {c}, 12, 12]
out_channels: 20
kernel_size: 3
padding: 1
grid: {{N: 2}}
algorithm: sample
"""
WAYS = {
    "forward": "arranged last=1 C=8 F=1 samples=1 cut=2",
    "backward_data": "unfolded samples=2",
    "backward_filter": "arranged last=0 C=1 F=32 samples=1 cut=1",
}
GPU = Device("Test GPU", "cuda:sm_90")
CEILINGS = Ceilings(flops_per_s={"float32": 1e13}, bytes_per_s=1e13, floor_us=0.1)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CONVGEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return layer_file(tmp_path / "layer.yaml", 12)


def layer_file(path: Path, channels: int) -> Path:
    path.write_text(LAYER.format(c=channels))
    return path


def convgen(*words: object) -> Result:
    done = CliRunner().invoke(cli, [str(w) for w in words])
    if done.exception is not None and not isinstance(done.exception, SystemExit | InputError):
        raise done.exception
    return done


def remember(file: Path, cache: Path, device: Device, kernels: dict[str, str], **changed: object) -> None:
    """Entries for a layer's problems, as the tuner would write them."""
    target = read_target(device.target).known()
    compiled = compile_layer(read_layer(file), target=device.target)
    for one in of_layers([compiled]):
        text = kernels.get(one.problem.phase)
        if text is not None:
            values = {
                "kernel": text, "ms": 0.5, "p20": 0.4, "p80": 0.6, "aten_ms": 0.7, "ratio": 1.4, "share": 0.5,
                "bound": "compute", "error": 1e-7, "tried": 3, "of": 30, "effort": "full", "versions": versions(target),
                "source": source_of(one.problem, parse_config(text), target),
            }  # fmt: skip
            update(cache / "devices" / device.file_name, device, {key_of(one.problem): Entry(**(values | changed))})  # type: ignore[arg-type]


def test_compile_uses_what_was_measured(file: Path, cache: Path) -> None:
    plain = convgen("compile", file, "--emit", "module")
    remember(file, cache, this_cpu(), WAYS)
    tuned = convgen("compile", file, "--emit", "module")
    assert plain.stderr == tuned.stderr == ""
    for text in WAYS.values():
        assert text not in plain.stdout and text in tuned.stdout
    assert "nn.functional.unfold" not in plain.stdout and "nn.functional.fold" in tuned.stdout
    assert convgen("compile", file, "--emit", "module", "--untuned").stdout == plain.stdout
    assert convgen("compile", file, "--emit", "module").stdout == tuned.stdout


def test_a_tuned_module_is_the_convolution(file: Path) -> None:
    """Its layer names its kernels, which need no database."""
    file.write_text(file.read_text() + f"bias: true\noptions: {{kernels: {json.dumps(WAYS)}}}\n")
    compiled = compile_layer(read_layer(file))
    report = check(compiled, transport="virtual")
    assert report.ok
    assert all(text in compiled.module() for text in WAYS.values())
    assert convgen("check", file).exit_code == 0


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"versions": {"torch": "1.9.0"}}, "measured with torch 1.9.0"),
        ({"source": "0" * 12}, "printed as 000000000000"),
    ],
)
def test_a_stale_entry_is_said_and_not_used(file: Path, cache: Path, changed: dict[str, object], said: str) -> None:
    plain = convgen("compile", file, "--emit", "module")
    remember(file, cache, this_cpu(), WAYS, **changed)
    done = convgen("compile", file, "--emit", "module")
    assert done.stdout == plain.stdout
    assert done.stderr.count("stale, not used") == 3 and said in done.stderr and "0 of 3 measured" in done.stderr


def test_a_layer_without_measurements_has_its_neighbours(tmp_path: Path, file: Path, cache: Path) -> None:
    remember(file, cache, this_cpu(), WAYS)
    near, far = (layer_file(tmp_path / f"c{c}.yaml", c) for c in (20, 4096))
    done = convgen("compile", near, "--emit", "module")
    assert "0 of 3 measured, 3 like their nearest neighbour" in done.stderr
    assert "unfolded samples=2" in done.stdout and "arranged last=1 C=8 F=1" in done.stdout
    assert "3 by default (nothing like it was measured" in convgen("compile", far, "--emit", "module").stderr


def test_whatever_tuning_finds_can_be_compiled(tmp_path: Path, cache: Path) -> None:
    """A zero is a number like others where it means something: `product whole=0` won, and was refused."""
    file = layer_file(tmp_path / "layer.yaml", 6)
    file.write_text(file.read_text().replace("kernel_size: 3\npadding: 1", "kernel_size: 1"))
    remember(file, cache, this_cpu(), dict.fromkeys(WAYS, "product whole=0"))
    done = convgen("check", file)
    assert done.exit_code == 0 and convgen("compile", file, "--emit", "module").stdout.count("product whole=0") >= 3
    target = read_target("cpu").known()
    for one in of_layers([compile_layer(read_layer(file))]):
        for c in candidates(one.problem, target):
            made = family(c.config.family, target)
            assert made is not None
            assert misfit(c.config, made.default(one.problem, target), (one.problem,), target) is None, c.label


@pytest.mark.parametrize(
    ("changed", "phase", "kernel", "said"),
    [
        ("groups: 4", "forward", "arranged last=1 C=8 F=1 samples=0 cut=1", "C=8, where groups"),
        ("groups: 4", "backward_data", "arranged last=0 C=1 F=1 samples=0 cut=2", "cut=2, where groups"),
        ("dtype: bfloat16", "backward_filter", "arranged last=0 C=1 F=1 samples=1 cut=1", "would round twice"),
        ("", "forward", "arranged last=2 C=1 F=1 samples=0 cut=1", "last=2"),
        ("", "forward", "unfolded samples=0", "samples=0"),
        ("", "forward", "unfolded samples=1 split=3", "it wants samples"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(file: Path, changed: str, phase: str, kernel: str, said: str) -> None:
    file.write_text(file.read_text() + f'{changed}\noptions: {{kernels: {{{phase}: "{kernel}"}}}}\n')
    done = convgen("compile", file, "--emit", "module")
    assert isinstance(done.exception, InputError) and said in str(done.exception)
    assert f"{file}:" in str(done.exception)


def test_an_entry_without_its_numbers_is_stale(file: Path, cache: Path) -> None:
    remember(file, cache, this_cpu(), WAYS)
    path = cache / "devices" / this_cpu().file_name
    path.write_text(path.read_text().replace(WAYS["forward"], "arranged last=1"))
    done = convgen("compile", file, "--emit", "module")
    assert done.exit_code == 0 and "is no configuration of arranged any more: it wants last, C" in done.stderr


def test_a_gpus_entries_are_for_its_target(file: Path, cache: Path) -> None:
    kernels = {
        "forward": "pointer BP=64 BF=32 BC=16 warps=4 stages=2",
        "backward_filter": "pointer BF=32 BC=16 BP=32 warps=4 stages=3 split=5",
    }
    remember(file, cache, GPU, kernels)
    done = convgen("compile", file, "--emit", "module", "--target", "cuda:sm_90")
    assert "2 of 3 measured, 1 by default" in done.stderr and "layer.backward_data" in done.stderr
    assert all(text in done.stdout for text in kernels.values())
    assert "split=5" not in convgen("compile", file, "--emit", "module", "--target", "cuda:sm_80").stdout
    other = Device("Another GPU", "cuda:sm_90")
    remember(file, cache, other, kernels)
    memory = remembered(read_target("cuda:sm_90"))
    assert memory.device is None and "Another GPU, Test GPU" in memory.said


def test_a_broken_database_stops_compiling_with_its_place(file: Path, cache: Path) -> None:
    remember(file, cache, this_cpu(), WAYS)
    path = cache / "devices" / this_cpu().file_name
    path.write_text(path.read_text().replace('"ms": 0.5', '"ms": "fast"', 1))
    done = convgen("compile", file, "--emit", "module")
    assert isinstance(done.exception, InputError) and f"{path}:7" in str(done.exception)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fast", "no family of kernels for cpu"),
        ("arranged last=1", "it wants last, C, F, samples, cut"),
        ("arranged last=1 C=0 F=1 samples=0 cut=1", "C=0"),
        ("product whole=1", "can't forward here: taps"),
        ("arranged last=x", "no kernel"),
    ],
)
def test_a_kernel_that_is_none_is_refused_with_its_line(file: Path, text: str, said: str) -> None:
    file.write_text(file.read_text() + f'options: {{kernels: {{forward: "{text}"}}}}\n')
    done = convgen("compile", file, "--emit", "module")
    assert isinstance(done.exception, InputError) and said in str(done.exception)
    assert f"{file}:9" in str(done.exception)


def test_a_wrong_key_of_kernels_is_refused(file: Path) -> None:
    file.write_text(file.read_text() + "options: {kernels: {sideways: aten}}\n")
    done = convgen("compile", file)
    assert isinstance(done.exception, InputError) and "sideways" in str(done.exception)


def test_tune_explain_and_json(file: Path, cache: Path) -> None:
    device = this_cpu(1)
    update(cache / "devices" / device.file_name, device, {}, CEILINGS)
    words = ("tune", file, "--threads", 1, "--effort", "quick")
    before = convgen(*words, "--explain", "forward")
    assert "not measured" in before.stdout and "convgen tune measures it" in before.stdout
    done = convgen(*words, "--json")
    results = json.loads(done.stdout)
    assert [r["uses"] for r in results] == [[f"layer.{p}"] for p in ("forward", "backward_data", "backward_filter")]
    assert all(r["measured"] and r["status"] == "tuned" and r["ms"] > 0 and r["aten_ms"] > 0 for r in results)
    assert len(list(read_trials(trials_path(device)))) == sum(r["tried"] for r in results)
    again = json.loads(convgen(*words, "--json").stdout)  # what is in doubt is measured again
    assert [r["status"] == "kept" for r in again] == [not r["doubt"] for r in results]
    assert device.name in convgen(*words).stdout
    after = convgen(*words, "--explain", "layer.backward_filter")
    assert "backward_filter" in after.stdout and "why" in after.stdout and "next" in after.stdout
    refused = convgen(*words, "--explain", "sideways")
    assert isinstance(refused.exception, InputError) and "there is none" in str(refused.exception)


def test_partitions_are_drawn(file: Path, cache: Path, tmp_path: Path) -> None:
    device = this_cpu(1)
    update(cache / "devices" / device.file_name, device, {}, CEILINGS)
    remember(file, cache, device, WAYS)  # what is not split need not be measured
    plot = tmp_path / "scaling.png"
    words = ("tune", file, "--threads", 1, "--effort", "quick", "--partitions", "1,2", "--splits", "channel")
    done = convgen(*words, "--plot", plot, "--json", "--budget", 4)
    assert plot.stat().st_size > 10_000
    uses = [u for r in json.loads(done.stdout) for u in r["uses"]]
    assert len(uses) == 6 and "layer.forward 2-way by channel" in uses
    for wrong in ("0,1", "a", "99"):
        assert isinstance(convgen(*words[:-3], wrong, *words[-2:]).exception, InputError)


def test_every_partition_of_every_layer_of_a_table(tmp_path: Path) -> None:
    table = tmp_path / "two.csv"
    table.write_text("name,N,C,H,W,F,K,S,P\na,2,16,8,8,32,3,1,1\nb,2,32,8,8,16,1,1,0\n")
    given = dict.fromkeys(("machine", "algorithm"))
    layers = compile_files(
        [str(table)], target="cuda:sm_90", grid="N=1", dtype="bfloat16", memory_format="channels_last",
        objective="seconds", **given,
    )  # fmt: skip
    wanted = of_partitions([one.layer for one in layers], (1, 2, 16), ("channel", "filter"))
    assert {use.layer for one in wanted for use in one.uses} == {"a", "b"}
    assert sum(len(one.uses) for one in wanted) == 2 * 3 * 2 * 3
    assert all(one.key.startswith("bfloat16 channels_last ") for one in wanted)
    done = convgen("tune", table, "--grid", "N=1", "--partitions", "1,2", "--plot", tmp_path / "x.png")
    assert isinstance(done.exception, InputError) and "--plot draws one layer, here are 2" in str(done.exception)


def test_without_the_device_nothing_is_measured(file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = convgen("tune", file, "--target", "sm_90", "--effort", "quick", "--jobs", 1, "--budget", 1e-9, "--json")
    assert json.loads(done.stdout) == [] and "nothing is measured or stored" in done.stderr
    monkeypatch.setitem(COMPILED, "quick", 2)
    times = iter((0.0, 1.0))  # time is up after the first problem
    monkeypatch.setattr("convgen.tune.modelled.time", SimpleNamespace(monotonic=lambda: next(times, 3.0)))
    done = convgen("tune", file, "--target", "sm_90", "--effort", "quick", "--jobs", 1, "--budget", 2, "--json")
    (first,) = json.loads(done.stdout)
    assert first["measured"] is False and "ms" not in first and first["candidates"]
    assert all(c["facts"]["spill_bytes"] == 0 for c in first["candidates"])
    assert not (cache / "devices").exists()


def test_what_cannot_be_tuned_is_refused(file: Path) -> None:
    for words, said in (
        (("--target", "sw26010"), "sw26010 has no families of kernels"),
        (("--target", "cuda:sm_70"), "no kernels are made"),
        (("--plot", "x.png"), "--plot draws partitions"),
    ):
        done = convgen("tune", file, *words)
        assert isinstance(done.exception, InputError) and said in str(done.exception)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--explain", "forward", "--json"), "takes no --json"),
        (("--explain", "forward", "--again"), "takes no --again"),
        (("--partitions", "1", "--plot", "no/such/folder.png"), "is no folder"),
        (("--partitions", "1", "--plot", "a.xyz"), "'.xyz' names no format"),
        (("--partitions", "9" * 5000), "no list of numbers"),
    ],
)
def test_what_can_not_be_done_is_refused_before_measuring(
    file: Path, cache: Path, words: tuple[str, ...], said: str
) -> None:
    done = convgen("tune", file, *words)
    assert isinstance(done.exception, InputError) and said in str(done.exception)
    assert not done.stdout and not cache.exists()


def test_trials_that_can_not_be_kept_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="can't be read"):
        list(read_trials(tmp_path / "t.jsonl"))
    for path in (tmp_path / "t.jsonl", tmp_path / "file" / "t.jsonl"):
        with pytest.raises(InputError, match="can't be written"):
            append(path, Trial("", "aten", 1.0, "", "", {}, "0" * 12))


def test_an_interrupt_fails_no_check(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*given: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("convgen.commands.tune.compile_files", interrupt)
    done = convgen("tune", file)
    assert done.exit_code == 130 and "interrupted" in done.stderr and not done.stdout
