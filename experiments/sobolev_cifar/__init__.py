"""Sobolev K-FAC against K-FAC on CIFAR (Bai, Rosenberg and Xu 2022). The command line is in ``command``."""
