"""The loss of a model that computes it itself, as in ``transformers``: ``labels`` in, ``loss`` and ``logits`` out."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

_TOKENS = ("ForCausalLM", "ForMaskedLM", "ForTokenClassification", "ForConditionalGeneration")
_EXAMPLES = (
    "ForSequenceClassification",
    "ForImageClassification",
    "ForVideoClassification",
    "ForAudioClassification",
)
_KINDS: dict[str, type[nn.Module]] = {
    "regression": nn.MSELoss,
    "single_label_classification": nn.CrossEntropyLoss,
    "multi_label_classification": nn.BCEWithLogitsLoss,
}


class OwnLoss(NamedTuple):
    """The loss of ``logits``, or of every head, with the axis of its classes and the weights of the heads."""

    loss: Any
    axis: int | None = None
    weights: dict[str, float] | None = None


def computes_loss(module: object) -> bool:
    """Whether this is a model of ``transformers`` with a loss of its own."""
    return isinstance(module, nn.Module) and hasattr(module, "config") and hasattr(type(module), "loss_function")


def own_loss(model: nn.Module) -> OwnLoss:
    """The loss that a model of ``transformers`` computes when it is given ``labels``; others are refused by name.

    Labels of −100, and the last token of a causal language model, have no term.
    """
    config: Any = model.config
    kind = getattr(model, "loss_type", None) or "ForCausalLM"  # as transformers has it
    if kind in _TOKENS:
        return OwnLoss(nn.CrossEntropyLoss(), axis=-1)
    if kind in _EXAMPLES:
        problem = getattr(config, "problem_type", None)  # where it is None, labels that are integers are classes
        problem = problem or ("regression" if config.num_labels == 1 else "single_label_classification")
        return OwnLoss(_KINDS[problem]())
    if kind == "ForQuestionAnswering":
        heads = ("start_logits", "end_logits")
        return OwnLoss({key: nn.CrossEntropyLoss() for key in heads}, weights=dict.fromkeys(heads, 0.5))
    raise TypeError(
        f"{type(model).__name__} computes a loss of the kind {kind}, of which no metric is known: give a loss of its "
        "outputs, or one for every head"
    )
