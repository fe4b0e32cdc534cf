r"""Training as people write it with libraries beside torch: timm, Accelerate, Lightning. See training_steps.py.

    pip install --target build/training --no-deps accelerate lightning lightning-utilities pytorch-lightning \
        torchmetrics timm torchvision huggingface_hub safetensors pyyaml tqdm psutil packaging
    PYTHONPATH=build/training python bench/training_scripts.py
"""

from __future__ import annotations

import importlib
import logging
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from training_steps import Make, Scripts, Trained, loop

from convgen.spec.torchvision_ops import declare_operators

script = Scripts()


def library(name: str) -> Any:
    """A module of a library that imports torchvision, which may be built for another torch."""
    declare_operators()
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    return importlib.import_module(name)


@script("timm: ModelEmaV3", needs="timm")
def ema(make: Make) -> Trained:
    model = make()
    average = library("timm.utils").ModelEmaV3(model, decay=0.9)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = loop(model, optimizer, make.batches(), lambda: average.update(model))
    x, labels = next(make.batches(1))
    with torch.no_grad():
        return found | {"ema": average.module, "validation": [F.cross_entropy(average(x), labels).item()]}


@script("timm: ModelEmaV3, foreach=False, without buffers", needs="timm")
def ema_of_each(make: Make) -> Trained:
    model = make()
    average = library("timm.utils").ModelEmaV3(model, decay=0.9, use_warmup=True, foreach=False, exclude_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return loop(model, optimizer, make.batches(), lambda: average.update(model)) | {"ema": average.module}


@script("timm: ModelEmaV2", needs="timm")
def ema_of_states(make: Make) -> Trained:
    model = make()
    average = library("timm.utils").ModelEmaV2(model, decay=0.9)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return loop(model, optimizer, make.batches(), lambda: average.update(model)) | {"ema": average.module}


def with_optimizer(make: Make, name: str, lr: float, **how: Any) -> Trained:
    """timm's factory, with its groups without decay."""
    model = make()
    return loop(model, library("timm.optim").create_optimizer_v2(model, name, lr, 0.05, **how), make.batches())


@script("timm: LAMB", needs="timm")
def lamb(make: Make) -> Trained:
    return with_optimizer(make, "lamb", 0.02)


@script("timm: LAMB, foreach=True", needs="timm")
def lamb_foreach(make: Make) -> Trained:
    return with_optimizer(make, "lamb", 0.02, foreach=True)


@script("timm: LARS", needs="timm")
def lars(make: Make) -> Trained:
    return with_optimizer(make, "lars", 5.0, momentum=0.9, trust_coeff=0.01)


@script("timm: LARS, foreach=True", needs="timm")
def lars_foreach(make: Make) -> Trained:
    return with_optimizer(make, "lars", 5.0, momentum=0.9, trust_coeff=0.01, foreach=True)


@script("timm: Muon, of convolutions too (bfloat16)", needs="timm", limit=0.1)
def muon(make: Make) -> Trained:
    model = make()
    return loop(model, library("timm.optim").create_optimizer_v2(model, "muon", 0.02, 0.05), make.batches(2))


@script("timm: Adafactor", needs="timm")
def adafactor(make: Make) -> Trained:
    return with_optimizer(make, "adafactor", 0.02)


@script("timm: Lion", needs="timm")
def lion(make: Make) -> Trained:
    return with_optimizer(make, "lion", 0.01)


@script("timm: Adan", needs="timm")
def adan(make: Make) -> Trained:
    return with_optimizer(make, "adan", 0.01)


@script("timm: Lookahead of RAdam", needs="timm")
def lookahead(make: Make) -> Trained:
    return with_optimizer(make, "lookahead_radam", 0.02)


@script("timm: adaptive clipping", needs="timm")
def adaptive(make: Make) -> Trained:
    model, clip = make(), library("timm.utils").adaptive_clip_grad
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    for x, labels in make.batches():
        optimizer.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        clip(model.parameters(), 0.01)
        optimizer.step()
    return {"model": model}


@script("timm: NativeScaler with clipping", needs="timm")
def native_scaler(make: Make) -> Trained:
    model, scaler = make(), library("timm.utils").NativeScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, labels in make.batches():
        optimizer.zero_grad()
        scaler(F.cross_entropy(model(x), labels), optimizer, clip_grad=0.1, parameters=model.parameters())
    return {"model": model}


def accelerated(make: Make, every: bool) -> Trained:
    accelerate = importlib.import_module("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # of the process that forked this one
    model, norms = make(), list[float]()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, step_scheduler_with_optimizer=False)
    if every:
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    else:  # the network is on all ranks already
        optimizer, schedule = accelerator.prepare(optimizer, schedule)
    for x, labels in make.batches():
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(x), labels))
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return {"model": accelerator.unwrap_model(model), "norms": norms}


@script("Accelerate: all but the network prepared", needs="accelerate")
def accelerate_optimizer(make: Make) -> Trained:
    return accelerated(make, False)


@script("Accelerate: the network prepared, too (DDP)", needs="accelerate")
def accelerate_all(make: Make) -> Trained:
    return accelerated(make, True)


@script("Lightning: Trainer, clipping, accumulation", needs="lightning")
def lightning(make: Make) -> Trained:
    home: Any = library("lightning.pytorch")
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    losses: list[float] = []

    class Task(home.LightningModule):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, number: int) -> Any:
            x, labels = batch
            loss = F.cross_entropy(self.model(x), labels)
            self.log("loss", loss)
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), 0.01)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    model = make()
    plugin = library("lightning.fabric.plugins.environments").LightningEnvironment()
    trainer = home.Trainer(
        accelerator="cpu", devices=1, max_epochs=2, logger=False, enable_checkpointing=False, gradient_clip_val=0.1,
        enable_progress_bar=False, enable_model_summary=False, accumulate_grad_batches=2, plugins=[plugin],
        default_root_dir=make.folder,
    )  # fmt: skip
    trainer.fit(Task(model), torch.utils.data.DataLoader(list(make.batches(4)), batch_size=None))  # type: ignore[arg-type]
    return {"model": model, "losses": losses}


@script("Lightning: Fabric", needs="lightning")
def fabric(make: Make) -> Trained:
    home: Any = library("lightning.fabric")
    fabric = home.Fabric(accelerator="cpu", devices=1)
    network, norms = make(), list[float]()
    model, optimizer = fabric.setup(network, torch.optim.AdamW(network.parameters(), 0.01))
    for x, labels in make.batches():
        optimizer.zero_grad()
        fabric.backward(F.cross_entropy(model(x), labels))
        norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=0.1)))
        optimizer.step()
    return {"model": network, "norms": norms}
