"""
Fine-tuning by low-rank adapters in Trainer
===========================================

A tiny GPT-2 of bytes is trained on natgrad's own source code. Then it is frozen, and adapters of rank 4 learn the same
code in capitals, in the ``Trainer`` of transformers. Freeze before you make the optimizer: only what is trainable is
stepped. Each optimizer has the best of three learning rates, by the last loss; lower is better.
"""

import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments

import natgrad as ng
from examples.gallery import style

LENGTH = 48  # bytes in an example
code = "".join(path.read_text(encoding="ascii", errors="ignore") for path in Path(ng.__file__).parent.glob("*.py"))


class Adapted(nn.Module):
    def __init__(self, layer: nn.Module, inputs: int, outputs: int, rank: int = 4) -> None:
        super().__init__()
        self.layer, self.down, self.up = layer, nn.Linear(inputs, rank), nn.Linear(rank, outputs, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


def train(model: nn.Module, kind: Any, lr: float, text: str, steps: int) -> Tensor:
    rows = torch.tensor(list(text.encode())).unfold(0, LENGTH, LENGTH)
    length: Any = {"max_steps": steps, "per_device_train_batch_size": 16, "logging_steps": 10}
    quiet: Any = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "use_cpu": True}
    arguments = TrainingArguments(tempfile.mkdtemp(), **length, **quiet)
    data, opt = [{"input_ids": row, "labels": row} for row in rows], kind(model.parameters(), lr=lr)
    trainer = Trainer(model, arguments, train_dataset=data, optimizers=(opt, None))
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return torch.tensor([entry["loss"] for entry in trainer.state.log_history[:-1]])


fig, (ax,) = style.figure(width=6)
sizes: Any = {"vocab_size": 256, "n_positions": LENGTH, "n_embd": 64, "n_layer": 2, "n_head": 4}
base: Any = GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **sizes))
train(base, torch.optim.AdamW, 3e-3, code, style.size(300, 10))
base.requires_grad_(False)
for block in base.transformer.h:
    block.attn.c_attn, block.mlp.c_fc = Adapted(block.attn.c_attn, 64, 192), Adapted(block.mlp.c_fc, 64, 256)
ax.set(title="training loss of the adapters, mean of 10 steps", xlabel="step", ylabel="nats a byte")
for name, kind in {"AdamW": torch.optim.AdamW, "ng.Natural": ng.Natural}.items():
    tried = ((copy.deepcopy(base), kind, lr) for lr in (0.003, 0.01, 0.03))
    best = min((train(*each, code.upper(), style.size(100, 10)) for each in tried), key=lambda losses: losses[-1])
    ax.plot(10.0 * torch.arange(1, len(best) + 1), best, color=style.COLOURS[name], label=name)
style.name_lines(ax)
