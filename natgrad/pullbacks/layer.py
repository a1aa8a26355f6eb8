"""Blocks: the parameters of a model by layers, those of each packed as W [c o i], and how its positions are counted."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeAlias, final

import torch
from torch import Tensor, nn

from natgrad.accelerate.autograd import is_view_of
from natgrad.model import Model
from natgrad.pullbacks.example_grads import ExampleGrads, slices
from natgrad.rules.base import Keys, Rule, check_packing, trainable
from natgrad.rules.features import Features, Moment
from natgrad.show import brief


@final
@dataclass(frozen=True)
class ParameterSlice:
    """The position of a parameter: its local name in the layer, its start in the flattening order, its shape."""

    key: str
    start: int
    shape: torch.Size

    @property
    def span(self) -> slice:
        return slice(self.start, self.start + self.shape.numel())


@final
@dataclass(frozen=True)
class Block:
    """The parameters of one layer, as structures see them.

    A weight that is tied between modules of different kinds (an embedding and the head of a language model) has one
    facet for each kind. It is packed as in the first facet, whose rule and modules are also those of the block.

    Attributes:
        names: The names of the parameters.
        slices: Where they lie in flattening order.
        shape: [c o i] of the packed parameters W; without a rule they are one column [1 p 1].
        device: Where they are.
        rule: The layer rule, or None.
        modules: The modules that use them.
        facets: One for each kind of module, if there are several.
    """

    names: tuple[str, ...]
    slices: tuple[ParameterSlice, ...]
    shape: tuple[int, int, int]
    device: torch.device
    rule: Rule | None = None
    modules: tuple[nn.Module, ...] = ()
    facets: tuple[Facet, ...] = ()

    __repr__ = brief

    @cached_property
    def kinds(self) -> tuple[Block, ...]:
        """One block for each kind of module; the block itself, if there is only one kind."""
        return tuple(facet.block for facet in self.facets) or (self,)

    @cached_property
    def owners(self) -> tuple[nn.Module, ...]:
        """The modules of all kinds."""
        return tuple(module for kind in self.kinds for module in kind.modules)

    @property
    def sparse(self) -> bool:
        """Whether the factor A is diagonal for all inputs (one-hot inputs)."""
        if not self.facets:
            return self.rule is not None and self.rule.one_hot
        return all(facet.block.sparse and not facet.transposed for facet in self.facets)

    @property
    def factor_groups(self) -> int:
        """How many factors S, and A, there are: one for every group c, or one for all."""
        return 1 if self.rule is not None and self.rule.shares_factors else self.shape[0]

    @property
    def size(self) -> int:
        """The number of parameters."""
        return math.prod(self.shape)

    @property
    def features(self) -> int:
        """i without the homogeneous 1 of a bias: how many numbers the weight reads.

        >>> import natgrad as ng
        >>> (block,) = ng.pullback(nn.Linear(3, 2), torch.zeros(4, 3), ng.Euclidean()).layers
        >>> block.shape, block.features
        ((1, 2, 4), 3)
        """
        column = self.shape[0] * self.shape[1]
        return self.shape[2] - sum(place.shape.numel() == column for place in self.slices[1:])

    @property
    def title(self) -> str:
        """The names of the parameters, for messages and tables."""
        return " + ".join(self.names)

    @cached_property
    def keys(self) -> Keys:
        """The local names, in the order of ``slices``."""
        return tuple(place.key for place in self.slices)

    @cached_property
    def named_slices(self) -> dict[str, ParameterSlice]:
        """The positions by the names of the parameters, in flattening order."""
        return dict(zip(self.names, sorted(self.slices, key=lambda place: place.start), strict=True))

    @cached_property
    def index(self) -> Tensor:
        """[p]: the index in the flattening order of each packed coordinate, row-major over [c o i].

        Computed lazily, because it has as many integers as there are parameters.
        """
        spans = (torch.arange(place.span.start, place.span.stop, device=self.device) for place in self.slices)
        if self.rule is None:
            return torch.cat(list(spans))
        local = {place.key: span.view(place.shape) for place, span in zip(self.slices, spans, strict=True)}
        return self.rule.pack(self.modules[0], local).reshape(-1)

    def pack(self, flat: Tensor) -> Tensor:
        """W [*batch c o i] from flattened parameters [*batch p]."""
        if flat.ndim == 1:
            return self.packed({name: flat[place.span].view(place.shape) for name, place in self.named_slices.items()})
        bare = self.rule is None  # an index has as many integers as there are parameters
        packed = torch.cat([flat[..., place.span] for place in self.slices], -1) if bare else flat[..., self.index]
        return packed.reshape(*flat.shape[:-1], *self.shape)

    def unpack(self, packed: Tensor, flat: Tensor) -> None:
        """Write W [*batch c o i] into flattened parameters [*batch p]."""
        named = self.unpacked(packed.reshape(*flat.shape[:-1], *self.shape))
        for name, place in self.named_slices.items():
            flat[..., place.span].view(flat.shape[:-1] + place.shape).copy_(named[name])

    def packed(self, named: Mapping[str, Tensor]) -> Tensor:
        """W [c o i] from named tensors, without flattening."""
        if self.rule is None:
            return torch.cat([named[name].reshape(-1) for name in self.names]).view(self.shape)
        local = {key: named[name] for key, name in self._named.items()}
        return self.rule.pack(self.modules[0], local).reshape(self.shape)

    def unpacked(self, packed: Tensor) -> dict[str, Tensor]:
        """Named tensors [*batch *shape] from W [*batch c o i]."""
        batch, slices = packed.shape[:-3], self.named_slices
        if self.rule is None:
            pieces = packed.reshape(*batch, -1).split([place.shape.numel() for place in slices.values()], dim=-1)
            pairs = zip(slices.items(), pieces, strict=True)
            return {name: piece.view(batch + place.shape) for (name, place), piece in pairs}
        local = self.rule.unpack(self.modules[0], self.keys, packed)
        return {name: local[place.key] for name, place in slices.items()}

    def columns(self, named: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """The blocks of columns [c o j] of W, by the names of the parameters; None if the rule has its own packing."""
        if self.rule is None:
            return None
        local = {key: named[name] for key, name in self._named.items()}
        columns = self.rule.columns(self.modules[0], local)
        if columns is None or any(block.shape[:2] != self.shape[:2] for block in columns.values()):
            return None
        return {self._named[key]: block for key, block in columns.items()}

    @cached_property
    def _named(self) -> dict[str, str]:
        """The names of the parameters by their keys, in the order of W."""
        names = {place.key: name for name, place in self.named_slices.items()}
        return {key: names[key] for key in self.keys}

    def separated(self) -> list[Block]:
        """One block for each parameter: the weight, and the bias."""
        if self.rule is None or len(self.slices) < 2:
            return [self]
        shape, module = self.rule.shape, self.modules[0]
        named = self.named_slices.items()
        return [replace(self, names=(name,), slices=(at,), shape=shape(module, (at.key,))) for name, at in named]

    def without_rule(self) -> Block:
        """The same parameters without the rule; ``torch.func`` differentiates them."""
        ordered = tuple(self.named_slices.values())
        return replace(self, slices=ordered, shape=(1, self.size, 1), rule=None, modules=(), facets=())

    @staticmethod
    def of_rows(blocks: Sequence[Block]) -> Block:
        """One block without a rule for the parameters of several blocks."""
        pairs = [pair for block in blocks for pair in block.named_slices.items()]
        names, slices = zip(*sorted(pairs, key=lambda pair: pair[1].start), strict=True)
        return Block(names, slices, (1, sum(block.size for block in blocks), 1), blocks[0].device)


@final
@dataclass(frozen=True)
class Facet:
    """A tied weight in the modules of one kind: packed like the block's W [c o i], or transposed [c i o]."""

    block: Block
    transposed: bool = False


@final
@dataclass(frozen=True)
class _Claim:
    """One module's claim on a parameter: its local name, and in which of the module's layers it is."""

    module: nn.Module
    rule: Rule | None
    key: str
    layer: int

    @property
    def where(self) -> tuple[int, int]:
        return id(self.module), self.layer


_Claims: TypeAlias = dict[str, list[_Claim]]


def partition(model: Model, rules: Sequence[Rule]) -> list[Block]:
    """Blocks of all trainable parameters, in flattening order: one for each layer, with its rule if it has one.

    Parameters that share a layer in every module that has them form one block; with several modules it has several
    uses. A weight that one kind of module packs as the transpose of another kind (an embedding and a linear layer) has
    a facet for each. A parameter has no rule if one of its modules has none, or if two modules pack it in ways that do
    not fit together; such parameters form blocks with those whose names agree up to the last dot.
    """
    slices, start = {}, 0
    for name, p in model.params.items():
        slices[name] = ParameterSlice(name, start, p.shape)
        start += p.numel()
    claims = _claims(model, rules)
    grouped: dict[object, list[str]] = defaultdict(list)
    for name in model.params:
        of_name = claims.get(name, [])
        ruled = bool(of_name) and all(claim.rule for claim in of_name)
        grouped[tuple(c.where for c in of_name) if ruled else name.rpartition(".")[0]].append(name)
    blocks = []
    for group, names in grouped.items():
        size = sum(slices[name].shape.numel() for name in names)
        block = Block(tuple(names), tuple(slices[name] for name in names), (1, size, 1), model.example.device)
        blocks.append(_with_rule(block, claims) if isinstance(group, tuple) else block)
    return blocks


def _claims(model: Model, rules: Sequence[Rule]) -> _Claims:
    """The claims of all modules on the trainable parameters, by parameter."""
    claims: _Claims = defaultdict(list)
    if model.module is None:
        return claims
    names = {id(p): name for params in (model.params, model.leaves) for name, p in params.items()}
    spoken_for: set[nn.Module] = set()  # submodules whose parameters belong to the rule of a parent
    for module in model.module.modules():
        if module in spoken_for:
            continue
        rule = next((rule for rule in rules if rule.covers(module)), None)
        # Parameters of the module that its rule does not cover are claimed without a rule.
        params = trainable(module) if rule is None else trainable(module) | rule.parameters(module)
        params = {key: p for key, p in params.items() if id(p) in names}  # the model may be of some of them only
        layers = () if rule is None else rule.layers(module)
        spoken_for |= {module.get_submodule(key.rpartition(".")[0]) for key in params if "." in key}
        for key, p in params.items():
            layer = next((at for at, keys in enumerate(layers) if key in keys), -1)
            claims[names[id(p)]].append(_Claim(module, rule if layer >= 0 else None, key, layer))
    return claims


def _with_rule(block: Block, claims: _Claims) -> Block:
    """The block with the rules of its modules, or without a rule if they have no common packing."""
    kinds: dict[object, list[tuple[_Claim, ...]]] = defaultdict(list)
    for owner in zip(*(claims[name] for name in block.names), strict=True):
        kinds[type(owner[0].rule), tuple(claim.key for claim in owner)].append(owner)
    blocks = [_of_kind(block, owners) for owners in kinds.values()]
    if len(blocks) == 1 or any(kind.rule is None for kind in blocks):
        return blocks[0] if len(blocks) == 1 else block
    modules = [module for kind in blocks for module in kind.modules]
    # A module with one parameter under two names puts it into the graph twice in one call.
    return block if len(set(modules)) < len(modules) else _tied(block, blocks)


def _of_kind(block: Block, owners: Sequence[tuple[_Claim, ...]]) -> Block:
    """The block with the rule of modules of one kind, or without a rule if their shapes differ."""
    rule, modules = owners[0][0].rule, tuple(owner[0].module for owner in owners)
    assert rule is not None
    order = rule.layers(modules[0])[owners[0][0].layer]
    named = (replace(place, key=claim.key) for place, claim in zip(block.slices, owners[0], strict=True))
    slices = tuple(sorted(named, key=lambda place: order.index(place.key)))
    shapes = {rule.shape(m, tuple(place.key for place in slices)) for m in modules}
    if len(shapes) > 1:
        return block
    shape = shapes.pop()
    check_packing(rule, block.names, shape, block.size)
    return replace(block, slices=slices, shape=shape, rule=rule, modules=modules)


def _tied(block: Block, kinds: Sequence[Block]) -> Block:
    """The kinds as facets of one block, if each packs it like the first or transposed.

    The first is one without one-hot inputs: the linear layer with W [1 V d], not the embedding with W [1 d V].
    """
    first = next((kind for kind in kinds if not kind.sparse), kinds[0])
    facets = [_facet(first, kind) for kind in (first, *(kind for kind in kinds if kind is not first))]
    valid = tuple(facet for facet in facets if facet is not None)
    return replace(first, facets=valid) if len(valid) == len(facets) else block


def _facet(first: Block, kind: Block) -> Facet | None:
    one, other = _packed_view(first), _packed_view(kind)
    if one is None or other is None:
        return None
    for transposed in (False, True):
        turned = other.mT if transposed else other
        if turned.shape == one.shape and any(
            a.is_contiguous() and b.is_contiguous() for a, b in ((one, turned), (one.mT, turned.mT))
        ):
            return Facet(kind, transposed)
    return None


def _packed_view(kind: Block) -> Tensor | None:
    """W as a view of its only parameter, on the meta device, for its strides; None if W is not a view."""
    if len(kind.slices) > 1 or kind.rule is None:
        return None
    flat = torch.empty(kind.slices[0].shape, device="meta")
    packed = kind.rule.pack(kind.modules[0], {kind.keys[0]: flat})
    return packed if is_view_of(packed, flat) else None


# Weights tied between two kinds of modules: the embedding of a language model and its head.
#
# The head is z = W a with W [V d]; the embedding is z = Wᵀ e with e one-hot. The row of example n is the sum of both,
#
#     R_kn = Σ_r g_knr a_nrᵀ + Σ_r e_nr h_knrᵀ          (g, h the cotangents of head and embedding)
#
# exactly. For a Kronecker product each kind u has factors S_u on the side of V and A_u on the side of d (for the
# embedding: the diagonal of word counts, and the second moment of h). As between layers, cross terms between kinds are
# neglected, and the sum of products is replaced by one product,
#
#     Σ_u S_u ⊗ A_u ≈ S ⊗ A,   S = Σ_u tr(A_u) S_u,   A = Σ_u tr(S_u) A_u / Σ_u tr(S_u) tr(A_u),
#
# with the same trace and the same two partial traces. It equals the sum if only one kind has a gradient, or if all S_u
# or all A_u are multiples of each other; otherwise it is an approximation.


def joined(block: Block, pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """S and A of a block from the pairs of its kinds, each in its own packing (the formula above).

    >>> import natgrad as ng
    >>> model = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False))
    >>> model[1].weight = model[0].weight
    >>> pb = ng.pullback(model, torch.tensor([[0, 1], [2, 4]]), ng.Euclidean())
    >>> {name: tuple(factor.shape) for name, factor in ng.Kronecker().estimate(pb).tensors().items()}
    {'0.weight/S': (1, 5, 5), '0.weight/A': (1, 3, 3)}
    """
    if not block.facets:
        return pairs[0]
    # On the sides of o and i of the block.
    sides = [(a, s) if facet.transposed else (s, a) for facet, (s, a) in zip(block.facets, pairs, strict=True)]
    weights = [(trace(a), trace(s)) for s, a in sides]
    total = sum((x * y for x, y in weights[1:]), start=weights[0][0] * weights[0][1])
    S = _sum([_times(s, of_a) for (s, _), (of_a, _) in zip(sides, weights, strict=True)])
    A = _sum([_times(a, of_s) for (_, a), (_, of_s) in zip(sides, weights, strict=True)])
    # If all gradients are zero, S or A is zero, and the other is arbitrary.
    return S, _times(A, torch.where(total > 0, total, 1.0).reciprocal())


def trace(factor: Tensor) -> Tensor:
    """The trace [c] of a factor [c d d], or of a diagonal [c d]."""
    return factor.sum(-1) if factor.ndim == 2 else factor.diagonal(dim1=-2, dim2=-1).sum(-1)


def _times(factor: Tensor, weight: Tensor) -> Tensor:
    """A factor times one number [c] for each group."""
    return factor * weight.view(-1, *[1] * (factor.ndim - 1))


def _sum(factors: Sequence[Tensor]) -> Tensor:
    """The sum of matrices [c d d] and diagonals [c d], in place; a diagonal only if all are."""
    first, *others = sorted(factors, key=lambda factor: factor.ndim, reverse=True)
    for other in others:
        (first if first.ndim == other.ndim else first.diagonal(dim1=-2, dim2=-1)).add_(other)
    return first


@final
@dataclass(frozen=True)
class Tied:
    """Per-example gradients of a tied weight, from a [n r c i] and g [k n r c o] of each kind.

    They have no common factors: on the side of o, the columns k of the root are in g for one kind and absent for the
    other.
    """

    block: Block
    a: Sequence[Tensor]
    g: Sequence[Tensor]

    @staticmethod
    def of(block: Block, pairs: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype) -> Tied:
        """From (a, g) of each kind, in this dtype."""
        return Tied(block, [a.to(dtype) for a, _ in pairs], [g.to(dtype) for _, g in pairs])

    def at(self, examples: slice) -> ExampleGrads:
        """Explicit rows of a slice of the examples, in flattening order."""
        block = self.block
        assert block.rule is not None
        local = block.rule.unpack(block.modules[0], block.keys, self._rows(examples))
        return ExampleGrads.of_rows(local[block.keys[0]].flatten(2))

    def rows(self, limit: int) -> Iterator[Tensor]:
        """R [k n c o i], packed like the block, in chunks of up to ``limit`` numbers (at least one example)."""
        return map(self._rows, slices(self.a[0].shape[0], limit // self.numbers))

    @property
    def numbers(self) -> int:
        """The size of the rows of one example."""
        return self.g[0].shape[0] * self.block.size

    def _rows(self, examples: slice) -> Tensor:
        out: Tensor | None = None
        for facet, a, g in zip(self.block.facets, self.a, self.g, strict=True):
            rows = ExampleGrads(a[examples], g[:, examples]).rows().unflatten(-1, facet.block.shape)
            rows = rows.mT if facet.transposed else rows
            out = rows if out is None else out.add_(rows)
        assert out is not None
        return out


def formed(factors: Sequence[ExampleGrads | Tied], limit: int) -> Iterator[list[ExampleGrads]]:
    """Factors of all blocks. With a tied weight, in chunks of examples whose rows have up to ``limit`` numbers.

    All chunks use the same forward pass.
    """
    tied = [f for f in factors if isinstance(f, Tied)]
    if not tied:
        yield [f for f in factors if isinstance(f, ExampleGrads)]
        return
    n = tied[0].a[0].shape[0]
    for examples in slices(n, limit // sum(f.numbers for f in tied)):
        yield [f.at(examples) for f in factors]


# Weight sharing in K-FAC: which positions of an example count, and how they enter the two factors.


LARGEST = 16384  # rows of a factor that is kept whole: 1 GiB in single precision


@final
@dataclass(frozen=True)
class Sharing:
    """How the positions r of an example that share a weight enter A and S, and which factors are kept diagonal.

        expand:  A = Σ_nr a aᵀ/(N·R),              S = Σ_kn Σ_r g gᵀ/N        (Grosse and Martens 2016)
        reduce:  A = Σ_n ā āᵀ/N, ā = mean_r a,     S = Σ_kn ĝ ĝᵀ/N, ĝ = Σ_r g (Eschenhagen et al. 2023)

    Both are exact for one position, R = 1, up to the independence of a and g. Positions that the loss does not see, and
    those that a layer masks, count neither in the sum nor in N·R. Of a factor with more than ``largest`` rows, that of
    a bias not counted, only the diagonal is formed. The second moment of one-hot inputs is kept diagonal too, also that
    of their means.
    """

    how: Literal["expand", "reduce"] = "expand"
    largest: int = LARGEST

    def only_diagonal(self, block: Block) -> tuple[bool, bool]:
        """Whether only the diagonals of A and of S are kept."""
        return block.sparse or block.features > self.largest, block.shape[1] > self.largest

    def inputs(self, a: Features) -> Features:
        """The a whose second moment is A."""
        return a.reduced("mean") if self.how == "reduce" else a

    def outputs(self, g: Features) -> Features:
        """The g whose second moment is S."""
        return g.reduced("sum") if self.how == "reduce" else g

    def input_moment(self, shared: Features, block: Block) -> Moment:
        """The sum of A, before it is divided by the count, from ``inputs``."""
        return shared.squares() if self.only_diagonal(block)[0] else shared.moment()

    def counted_moment(self, a: Features, block: Block, there: Tensor | None, weights: Tensor | None) -> Moment:
        """The sum of A, before it is divided by the count, from the inputs of a layer.

        ``there`` [n r]: the positions that count (``VisiblePositions``). ``weights`` [n]: 1 for examples that count.
        With "expand", ``there`` is enough: an example that does not count has no position that does.
        """
        shared = self.inputs(counted(a, there))
        if weights is None or (there is not None and self.how == "expand"):
            return self.input_moment(shared, block)
        return self.input_moment(shared.weight_examples(weights), block).over(shared.count(weights))

    def output_moment(self, shared: Features, block: Block) -> Moment:
        """The sum of S, before it is divided by N, from ``outputs``."""
        return shared.squares() if self.only_diagonal(block)[1] else shared.moment()

    def marked_output_moment(self, g: Features, block: Block, there: Tensor) -> Moment:
        """``output_moment`` from the cotangents of a layer. Writes where these are not all zero to ``there`` [n r]."""
        if self.how == "expand" and not self.only_diagonal(block)[1]:
            return g.marked_moment(there)
        mask = g.reached()
        there.fill_(True) if mask is None else there.copy_(mask)
        return self.output_moment(self.outputs(g), block)


def counted(a: Features, there: Tensor | None) -> Features:
    """The inputs of a layer at the positions that count, [n r]; None for all."""
    return a if there is None else a.mask(there)
