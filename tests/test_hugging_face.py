"""Language and vision models of ``transformers``: every parameter has a rule, and every number is brute force's.

The models have tiny widths and random weights, and run in float64 throughout (``InDouble``).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import natgrad as ng
from tests.pulled import Rooted, close, rows

tr: Any = pytest.importorskip("transformers")

N, T, V = 3, 5, 11
TINY = {"vocab_size": V, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
TEXT = {**TINY, "max_position_embeddings": 20, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
HEADS = {"num_key_value_heads": 1, "head_dim": 4}
PLAIN = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
RELATIVE = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4, "type_vocab_size": 0}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


class InDouble(TorchFunctionMode):
    """Casts to single precision, as in most normalisations, are casts to double precision."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        swap = {torch.float32: torch.float64}
        args = tuple(swap.get(a, a) if isinstance(a, torch.dtype) else a for a in args)
        kwargs = {k: swap.get(a, a) if isinstance(a, torch.dtype) else a for k, a in (kwargs or {}).items()}
        return func(*args, **kwargs) if func is not Tensor.float else args[0].double()


class Wrapped(nn.Module):
    """A model whose outputs are its logits [n *out], in double precision."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Tensor:
        with InDouble():
            logits: Tensor = self.model(**inputs).logits
            return logits


def _tokens() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, V, (N, T))}


def _images() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(N, 3, 8, 8, dtype=torch.float64)}


def _pairs() -> dict[str, Tensor]:
    return {**_tokens(), "decoder_input_ids": torch.randint(3, V, (N, 4))}


def _sounds() -> dict[str, Tensor]:
    sound = torch.randn(N, 4, 12, dtype=torch.float64)
    return {"input_features": sound, "decoder_input_ids": torch.randint(3, V, (N, 4))}


def _latents() -> dict[str, Tensor]:
    return {"inputs": torch.randint(3, V, (N, T))}


def _perceiver() -> Any:
    """Learned queries, for all examples, pass through normalisations and layers before they meet the data."""
    return tr.PerceiverConfig(
        vocab_size=V,
        num_latents=4,
        d_latents=8,
        d_model=8,
        num_blocks=1,
        num_self_attends_per_block=1,
        num_self_attention_heads=2,
        num_cross_attention_heads=2,
        max_position_embeddings=T,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    )


Inputs = Callable[[], dict[str, Tensor]]
MODELS: dict[str, tuple[Callable[[], nn.Module], Inputs]] = {
    "GPT-2": (
        lambda: tr.GPT2LMHeadModel(
            tr.GPT2Config(vocab_size=V, n_embd=8, n_layer=1, n_head=2, n_positions=16, **SPECIAL)
        ),
        _tokens,
    ),
    "Llama": (lambda: tr.LlamaForCausalLM(tr.LlamaConfig(**TEXT, **HEADS)), _tokens),
    "Mistral": (lambda: tr.MistralForCausalLM(tr.MistralConfig(**TEXT, **HEADS)), _tokens),
    "Qwen3": (lambda: tr.Qwen3ForCausalLM(tr.Qwen3Config(**TEXT, **HEADS)), _tokens),
    "Gemma": (lambda: tr.GemmaForCausalLM(tr.GemmaConfig(**TEXT, **HEADS)), _tokens),
    "NeoX": (lambda: tr.GPTNeoXForCausalLM(tr.GPTNeoXConfig(**TEXT)), _tokens),
    "BERT": (lambda: tr.BertForMaskedLM(tr.BertConfig(**TEXT, **PLAIN)), _tokens),
    "RoBERTa": (lambda: tr.RobertaForMaskedLM(tr.RobertaConfig(**TEXT, **PLAIN)), _tokens),
    "DistilBERT": (
        lambda: tr.DistilBertForMaskedLM(
            tr.DistilBertConfig(vocab_size=V, dim=8, n_layers=1, n_heads=2, hidden_dim=12, max_position_embeddings=16)
        ),
        _tokens,
    ),
    "DeBERTa": (lambda: tr.DebertaV2ForMaskedLM(tr.DebertaV2Config(**TEXT, **PLAIN, **RELATIVE)), _tokens),
    "T5": (
        lambda: tr.T5ForConditionalGeneration(
            tr.T5Config(vocab_size=V, d_model=8, d_kv=4, d_ff=12, num_layers=1, num_heads=2)
        ),
        _pairs,
    ),
    "Whisper": (
        lambda: tr.WhisperForConditionalGeneration(
            tr.WhisperConfig(
                vocab_size=V,
                d_model=8,
                encoder_layers=1,
                decoder_layers=1,
                encoder_attention_heads=2,
                decoder_attention_heads=2,
                encoder_ffn_dim=12,
                decoder_ffn_dim=12,
                num_mel_bins=4,
                max_source_positions=6,
                max_target_positions=8,
                decoder_start_token_id=1,
                **SPECIAL,
            )
        ),
        _sounds,
    ),
    "ViT": (
        lambda: tr.ViTForImageClassification(
            tr.ViTConfig(**{**TINY, "vocab_size": 1}, **PLAIN, image_size=8, patch_size=4)
        ),
        _images,
    ),
    "DINOv2": (  # with a mask token that is not used
        lambda: tr.Dinov2ForImageClassification(
            tr.Dinov2Config(**{**TINY, "vocab_size": 1}, image_size=8, patch_size=4, num_labels=3)
        ),
        _images,
    ),
    "Wav2Vec2": (
        lambda: tr.Wav2Vec2ForCTC(
            tr.Wav2Vec2Config(
                **TINY,
                conv_dim=[4, 4],
                conv_stride=[3, 2],
                conv_kernel=[5, 3],
                num_feat_extract_layers=2,
                num_conv_pos_embeddings=4,
                num_conv_pos_embedding_groups=2,
            )
        ),
        lambda: {"input_values": torch.randn(N, 40, dtype=torch.float64)},
    ),
    "Perceiver": (lambda: tr.PerceiverForMaskedLM(_perceiver()), _latents),
    "Perceiver, classes": (lambda: tr.PerceiverForSequenceClassification(_perceiver()), _latents),
    "Mixtral": (
        lambda: tr.MixtralForCausalLM(
            tr.MixtralConfig(**TEXT, **HEADS, num_local_experts=3, experts_implementation="eager")
        ),
        _tokens,
    ),
    "Mamba": (
        lambda: tr.MambaForCausalLM(
            tr.MambaConfig(
                vocab_size=V,
                hidden_size=8,
                state_size=3,
                num_hidden_layers=1,
                conv_kernel=3,
                time_step_rank=2,
                **SPECIAL,
            )
        ),
        _tokens,
    ),
}


def build(name: str) -> tuple[Wrapped, dict[str, Tensor]]:
    """The model, with weights that are not those of a fresh initialisation, and inputs."""
    make, inputs = MODELS[name]
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(0)
        model = Wrapped(make().double()).eval()
        for p in model.parameters():
            p.data += 0.1 * torch.randn_like(p)
        return model, inputs()


class Calls(TorchFunctionMode):
    """The products x Wᵀ + b and x W + b of a pass, by ``F.linear`` and ``torch.addmm``, and what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Tensor, Tensor, Any, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is F.linear:
            x, weight, bias = (*args, *(kwargs or {}).values(), None)[:3]
            self.found.append((x.detach(), weight, bias, out))
        elif func is torch.addmm:
            bias, x, weight = args
            self.found.append((x.detach(), weight, bias, out))
        return out


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def brute_force(
    model: Wrapped, x: dict[str, Tensor], s: Tensor
) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor | None]]]:
    """R [k n p] by one backward pass an example, and S and A of every matrix by the products that use it.

    A is None where rounding decides which positions a cotangent comes to.
    """
    with Calls() as calls:
        y = model(**x)
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    R = [
        [
            torch.autograd.grad(y[n], list(params.values()), column[n], retain_graph=True, allow_unused=True)
            for n in range(N)
        ]
        for column in s
    ]
    flat = [
        torch.stack([torch.cat([_or_zero(g, p) for g, p in zip(one, params.values(), strict=True)]) for one in of_n])
        for of_n in R
    ]
    names = {p.untyped_storage().data_ptr(): (name, p) for name, p in params.items()}
    sums: dict[str, list[Any]] = {}
    doubtful: set[str] = set()
    for a, weight, bias, out in calls.found:
        name, p = names.get(weight.untyped_storage().data_ptr(), ("", weight))
        if not name:
            continue
        c = p.shape[0] if p.ndim == 3 else 1
        e = weight.storage_offset() // p[0].numel() if p.ndim == 3 else 0
        a = a.reshape(-1, a.shape[-1])
        a = a if bias is None else torch.cat([a, torch.ones_like(a[:, :1])], dim=1)
        total = sums.setdefault(
            name, [torch.zeros(c, out.shape[-1], out.shape[-1]), torch.zeros(c, *[a.shape[-1]] * 2), [0] * c]
        )
        gs = [torch.autograd.grad(y, out, column, retain_graph=True, allow_unused=True)[0] for column in s]
        g = torch.stack([torch.zeros_like(out) if g is None else g for g in gs]).reshape(len(s), -1, out.shape[-1])
        size = g.abs().amax(-1).amax(0)
        if bool((size < 1e-12 * size.max()).any()):
            doubtful.add(name)  # queries of first tokens, or of all but one: 0 but for rounding, which decides
        total[0][e] += torch.einsum("kro,krp->op", g, g) / N
        total[1][e] += a.T @ a
        total[2][e] += len(a)
    counts = {name: torch.tensor(count).clamp(min=1).view(-1, 1, 1) for name, (_, _, count) in sums.items()}
    factors = {name: (S, None if name in doubtful else A / counts[name]) for name, (S, A, _) in sums.items()}
    return torch.stack(flat), factors


def _or_zero(g: Tensor | None, p: Tensor) -> Tensor:
    return torch.zeros_like(p).reshape(-1) if g is None else g.reshape(-1)


@pytest.fixture(autouse=True)
def _double(monkeypatch: pytest.MonkeyPatch, double_precision: None) -> None:
    deberta = "transformers.models.deberta_v2.modeling_deberta_v2.scaled_size_sqrt"
    # A function of torch.jit, which no mode sees, and which rounds to single precision.
    monkeypatch.setattr(deberta, lambda q, factor: torch.tensor(float(q.shape[-1] * factor)).sqrt())


@pytest.mark.parametrize("name", MODELS)
def test_every_factor_is_that_of_brute_force(name: str) -> None:
    """Rows of all parameters; S and A of all matrices that are no embedding as well; and nothing falls back."""
    model, x = build(name)
    with quiet():
        y = model(**x)
        s = torch.randn(2, *y.shape, generator=torch.Generator().manual_seed(0))
        R, factors = brute_force(model, x, s)
        pb = ng.pullback(model, x, Rooted(s))
        close(rows(pb) * N**0.5, R)
        G = ng.Kronecker(strict=True).estimate(pb).tensors()
    tied = {name for layer in pb.layers if layer.facets for name in layer.names}
    compared = [name for name in factors if f"{name}/S" in G and name not in tied and G[f"{name}/S"].shape[1] > 1]
    for own in compared:
        S, A = factors[own]
        close(G[f"{own}/S"], S)
        if A is not None:
            close(G[f"{own}/A"], A)
    assert len(compared) >= 3


@pytest.mark.parametrize("name", ["GPT-2", "T5", "Mixtral", "Mamba"])
def test_an_optimizer_sees_them_in_the_users_own_pass(name: str) -> None:
    model, x = build(name)
    with quiet():
        opt = ng.KFAC(model, ng.Euclidean(), lr=0.1, damping=0.1, strict=True, metric_every=1)
        for _ in range(2):
            opt.zero_grad()
            model(**x).square().mean().backward()
            opt.step()
        y = model(**x)
        expected = ng.Kronecker().estimate(ng.pullback(model, x, ng.Euclidean())).tensors()
        found = opt.tracker.fresh or opt.tracker.average
    assert y.isfinite().all()
    assert found is not None
    assert expected.keys() == found.tensors().keys()


def test_losses_by_number_are_those_of_the_outputs_in_their_order() -> None:
    """``transformers`` returns mappings that are indexed by names and by numbers."""

    class Answer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.start, self.end = nn.Linear(3, 4).double(), nn.Linear(3, 4).double()

        def forward(self, x: Tensor) -> Any:
            start, end = self.start(x), self.end(x)
            return tr.modeling_outputs.QuestionAnsweringModelOutput(start_logits=start, end_logits=end)

    torch.manual_seed(0)
    named, numbered = Answer(), Answer()
    numbered.load_state_dict(named.state_dict())
    loss, x, t = nn.CrossEntropyLoss(), torch.randn(5, 3).double(), torch.arange(5) % 4
    for model, losses in ((named, {"start_logits": loss, "end_logits": loss}), (numbered, (loss, loss))):
        opt = ng.KFAC(model, losses, strict=True, generator=torch.Generator().manual_seed(0))
        out = model(x)
        (loss(out.start_logits, t) + loss(out[1], t.flip(0))).backward()
        opt.step()
    torch.testing.assert_close(numbered.state_dict(), named.state_dict(), rtol=0.0, atol=0.0)
