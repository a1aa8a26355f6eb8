"""Everything that depends on the device: products and inverses, CUDA graphs, fused updates, private torch functions.

The rest of the library asks questions (``devices``) and calls functions whose results do not depend on the device.
"""
