"""What people write around steps of training, with torch alone: averages of weights, schedules, freezing, several
networks, checkpoints. See training_steps.py.
"""

from __future__ import annotations

import copy
import io

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn
from training_steps import STEPS, Make, Scripts, Trained, loop

script = Scripts()


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


@script("parameters counted")
def counted(make: Make) -> Trained:
    model = make()
    return {"model": model, "numbers": [sum(p.numel() for p in model.parameters())]}


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
        *_, rows, columns = make.images
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
    state = torch.load(file)
    models[1].load_state_dict(state["model"])
    second.load_state_dict(state["optimizer"])
    return loop(models[1], second, given[3:])


@script("DCP: stored on one grid, loaded on another, and on")
def across_grids(make: Make) -> Trained:
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
