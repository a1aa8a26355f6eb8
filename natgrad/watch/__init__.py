"""Checks beside an optimizer: is the trained loss the given one, and the model still the one it was made for?

``opt.watchers`` lists them. They see what passes return, what backward passes send there, and the gradients of a step,
and decide nothing: without them, ``opt.watchers.clear()``, every step is the same, only mistakes are not reported.

>>> import torch, natgrad as ng
>>> opt = ng.KFAC(torch.nn.Linear(2, 1), torch.nn.MSELoss())
>>> [type(watcher).__name__ for watcher in opt.watchers]
['ModelWatch', 'LossWatch']
>>> opt.watchers.clear()
"""

from natgrad.watch.base import Watcher as Watcher
from natgrad.watch.loss import LossWatch as LossWatch
from natgrad.watch.loss import ScaleWatch as ScaleWatch
from natgrad.watch.model import ModelWatch as ModelWatch
