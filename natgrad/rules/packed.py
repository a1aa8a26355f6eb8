"""Packed sequences as padded ones: where every entry of the data belongs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


@final
@dataclass(frozen=True)
class Places:
    """The example n and the time t of every row of a packed sequence's data; the examples are in the user's order.

    >>> from torch.nn.utils.rnn import pack_padded_sequence
    >>> packed = pack_padded_sequence(torch.tensor([[[1.0], [0.0]], [[2.0], [3.0]]]), torch.tensor([1, 2]), True, False)
    >>> packed.data.flatten()
    tensor([2., 1., 3.])
    >>> places = Places.of(packed)
    >>> places.pad(packed.data).squeeze(-1)
    tensor([[1., 0.],
            [2., 3.]])
    >>> places.mask(packed.data)
    tensor([[1., 0.],
            [1., 1.]])
    """

    example: Tensor  # [row]
    time: Tensor  # [row]
    n: int
    steps: int

    @staticmethod
    def of(packed: PackedSequence) -> Places:
        sizes = packed.batch_sizes  # on the CPU, [t]: the examples are sorted by length, and this many have a time t
        starts = sizes.cumsum(0) - sizes
        time = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        example = (torch.arange(len(time)) - starts[time]).to(packed.data.device)
        if packed.sorted_indices is not None:
            example = packed.sorted_indices[example]
        return Places(example, time.to(packed.data.device), int(sizes[0]), len(sizes))

    def pad(self, data: Tensor) -> Tensor:
        """[row ·] → [n t ·], zero where an example has ended."""
        return data.new_zeros(self.n, self.steps, data.shape[1]).index_put((self.example, self.time), data)

    def pack(self, padded: Tensor) -> Tensor:
        """The inverse of ``pad``."""
        return padded[self.example, self.time]

    def mask(self, data: Tensor) -> Tensor:
        """[n t], one where an example has not ended."""
        return self.pad(data.new_ones(len(data), 1)).squeeze(-1)
