"""Training as people write it around a network, with torch alone: the same lines for a module and for its ranks.

A script takes what makes networks, trains, and gives what it trained and the numbers that it would log.
`python bench/training_scripts.py` runs them.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

STEPS = 6
Trained = dict[str, Any]  # modules, and lists of numbers


@dataclass
class Make:
    """What a script has: new networks, all with the weights of the same seed, and a folder that all ranks see."""

    network: Callable[..., Any]
    samples: int
    pixels: tuple[int, int]
    features: int  # of a backbone
    folder: Path

    def __call__(self, kind: str = "net", elsewhere: bool = False) -> Any:
        """A network to train: net, backbone, generator or discriminator; elsewhere: on another grid."""
        return self.network(kind, elsewhere)

    def batches(self, count: int = STEPS) -> Iterator[tuple[Tensor, Tensor]]:
        draw = torch.Generator().manual_seed(7)
        for _ in range(count):
            x = torch.randn(self.samples, 3, *self.pixels, dtype=torch.float64, generator=draw)
            yield x, torch.randint(4, (self.samples,), generator=draw)


@dataclass(frozen=True)
class Script:
    name: str
    run: Callable[[Make], Trained]
    needs: str = ""  # a library beside torch
    limit: float = 1e-9  # of the relative error


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


@script("SGD with momentum, Nesterov")
def sgd(make: Make) -> Trained:
    model = make()
    return loop(model, torch.optim.SGD(model.parameters(), 0.1, 0.9, nesterov=True), make.batches())


@script("AdamW")
def adamw(make: Make) -> Trained:
    model = make()
    return loop(model, torch.optim.AdamW(model.parameters(), 0.01), make.batches())


@script("AdamW, foreach=True")
def adamw_foreach(make: Make) -> Trained:
    model = make()
    return loop(model, torch.optim.AdamW(model.parameters(), 0.01, foreach=True), make.batches())


@script("AdamW, fused=True")
def adamw_fused(make: Make) -> Trained:
    model = make()
    return loop(model, torch.optim.AdamW(model.parameters(), 0.01, fused=True), make.batches())


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


@script("accumulation, clip_grad_norm_")
def clipping(make: Make) -> Trained:
    return accumulate(make, lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1))


@script("clip_grad_norm_, foreach=True")
def clipping_foreach(make: Make) -> Trained:
    return accumulate(make, lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=True))


@script("clip_grad_norm_, norm_type=inf")
def clipping_by_the_largest(make: Make) -> Trained:
    return accumulate(make, lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type=float("inf")))


@script("get_total_norm, clip_grads_with_norm_")
def clipping_in_two(make: Make) -> Trained:
    def clip(model: Any) -> Any:
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, norm)
        return norm

    return accumulate(make, clip)


@script("clip_grad_value_")
def clipping_values(make: Make) -> Trained:
    return accumulate(make, lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01))


@script("clipping by hand")
def clipping_by_hand(make: Make) -> Trained:
    def clip(model: Any) -> Any:
        norm = sum(p.grad.square().sum() for p in model.parameters()) ** 0.5
        for p in model.parameters():
            p.grad.mul_(min(1.0, 0.1 / float(norm)))
        return norm

    return accumulate(make, clip)


@script("norms logged")
def logging(make: Make) -> Trained:
    model, norms = make(), list[float]()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def log() -> None:
        norms.extend(p.norm().item() for p in model.parameters())
        norms.extend(p.grad.abs().max().item() for p in model.parameters())

    return loop(model, optimizer, make.batches(), log) | {"norms": norms}


@script("EMA: AveragedModel, get_ema_multi_avg_fn, buffers")
def ema_of_torch(make: Make) -> Trained:
    model = make()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    found = loop(model, torch.optim.SGD(model.parameters(), 0.1), make.batches(), lambda: ema.update_parameters(model))
    x, labels = next(make.batches(1))
    ema.eval()
    with torch.no_grad():
        return found | {"ema": ema.module, "validation": [F.cross_entropy(ema(x), labels).item()]}


@script("SWA: AveragedModel, SWALR")
def swa(make: Make) -> Trained:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    average, schedule = AveragedModel(model), SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)

    def then() -> None:
        average.update_parameters(model)
        schedule.step()

    return loop(model, optimizer, make.batches(), then) | {"average": average.module}


@script("SWA: update_bn")
def swa_norms(make: Make) -> Trained:
    model = make()
    average = AveragedModel(model)
    found = loop(
        model, torch.optim.SGD(model.parameters(), 0.1), make.batches(), lambda: average.update_parameters(model)
    )
    torch.optim.swa_utils.update_bn([x for x, _ in make.batches()], average)
    return found | {"average": average.module}


@script("EMA by hand: deepcopy, lerp_")
def ema_by_hand(make: Make) -> Trained:
    model = make()
    ema = copy.deepcopy(model).requires_grad_(False)

    @torch.no_grad()
    def then() -> None:
        for mine, p in zip(ema.parameters(), model.parameters(), strict=True):
            mine.lerp_(p, 0.1)
        for mine, b in zip(ema.buffers(), model.buffers(), strict=True):
            mine.copy_(b)

    return loop(model, torch.optim.SGD(model.parameters(), 0.1), make.batches(), then) | {"ema": ema}


@script("EMA by hand: state dicts, loaded at the end")
def ema_of_states(make: Make) -> Trained:
    model = make()
    ema = {k: v.detach().clone() for k, v in model.state_dict().items()}

    def then() -> None:
        for k, v in model.state_dict().items():
            if v.is_floating_point():
                ema[k].mul_(0.9).add_(v.detach(), alpha=0.1)
            else:
                ema[k].copy_(v)

    found = loop(model, torch.optim.SGD(model.parameters(), 0.1), make.batches(), then)
    model.load_state_dict(ema)
    return found


@script("EMA by hand: shadow tensors, swapped for validation")
def ema_of_shadows(make: Make) -> Trained:
    model, values = make(), list[float]()
    shadow = {n: p.data.clone() for n, p in model.named_parameters()}
    x, labels = next(make.batches(1))

    def then() -> None:
        for n, p in model.named_parameters():
            shadow[n] = 0.9 * shadow[n] + 0.1 * p.data
        kept = {n: p.data for n, p in model.named_parameters()}
        for n, p in model.named_parameters():
            p.data = shadow[n]
        model.eval()
        with torch.no_grad():
            values.append(F.cross_entropy(model(x), labels).item())
        for n, p in model.named_parameters():
            p.data = kept[n]
        model.train()

    return loop(model, torch.optim.SGD(model.parameters(), 0.1), make.batches(), then) | {"values": values}


@script("OneCycleLR, no decay of norms and biases")
def one_cycle(make: Make) -> Trained:
    model = make()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, 0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=STEPS)
    return loop(model, optimizer, make.batches(), schedule.step)


@script("ReduceLROnPlateau, the best state kept and loaded")
def plateau(make: Make) -> Trained:
    model, losses, best = make(), list[float](), {}
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for x, labels in make.batches():
        found = loop(model, optimizer, [(x, labels)])["losses"]
        schedule.step(found[0])
        if not losses or found[0] < min(losses):
            best = copy.deepcopy(model.state_dict())
        losses += found
    model.load_state_dict(best)
    return {"model": model, "losses": losses, "rates": [optimizer.param_groups[0]["lr"]]}


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


@script("Adafactor")
def adafactor(make: Make) -> Trained:
    model = make()
    return loop(model, torch.optim.Adafactor(model.parameters(), 0.05), make.batches())


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


@script("parameters counted")
def counted(make: Make) -> Trained:
    model = make()
    return {"model": model, "numbers": [sum(p.numel() for p in model.parameters())]}


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


def scaled(make: Make, model: Any, poison: Callable[[Any, int], Any] = lambda loss, step: loss) -> Trained:
    """A loop under GradScaler with unscaled clipping."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    scales: list[float] = []
    for i, (x, labels) in enumerate(make.batches()):
        optimizer.zero_grad()
        y = model(x)
        scaler.scale(poison(y, i) + F.cross_entropy(y, labels)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return {"model": model, "scales": scales}


@script("GradScaler")
def scaler(make: Make) -> Trained:
    return scaled(make, make(), lambda y, i: 0.0)


@script("GradScaler, everything overflows in a step")
def scaler_overflows(make: Make) -> Trained:
    return scaled(make, make(), lambda y, i: y.sum() * (1e308 if i == 2 else 0.0))


@script("GradScaler, one class of the last layer overflows in a step")
def scaler_overflows_in_part(make: Make) -> Trained:
    """All but the last layer is frozen, so that one rank alone may hold what is infinite."""
    model = make()
    for n, p in model.named_parameters():
        p.requires_grad_(n.startswith("fc"))
    return scaled(make, model, lambda y, i: y[:, -1].sum() * (1e308 if i == 2 else 0.0))


@script("GradScaler, one filter's gradient overflows in a step")
def scaler_overflows_in_a_filter(make: Make) -> Trained:
    """A hook stands for what overflows inside of the network: the last filter's alone."""
    model, calls = make(), [0]
    weight = model.get_parameter("bn2.weight")  # of which the last filter has the largest

    def overflow(g: Any) -> Any:
        calls[0] += 1
        return g / (weight.detach() < 1.4).double() if calls[0] == 3 else g

    weight.register_hook(overflow)
    return scaled(make, model, lambda y, i: 0.0)


@script("freeze and unfreeze during training")
def freezing(make: Make) -> Trained:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    given = list(make.batches())
    found = loop(model, optimizer, given[:2])["losses"]
    for n, p in model.named_parameters():
        p.requires_grad_(not n.startswith(("conv1", "bn1")))
    found += loop(model, optimizer, given[2:4])["losses"]
    for p in model.parameters():
        p.requires_grad_(True)
    found += loop(model, optimizer, given[4:])["losses"]
    return {"model": model, "losses": found}


@script("fine-tuning: the head, then all with a smaller rate for the rest")
def fine_tuning(make: Make) -> Trained:
    model = make()
    model.requires_grad_(False)
    model.fc.requires_grad_(True)
    optimizer = torch.optim.SGD(model.fc.parameters(), 0.1, 0.9)
    given = list(make.batches())
    found = loop(model, optimizer, given[:3])["losses"]
    model.requires_grad_(True)
    optimizer.add_param_group({"params": [p for n, p in model.named_parameters() if "fc" not in n], "lr": 0.01})
    found += loop(model, optimizer, given[3:])["losses"]
    return {"model": model, "losses": found}


@script("frozen norms: bn.eval() in training")
def frozen_norms(make: Make) -> Trained:
    model = make()
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.eval()
            m.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    return loop(model, optimizer, make.batches())


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


@script("weights averaged over two runs")
def soup(make: Make) -> Trained:
    runs = [make(), make()]
    for model, lr in zip(runs, (0.1, 0.2), strict=True):
        loop(model, torch.optim.SGD(model.parameters(), lr), make.batches(3))
    a, b = (m.state_dict() for m in runs)
    runs[0].load_state_dict({k: (a[k] + b[k]) / 2 if a[k].is_floating_point() else a[k] for k in a})
    return {"model": runs[0]}


@script("a GAN: two networks, two optimizers")
def gan(make: Make) -> Trained:
    generator, discriminator, losses = make("generator"), make("discriminator"), list[float]()
    of_g = torch.optim.Adam(generator.parameters(), 0.01, betas=(0.5, 0.9))
    of_d = torch.optim.Adam(discriminator.parameters(), 0.01, betas=(0.5, 0.9))
    draw = torch.Generator().manual_seed(9)
    for x, _ in make.batches(4):
        rows, columns = make.pixels
        z = torch.randn(len(x), 4, (rows + 1) // 2, (columns + 1) // 2, dtype=torch.float64, generator=draw)
        fake = generator(z)
        of_d.zero_grad()
        loss = F.softplus(-discriminator(x)).mean() + F.softplus(discriminator(fake.detach())).mean()
        loss.backward()
        of_d.step()
        of_g.zero_grad()
        wish = F.softplus(-discriminator(fake)).mean()
        wish.backward()
        of_g.step()
        losses += [loss.item(), wish.item()]
    return {"generator": generator, "discriminator": discriminator, "losses": losses}


def with_head(make: Make) -> nn.Module:
    backbone = make("backbone")
    torch.manual_seed(3)
    return nn.Sequential(backbone, nn.Linear(make.features, 4, dtype=torch.float64))


@script("a backbone and an ordinary head, one optimizer")
def head(make: Make) -> Trained:
    model = with_head(make)
    return loop(model, torch.optim.AdamW(model.parameters(), 0.01), make.batches())


@script("a backbone and an ordinary head, foreach=True, clip_grad_norm_")
def head_foreach(make: Make) -> Trained:
    model, norms = with_head(make), list[float]()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, foreach=True)
    for x, labels in make.batches():
        optimizer.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=True).item())
        optimizer.step()
    return {"model": model, "norms": norms}


@script("torch.save and load_state_dict of a rank, and on")
def resumed(make: Make) -> Trained:
    given = list(make.batches())
    models = make(), make()
    first, second = (torch.optim.AdamW(m.parameters(), 0.01) for m in models)
    loop(models[0], first, given[:3])
    file = io.BytesIO()
    torch.save({"model": models[0].state_dict(), "optimizer": first.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=False)
    models[1].load_state_dict(state["model"])
    second.load_state_dict(state["optimizer"])
    return loop(models[1], second, given[3:])


@script("DCP: stored on one grid, loaded on another, and on")
def across_grids(make: Make) -> Trained:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    given = list(make.batches())
    models = make(), make(elsewhere=True)
    first, second = (torch.optim.AdamW(m.parameters(), 0.01) for m in models)
    loop(models[0], first, given[:3])
    model, states = get_state_dict(models[0], first)
    dcp.save({"model": model, "optimizer": states}, checkpoint_id=make.folder)
    model, states = get_state_dict(models[1], second)
    dcp.load({"model": model, "optimizer": states}, checkpoint_id=make.folder)
    set_state_dict(models[1], second, model_state_dict=model, optim_state_dict=states)
    return loop(models[1], second, given[3:])


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
