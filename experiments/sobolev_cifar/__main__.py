"""``python -m experiments.sobolev_cifar``."""

from experiments.sobolev_cifar.command import main

main()
