"""Kernels of a model's inputs: Matérn kernels as reproducing kernels of Sobolev spaces, and their matrices."""
