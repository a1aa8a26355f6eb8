"""Which tensors of a graph hold their examples in order, proven from the operations alone.

A tensor keeps the order of the n examples if its elements, row after row, are those of the first example, then those
of the second, and so on: its first axis has n, 2n, … entries. A reshape keeps the order, and so does every operation
that works on each entry of the first axis by itself. Going down from the outputs y [n *out], a node whose tensors are
ordered, and that only such operations separate from y, is proven.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from natgrad.pullback.graph import leaf_below, nodes


def _names(*names: str) -> frozenset[str]:
    return frozenset(f"{name}Backward{version}" for name in names for version in range(4))


# Functions of every number by itself, or of the numbers of several tensors at the same place.
_ELEMENTWISE = _names(
    *("Add", "Sub", "Rsub", "Mul", "Div", "Neg", "Pow", "Exp", "Log", "Log1P", "Sqrt", "Rsqrt", "Reciprocal", "Sin"),
    *("Cos", "Abs", "Erf", "Clamp", "ClampMin", "ClampMax", "Maximum", "Minimum", "Where", "MaskedFill", "Lerp"),
    *("Relu", "LeakyRelu", "Threshold", "Elu", "Gelu", "Silu", "Mish", "Tanh", "Sigmoid", "Softplus", "LogSigmoid"),
    *("Hardtanh", "Hardswish", "Hardsigmoid", "Celu", "Selu", "ToCopy", "Clone", "Alias", "NativeDropout", "Square"),
    "PreluKernel",
)
# Reshapes: the row-major order of the elements stays.
_RESHAPES = _names("View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Flatten", "Reshape")
# Operations on every entry of the first axis by itself, whose parameters are leaves.
_ROWWISE = _names(
    *("Bmm", "Baddbmm", "NativeLayerNorm", "NativeGroupNorm", "FusedRmsNorm", "Convolution", "ConvolutionOverrideable"),
    *("MaxPool1DWithIndices", "MaxPool2DWithIndices", "MaxPool3DWithIndices", "AvgPool1D", "AvgPool2D", "AvgPool3D"),
    *("AdaptiveAvgPool2D", "AdaptiveAvgPool3D", "AdaptiveMaxPool2D", "MkldnnAdaptiveAvgPool2D", "ConstantPadNd"),
    *("ReflectionPad1D", "ReflectionPad2D", "ReplicationPad1D", "ReplicationPad2D", "UpsampleNearest2D", "Glu"),
    *("UpsampleBilinear2D", "Embedding", "Prelu", "MkldnnConvolution", "CudnnConvolution", "MiopenConvolution"),
    *("ScaledDotProductFlashAttention", "ScaledDotProductFlashAttentionForCpu", "ScaledDotProductEfficientAttention"),
    *("ScaledDotProductCudnnAttention", "ScaledDotProductFusedAttentionOverrideable"),
)
# Operations along one axis or several.
_ALONG = _names("Softmax", "LogSoftmax", "SafeSoftmax", "Cat", "Stack", "Split", "SplitWithSizes", "Unbind", "Slice",
                "Select", "Sum", "Mean", "Logsumexp", "Transpose", "Cumsum", "Narrow", "Chunk", "Flip", "Amax",
                "SoftmaxBackwardData", "Var", "VarMean")  # fmt: skip
_PRODUCTS = {"AddmmBackward0": 2, "MmBackward0": 1}  # where the weight is: (bias, rows, weight), (rows, weight)
_NORMS = _names("NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm")
_FORK = "ForkBackward"

# Where a row goes depends on numbers that the graph does not name.
DATA_DEPENDENT = _names(
    *("Index", "IndexSelect", "Gather", "Take", "Scatter", "ScatterAdd", "IndexPut", "IndexAdd", "IndexCopy"),
    *("MaskedSelect", "MaskedScatter", "Sort", "Topk", "Permutation", "PackPaddedSequence", "IndexFill", "Unique"),
)


def ordered(y: Tensor) -> tuple[set[Any], set[Any]]:
    """The nodes whose outputs are proven to hold their examples in order, and all nodes below y."""
    n = y.shape[0]
    proven: set[Any] = set()
    doubtful: list[Any] = []
    stack = [y.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in proven:
            continue
        proven.add(node)
        kept = _keeps(node)
        for at, (child, output) in enumerate(node.next_functions):
            if child is None or leaf_below(child) is not None:
                continue
            if kept and _follows(node, at, child, output, n):
                stack.append(child)
            elif not (node.name() == _FORK and at == 0):  # the way of the user's gradient, which the metric never goes
                doubtful.append(child)
    return proven - set(nodes(doubtful)), set(nodes([y.grad_fn]))


def _keeps(node: Any) -> bool:
    """Whether an operation works on every entry of the first axis by itself."""
    name = node.name()
    if hasattr(node, "_saved_normalized_shape") and len(node._saved_normalized_shape) == len(_shape(node, 0)):
        return False
    if name in _ELEMENTWISE or name in _RESHAPES or name in _ROWWISE or name == _FORK:
        return True
    if name in _PRODUCTS:
        return leaf_below(node.next_functions[_PRODUCTS[name]][0]) is not None
    if name in _ALONG:
        return 0 not in _axes(node)
    if name == "PermuteBackward0":
        return bool(node._saved_dims[0] == 0)
    if name == "ExpandBackward0":
        return len(node._saved_self_sym_sizes) == len(_shape(node, 0))
    return name in _NORMS and not getattr(node, "_saved_training", True)


def _follows(node: Any, at: int, child: Any, output: int, n: int) -> bool:
    """Whether an argument of an order-keeping operation is ordered where its result is."""
    name, result, argument = node.name(), _shape(node, 0), _shape(child, output)
    if name == _FORK and at == 0:
        return False
    if not argument or argument[0] == 0 or argument[0] % n:
        return False
    if name in _RESHAPES:
        return True
    # Spread over the examples from a smaller tensor, or from one whose first axis means something else.
    return argument[0] == result[0] and (name not in _ELEMENTWISE or len(argument) == len(result))


def _shape(node: Any, output: int) -> tuple[int, ...]:
    return tuple(node._input_metadata[output].shape)


def _axes(node: Any) -> set[int]:
    """The axes that an operation works along, counted from the front; all where it does not say."""
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    d = len(_shape(node, 0)) if sizes is None else len(sizes)
    found = [getattr(node, key) for key in ("_saved_dim", "_saved_dim0", "_saved_dim1") if hasattr(node, key)]
    if not found or any(axes is None for axes in found):
        return set(range(d))
    flat = [axis for axes in found for axis in (axes if isinstance(axes, (tuple, list)) else (axes,))]
    return {_signed(axis) % d for axis in flat} if flat else set(range(d))


def _signed(axis: int) -> int:
    """Saved axes are unsigned: −1 comes as 2⁶⁴ − 1."""
    return axis - 2**64 if axis >= 2**63 else axis
