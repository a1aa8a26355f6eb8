"""What ng.Natural, ng.Muon, ng.SOAP and ng.Shampoo share: they see gradients, and nothing else of a model.

A step has five parts, in this order: the gradients are checked; the momentum of every matrix is formed,
M = μm + (1 − μ)∇ with m ← μm + (1 − μ)∇ (Nesterov 1983); all matrices of one shape are laid side by side
(``ShapeBatch``); the optimizer turns them into directions, all of one shape at once (``directions``, the one method
that a subclass must have); the parameters move, θ ← (1 − lr·wd)θ − lr·v. AdamW steps what is no matrix
(``natgrad.gradients.assignment``).

Nothing waits for a GPU. There NaN and infinity close a gate on the device: the step changes nothing, and a later step
raises (``natgrad.accelerate.fused``). A step that comes again is replayed from a CUDA graph.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from natgrad.accelerate import fused
from natgrad.accelerate.devices import full_precision, is_asynchronous
from natgrad.accelerate.fused import Flag
from natgrad.accelerate.modules import load_compiler, uncompiled
from natgrad.accelerate.replay import GraphCache, Scalar
from natgrad.errors import NonFiniteError
from natgrad.geometry import refuse_sparse
from natgrad.gradients.assignment import Assignment, GradientPlan, Modules, assigned, groups_of
from natgrad.gradients.earlier_checkpoints import converted
from natgrad.gradients.shards import Member, Owners, Stage, State
from natgrad.linalg import Damping, Relative, eigvalsh, is_number, is_rounding, number_of
from natgrad.log import flat, listed, nbytes, of_groups
from natgrad.model import check_types
from natgrad.optim import metrics as told
from natgrad.optim.checkpoint import check_nonnegative, check_tensor, check_torch, reading
from natgrad.optim.distributed import refuse_flat_shards
from natgrad.optim.update import adamw, check_keys, check_numbers, common_damping, corrected_weight, tensors_of
from natgrad.sharding import divided_as, gradient_of, is_sharded, local, whole

Parameters: TypeAlias = (
    nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]] | Mapping[str, Tensor]
)
Groups: TypeAlias = Iterable[dict[str, Any]]
Moved: TypeAlias = dict[str, Tensor]  # ‖v‖ [] of every matrix that has moved
Moving: TypeAlias = tuple[list[Member], list[Member]]  # the matrices of a group, and what AdamW steps

_EAGER = "a step of natgrad is not compiled. With fullgraph=True compile the model alone, and call opt.step() outside"


@final
@dataclass
class ShapeBatch:
    """The matrices of one shape that move in a step: N of them, with k offsets each."""

    G: Tensor  # gradients [N k o i], in single precision at least
    M: Tensor  # their momentum, what the step follows
    members: Sequence[Member]
    states: Sequence[State]  # of every parameter
    counts: Sequence[int]  # matrices of every parameter
    is_new: bool  # they have their first gradient
    is_owned: bool  # this process computes their directions
    gate: Tensor | None  # not zero on the device: the step changes nothing
    is_zero: Tensor = field(init=False)  # [N]: M is rounding beside the largest of all matrices

    def get(self, letter: str) -> Tensor:
        """What is kept of all matrices."""
        if len(self.states) == 1:
            return self.states[0][letter]
        return torch.cat([state[letter] for state in self.states])

    def has(self, letter: str) -> bool:
        """Whether this is kept, which is so after the first gradient."""
        return letter in self.states[0]

    def divided(self, value: Tensor) -> Sequence[Tensor]:
        """[N …] or [N·k …] by parameters."""
        if len(self.states) == 1:
            return (value,)
        return value.split_with_sizes([value.shape[0] * count // self.M.shape[0] for count in self.counts])

    def put(self, letter: str, value: Tensor) -> None:
        """Keep something of all matrices [N …], in the memory that it has."""
        if self.has(letter):
            fused.copy_([state[letter] for state in self.states], self.divided(value), gate=self.gate)
            return
        value = value if self.gate is None else torch.where(self.gate > 0, 0.0, value)
        for state, mine in zip(self.states, self.divided(value), strict=True):
            state[letter] = mine.clone()


class GradientOptimizer(torch.optim.Optimizer):
    """An optimizer of matrices that needs their gradients alone, with AdamW for all other parameters."""

    polar: bool = False  # whether steps are polar factors: a vector has none
    largest: float = float("inf")  # rows of a factor that is more than a diagonal
    decay: float = 0.95  # of moving averages
    nesterov: bool = True
    letters: tuple[str, ...] = ()  # what a state keeps beside the momentum
    decomposed: tuple[str, ...] = ()  # of these, what changes when factors are decomposed
    _is_shared: bool | None  # unknown before the first step
    _owners: Owners | None
    _ddp: DistributedDataParallel | None

    def __init__(
        self,
        params: Parameters,
        groups: Groups,
        *,
        lr: float,
        weight_decay: float,
        momentum: float,
        damping: Damping,
    ) -> None:
        load_compiler()
        if not is_number(self.decay) or not 0 <= self.decay < 1:
            raise ValueError(f"{type(self).__name__}(decay=…) must be in [0, 1), got {self.decay}")
        if not isinstance(params, Iterable | nn.Module) or isinstance(params, str):
            raise TypeError(f"{type(self).__name__} takes a model, or its parameters, not {type(params).__name__}")
        if not isinstance(groups, Iterable):
            raise TypeError(
                f'groups must be a list of dicts, [{{"params": layer.parameters(), "lr": 0.1}}], got {groups!r}'
            )
        self._relative = isinstance(damping, Relative)
        given, self._modules = groups_of(params, groups)
        flat = [p.ndim < 2 or min(len(p), p.shape[1:].numel()) < 2 for g in given for p in tensors_of(g)]
        self._takes_vectors = not self.polar or all(flat)
        self._assignments: list[list[Assignment]] = []
        self._loss: Any = None  # of the closure
        self._moved: Moved = {}  # ‖v‖ in the last step
        self._rates: list[float] = []  # of the groups, in the last step
        self._taken = self._refreshes = self._refreshed = 0  # steps and refreshes of this process; the last refresh
        if isinstance(params, nn.Module):
            refuse_flat_shards(params)
        self._refresh()
        self._ddp = self._modules.ddp
        numbers = {"lr": lr, "damping": number_of(damping), "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(given, numbers | {"steps": 0})
        self._modules = Modules(None)
        if not any(a.is_matrix for a in self.plan().assignments):
            raise ValueError(
                f"{type(self).__name__} leaves no parameter for the metric, as none is a matrix: use "
                'torch.optim.AdamW, or give groups with "fallback": None'
            )

    def _refresh(self) -> None:
        """What is made anew after a copy: a flag that travels from a device, and captured steps."""
        self._flag, self._graphs = Flag(), GraphCache[tuple[Moved, Tensor | None]](capacity=4)
        self._is_shared, self._owners, self._ddp = None, None, None
        self._take_uncompiled = uncompiled(_take, reason=_EAGER)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch.optim; "fallback" and "blocks" of a group decide what steps its parameters."""
        check_keys(param_group)
        check_numbers({**self.defaults, **param_group})
        said = {key: value for key, value in param_group.items() if key in ("fallback", "blocks")}
        super().add_param_group({key: value for key, value in param_group.items() if key not in said})
        group = self.param_groups[-1]
        group["steps"] = self.param_groups[0]["steps"]
        common_damping(self.param_groups)
        params, names = group["params"], group.get("param_names")
        before = sum(map(len, self._assignments))
        names = names or [self._modules.names.get(id(p), f"parameter {before + n}") for n, p in enumerate(params)]
        if bad := [name for name, p in zip(names, params, strict=True) if p.is_complex()]:
            raise TypeError(f"{', '.join(bad)} is complex: optimize torch.view_as_real of it")
        self._assignments.append(
            assigned(
                params,
                names,
                self._modules,
                said,
                optimizer=type(self).__name__,
                vectors=self._takes_vectors,
                largest=self.largest,
            )
        )
        self._is_shared = None

    def _owners_now(self) -> Owners | None:
        """Who owns which matrix, if processes share some. All of them call this together.

        Not before the first step: a framework may make the optimizer first, and put shards into its groups.
        """
        if self._is_shared is None:
            ddp = set(map(id, self._ddp.parameters())) if self._ddp is not None else set()
            params = [p for group in self.param_groups for p in group["params"]]
            pairs = zip(params, self.plan().assignments, strict=True)
            shared = [(p, a) for p, a in pairs if is_sharded(p) or id(p) in ddp]
            self._is_shared = bool(shared)
            self._owners = Owners(shared, self._ddp, self.shapes) if shared else None
        return self._owners

    def plan(self) -> GradientPlan:
        """What steps every parameter, and why: ``print(opt.plan())``."""
        return GradientPlan(tuple(a for of_group in self._assignments for a in of_group))

    def metrics(self, *, layers: bool = False) -> dict[str, Tensor]:
        """Numbers for a logger, tensors [] by name; nothing waits for the device (``ng.log_to`` does not either).

        As those of ``NaturalGradient.metrics``, which describes them: the numbers of the parameter groups, ``loss`` of
        the closure, ``step_rms`` = √mean((lr·v)²) of the matrices, ``params_metric``, ``params_adamw``,
        ``state_bytes``, ``metric_updates``, and of those that decompose factors ``inverse_age`` and
        ``inverse_updates``. ``layers=True`` adds ``natgrad/layer/0.weight/step_rms`` and, of optimizers with factors,
        ``cond_S`` and ``cond_A``, the largest over the smallest eigenvalue; those of whole factors wait for the device.
        """
        numbers, of_layers = of_groups(self.param_groups), dict[str, Any]()
        lengths, moved, adamw = list[tuple[list[Tensor], float]](), 0, 0
        members = [
            list(zip(group["params"], of_group, strict=True))
            for group, of_group in zip(self.param_groups, self._assignments, strict=True)
        ]
        for mine, rate in zip(members, self._rates or [0.0] * len(members), strict=True):
            of_group = [(p, a, self._moved[a.name]) for p, a in mine if a.name in self._moved]
            lengths.append(([length for _, _, length in of_group], rate))
            moved += sum(p.numel() for p, _, _ in of_group)
            adamw += sum(p.numel() for p, a in mine if not a.is_matrix)
            if layers:
                of_layers |= {f"layer/{a.name}/step_rms": rate * of / p.numel() ** 0.5 for p, a, of in of_group}
                factors = [(a.name, F, self.state[p]) for p, a in mine for F in "SA" if F in self.state[p]]
                of_layers |= {f"layer/{name}/cond_{F}": _condition(of[F], f"{F} of {name}") for name, F, of in factors}
        total = sum(p.numel() for mine in members for p, _ in mine)
        numbers |= {"params_metric": total - adamw, "params_adamw": adamw, "loss": self._loss}
        numbers["step"] = self.param_groups[0]["steps"]
        numbers["state_bytes"] = nbytes(t for of_param in self.state.values() for t in of_param.values())
        numbers |= {"step_rms": told.step_rms(lengths, moved), "metric_updates": self._taken if self.letters else None}
        if self._refreshes:
            age = self.param_groups[0]["steps"] - 1 - self._refreshed
            numbers |= {"inverse_age": age, "inverse_updates": self._refreshes}
        return flat(numbers | of_layers)

    def statistics(self, batch: ShapeBatch) -> dict[str, Tensor]:
        """What a gradient adds to the moving averages of its matrices, by letter: F̄ ← (1 − w)F̄ + wF."""
        return {}

    @abstractmethod
    def directions(self, batches: Sequence[ShapeBatch], step: int) -> list[Tensor]:
        """v [N k o i] of every batch, in the step 0, 1, …"""

    def refreshes(self, step: int) -> bool:
        """Whether factors are decomposed in this step: it is then not replayed from a graph."""
        return False

    def refresh(self, batches: Sequence[ShapeBatch]) -> None:
        """Decompose the factors of matrices, also of those without a gradient in this step."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. Returns the loss of the closure, if there is one."""
        loss = None
        if closure is not None:
            if not callable(closure):
                raise TypeError(
                    "opt.step takes a closure, a function that computes the loss and its gradient, not a "
                    f"{type(closure).__name__}: call loss.backward() and opt.step()"
                )
            with torch.enable_grad():
                loss = closure()
        self._take_uncompiled(self, loss) if torch.compiler.is_compiling() else self._take(loss)
        return loss

    def _take(self, loss: Any) -> None:
        self._flag.raise_pending()
        owners = self._owners_now()
        moving, grads, is_new = list[Moving](), dict[str, Tensor](), False
        for group, of_group in zip(self.param_groups, self._assignments, strict=True):
            matrices, others = list[Member](), list[Member]()
            for p, a in zip(group["params"], of_group, strict=True):
                if p.grad is not None:
                    grads[a.name], state = p.grad if owners is None else gradient_of(p), self.state[p]
                    is_new = is_new or not state
                    (matrices if a.is_matrix else others).append((p, a, state))
            moving.append((matrices, others))
        if not grads:
            raise ValueError("no parameter has a gradient: call loss.backward() before opt.step()")
        refuse_sparse(grads)
        asynchronous = is_asynchronous(next(iter(grads.values())).device)
        if not asynchronous:
            self._check(self._norm(grads), grads, "the gradient")
        step = self.param_groups[0]["steps"]

        def run(gradients: Sequence[Tensor], numbers: Sequence[Scalar]) -> tuple[Moved, Tensor | None]:
            named = dict(zip(grads, gradients, strict=True))
            if asynchronous:
                self._check(self._norm(named), named, "the gradient")
            moved = self._move(moving, named, numbers, step)
            for group, (_, others), rate in zip(self.param_groups, moving, numbers[1:], strict=False):
                of_adamw = [(p, named[a.name], state) for p, a, state in others]
                adamw(of_adamw, rate, weight_decay=group["weight_decay"], gate=self._flag.value)
            return moved, self._flag.value

        numbers, refreshes = self._numbers(step), self.refreshes(step)
        if not asynchronous or is_new or refreshes or not (owners is None or owners.is_one):
            self._moved, _ = run(list(grads.values()), numbers)
        else:
            gradients, key = list(grads.values()), self._key(list(grads))
            self._moved, self._flag.value = self._graphs.run(run, gradients, numbers, key, may_copy=True, shaped=True)
        self._flag.send("the step", step)
        self._rates, self._taken = numbers[1 : 1 + len(self.param_groups)], self._taken + 1
        if refreshes:
            self._refreshed, self._refreshes = step, self._refreshes + 1
        for group in self.param_groups:
            group["steps"] = step + 1
        self._loss = loss.detach() if isinstance(loss, Tensor) else loss

    def _norm(self, grads: Mapping[str, Tensor]) -> Tensor:
        """Σ ‖∇‖ of all processes that have shards of these parameters."""
        norm = fused.total_norm(list(grads.values()))
        return norm if self._owners is None else self._owners.total(norm)

    def _check(self, total: Tensor, tensors: Mapping[str, Tensor], what: str) -> None:
        """Raise (CPU), or close the gate (GPU), unless a total of tensors is finite: over all processes, in squares."""
        if is_asynchronous(total.device):
            self._flag.look({what: total})
            return
        if math.isfinite(total):
            return
        self._flag.check({name: t for name, t in tensors.items() if t.numel()}, what)
        if self._owners is not None and math.isfinite(fused.total_norm(list(tensors.values()))):
            raise NonFiniteError(f"{what} holds NaN or infinity in another process. Nothing was changed")
        if self.letters:
            raise NonFiniteError(
                f"the square of {what} of {listed(tensors)} holds NaN or infinity. Nothing was changed: lower the "
                "learning rate, or clip the gradient"
            )

    def _numbers(self, step: int) -> list[float]:
        """The weight of this gradient in moving averages, the rates of all groups, its weights in corrected momenta."""
        rates = [group["lr"] for group in self.param_groups]
        momenta = [] if self.nesterov else [float(group["momentum"]) for group in self.param_groups]
        return [corrected_weight(self.decay, step + 1), *rates, *(corrected_weight(μ, step + 1) for μ in momenta)]

    def _key(self, names: Sequence[str]) -> Hashable:
        """All that a captured step depends on, but for gradients and numbers."""
        states = [t for of_param in self.state.values() for t in of_param.values()]
        params = [p for group in self.param_groups for p in group["params"]]
        options = [(group["momentum"], group["weight_decay"], group["damping"]) for group in self.param_groups]
        own = [v for name, v in vars(self).items() if name[0] != "_" and isinstance(v, str | float)]  # rms, power, …
        return tuple(names), tuple(options), tuple(own), tuple([local(t).data_ptr() for t in (*params, *states)])

    def _move(
        self, moving: Sequence[Moving], grads: Mapping[str, Tensor], numbers: Sequence[Scalar], step: int
    ) -> Moved:
        """Momentum, statistics, directions and steps of the matrices of all groups."""
        matrices, owners = [members for members, _ in moving], self._owners
        if self.refreshes(step) and (idle := self._idle(grads)):
            with full_precision(idle[0].G.device):
                self.refresh(idle)
        if not any(matrices):
            return {}
        stages, followed, of_stages, together = list[Stage](), list[list[list[Tensor]]](), [], list[ShapeBatch]()
        for stage in (Stage(matrices, grads),) if owners is None else owners.stages(matrices, grads):
            stages.append(stage)
            followed.append(self._followed(stage, numbers))
            of_stages.append(self._batches(stage, followed[-1]))
            together += of_stages[-1]
        self._judge(together, matrices, grads)
        v, computed = dict[str, Tensor](), dict[str, Tensor]()
        with full_precision(next(iter(grads.values())).device):
            for stage, batches in zip(stages, of_stages, strict=True):
                owned = [batch for batch in batches if batch.is_owned]
                self._average(batches, numbers[0])
                directions = dict[str, Tensor]()
                for batch, V in zip(owned, self.directions(owned, step) if owned else (), strict=True):
                    for (p, a, _), W in zip(batch.members, batch.divided(V), strict=True):
                        directions[a.name] = a.join(W).to(p.dtype)
                computed |= directions
                stage.send(directions)
        for stage in stages:
            v |= stage.received()
        if owners is None:
            moved = dict(zip(v, fused.norms(list(v.values())), strict=True))
            total = torch.stack(list(moved.values())).sum()  # a number that is finite only if they are
        else:
            moved, total = owners.lengths(v, computed)
        self._check(total, v, "the step")
        if owners is not None and (any(batch.is_new for batch in together) or self.refreshes(step)):
            owners.share({a.name: s for stage in stages for ms in stage.members for _, a, s in ms}, self.decomposed)
        gate = self._flag.value
        for group, members, rate in zip(self.param_groups, matrices, numbers[1:], strict=False):
            if members:
                params, steps = [], []
                for p, a, _ in members:
                    params.append(p if owners is None else local(p))
                    steps.append(v[a.name])
                fused.descend_(params, steps, rate, decay=group["weight_decay"], gate=gate)
        for stage, of_stage in zip(stages, followed, strict=True):
            for group, kept, Ms in zip(self.param_groups, stage.members, of_stage, strict=True):
                μ, momenta, new = group["momentum"], [], []
                for _, a, state in kept if μ else ():
                    momenta.append(state["momentum"])
                    new.append(stage.grads[a.name])
                if momenta and self.nesterov:
                    fused.average_(momenta, new, 1 - μ, gate=gate)
                elif momenta:
                    fused.copy_(momenta, Ms, gate=gate)
        return moved

    def _followed(self, stage: Stage, numbers: Sequence[Scalar]) -> list[list[Tensor]]:
        """M of the matrices of every group: μm + (1 − μ)∇ of the next m, or without Nesterov's step m/(1 − μᵗ)."""
        groups, out = len(self.param_groups), list[list[Tensor]]()
        corrected = numbers[1 + groups :] or [1.0] * groups
        for group, members, weight in zip(self.param_groups, stage.members, corrected, strict=True):
            μ, gradients, momenta, first = group["momentum"], list[Tensor](), list[Tensor](), list[bool]()
            for p, a, state in members:
                gradients.append(stage.grads[a.name])
                first.append("momentum" not in state)
                if μ and first[-1]:
                    state["momentum"] = torch.zeros_like(p)
                momenta.append(state.get("momentum", p))
            if not μ or not members:
                out.append(gradients)
            elif self.nesterov:
                out.append(fused.lerp(momenta, gradients, 1 - μ**2))
            else:
                averaged = fused.averaged(momenta, gradients, weight)
                out.append([g if new else m for m, g, new in zip(averaged, gradients, first, strict=True)])
        return out

    def _batches(self, stage: Stage, followed: Sequence[Sequence[Tensor]]) -> list[ShapeBatch]:
        """The matrices of one shape side by side, apart from those that have their first gradient, or another owner."""
        alike: dict[tuple[Any, ...], list[tuple[Member, Tensor]]] = {}
        for members, Ms in zip(stage.members, followed, strict=True):
            for member, M in zip(members, Ms, strict=True):
                p, a, state = member
                is_new = not self.letters or self.letters[0] not in state  # its first gradient counts in full
                is_owned = stage.owned is None or a.name in stage.owned
                alike.setdefault((a.sizes, p.dtype, p.device, is_new, is_owned), []).append((member, M))
        out = []
        for (*_, is_new, is_owned), pairs in alike.items():
            split_Gs, split_Ms, of_shape, states, counts = [], [], [], [], []
            for member, M in pairs:
                _, a, state = member
                split_Gs.append(a.split(stage.grads[a.name]))
                split_Ms.append(a.split(M))
                of_shape.append(member)
                states.append(state)
                counts.append(a.sizes[0])
            single = torch.promote_types(split_Ms[0].dtype, torch.float32)
            G, M = torch.cat(split_Gs).to(single), torch.cat(split_Ms).to(single)
            out.append(ShapeBatch(G, M, of_shape, states, counts, is_new, is_owned, self._flag.value))
        return out

    def _judge(
        self, batches: Sequence[ShapeBatch], matrices: Sequence[Sequence[Member]], grads: Mapping[str, Tensor]
    ) -> None:
        """Which matrices are rounding beside the largest of all."""
        each, types = [], set()
        for members in matrices:
            for _, a, _ in members:
                g = grads[a.name]
                types.add(g.dtype)
        for batch in batches:
            size = torch.linalg.vector_norm(batch.M, dim=(1, 2, 3), dtype=torch.float64)
            each.append(size.div_(batch.M[0].numel() ** 0.5))
        sizes = torch.cat(each) if each else g.new_zeros(0, dtype=torch.float64)
        coarsest = types.pop() if len(types) == 1 else max(types, key=_eps)
        beside = None if self._owners is None else self._owners.largest(sizes)
        zeros = is_rounding(sizes, beside, dtype=coarsest)
        at = 0
        for batch, size in zip(batches, each, strict=True):
            batch.is_zero = zeros[at : at + size.shape[0]]
            at += size.shape[0]

    def _average(self, batches: Sequence[ShapeBatch], weight: Scalar) -> None:
        """Add the statistics of this gradient to their averages, all at once."""
        averages, new = list[Tensor](), list[Tensor]()
        for batch in batches:
            for letter, value in self.statistics(batch).items():
                if letter not in batch.states[0]:
                    batch.put(letter, value)
                    continue
                for state in batch.states:
                    averages.append(state[letter])
                new += (value,) if len(batch.states) == 1 else batch.divided(value)
        if averages:
            fused.average_(averages, new, weight, gate=batches[0].gate)

    def shifts(self, S: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
        """λ_S and λ_A [N 1] for the mean eigenvalues of S and A: ε of each, or √λ/π and π√λ with π² = A/S.

        Infinite where a factor is zero: its inverse power is then zero, and so is the step.
        """
        λ = self.param_groups[0]["damping"]
        if self._relative:
            both = none_of_zero(λ * torch.cat((S, A), 1))
            return both[:, :1], both[:, 1:]
        π = torch.where((S > 0) & (A > 0), A / S, 1.0).sqrt()
        return λ**0.5 / π, λ**0.5 * π

    def _idle(self, grads: Mapping[str, Tensor]) -> list[ShapeBatch]:
        """The matrices that have no gradient in this step, and had one before."""
        out = []
        for group, of_group in zip(self.param_groups, self._assignments, strict=True):
            for p, a in zip(group["params"], of_group, strict=True):
                state = self.state[p]
                if a.is_matrix and a.name not in grads and "S" in state:
                    zero = state["S"].new_zeros(()).expand(state["S"].shape[0], *a.sizes[1:])
                    out.append(ShapeBatch(zero, zero, [(p, a, state)], [state], [len(zero)], False, True, None))
        return out

    # Copies and checkpoints.

    def __getstate__(self) -> dict[str, Any]:
        """Without what is made anew, and without the hooks and the wrapped ``step`` of schedulers, as in torch."""
        made_anew = ("_flag", "_graphs", "_is_shared", "_owners", "_ddp")
        mine = {key: value for key, value in vars(self).items() if key not in made_anew and not callable(value)}
        return {key: value for key, value in mine.items() if not key.startswith("_optimizer_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._refresh()

    def state_dict(self) -> dict[str, Any]:
        """As in torch. Where owners keep the state of matrices, all processes call this together: see ``Owners``."""
        out, owners = super().state_dict(), self._owners_now()
        if owners is not None:
            of_matrices = owners.for_checkpoint(self.state)
            for key, a in enumerate(self.plan().assignments):
                if a.name in of_matrices:
                    out["state"][key] = of_matrices[a.name]
        return out

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume exactly. A state that does not fit is refused with the difference, before anything is changed."""
        assignments = self.plan().assignments
        params = [p for group in self.param_groups for p in group["params"]]
        names = {id(p): a.name for p, a in zip(params, assignments, strict=True)}
        with reading():
            state_dict = converted(state_dict, list(names.values()), self.letters)
            check_torch(state_dict, self.param_groups, names)
            keys = [key for group in state_dict["param_groups"] for key in group["params"]]
            for key, a in zip(keys, assignments, strict=True):
                self._check_state(a, state_dict["state"].get(key, {}))
            for steps in (group["steps"] for group in state_dict["param_groups"]):
                if not is_number(steps, whole=True) or steps < 0:
                    raise ValueError(f'"steps" of a group of the state is {steps!r}. Nothing was loaded')
        super().load_state_dict(state_dict)
        # torch goes on in the tensors of the dictionary, cast to the type of the parameter: we keep copies as they are.
        for key, p in zip(keys, params, strict=True):
            for what, t in state_dict["state"].get(key, {}).items():
                self.state[p][what] = divided_as(p, t.to(p.device, copy=True)) if isinstance(t, Tensor) else t
        if (owners := self._owners_now()) is not None:
            owners.from_checkpoint(self.state)

    def _check_state(self, a: Assignment, state: Mapping[str, Any]) -> None:
        """Raise unless this is the state of such a parameter, with second moments that are not negative."""
        shapes = self.shapes(a) if a.is_matrix else {}
        expected = list(shapes) or ["exp_avg", "exp_avg_sq"]
        strange = [what for what in state if what not in expected and what != "step"]
        missing = [what for what in expected if what not in state and what != "momentum" and state]
        if strange or missing:
            differs = f"has {', '.join(strange)}" if strange else f"has no {', '.join(missing)}"
            raise ValueError(
                f"this is the state of another optimizer: {a.name} {differs}, and {a.optimizer} steps it here. "
                "Nothing was loaded"
            )
        for what in [what for what in shapes if what != "momentum"] if state else ():
            t = whole(state[what])
            check_tensor(f"{what} of {a.name}", t, shapes[what])
            if what[0] not in "QP":
                moments = t if what == "D" or t.ndim == 2 else t.diagonal(dim1=1, dim2=2)
                check_nonnegative(a.name, {what: moments})

    def shapes(self, a: Assignment) -> dict[str, tuple[int, ...]]:
        """What the state of a matrix keeps."""
        n, k, o, i = a.sizes
        sides = {"S": o, "A": i, "Q": o, "P": i}
        out: dict[str, tuple[int, ...]] = {"momentum": a.shape}
        for letter in self.letters:
            d = sides.get(letter[0], 0)
            diagonal = self.largest < d
            if letter == "D":
                out[letter] = (n * k, o, i)
            elif not (diagonal and letter in "QP"):
                out[letter] = (n, d) if diagonal else (n, d, d)
        return out


def _take(optimizer: GradientOptimizer, loss: Any) -> None:
    optimizer._take(loss)


def _condition(F: Tensor, what: str) -> Tensor:
    """The worst condition [] of factors [n d d], or of diagonals [n d]."""
    values = F if F.ndim == 2 else eigvalsh(F, what).clamp(min=0)
    return (values.amax(1) / values.amin(1)).amax()


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def of_length(v: Tensor, lengths: float | Tensor, batch: ShapeBatch) -> Tensor:
    """v [N k o i], every matrix as long as its number in ``lengths``; zero stays zero, and NaN stays NaN."""
    stretch = (norms := torch.linalg.vector_norm(v, dim=(1, 2, 3), dtype=torch.float64)) / lengths  # zero by zero, too
    scale = (stretch.reciprocal() + (stretch - stretch)).masked_fill(batch.is_zero | (norms == 0), 0.0)
    return v * scale.to(v.dtype)[:, None, None, None]


def none_of_zero(λ: Tensor) -> Tensor:
    """Relative damping λ, infinite where there is nothing that it could be relative to: squares have vanished there."""
    return torch.where(λ <= torch.finfo(λ.dtype).tiny, torch.inf, λ)  # NaN stays


def is_due(step: int, period: int, *, early: bool) -> bool:
    """Whether factors are decomposed in the step 0, 1, …: every ``period`` steps, and early in the steps 1, 2, 4, …

    >>> [step + 1 for step in range(25) if is_due(step, 10, early=True)]
    [1, 2, 4, 8, 11, 21]
    """
    return step % period == 0 or (early and step < period and (step + 1) & step == 0)


def check_period(optimizer: str, name: str, period: int, *, early: bool, largest: int) -> None:
    """Refuse numbers of steps and rows that are none."""
    check_types(early=(early, bool, "True or False"))
    if not is_number(period, whole=True) or period < 1:
        raise ValueError(f"{optimizer}({name}=…) must be a whole number of steps, at least 1, got {period!r}")
    if not is_number(largest, whole=True) or largest < 1:
        raise TypeError(f"{optimizer}(largest=…): largest must be a whole number of rows, at least 1, got {largest!r}")
