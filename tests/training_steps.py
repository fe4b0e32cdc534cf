"""Steps of training as people write them, with torch alone: the same lines for a module and for its ranks.

A script takes what makes networks, trains, and gives what it trained and the numbers that it would log; here how a step
is made, in training_runs.py what is around steps, in training_libraries.py other libraries.
`python bench/training_scripts.py` runs them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STEPS = 6


Trained = dict[str, Any]  # modules, and lists of numbers


@dataclass
class Make:
    """What a script has: new networks, all with the weights of the same seed, and a folder that all ranks see."""

    network: Callable[..., Any]
    images: tuple[int, int, int, int]
    features: int  # of a backbone
    folder: Path
    off: float = 0.0  # by how much images are off, relatively
    at_random: int = 0  # up or down, drawn from this seed; 0: all alike

    def __call__(self, kind: str = "net", elsewhere: bool = False) -> Any:
        """A network to train: net, backbone, generator or discriminator; elsewhere: on another grid."""
        return self.network(kind, elsewhere)

    def batches(self, count: int = STEPS) -> Iterator[tuple[Tensor, Tensor]]:
        draw, signs = (torch.Generator().manual_seed(seed) for seed in (7, self.at_random))
        for _ in range(count):
            x = torch.randn(self.images, dtype=torch.float64, generator=draw)
            sign = torch.randint(2, x.shape, generator=signs) * 2 - 1 if self.at_random else 1
            yield x * (1 + self.off * sign), torch.randint(4, self.images[:1], generator=draw)


@dataclass(frozen=True)
class Script:
    name: str
    run: Callable[[Make], Trained]
    needs: str = ""  # a library beside torch
    limit: float = 1e-9  # of the relative error
    unit: float = 0.0  # of images in a low type: what it changes on one process decides the limit (training_ranks.py)


@dataclass
class Scripts:
    found: list[Script] = field(default_factory=list)

    def __call__(self, name: str, **how: Any) -> Callable[[Callable[[Make], Trained]], Callable[[Make], Trained]]:
        def add(run: Callable[[Make], Trained]) -> Callable[[Make], Trained]:
            self.found.append(Script(name, run, **how))
            return run

        return add


script = Scripts()


def loop(model: Any, optimizer: Any, batches: Iterable[tuple[Tensor, Tensor]], then: Any = lambda: None) -> Trained:
    """The plainest loop; `then` follows each step."""
    losses: list[float] = []
    for x, labels in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        then()
        losses.append(loss.item())
    return {"model": model, "losses": losses}


def plain(name: str, kind: Callable[..., Any], *given: Any, **how: Any) -> None:
    """The plainest loop under an optimizer of torch's."""

    @script(name)
    def run(make: Make) -> Trained:
        model = make()
        return loop(model, kind(model.parameters(), *given, **how), make.batches())


plain("SGD with momentum, Nesterov", torch.optim.SGD, 0.1, 0.9, nesterov=True)
plain("AdamW", torch.optim.AdamW, 0.01)
plain("AdamW, foreach=True", torch.optim.AdamW, 0.01, foreach=True)
plain("AdamW, fused=True", torch.optim.AdamW, 0.01, fused=True)


def accumulate(make: Make, clip: Callable[[Any], Any]) -> Trained:
    """Two batches a step, gradients clipped by `clip`, whose norm is logged."""
    model, norms = make(), list[float]()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    for i, (x, labels) in enumerate(make.batches()):
        (F.cross_entropy(model(x), labels) / 2).backward()
        if i % 2:
            norm = clip(model)
            norms += [] if norm is None else [float(norm)]
            optimizer.step()
            optimizer.zero_grad()
    return {"model": model, "norms": norms}


def in_two(model: Any) -> Any:
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, norm)
    return norm


def by_hand(model: Any) -> Any:
    norm = sum(p.grad.square().sum() for p in model.parameters()) ** 0.5
    for p in model.parameters():
        p.grad.mul_(min(1.0, 0.1 / float(norm)))
    return norm


CLIPPING: dict[str, Callable[[Any], Any]] = {
    "accumulation, clip_grad_norm_": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1),
    "clip_grad_norm_, foreach=True": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1, foreach=True),
    "clip_grad_norm_, norm_type=inf": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.01, float("inf")),
    "get_total_norm, clip_grads_with_norm_": in_two,
    "clip_grad_value_": lambda m: nn.utils.clip_grad_value_(m.parameters(), 0.01),
    "clipping by hand": by_hand,
}
for name, clip in CLIPPING.items():
    script(name)(partial(accumulate, clip=clip))


@script("norms logged")
def logging(make: Make) -> Trained:
    model, norms = make(), list[float]()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def log() -> None:
        norms.extend(p.norm().item() for p in model.parameters())
        norms.extend(p.grad.abs().max().item() for p in model.parameters())

    return loop(model, optimizer, make.batches(), log) | {"norms": norms}


@script("torch's Muon (bfloat16) of the head, AdamW of the rest", limit=0.02)
def muon(make: Make) -> Trained:
    model = make()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    optimizers = [torch.optim.Muon(matrices, 0.02), torch.optim.SGD(others, 0.05)]
    for x, labels in make.batches(3):
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {"model": model}


@torch.no_grad()
def orthogonal(g: Tensor) -> Tensor:
    """Newton and Schulz's iteration towards the nearest orthogonal matrix, of filters as rows."""
    m = g.flatten(1)
    wide = m.shape[0] <= m.shape[1]
    m = m if wide else m.mT
    m = m / (m.norm() + 1e-7)
    for _ in range(5):
        a = m @ m.mT
        m = 3.4445 * m + (-4.7750 * a + 2.0315 * a @ a) @ m
    return (m if wide else m.mT).reshape(g.shape)


@script("Muon by hand, of convolutions too")
def muon_by_hand(make: Make) -> Trained:
    model = make()
    moments = {p: torch.zeros_like(p) for p in model.parameters()}
    for x, labels in make.batches(3):
        model.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        with torch.no_grad():
            for p, m in moments.items():
                m.mul_(0.95).add_(p.grad)
                p.add_(orthogonal(m) if p.ndim > 1 else m, alpha=-0.02)
    return {"model": model}


@script("LAMB by hand")
def lamb(make: Make) -> Trained:
    model, ratios = make(), list[float]()
    moments = {p: (torch.zeros_like(p), torch.zeros_like(p)) for p in model.parameters()}
    for t, (x, labels) in enumerate(make.batches(), 1):
        model.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        with torch.no_grad():
            for p, (m, v) in moments.items():
                m.mul_(0.9).add_(p.grad, alpha=0.1)
                v.mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                update = (m / (1 - 0.9**t)) / ((v / (1 - 0.99**t)).sqrt() + 1e-6) + 0.01 * p
                size, change = p.norm(), update.norm()
                ratio = float(size / change) if size > 0 and change > 0 else 1.0
                ratios.append(ratio)
                p.add_(update, alpha=-0.01 * ratio)
    return {"model": model, "ratios": ratios}


@script("LARS by hand")
def lars(make: Make) -> Trained:
    model = make()
    moments = {p: torch.zeros_like(p) for p in model.parameters()}
    for x, labels in make.batches():
        model.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        with torch.no_grad():
            for p, m in moments.items():
                size, change = torch.norm(p), torch.norm(p.grad)
                ratio = torch.where(size > 0, 0.02 * size / (change + 0.001 * size + 1e-9), torch.ones_like(size))
                m.mul_(0.9).add_((p.grad + 0.001 * p) * ratio)
                p.sub_(m)
    return {"model": model}


plain("Adafactor", torch.optim.Adafactor, 0.05)


@script("Adafactor of norms and biases, SGD of the rest")
def adafactor_of_vectors(make: Make) -> Trained:
    model = make()
    vectors, others = ([p for p in model.parameters() if (p.ndim == 1) == is_one] for is_one in (True, False))
    second = torch.optim.SGD(others, 0.05)

    def then() -> None:
        second.step()
        second.zero_grad()

    return loop(model, torch.optim.Adafactor(vectors, 0.05), make.batches(), then)


@script("steps as large as each parameter's root mean square")
def by_rms(make: Make) -> Trained:
    model = make()
    for x, labels in make.batches():
        model.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        with torch.no_grad():
            for p in model.parameters():
                size = float(p.norm()) / p.numel() ** 0.5
                change = float(p.grad.norm()) / p.numel() ** 0.5
                p.add_(p.grad, alpha=-0.05 * max(size, 1e-3) / (change + 1e-3))
    return {"model": model}


@script("rates by fan-in")
def by_fan_in(make: Make) -> Trained:
    model = make()
    groups = [
        {"params": [p], "lr": 0.5 / p.shape[1] if p.ndim > 1 else 0.1, "weight_decay": 0.01 / p.shape[0]}
        for p in model.parameters()
    ]
    return loop(model, torch.optim.SGD(groups, 0.1), make.batches())


@script("SAM by hand")
def sam(make: Make) -> Trained:
    model, norms = make(), list[float]()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    for x, labels in make.batches():
        optimizer.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        moved: list[tuple[Any, Tensor]] = []
        with torch.no_grad():
            norm = torch.norm(torch.stack([p.grad.norm(p=2) for p in model.parameters()]), p=2)
            for p in model.parameters():
                moved.append((p, p.grad * (0.05 / (norm + 1e-12))))
                p.add_(moved[-1][1])
        optimizer.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        with torch.no_grad():
            for p, by in moved:
                p.sub_(by)
        optimizer.step()
        norms.append(norm.item())
    return {"model": model, "norms": norms}


def scaled(make: Make, model: Any, others: Callable[[Any, int], Any], parameters: Any = None) -> Trained:
    """A loop under GradScaler; `others` adds to the loss of a step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    optimizer = torch.optim.SGD(parameters or [p for p in model.parameters() if p.requires_grad], 0.1)
    scales: list[float] = []
    for i, (x, labels) in enumerate(make.batches()):
        optimizer.zero_grad()
        y = model(x)
        scaler.scale(others(y, i) + F.cross_entropy(y, labels)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return {"model": model, "scales": scales}


script("GradScaler")(lambda make: scaled(make, make(), lambda y, i: 0.0))
script("GradScaler, everything overflows in a step")(
    lambda make: scaled(make, make(), lambda y, i: y.sum() * (1e308 if i == 2 else 0.0))
)


@script("GradScaler, one class of the last layer overflows in a step")
def scaler_overflows_in_part(make: Make) -> Trained:
    """All but the last layer is frozen, so that one rank alone may hold what is infinite."""
    model = make()
    for n, p in model.named_parameters():
        p.requires_grad_(n.startswith("fc"))
    return scaled(make, model, lambda y, i: y[:, -1].sum() * (1e308 if i == 2 else 0.0))


def with_overflow(model: Any) -> Any:
    """A hook stands for what overflows inside of the network in the third step: the last filter's gradient alone."""
    calls, weight = [0], model.get_parameter("bn2.weight")  # of which the last filter has the largest

    def overflow(g: Any) -> Any:
        calls[0] += 1
        return g / (weight.detach() < 1.4).double() if calls[0] == 3 else g

    weight.register_hook(overflow)
    return model


@script("GradScaler, one filter's gradient overflows in a step")
def scaler_overflows_in_a_filter(make: Make) -> Trained:
    return scaled(make, with_overflow(make()), lambda y, i: 0.0)


@script("GradScaler, one filter's gradient overflows, the head's parameters first")
def scaler_overflows_behind_the_head(make: Make) -> Trained:
    model = with_overflow(make())
    return scaled(make, model, lambda y, i: 0.0, [*reversed([*model.parameters()])])


@script("an optimizer a parameter, in backward")
def in_backward(make: Make) -> Trained:
    model, losses = make(), list[float]()
    optimizers = {p: torch.optim.AdamW([p], 0.01) for p in model.parameters()}

    def step(p: Any) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for x, labels in make.batches():
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        losses.append(loss.item())
    return {"model": model, "losses": losses}


@script("weight decay in the loss")
def penalty(make: Make) -> Trained:
    model, losses = make(), list[float]()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, labels in make.batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), labels) + 0.01 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"model": model, "losses": losses}


@script("gradient centralisation")
def centred(make: Make) -> Trained:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, labels in make.batches():
        optimizer.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        for p in model.parameters():
            if p.ndim > 1:
                p.grad.sub_(p.grad.mean(dim=tuple(range(1, p.ndim)), keepdim=True))
        optimizer.step()
    return {"model": model}


@script("L-BFGS")
def lbfgs(make: Make) -> Trained:
    model = make()
    optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3)
    x, labels = next(make.batches(1))

    def closure() -> Any:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        return loss

    losses = [float(optimizer.step(closure)) for _ in range(2)]
    return {"model": model, "losses": losses}
