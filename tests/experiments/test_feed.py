"""What a network sees of an epoch: shuffled images, and all crops of each."""

from __future__ import annotations

import torch

from experiments.images import Feed, Scale, Split


def feed(split: Split, batch: int, seed: int = 0) -> Feed:
    """Of pixels that are not scaled."""
    return Feed.of(split, Scale(torch.zeros(3), torch.ones(3)), batch, torch.Generator().manual_seed(seed))


def test_the_crops_begin_at_all_nine_rows_and_columns_of_the_padding_alike_with_and_without_mirror() -> None:
    """Four pixels around 32 × 32 leave 9 × 9 crops, and 2 mirrors of each."""
    n = 9 * 9 * 2 * 50
    index = torch.arange(1, 33, dtype=torch.uint8)
    rows, columns = index[:, None].expand(32, 32), index.expand(32, 32)
    image = torch.stack([rows, columns, torch.zeros_like(rows)], dim=-1)  # a pixel says where it was
    split = Split(image.expand(n, 32, 32, 3), torch.zeros(n, dtype=torch.int64))
    ((x, _),) = feed(split, n).epoch()
    row = x[:, 0, 16, 16] - 13  # the middle is never padding
    mirrored = x[:, 1, 16, 17] < x[:, 1, 16, 16]
    column = x[:, 1, 16, 16] - torch.where(mirrored, 12, 13)
    counts = torch.bincount(((row * 9 + column) * 2 + mirrored).long(), minlength=162)
    assert counts.shape == (162,)
    assert int(counts.sum()) == n
    assert 20 < int(counts.min()) <= int(counts.max()) < 90  # 50 ± 7


def test_an_epoch_is_shuffled_and_every_epoch_and_seed_in_another_way() -> None:
    split = Split(torch.zeros(64, 1, 1, 3, dtype=torch.uint8), torch.arange(64))
    one, other = feed(split, 16), feed(split, 16, seed=1)
    orders = [torch.cat([t for _, t in source.epoch()]).tolist() for source in (one, one, other)]
    assert all(sorted(order) == list(range(64)) for order in orders)
    assert len({tuple(order) for order in (*orders, list(range(64)))}) == 4
