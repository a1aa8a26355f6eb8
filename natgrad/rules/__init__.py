"""Layer rules: how each layer type's per-example gradient factors into inputs and cotangents."""

from natgrad.rules.base import Rule as Rule
from natgrad.rules.linear import LinearRule as LinearRule
