"""VGG16 with batch normalisation for images of 32 × 32 pixels, as the code that paper 000 builds on has it."""

from __future__ import annotations

import math

from torch import nn

_PLAN = (1, 1, 0, 2, 2, 0, 4, 4, 4, 0, 8, 8, 8, 0, 8, 8, 8, 0)  # channels in units of the width; 0: a pooling layer


def vgg16(classes: int, width: int = 64) -> nn.Sequential:
    """Thirteen convolutions 3 × 3 (Conv, BatchNorm, ReLU) and one linear layer 8·width → classes (000 §6.3).

    Weights are drawn from N(0, 2/(9·o)) in convolutions with o outputs and from N(0, 10⁻⁴) in the last layer, biases
    are zero, as in the KFAC-Pytorch of Wang (2019).

    >>> sum(p.numel() for p in vgg16(10).parameters())
    14728266
    """
    layers: list[nn.Module] = []
    i = 3
    for o in (width * channels for channels in _PLAN):
        if o == 0:
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU()]
        i = o
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(i, classes))
    for module in model:
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            spread = math.sqrt(2 / (9 * module.out_channels)) if isinstance(module, nn.Conv2d) else 0.01
            nn.init.normal_(module.weight, 0.0, spread)
            assert module.bias is not None
            nn.init.zeros_(module.bias)
    return model
