"""Layer rules: how each layer type writes its per-example gradients as Σ_r g aᵀ. They know no structure."""

from natgrad.rules.base import Call as Call
from natgrad.rules.base import Rule as Rule
from natgrad.rules.features import DenseFeatures as DenseFeatures
from natgrad.rules.features import Entries as Entries
from natgrad.rules.features import Features as Features
from natgrad.rules.features import Joined as Joined
from natgrad.rules.features import Moment as Moment
from natgrad.rules.features import OneHot as OneHot
from natgrad.rules.features import Patches as Patches
from natgrad.rules.features import Rows as Rows
from natgrad.rules.linear import ConvRule as ConvRule
from natgrad.rules.linear import EmbeddingBagRule as EmbeddingBagRule
from natgrad.rules.linear import EmbeddingRule as EmbeddingRule
from natgrad.rules.linear import LinearRule as LinearRule
from natgrad.rules.norm import BatchNormRule as BatchNormRule
from natgrad.rules.norm import GroupNormRule as GroupNormRule
from natgrad.rules.norm import InstanceNormRule as InstanceNormRule
from natgrad.rules.norm import LayerNormRule as LayerNormRule
from natgrad.rules.norm import RMSNormRule as RMSNormRule
from natgrad.rules.replayed import AttentionRule as AttentionRule
from natgrad.rules.replayed import CellRule as CellRule
from natgrad.rules.replayed import RecurrentRule as RecurrentRule
from natgrad.rules.replayed import Replay as Replay
from natgrad.rules.replayed import Replayed as Replayed

RULES: tuple[Rule, ...] = (
    LinearRule(),
    EmbeddingRule(),
    EmbeddingBagRule(),
    LayerNormRule(),
    RMSNormRule(),
    GroupNormRule(),
    BatchNormRule(),
    InstanceNormRule(),
    ConvRule(),
    RecurrentRule(),
    CellRule(),
    AttentionRule(),
)
