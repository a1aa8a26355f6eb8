"""Layer rules: how each layer type writes its per-example gradients as Σ_r g aᵀ. They know no structure."""

from natgrad.rules.base import Call as Call
from natgrad.rules.base import Moment as Moment
from natgrad.rules.base import Replay as Replay
from natgrad.rules.base import Replayable as Replayable
from natgrad.rules.base import Replayed as Replayed
from natgrad.rules.base import Rule as Rule
from natgrad.rules.linear import LinearRule as LinearRule

RULES: tuple[Rule, ...] = (LinearRule(),)
