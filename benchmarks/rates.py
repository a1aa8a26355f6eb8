"""Does the learning rate of AdamW carry over? Fourteen small tasks on a CPU, learning rates a factor of two apart.

    python -m benchmarks.rates --data FOLDER --records FILE [--processes 16] [--minutes 4]   # runs what is missing
    python -m benchmarks.rates --device cuda --task GPT-2 Llama --processes 4 --records FILE  # decoders of transformers
    python -m benchmarks.rates --data FOLDER --records FILE --measure                         # lengths of steps
    python -m benchmarks.rates --records FILE --report                                        # the tables

A search starts at AdamW's default, 0.001, and goes up and down by factors of two until the best has worse neighbours;
the default of a method is run as well.
All have the same schedule and the same batches: warm-up over 5 % of the steps, cosine to 10 %. The loss is that of the
validation examples after the last step. AdamW is torch's with its defaults. ``--method`` names what competes: the
others are ``ng.Natural``, and its step with another length, "κ signal averaged". Every run is a line of JSON in the
records, and is not repeated.

``--measure`` asks of other lengths whether they could do better, without a search: along the run with the best rate of
``ng.Natural`` it measures how long each of them would make the steps (``LENGTHS``). A rate at which that length is what
it is there is its best rate, as far as a run depends on the length of its steps alone.

Fine-tuning starts from an encoder that AdamW has trained to guess bytes that are hidden in a text, and asks which of
two texts a line is from.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad as ng
from benchmarks.networks import Block, cross_entropy
from benchmarks.race_models import MLP, ByteLSTM, Decoder, autoencoder, digits, pictures, read_arrays, read_text, rows
from benchmarks.races import schedule
from experiments.files import markdown_table
from natgrad.errors import NonFiniteError
from natgrad.gradients.muon import polar_factors
from natgrad.gradients.optimizer import GradientOptimizer, ShapeBatch, of_length
from natgrad.linalg import Relative

DEFAULT = 1e-3  # of torch.optim.AdamW, and of the other length
DEFAULTS = {"ng.Natural": 3e-3}
OTHER = "κ signal averaged"
EVERY = 8  # steps between two measurements
RATES = tuple(DEFAULT * 2.0**k for k in range(-5, 9))
Batch = tuple[Tensor, Tensor]
Memory = dict[Any, Tensor]
Draw = Callable[[torch.Generator], Batch]


# Lengths of a step.


@final
class Natural(GradientOptimizer):
    """``ng.Natural`` with another length of the step, or as it is, to measure ``LENGTHS``."""

    polar, letters, largest, decay = True, ("S", "A", "D"), 1, 0.95

    def __init__(self, params: Any, *, length: Length, lr: float, weight_decay: float = 0.1) -> None:
        self.length, self.memory = length, Memory()
        super().__init__(params, (), lr=lr, weight_decay=weight_decay, momentum=0.9, damping=Relative(1e-2))

    def statistics(self, batch: ShapeBatch) -> dict[str, Tensor]:
        """As in ``ng.Natural``, and the second moments of Adam."""
        squares = batch.G.square()
        return {"S": squares.mean((1, 3)), "A": squares.mean((1, 2)), "D": squares.flatten(0, 1)}

    def directions(self, batches: Sequence[ShapeBatch], step: int) -> list[Tensor]:
        """As in ``ng.Natural``, and then another length."""
        sides, whitened = [], []
        for batch in batches:
            S, A = batch.get("S"), batch.get("A")
            λ_S, λ_A = self.shifts(S.mean(1, keepdim=True), A.mean(1, keepdim=True))
            l, r = (S + λ_S).pow_(-0.25)[:, None, :, None], (A + λ_A).pow_(-0.25)[:, None, None, :]
            sides.append((l, r))
            W = batch.M * l * r
            norms = torch.linalg.vector_norm(W, dim=(1, 2, 3), keepdim=True)
            whitened.append(W.div_(norms.clamp_(min=1e-30)))
        found = []
        for batch, (l, r), W, X in zip(batches, sides, whitened, polar_factors(whitened, "muon"), strict=True):
            o, i = batch.M.shape[2:]
            S = batch.get("S")
            found.append(
                Found(
                    M=batch.M,
                    v=of_length(X * l * r, (o * i) ** 0.5, batch),
                    spread=torch.linalg.vector_norm(X, dim=(1, 2, 3)) / min(o, i) ** 0.5,
                    nuclear=(W * X).sum((1, 2, 3)) / min(o, i) ** 0.5,
                    adafactor=batch.M * (l * r).square() * S.mean(1)[:, None, None, None].sqrt(),
                    adam=batch.M / batch.get("D").view_as(batch.M).sqrt().add(1e-8),
                )
            )
        factors = self.length(found, self.memory)
        return [f.v * c[:, None, None, None] for f, c in zip(found, factors, strict=True)]


@final
@dataclass(frozen=True)
class Found:
    """What a length may be made of, for a batch of matrices.

    ``v``: the direction with root mean square one. ``spread``: that of the polar factor over that of an orthogonal
    one. ``nuclear``: ‖P‖_*/(√min ‖P‖_F) of what the polar factor is of: 1 if all singular values are equal.
    ``adam``: M/√D, the step of Adam. ``adafactor``: M/√(SA/mean), with the second moments of Adafactor.
    """

    M: Tensor
    v: Tensor
    spread: Tensor
    nuclear: Tensor
    adafactor: Tensor
    adam: Tensor


Length = Callable[[Sequence[Found], Memory], list[Tensor]]


def usual(f: Found) -> Tensor:
    """That of ``ng.Natural``."""
    return 0.4 * f.spread


def rms(t: Tensor) -> Tensor:
    return t.square().mean((1, 2, 3)).sqrt()


def carried(f: Found) -> Tensor:
    """The step of Adam with Adafactor's moments, as long where κ is 1: ⟨M, v⟩ is about that of Adam's step."""
    return f.spread * rms(f.adafactor) / f.nuclear


def as_norm(order: Any) -> Callable[[Found], Tensor]:
    """The norm of the step of Adam, in this norm of matrices."""

    def of(f: Found) -> Tensor:
        adam, v = (torch.linalg.matrix_norm(t.flatten(1, 2), order) for t in (f.adam, f.v))
        return adam / v

    return of


LENGTHS: dict[str, Callable[[Found], Tensor]] = {
    "that of ng.Natural": usual,
    "κ": lambda f: f.spread / f.nuclear,
    "signal": lambda f: rms(f.adam),
    "κ signal": carried,
    "Adam's decrease": lambda f: (f.M * f.adam).sum((1, 2, 3)) / (f.M * f.v).sum((1, 2, 3)),
    "Adafactor's decrease": lambda f: (f.M * f.adafactor).sum((1, 2, 3)) / (f.M * f.v).sum((1, 2, 3)),
    "Adam's spectral norm": as_norm(2),
    "Adam's nuclear norm": as_norm("nuc"),
}


def averaged(found: Sequence[Found], memory: Memory) -> list[Tensor]:
    """ "κ signal averaged": its logarithm is averaged over the steps, corrected for the start."""
    out = []
    for n, f in enumerate(found):
        total, weight = memory.setdefault((n, f.M.shape), torch.zeros(2, len(f.M), device=f.M.device))
        total.lerp_(carried(f).clamp(min=1e-12).log(), 0.05)
        weight.lerp_(torch.ones_like(weight), 0.05)
        out.append((total / weight).exp())
    return out


# Tasks.


@final
@dataclass(frozen=True)
class Task:
    """A network, the batches it learns from, and what it is judged by."""

    network: Callable[[Path], nn.Module]
    draw: Callable[[Path], tuple[Draw, list[Batch]]]
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    steps: int = 200
    seed: int = 0
    autocast: bool = False


@final
class Encoder(nn.Module):
    """A transformer that reads bytes [n r] in both directions: logits of bytes, and later of classes."""

    def __init__(self, layers: int, width: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(257, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, 4, causal=False) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head: nn.Module = nn.Linear(width, 256)
        self.classifier: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[n r] to [n r 256], or [n classes] of the mean over positions."""
        y = self.norm(self.blocks(self.tokens(x) + self.positions.weight))
        return self.head(y) if self.classifier is None else self.classifier(y.mean(1))


LINE = 64  # bytes of a text that are classified


@cache
def two_texts(folder: Path) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Encyclopedia and plays in small letters without lines: training texts, and validation texts."""
    out = []
    for name in ("wikitext2.train", "tinyshakespeare"):
        text = read_text(folder, name)[:900_000].clone()
        text[(text >= 65) & (text <= 90)] += 32
        text = text[(text == 32) | ((text >= 97) & (text <= 122))]
        out.append((text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]))
    (a, b), (c, d) = out
    return (a, c), (b, d)


def lines(n: int) -> Callable[[Path], tuple[Draw, list[Batch]]]:
    """Which of the two texts a line is from."""

    def make(folder: Path) -> tuple[Draw, list[Batch]]:
        train, valid = two_texts(folder)

        def cut(texts: tuple[Tensor, Tensor], n: int, generator: torch.Generator) -> Batch:
            t = torch.randint(2, (n,), generator=generator)
            at = torch.stack([torch.randint(len(s) - LINE, (n,), generator=generator) for s in texts])
            x = torch.stack([s[a[:, None] + torch.arange(LINE)].long() for s, a in zip(texts, at, strict=True)])
            return x[t, torch.arange(n)], t

        return lambda g: cut(train, n, g), [cut(valid, 1000, torch.Generator().manual_seed(7))]

    return make


def pretrained(layers: int, width: int, seed: int) -> Callable[[Path], nn.Module]:
    """An encoder that AdamW has trained to guess one byte in six, and a new classifier."""
    file = Path(tempfile.gettempdir()) / f"natgrad-rates-{layers}-{width}-{seed}.pt"

    def train(folder: Path, net: nn.Module, steps: int = 800) -> None:
        generator, draw = torch.Generator().manual_seed(seed), lines(32)(folder)[0]
        opt = torch.optim.AdamW(net.parameters(), lr=2e-3)
        for step in range(steps):
            opt.param_groups[0]["lr"] = 2e-3 * schedule(step, steps)
            x, _ = draw(generator)
            hidden = torch.rand(x.shape, generator=generator) < 1 / 6
            opt.zero_grad()
            cross_entropy(net(x.masked_fill(hidden, 256))[hidden], x[hidden]).backward()
            opt.step()

    def new(folder: Path) -> nn.Module:
        torch.manual_seed(100 + seed)
        net = Encoder(layers, width, LINE)
        if file.exists():
            net.load_state_dict(torch.load(file))
        else:
            train(folder, net)
            part = file.with_suffix(f".{time.time_ns()}")
            torch.save(net.state_dict(), part)
            part.rename(file)
        torch.manual_seed(seed)
        net.head, net.classifier = nn.Identity(), nn.Linear(width, 2)
        return net

    return new


def text(n: int, length: int) -> Callable[[Path], tuple[Draw, list[Batch]]]:
    """Windows of tiny-shakespeare and the byte after each."""

    @cache
    def make(folder: Path) -> tuple[Draw, list[Batch]]:
        whole = read_text(folder, "tinyshakespeare")
        train, valid = whole[:1_000_000], whole[1_000_000:]

        def cut(source: Tensor, at: Tensor) -> Batch:
            w = source[at[:, None] + torch.arange(length + 1)].long()
            return w[:, :-1], w[:, 1:]

        fixed = cut(valid, torch.linspace(0, len(valid) - length - 1, 16_384 // length).long())
        return lambda g: cut(train, torch.randint(len(train) - length, (n,), generator=g)), [fixed]

    return make


def loaded(load: Any, limit: int = 2000) -> Callable[[Path], tuple[Draw, list[Batch]]]:
    """A task's data of the large races, judged by the first of the tuning split."""

    @cache
    def data(folder: Path) -> Any:
        return load(folder, "tune", torch.device("cpu"))

    def make(folder: Path) -> tuple[Draw, list[Batch]]:
        d = data(folder)
        x, t = d.validation[0]
        return d.draw, [(x[:limit], t[:limit])]

    return make


def labelled(n: int) -> Callable[[Path], tuple[Draw, list[Batch]]]:
    """MNIST at 14 × 14 pixels with its classes."""

    @cache
    def data(folder: Path) -> Batch:
        z = read_arrays(folder, "mnist")
        return z["x_train"][:, None, ::2, ::2].float() / 255 - 0.13, z["y_train"].long()

    def make(folder: Path) -> tuple[Draw, list[Batch]]:
        x, y = data(folder)

        def draw(g: torch.Generator) -> Batch:
            at = torch.randint(50_000, size=(n,), generator=g)
            return x[at], y[at]

        return draw, [(x[50_000:53_000], y[50_000:53_000])]

    return make


def convolutions(width: int, norm: bool, channels: int, pixels: int) -> nn.Module:
    """Three convolutions 3 × 3 and a linear layer, with BatchNorm or without."""
    layers: list[nn.Module] = []
    for i, o in ((channels, width), (width, 2 * width), (2 * width, 4 * width)):
        layers += [nn.Conv2d(i, o, 3, 2, padding=1, bias=not norm), *([nn.BatchNorm2d(o)] if norm else []), nn.ReLU()]
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1 if norm else 2), nn.Flatten(), nn.Linear((1 if norm else 4) * 4 * width, 10)
    )


def relu(*widths: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), MLP(*widths))


def half_square(y: Tensor, t: Tensor) -> Tensor:
    return 0.5 * (y - t).square().sum(-1).mean()


def bits(y: Tensor, t: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(y, t, reduction="none").sum(-1).mean()


class Tied(nn.Module):
    """GPT-2's: LayerNorm, GELU, learned positions, a tied head."""

    def __init__(self, layers: int, width: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, 4, causal=True) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.blocks(self.tokens(x) + self.positions.weight[: x.shape[1]]))
        return y @ self.tokens.weight.T


def fresh(layers: int, width: int) -> nn.Module:
    net = Encoder(layers, width, LINE)
    net.head, net.classifier = nn.Identity(), nn.Linear(width, 2)
    return net


def sources(n: int, length: int) -> Callable[[Path], tuple[Draw, list[Batch]]]:
    """The bytes of the Python files of torch and transformers; every twentieth file validates."""

    @cache
    def make(folder: Path) -> tuple[Draw, list[Batch]]:
        import transformers

        files = [p for m in (torch, transformers) for p in sorted(Path(m.__file__ or "").parent.rglob("*.py"))]
        texts = [[p for k, p in enumerate(files) if (k % 20 == 0) == held] for held in (False, True)]
        train, valid = (
            torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in ps)), dtype=torch.uint8) for ps in texts
        )

        def cut(source: Tensor, at: Tensor) -> Batch:
            w = source[at[:, None] + torch.arange(length + 1)].long()
            return w[:, :-1], w[:, 1:]

        at = torch.linspace(0, len(valid) - length - 1, 32 * n, dtype=torch.float64).long()
        return lambda g: cut(train, torch.randint(len(train) - length, (n,), generator=g)), [
            cut(valid, a) for a in at.split(n)
        ]

    return make


@final
class Logits(nn.Module):
    """A language model of transformers that returns its logits."""

    def __init__(self, kind: str, layers: int, width: int, length: int) -> None:
        super().__init__()
        import transformers as hf

        self.model: Any
        if kind == "GPT-2":
            sizes = {"n_positions": length, "n_embd": width, "n_layer": layers, "n_head": 8}
            config: Any = hf.GPT2Config(vocab_size=256, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
            config.update(sizes)
            self.model = hf.GPT2LMHeadModel(config)
        else:
            config = hf.LlamaConfig(
                vocab_size=256,
                hidden_size=width,
                intermediate_size=8 * width // 3 // 32 * 32,
                num_hidden_layers=layers,
                num_attention_heads=8,
                num_key_value_heads=4,
                max_position_embeddings=length,
            )
            self.model = hf.LlamaForCausalLM(config)

    def forward(self, x: Tensor) -> Tensor:
        """Bytes [n r] to logits [n r 256]."""
        return self.model(input_ids=x, use_cache=False).logits


def decoder(kind: str) -> Task:
    """A decoder of transformers with 25 million parameters."""
    return Task(lambda _: Logits(kind, 8, 512, 256), sources(32, 256), cross_entropy, steps=600, autocast=True)


LARGE: dict[str, Task] = {kind: decoder(kind) for kind in ("GPT-2", "Llama")}
TASKS: dict[str, Task] = {
    "fine-tune 2 × 48": Task(pretrained(2, 48, 0), lines(16), steps=150),
    "fine-tune 2 × 48, seed 1": Task(pretrained(2, 48, 1), lines(16), steps=150, seed=1),
    "fine-tune 3 × 80": Task(pretrained(3, 80, 0), lines(16), steps=150),
    "fine-tune 3 × 80, seed 1": Task(pretrained(3, 80, 1), lines(16), steps=150, seed=1),
    "classify lines 2 × 48": Task(lambda _: fresh(2, 48), lines(32), steps=300),
    "decoder 2 × 64": Task(lambda _: Decoder(2, 64, 2, 64), text(8, 64), cross_entropy, steps=250),
    "GPT 2 × 64": Task(lambda _: Tied(2, 64, 64), text(8, 64), cross_entropy, steps=250),
    "LSTM 64": Task(lambda _: ByteLSTM(1, 64), text(8, 48), cross_entropy, steps=250),
    "CNN, MNIST": Task(lambda _: convolutions(12, False, 1, 14), labelled(64), steps=250),
    "CNN, BatchNorm, CIFAR": Task(
        lambda _: convolutions(16, True, 3, 32), loaded(pictures(64, 10_000), 1000), steps=250
    ),
    "MLP, MNIST": Task(lambda _: relu(196, 128, 64, 10), labelled(64), steps=400),
    "deep MLP, MNIST": Task(lambda _: relu(196, 64, 64, 64, 64, 64, 10), labelled(256), steps=300),
    "auto-encoder": Task(lambda _: autoencoder((196, 128, 64, 16)), loaded(digits(128, every=2)), bits, steps=400),
    "regression, protein": Task(lambda _: MLP(288, 96, 96, 1), loaded(rows(128)), half_square, steps=400),
}


# Runs.


def optimizer(method: str, model: nn.Module, lr: float, length: Length) -> torch.optim.Optimizer:
    """A contender, by its name."""
    if method == "AdamW":
        return torch.optim.AdamW(model.parameters(), lr=lr, fused=next(model.parameters()).is_cuda)
    return ng.Natural(model, lr=lr) if method == "ng.Natural" else Natural(model, length=length, lr=lr)


def run(task: Task, method: str, lr: float, folder: Path, device: torch.device, length: Length | None = None) -> float:
    """The validation loss at the end; ∞ after a divergence."""
    torch.manual_seed(task.seed)
    model = task.network(folder).to(device)
    draw, validation = task.draw(folder)
    opt, generator = optimizer(method, model, lr, length or averaged), torch.Generator().manual_seed(task.seed)

    def loss_of(batch: Batch) -> Tensor:
        x, t = (a.to(device, non_blocking=True) for a in batch)
        with torch.autocast(device.type, torch.bfloat16, enabled=task.autocast):
            y = model(x)
        return task.loss(y.float(), t)

    for step in range(task.steps):
        for group in opt.param_groups:
            group["lr"] = lr * schedule(step, task.steps)
        opt.zero_grad()
        loss = loss_of(draw(generator))
        loss.backward()
        try:
            opt.step()
        except NonFiniteError:
            return math.inf
        if step % 50 == 0 and not math.isfinite(float(loss.detach())):
            return math.inf
    model.eval()
    with torch.no_grad():
        value = float(torch.stack([loss_of(batch) for batch in validation]).mean())
    return value if math.isfinite(value) else math.inf


@final
class Records:
    """The losses of a file, by task, method and learning rate."""

    def __init__(self, path: Path) -> None:
        self.path, self.losses = path, dict[tuple[str, str, float], float]()
        self.lengths: dict[str, dict[str, float]] = {}
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for r in map(json.loads, lines):
            if "lengths" in r:
                self.lengths[r["task"]] = r["lengths"]
            else:
                self.losses[r["task"], r["method"], r["lr"]] = r["loss"]

    def add(self, task: str, method: str, lr: float, loss: float, seconds: float) -> None:
        """One more."""
        self.losses[task, method, lr] = loss
        line = {"task": task, "method": method, "lr": lr, "loss": loss, "seconds": round(seconds, 2)}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def best(self, task: str, method: str) -> tuple[float, float]:
        """The best learning rate of the search, and its loss."""
        mine = {lr: loss for (t, m, lr), loss in self.losses.items() if (t, m) == (task, method) and lr in RATES}
        lr = min(mine, key=lambda lr: mine[lr], default=math.nan)
        return lr, mine.get(lr, math.nan)

    def default(self, task: str, method: str) -> float:
        """The loss at the method's default."""
        return self.losses.get((task, method, DEFAULTS.get(method, DEFAULT)), math.nan)

    def is_done(self, task: str, method: str) -> bool:
        """Whether the best rate has neighbours, which are then worse, and the default was run."""
        lr, _ = self.best(task, method)
        at = RATES.index(lr) if lr in RATES else 0
        near = {RATES[k] for k in (at - 1, at + 1) if 0 <= k < len(RATES)}
        return not math.isnan(self.default(task, method)) and all((task, method, r) in self.losses for r in near)


def search(name: str, method: str, folder: Path, records: Records, device: torch.device) -> None:
    """Run the default, and until the best rate has worse neighbours."""

    def loss(lr: float) -> float:
        if (name, method, lr) not in records.losses:
            began = time.perf_counter()
            value = run((TASKS | LARGE)[name], method, lr, folder, device)
            records.add(name, method, lr, value, time.perf_counter() - began)
        return records.losses[name, method, lr]

    tried = {RATES.index(DEFAULT)}
    while True:
        best = min(tried, key=lambda k: loss(RATES[k]))
        missing = [k for k in (best + 1, best - 1) if 0 <= k < len(RATES) and k not in tried]
        if not missing:
            loss(DEFAULTS.get(method, DEFAULT))
            return
        tried.add(missing[0])


def measure(name: str, folder: Path, records: Records) -> None:
    """How long each of ``LENGTHS`` would make a step, along the best run of ``ng.Natural``: geometric means."""
    logs, counts = dict.fromkeys(LENGTHS, 0.0), [0, 0]

    def length(found: Sequence[Found], memory: Memory) -> list[Tensor]:
        for f in found if counts[0] % EVERY == 0 else ():
            counts[1] += f.M.numel()
            for key, of in LENGTHS.items():
                logs[key] += f.M[0].numel() * float(of(f).clamp(min=1e-12).log().sum())
        counts[0] += 1
        return [usual(f) for f in found]

    lr, _ = records.best(name, "ng.Natural")
    run(TASKS[name], "measured", lr, folder, torch.device("cpu"), length)
    records.lengths[name] = {key: round(math.exp(log / counts[1]), 4) for key, log in logs.items()}
    with records.path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"task": name, "lengths": records.lengths[name]}) + "\n")


def searches(arguments: argparse.Namespace) -> None:
    """Every task and method in a process of its own, some at once, until the time is up."""
    waiting = [(task, method) for method in arguments.method for task in arguments.task]
    end, running = time.monotonic() + 60 * arguments.minutes, list[subprocess.Popen[bytes]]()
    common = ["--data", arguments.data, "--records", arguments.records, "--device", arguments.device]
    while (waiting or running) and time.monotonic() < end:
        while waiting and len(running) < arguments.processes:
            task, method = waiting.pop(0)
            command = [sys.executable, "-m", "benchmarks.rates", *map(str, common), "--task", task, "--method", method]
            running.append(subprocess.Popen(command))
        time.sleep(0.2)
        running = [p for p in running if p.poll() is None]
    for p in running:
        p.kill()


def main() -> None:
    """Runs, or the table of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--method", nargs="*", default=["AdamW", "ng.Natural", OTHER])
    parser.add_argument("--task", nargs="*", default=list(TASKS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    if arguments.measure:
        torch.set_num_threads(1)
        records = Records(arguments.records)
        for name in [t for t in arguments.task if t not in records.lengths and is_searched(records, t)]:
            measure(name, arguments.data, records)
        return
    if not arguments.report and (arguments.processes > 1 or math.isfinite(arguments.minutes)):
        searches(arguments)
    elif not arguments.report:
        torch.set_num_threads(1)
        for name in arguments.task:
            for method in arguments.method:
                search(name, method, arguments.data, Records(arguments.records), torch.device(arguments.device))
        return
    print(*tables(Records(arguments.records)), sep="\n\n")


def is_searched(records: Records, task: str) -> bool:
    return records.is_done(task, "AdamW") and records.is_done(task, "ng.Natural")


def tables(records: Records) -> tuple[str, str, str, str]:
    """Counts over the tasks; the best rates, with the losses there and at the defaults; other lengths and defaults.

    Counted are searches that are done.
    """
    methods = list(dict.fromkeys(method for _, method, _ in records.losses))
    rows, totals = list[list[str]](), list[list[str]]()
    for name in (*TASKS, *LARGE):
        done = [method for method in methods if records.is_done(name, method)]
        for method in done if len(done) > 1 else ():
            lr, loss = records.best(name, method)
            rows.append([name, method, f"{lr:.3g}", f"{loss:.4g}", f"{records.default(name, method):.4g}"])
    for method in methods[1:]:
        both = [t for t in (*TASKS, *LARGE) if records.is_done(t, method) and records.is_done(t, "AdamW")]
        adamw, mine = [records.best(t, "AdamW") for t in both], [records.best(t, method) for t in both]
        near = sum(0.45 < a[0] / b[0] < 2.2 for a, b in zip(adamw, mine, strict=True))
        below = sum(records.default(t, method) < records.default(t, "AdamW") for t in both)
        least = sum(b[1] < a[1] for a, b in zip(adamw, mine, strict=True))
        usual = sum(b[1] <= records.best(t, "ng.Natural")[1] for t, b in zip(both, mine, strict=True))
        totals.append([method, f"{len(both)}", *(f"{n}" for n in (near, below, least, usual))])
    head = ["method", "tasks", "best rate within 2 × of AdamW's", "default below AdamW's default"]
    counts = markdown_table([*head, "best below AdamW's best", "best at most that of ng.Natural"], totals)
    best = markdown_table(["task", "method", "best rate", "loss", "loss at the default"], rows)
    return counts, best, lengths(records), defaults(records)


def defaults(records: Records) -> str:
    """On how many tasks ``ng.Natural`` at one rate is below AdamW at its default, of those in which both were run."""
    rows = []
    for lr in sorted({DEFAULTS["ng.Natural"], *RATES[5:9]}):
        losses = [(records.losses.get((t, "ng.Natural", lr)), records.losses.get((t, "AdamW", DEFAULT))) for t in TASKS]
        pairs = [(mine, adamw) for mine, adamw in losses if mine is not None and adamw is not None]
        rows.append([f"{lr:g}", f"{sum(mine < adamw for mine, adamw in pairs)} of {len(pairs)}"])
    return markdown_table(["rate of ng.Natural", "below AdamW at its default"], rows)


def lengths(records: Records) -> str:
    """Of every length, what it is on each task, and the best rates it would have beside AdamW's.

    They are known up to a constant, so that the largest is given over the smallest, and how many lie within a factor of
    two of one, for the constant that is best.
    """
    names = [name for name in TASKS if name in records.lengths]
    rows = []
    for key in LENGTHS:
        sizes = [records.lengths[name][key] for name in names]
        quotients = sorted(
            records.best(name, "ng.Natural")[0] * records.lengths[name]["that of ng.Natural"] / size
            / records.best(name, "AdamW")[0]
            for name, size in zip(names, sizes, strict=True)
        )  # fmt: skip
        within = max((sum(low <= q <= 4 * low for q in quotients) for low in quotients), default=0)
        ends = [f"{min(sizes):.2g} to {max(sizes):.2g}", f"{quotients[-1] / quotients[0]:.0f}"] if names else ["", ""]
        rows.append([key, *ends, f"{within} of {len(names)}"])
    return markdown_table(
        ["as long as", "length, lr = 1", "best rates over AdamW's: largest / smallest", "within a factor of 2"], rows
    )


if __name__ == "__main__":
    main()
