"""The decoder's ways to compute a step, against transformers, on a CPU with the kernels' twins."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl_backend.attention.base import Chunks, DecodeRows
from minisgl_backend.attention.latent_kernels import LatentDecode, LatentPrefill
from minisgl_backend.attention.own_kernels import TritonDecode, TritonPrefill
from minisgl_backend.execution.states import StateStorage
from minisgl_backend.execution.storage import KVStorage
from minisgl_backend.experts_spec import GateLimits, RoutingRule
from minisgl_backend.gates import ExpertsGate, Gate
from minisgl_backend.kernels import float8_rows, linear_cut, small_batch, wide_linear
from minisgl_backend.kernels.activation import open_gates_reference
from minisgl_backend.kernels.adapters import (
    IN_STEP,
    Adaptation,
    AdaptedTokens,
    add_adapter_delta_reference,
    arrange_tokens,
    arranged_size,
)
from minisgl_backend.kernels.chunk_runs import Run, Runs
from minisgl_backend.kernels.experts import ExpertWeights, fused_experts_reference
from minisgl_backend.kernels.float8_rows import Float8Rows
from minisgl_backend.kernels.packed_weight import (
    PLACES_OF_BYTES,
    CodesKind,
    PackedWeight,
    dequantize_weight,
)
from minisgl_backend.kernels.paged_kv import PagedKV
from minisgl_backend.kernels.quantized import dequantized, quantize
from minisgl_backend.kernels.rope_store import TokenPlaces, qk_norm_rope_store_reference
from minisgl_backend.kernels.routing import Choices, RouterExtras, choose
from minisgl_backend.kernels.rows import (
    DecodeInputs,
    RowTable,
    StepInputs,
    begin_decode,
    keep_sampled,
)
from minisgl_backend.kernels.sampling_table import ONCE, Samples
from minisgl_backend.kernels.small_batch import small_batch_linear
from minisgl_backend.layers import quantized_matrix
from minisgl_backend.layers.experts import ExpertsMLP
from minisgl_backend.layers.norm import Normed
from minisgl_backend.models import kernel_choice
from minisgl_backend.models.adapter_files import open_adapter
from minisgl_backend.models.adapter_slots import AdapterSlots
from minisgl_backend.models.build import KernelChoices, build_model
from minisgl_backend.models.catalog import load_spec
from minisgl_backend.models.decoder import Decoder
from minisgl_backend.models.gemma4_layer import ExpertsBeside
from minisgl_backend.models.kernel_choice import (
    has_expert_kernels,
    has_fused_layers,
    use_tensor_cores,
)
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.models.token_mixing import RecurrentRows
from minisgl_backend.parallel.group import Group, OneRank
from minisgl_backend.plan import MTP_GUESS
from minisgl_backend.weight_format import (
    CONVERTED_FP8,
    Encoding,
    Layout,
    Rule,
    WeightFormat,
    WeightFormats,
)
from minisgl_kit.adapters import write_adapter
from tests.conformance.adapter_folders import merged
from tests.conformance.checkpoints import (
    CONTEXT,
    VOCAB_SIZE,
    write_broad_afmoe_checkpoint,
    write_broad_checkpoint,
    write_broad_experts_checkpoint,
    write_broad_gemma_checkpoint,
    write_broad_hybrid_checkpoint,
    write_broad_latents_checkpoint,
    write_broad_olmoe_checkpoint,
    write_checkpoint,
)
from tests.conformance.quantized_checkpoints import write_quantized
from tests.parallel.threads import on_ranks

CPU = torch.device("cpu")
PAGE_SIZE = 4
NUM_PAGES = 32
MAX_RANK = 16
NUM_EXPERTS = 16
Prompt: TypeAlias = tuple[Tensor, Tensor, Tensor]


def load(
    folder: Path,
    group: Group,
    *,
    fused: bool,
    spec: ModelSpec | None = None,
    whole_experts: bool = False,
    keeps_experts: Callable[[WeightFormat], bool] | None = None,
) -> Decoder:
    """A model over pages of its own; a ``spec`` may have quantized weights, which are kept."""
    model = build_model(
        spec or load_spec(folder),
        folder,
        dtype=torch.float32,
        device=CPU,
        group=group,
        max_sequence_length=CONTEXT,
        whole_experts=whole_experts,
        kernels=KernelChoices(
            fused=fused,
            fused_experts=fused,
            keep_quantized=spec is not None,
            keeps_experts=keeps_experts,
        ),
    )
    model.bind_pages(pages_of(model))
    return model


def pages_of(model: Decoder) -> list[PagedKV]:
    shape = model.spec.attention_shape(model.group.size)
    pages = NUM_PAGES - 1  # and the dummy page
    return KVStorage(
        shape, num_pages=pages, page_size=PAGE_SIZE, dtype=torch.float32, device=CPU
    ).layers


@pytest.mark.parametrize(
    ("case", "fused"),
    [
        (case, fused)
        for case in ("llama-biases", "llama3", "mistral-window", "qwen2", "qwen3", "qwen3-moe")
        for fused in (True, False)
    ]
    + [("broad", True), ("broad", False)]
    + [(case, True) for case in ("gemma3", "granite-tied", "olmo2", "phi3-partial", "smollm3")]
    + [(case, True) for case in ("ernie-biases", "ernie-moe", "exaone4", "glm4", "granite-moe")]
    + [(case, True) for case in ("hunyuan-yarn", "hunyuan-moe", "olmoe")]
    + [(case, True) for case in ("exaone-moe-groups", "hy-v3", "hyperclova", "mellum")]
    + [(case, True) for case in ("granite-shared", "granite-swa", "granite-moe-swa-shared")]
    + [("afmoe", True), ("nemotron-h", True), ("nemotron-h-experts", True)]
    + [(case, True) for case in ("arcee-biases", "cohere-biases", "cohere2", "gemma", "gemma2")]
    + [("apertus", True), ("cohere2-moe", True), ("starcoder2", True), ("laguna", True)]
    + [("step3.5", True), ("step3.7", True)]
    + [("lfm2", True), ("lfm2-moe", True), ("lfm3", True)]
    + [("olmo-hybrid", True), ("kimi-linear", True)]
    + [("bailing-hybrid", True), ("bailing-v3", True)]
    + [("granite-hybrid", True), ("granite-hybrid-dense", True)]
    + [(case, True) for case in ("axk1", "deepseek-v2-lite", "glm4-moe-lite", "broad-latents")],
)
@pytest.mark.parametrize("length", [5, 40])
def test_a_prompt_then_a_token(case: str, length: int, fused: bool, tmp_path: Path) -> None:
    """If fused, a layer computes 5 tokens as a small batch and 40 as a wide one; else plainly.

    The case "broad" is large enough for the GEMMs of ``wide_linear``.
    """
    theirs = write(case, tmp_path)
    check_prompt_then_token(load(tmp_path, OneRank(), fused=fused), *a_prompt(theirs, length))


def test_a_layer_pairs_dimensions_by_its_own_rope(tmp_path: Path) -> None:
    prompt, spec = a_prompt(write("glm4", tmp_path), 40), load_spec(tmp_path)
    halves = replace(spec.rope, interleaved=not spec.rope.interleaved)
    by_layer = replace(spec, rope=halves, ropes=(spec.rope,) * spec.num_layers)
    check_prompt_then_token(load(tmp_path, OneRank(), fused=True, spec=by_layer), *prompt)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", ["llama-biases", "qwen3", "qwen3-moe", "broad", "deepseek-v3"])
def test_a_prompt_then_a_token_on_several_ranks(
    case: str, size: int, fused: bool, tmp_path: Path
) -> None:
    """Four ranks share two key-value heads, but llama-biases and broad have four heads."""
    theirs = write(case, tmp_path)
    prompt = a_prompt(theirs, 40)

    def check(group: Group) -> None:
        check_prompt_then_token(load(tmp_path, group, fused=fused), *prompt)

    on_ranks(size, check)


def exact_rows(x: Tensor, group: int) -> Float8Rows:
    """Stands in for ``float8_rows_reference``: the same order, but not rounded."""
    permuted = x.reshape(len(x), -1, 16)[..., PLACES_OF_BYTES].flatten(1)
    return Float8Rows(permuted, torch.ones(len(x), x.shape[1] // group), len(x))


def as_they_were(x: Float8Rows) -> Tensor:
    numbers = x.numbers.reshape(x.num_rows, -1, 16)
    return numbers[..., torch.tensor(PLACES_OF_BYTES).argsort()].flatten(1)


class TwinCores:
    """``TensorCores`` for up to 20 tokens, in plain PyTorch, with the ``squares`` of two tiles."""

    most_tokens = 20

    def shrink(self, x: Tensor, adaptation: Adaptation, *, pdl: bool) -> Tensor:
        raise AssertionError("more tokens take the twin of the Triton kernels")

    def linear(
        self,
        shape: Sequence[int],
        *,
        gate: Gate | None,
        codes: CodesKind | None,
        adapters: tuple[int, int] | None = None,
    ) -> Any:
        def gemm(
            x: Tensor,
            weight: Tensor | PackedWeight,
            *,
            squares: Tensor | None,
            eps: float,
            bias: Tensor | None = None,
            adaptation: Adaptation | None = None,
            pdl: bool,
        ) -> Tensor:
            assert weight.shape == shape and not pdl  # a CPU starts nothing early
            assert (codes is not None) == isinstance(weight, PackedWeight)
            assert adaptation is None or adapters
            y = self._linear(x, weight, squares, eps, bias, adaptation)
            return y if gate is None else open_gates_reference(y, gate)

        return self._kernel(gemm)

    def float8(self, shape: Sequence[int], *, codes: CodesKind, gate: Gate | None) -> Any:
        """For up to 40 tokens, which are ``exact_rows``."""

        def gemm(
            x: Float8Rows, weight: PackedWeight, *, bias: Tensor | None = None, pdl: bool
        ) -> Tensor:
            assert weight.shape == shape and weight.kind == codes and not pdl
            assert x.num_rows > self.most_tokens and x.group == weight.shape[1]
            y = self._linear(as_they_were(x), weight, None, 0.0, bias, None)
            return y if gate is None else open_gates_reference(y, gate)

        kernel: Any = gemm
        kernel.gate, kernel.most_rows = gate, 2 * self.most_tokens
        return kernel

    def for_many(self, shape: Sequence[int], *, codes: CodesKind, gate: Gate | None) -> Any:
        """For up to 40 tokens."""

        def gemm(
            x: Tensor,
            weight: PackedWeight,
            *,
            bias: Tensor | None,
            out: Tensor | None,
            pdl: bool,
        ) -> Tensor:
            assert weight.shape == shape and weight.kind == codes and not pdl
            assert len(x) > self.most_tokens and out is None
            y = self._linear(x, weight, None, 0.0, bias, None)
            return y if gate is None else open_gates_reference(y, gate)

        kernel: Any = gemm
        kernel.gate, kernel.most_tokens = gate, 2 * self.most_tokens
        return kernel

    def residual(
        self,
        shape: Sequence[int],
        *,
        codes: CodesKind | None,
        adapters: tuple[int, int] | None = None,
    ) -> Any:
        def add(
            x: Tensor,
            weight: Tensor | PackedWeight,
            residual: Tensor,
            norm_weight: Tensor,
            *,
            bias: Tensor | None,
            adaptation: Adaptation | None,
            pdl: bool,
        ) -> tuple[Tensor, Tensor]:
            assert weight.shape == shape and (adapters or adaptation is None)
            residual.add_(self._linear(x, weight, None, 0.0, bias, adaptation))
            squares = torch.stack([half.square().sum(1) for half in residual.chunk(2, 1)])
            return residual * norm_weight, squares

        return self._kernel(add)

    def heads(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        in_features: int,
        *,
        page_size: int,
        fp8: bool,
        codes: CodesKind | None,
        adapters: tuple[int, int] | None = None,
    ) -> Any:
        def heads(
            x: Tensor,
            weight: Tensor | PackedWeight,
            places: TokenPlaces,
            kv: PagedKV,
            *,
            squares: Tensor | None,
            eps: float,
            bias: Tensor | None,
            q_weight: Tensor | None,
            k_weight: Tensor | None,
            adaptation: Adaptation | None,
            pdl: bool,
        ) -> Tensor:
            assert weight.shape == ((num_heads + 2 * num_kv_heads) * head_dim, in_features)
            assert page_size == PAGE_SIZE and not fp8
            assert adapters or adaptation is None
            qkv = self._linear(x, weight, squares, eps, bias, adaptation)
            head_weights = None
            if q_weight is not None and k_weight is not None:
                head_weights = torch.stack([q_weight] * num_heads + [k_weight] * num_kv_heads)
            return qk_norm_rope_store_reference(
                qkv,
                places,
                kv,
                num_heads=num_heads,
                head_weights=head_weights,
                eps=eps,
            )

        return self._kernel(heads)

    def _linear(
        self,
        x: Tensor,
        weight: Tensor | PackedWeight,
        squares: Tensor | None,
        eps: float,
        bias: Tensor | None,
        adaptation: Adaptation | None,
    ) -> Tensor:
        if squares is not None:
            x = x * (squares.sum(0)[:, None] / x.shape[1] + eps).rsqrt()
        if isinstance(weight, PackedWeight):
            numbers = dequantize_weight(weight.weight, x.dtype, packed=True)
            y = F.linear(weight.ordered(x), numbers, bias)
        else:
            y = F.linear(x, weight, bias)
        if adaptation is not None:
            assert x.shape[1] % IN_STEP == 0
            add_adapter_delta_reference(y, x, adaptation)
        return y

    def _kernel(self, compute: Any) -> Any:
        compute.most_tokens = self.most_tokens
        return compute


def use_twins(model: Decoder) -> None:
    """Do what ``use_tensor_cores`` of ``kernel_choice`` does on a GPU, with the kernels' twins."""
    cores: Any = TwinCores()
    make: Any = TwinExperts()
    for layer in model.layers:
        if isinstance(layer.mlp, ExpertsMLP):
            layer.mlp.use_kernels(make)
    model.use_tensor_cores(cores)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("length", [5, 40])
@pytest.mark.parametrize(
    "case",
    ["llama-biases", "qwen3", "ernie-biases", "glm", "hunyuan-yarn", "granite-swa"],
)
def test_a_prompt_then_a_token_on_tensor_cores(
    case: str, length: int, size: int, tmp_path: Path
) -> None:
    """After 40 tokens they compute only the one that follows."""
    prompt = a_prompt(write(case, tmp_path), length)

    def check(group: Group) -> None:
        model = load(tmp_path, group, fused=True)
        use_twins(model)
        check_prompt_then_token(model, *prompt)

    on_ranks(size, check)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("length", [5, 40])
@pytest.mark.parametrize("packed", [False, True])
def test_projections_of_latents_on_tensor_cores(
    packed: bool, length: int, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The projection to latents, that to queries and that of the output: each takes them
    separately, if packed with the weight between them in plain numbers."""
    made: list[tuple[tuple[int, ...], bool]] = []

    class Cores(TwinCores):
        def __init__(self, device: torch.device, most_tokens: int) -> None:
            assert device == CPU and most_tokens >= self.most_tokens

        def linear(self, shape: Sequence[int], **of: Any) -> Any:
            made.append((tuple(shape), of["codes"] is not None))
            return super().linear(shape, **of)

    make: Any = TwinExperts()
    twins = SimpleNamespace(HopperExperts=lambda device: make, TensorCores=Cores)
    monkeypatch.setattr(kernel_choice, "has_hopper_kernels", lambda device, dtype: True)
    monkeypatch.setattr(kernel_choice, "importlib", SimpleNamespace(import_module=lambda _: twins))
    monkeypatch.setattr(float8_rows, "float8_rows_reference", exact_rows)
    monkeypatch.setattr(linear_cut, "_LEAST_ALONE", 256 * 256)
    theirs = write_broad_latents_checkpoint(tmp_path)
    spec = load_spec(tmp_path)
    if packed:
        spec = with_packed(spec, theirs, r".*attn\.(q_b|o)_proj")
    prompt = a_prompt(theirs, length)

    def check(group: Group) -> None:
        model = load(tmp_path, group, fused=True, spec=spec)
        use_tensor_cores(model, CPU)
        check_prompt_then_token(model, *prompt)

    on_ranks(size, check)
    of_attention = [
        ((448, 512), False),
        ((1024 // size, 256), packed),
        ((512, 512 // size), packed),
    ]
    assert set(made) >= set(of_attention)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("length", [5, 40])
@pytest.mark.parametrize(
    ("packed", "is_large"), [("", True), ("", False), ("attn", True), ("mlp|attn", False)]
)
def test_weights_between_norms_take_tensor_cores_separately(
    packed: str,
    is_large: bool,
    length: int,
    size: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plain weights that are large enough, and packed ones, which leave more tokens to float8, in
    large layers even more. If plain weights are small, the kernels leave one row to another one.
    They also open gates of GELU."""
    made: list[tuple[Gate | None, bool, int]] = []
    streamed: list[Gate | None] = []

    def stream(x: Tensor, weight: Tensor, *, gate: Gate | None = None, **of: Any) -> Tensor:
        if len(x) == 1:
            streamed.append(gate)
        return small_batch_linear(x, weight, gate=gate, **of)

    class Cores(TwinCores):
        def __init__(self, device: torch.device, most_tokens: int) -> None:
            assert device == CPU and most_tokens >= self.most_tokens
            self._asked = most_tokens

        def linear(self, shape: Sequence[int], **of: Any) -> Any:
            made.append((of["gate"], of["codes"] is not None, self._asked))
            return super().linear(shape, **of)

    twins = SimpleNamespace(HopperExperts=lambda device: None, TensorCores=Cores)
    monkeypatch.setattr(kernel_choice, "has_hopper_kernels", lambda device, dtype: True)
    monkeypatch.setattr(kernel_choice, "importlib", SimpleNamespace(import_module=lambda _: twins))
    monkeypatch.setattr(quantized_matrix, "cuts_of", lambda *_, more_than: {2 * more_than: None})
    monkeypatch.setattr(float8_rows, "float8_rows_reference", exact_rows)
    monkeypatch.setattr(linear_cut, "_LEAST_ALONE", 512 * 256)
    monkeypatch.setattr(small_batch, "small_batch_linear", stream)
    if is_large:
        monkeypatch.setattr(small_batch, "_MOST_ALONE", 0)
        monkeypatch.setattr(linear_cut, "_LARGE_LAYER", 0)
    theirs = write_broad_gemma_checkpoint(tmp_path)
    spec = load_spec(tmp_path)
    if packed:
        spec = with_packed(spec, theirs, rf".*({packed})\.\w+_proj")
    prompt = a_prompt(theirs, length)

    def check(group: Group) -> None:
        model = load(tmp_path, group, fused=True, spec=spec)
        use_tensor_cores(model, CPU)
        check_prompt_then_token(model, *prompt)

    on_ranks(size, check)
    assert len(made) == 4 * spec.num_layers * size
    assert {gate for gate, *_ in made} == {None, "gelu"}
    most = {"": {(False, 256)}, "attn": {(False, 256), (True, 32)}, "mlp|attn": {(True, 64)}}
    assert {(in_codes, asked) for _, in_codes, asked in made} == most[packed]
    of_layer = [] if is_large or packed else [None, None, "gelu", None]
    assert Counter(streamed) == Counter([*of_layer * spec.num_layers, None] * size)  # with the head


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("length", [5, 40])
@pytest.mark.parametrize("case", ["llama-biases", "qwen3", "broad"])
def test_an_adapter_on_tensor_cores(case: str, length: int, size: int, tmp_path: Path) -> None:
    """It is added to a GEMM or to the residual stream before one; with 40 tokens, to other ones."""
    theirs = write(case, tmp_path)
    path = write_adapter(tmp_path / "adapter", load_spec(tmp_path), rank=12)
    prompt = a_prompt(merged(theirs, path), length)

    def check(group: Group) -> None:
        model = load(tmp_path, group, fused=True)
        slots = AdapterSlots(model, 2, MAX_RANK, CPU)
        file = open_adapter(path, slots.projections, slots.names, max_rank=MAX_RANK)
        slots.write(2, slots.shape_of(file), slots.pack(file))
        use_twins(model)
        check_prompt_then_token(model, *prompt, slot=2)

    on_ranks(size, check)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("case", "encoding", "block", "symmetric", "length"),
    [
        ("broad", Encoding.E4M3, (128, 128), True, 15),
        ("broad", Encoding.E4M3, (128, 128), True, 40),
        ("broad", Encoding.E4M3, (128, 128), True, 50),
        ("broad", Encoding.E4M3, (1, None), True, 50),
        ("broad", Encoding.INT8, (1, None), True, 40),
        ("broad", Encoding.INT4, (1, 64), False, 40),
        ("broad", Encoding.INT4, (1, 64), False, 50),
        ("broad", Encoding.E2M1, (1, 32), True, 40),
        ("broad-hybrid", Encoding.E4M3, (128, 128), True, 15),
        ("broad-hybrid", Encoding.E4M3, (128, 128), True, 50),
        ("broad-hybrid-experts", Encoding.E4M3, (128, 128), True, 50),
    ],
)
def test_packed_weights_are_computed_by_kernels(
    case: str,
    encoding: Encoding,
    block: tuple[int, int | None],
    symmetric: bool,
    length: int,
    size: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On tensor cores; 40 tokens by kernels for many, those of float8 or others; more by the
    library's for float8, or else dequantized. In recurrent layers, all weights except those of the
    rates."""
    monkeypatch.setattr(quantized_matrix, "cuts_of", lambda *_, more_than: {2 * more_than: None})
    if encoding is Encoding.E4M3 or length <= 40:
        monkeypatch.delattr(quantized_matrix, "dequantize_weight")
    monkeypatch.setattr(float8_rows, "float8_rows_reference", exact_rows)
    form = WeightFormat(
        layout=Layout.CONVERTED, encoding=encoding, block=block, symmetric=symmetric
    )
    theirs = write(case, tmp_path)
    names = r".*(attn|mlp|shared_expert)\.(\w+_proj|in_proj_qkv|in_proj_z)"
    for name, weight in theirs.named_parameters():
        if re.fullmatch(names, name.removesuffix(".weight")):
            cells = block[0], block[1] or weight.shape[1]
            found = quantize(weight.data, encoding, cells, symmetric=symmetric)
            weight.data.copy_(dequantized(found, torch.float32))
    prompt = a_prompt(theirs, length)
    weights = WeightFormats("test", (Rule(re.compile(names), form),))
    spec = replace(load_spec(tmp_path), weights=weights)

    def check(group: Group) -> None:
        model = load(tmp_path, group, fused=True, spec=spec)
        use_twins(model)
        check_prompt_then_token(model, *prompt)

    on_ranks(size, check)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], tuple[Path, Prompt]]:
    """The folder of a case's checkpoint, and a prompt of 5 or 40 tokens; the largest takes 110 MB,
    so each is written once."""

    @functools.cache
    def write_once(case: str) -> tuple[Path, dict[int, Prompt]]:
        folder = tmp_path_factory.mktemp(case)
        theirs = write(case, folder)
        return folder, {length: a_prompt(theirs, length) for length in (5, 40)}

    def folder_and_prompt(case: str, length: int) -> tuple[Path, Prompt]:
        folder, prompts = write_once(case)
        return folder, prompts[length]

    return folder_and_prompt


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("length", [5, 40])
@pytest.mark.parametrize(
    ("case", "least_streamed"),
    [
        ("qwen3.5", 0),
        ("qwen3-next", 2**30),
        ("granite-hybrid-dense", 0),
        ("broad-hybrid", 0),
        ("broad-hybrid-experts", 0),
        ("broad-hybrid-experts", 2**30),
    ],
)
def test_recurrent_layers_on_tensor_cores(
    case: str,
    least_streamed: int,
    length: int,
    size: int,
    written: Callable[[str, int], tuple[Path, Prompt]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Together with gated attention and, if there are experts, a gated one that all tokens take. A
    single row is left to another kernel if its weight has at least ``least_streamed`` elements."""
    folder, prompt = written(case, length)
    monkeypatch.setattr(small_batch, "_LEAST_ELEMENTS", least_streamed)

    def check(group: Group) -> None:
        model = load(folder, group, fused=True)
        use_twins(model)
        check_prompt_then_token(model, *prompt)

    on_ranks(size, check)


class TwinExperts:
    """Stands in for ``HopperExperts``: makes twins of its kernels. ``calls`` has the number of
    tokens of each call, and ``with_shared`` those of calls with the shared expert."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.with_shared: list[int] = []

    def kernels(
        self,
        rule: RoutingRule,
        held: tuple[int, int],
        *shapes: object,
        kinds: tuple[CodesKind, CodesKind] | None,
        gate: ExpertsGate | None,
        hidden_size: int,
        wide: bool,
        shared: bool,
        scales_inputs: bool,
    ) -> Any:
        begin, end = held
        assert wide  # for weights in float32

        def compute(
            x: Tensor,
            router: Tensor,
            logits: Callable[[bool], Tensor],
            experts: ExpertWeights,
            *,
            extras: RouterExtras,
            routed: Tensor | None = None,
            pdl: bool,
            with_shared: bool = False,
            shared_gate: Tensor | None = None,
            squares: Tensor | None = None,
            eps: float = 0.0,
        ) -> tuple[Tensor, Choices]:
            self.calls.append(len(x))
            assert shared or not with_shared
            assert with_shared or shared_gate is None
            assert routed is None or torch.equal(F.linear(routed, router), logits(False))
            assert experts.shapes == shapes and experts.kinds == kinds and not pdl
            assert experts.gate == gate and x.shape[1] == experts.shapes[1][1]
            assert router.shape[1] == hidden_size
            scale = torch.ones(len(x), 1)
            if squares is not None:
                scale = (squares.sum(0)[:, None] / x.shape[1] + eps).rsqrt()
            scores = scale * logits(False)
            scores = scores if extras.bias is None else scores + extras.bias
            chosen = choose(scores, rule, extras.correction, extras.factors)
            is_here = (chosen.ids >= begin) & (chosen.ids < end)
            ids, weights = torch.where(is_here, chosen.ids - begin, -1), chosen.weights
            of_rows = scale * x
            if scales_inputs:
                of_rows, weights = of_rows * weights, torch.ones_like(weights)
            if with_shared:
                self.with_shared.append(len(x))
                ids = torch.cat([ids, torch.full((len(x), 1), end - begin)], dim=1)
                opening = torch.ones(len(x), 1)
                if shared_gate is not None:
                    opening = (scale * x @ shared_gate[:, None]).sigmoid()
                weights = torch.cat([weights, opening], dim=1)
            outputs = [
                fused_experts_reference(
                    of_rows, experts, Choices(of_all[:, None], torch.ones(len(x), 1))
                )
                for of_all in ids.unbind(1)
            ]
            return torch.stack(outputs, 1), Choices(ids, weights, elsewhere=True)

        kernels: Any = compute
        kernels.takes_shared = lambda num_tokens, router: num_tokens <= 4
        return kernels


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("length", [5, 40])
@pytest.mark.parametrize("whole_experts", [False, True])
@pytest.mark.parametrize("case", ["broad-experts", "broad-olmoe"])
def test_experts_behind_tensor_cores(
    case: str,
    length: int,
    size: int,
    whole_experts: bool,
    written: Callable[[str, int], tuple[Path, Prompt]],
) -> None:
    """Experts get half-done norms, for up to 20 tokens and on one rank."""
    folder, prompt = written(case, length)

    def check(group: Group) -> None:
        model = load(folder, group, fused=True, whole_experts=whole_experts)
        assert all(isinstance(layer.mlp, ExpertsMLP) for layer in model.layers)
        use_twins(model)
        check_prompt_then_token(model, *prompt)

    on_ranks(size, check)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("length", [5, 40])
@pytest.mark.parametrize("whole_experts", [False, True])
def test_experts_between_norms_behind_kernels(
    length: int,
    size: int,
    whole_experts: bool,
    written: Callable[[str, int], tuple[Path, Prompt]],
) -> None:
    """The shared expert is one more choice of few tokens, unless ranks hold whole experts."""
    folder, prompt = written("broad-afmoe", length)

    def check(group: Group) -> None:
        model = load(folder, group, fused=True, whole_experts=whole_experts)
        make: Any = TwinExperts()
        experts = [layer.mlp for layer in model.layers if isinstance(layer.mlp, ExpertsMLP)]
        assert 0 < len(experts) < model.spec.num_layers
        for module in experts:
            module.use_kernels(make)
        check_prompt_then_token(model, *prompt)
        assert len(make.calls) == 2 * len(experts)

    on_ranks(size, check)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    "case", ["fp8-blocks-moe", "awq-64-moe", "gptq-8-bits-moe", "mxfp4-gpt-oss"]
)
def test_experts_in_codes_behind_kernels(case: str, size: int, tmp_path: Path) -> None:
    """Weights are packed for kernels, and each rank holds whole experts."""
    prompt = a_prompt(write_quantized(case, tmp_path), 12)
    spec = load_spec(tmp_path)

    def keeps(form: WeightFormat) -> bool:
        return has_expert_kernels(form, spec, 1)

    def check(group: Group) -> None:
        model = load(tmp_path, group, fused=False, whole_experts=True, keeps_experts=keeps)
        make: Any = TwinExperts()
        experts = [layer.mlp for layer in model.layers if isinstance(layer.mlp, ExpertsMLP)]
        for module in experts:
            module.use_kernels(make)
            assert module.weights.kinds is not None
        check_prompt_then_token(model, *prompt)

    on_ranks(size, check)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("whole_experts", [False, True])
@pytest.mark.parametrize(
    "form", [None, CONVERTED_FP8, replace(CONVERTED_FP8, block=(1, None))], ids=str
)
def test_experts_beside_a_block_behind_kernels(
    form: WeightFormat | None,
    whole_experts: bool,
    size: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They read other rows than their router, whose choices are multiplied by factors. Weights are
    plain or packed for kernels."""
    write_checkpoint("gemma4-experts", tmp_path)
    spec = load_spec(tmp_path)
    assert spec.moe is not None and not has_fused_layers(spec)
    experts = replace(spec.moe.experts, intermediate_size=128)
    spec = replace(spec, hidden_size=128, moe=replace(spec.moe, experts=experts))
    if form is not None:
        rules = (Rule(re.compile(r".*\.experts\..*"), form),)
        spec = replace(spec, weights=WeightFormats("test", rules))
    parts = 1 if whole_experts else size
    made = TwinExperts()
    twins = SimpleNamespace(HopperExperts=lambda device: made, TensorCores=TwinCores)
    monkeypatch.setattr(kernel_choice, "has_hopper_kernels", lambda device, dtype: True)
    monkeypatch.setattr(kernel_choice, "importlib", SimpleNamespace(import_module=lambda _: twins))
    rows, routed = torch.randn(2, 30, 128, generator=torch.Generator().manual_seed(5))

    def check(group: Group) -> None:
        model = build_model(
            spec,
            tmp_path,
            dtype=torch.float32,
            device=CPU,
            group=group,
            load_format="dummy",
            max_sequence_length=CONTEXT,
            whole_experts=whole_experts,
            kernels=KernelChoices(
                fused_experts=True, keeps_experts=lambda form: has_expert_kernels(form, spec, parts)
            ),
        )
        beside = [module for module in model.modules() if isinstance(module, ExpertsBeside)]
        assert len(beside) == spec.num_layers
        for module in beside:
            assert module.experts.router.factors is not None
            module.experts.router.factors.data.copy_(torch.linspace(0.5, 2, experts.num_experts))
        with torch.inference_mode():
            expected = [module.output(rows, routed, pdl=False)[0] for module in beside]
            use_tensor_cores(model, CPU)
            found = [module.output(rows, routed, pdl=False)[0] for module in beside]
        assert all((module.experts.weights.kinds is None) == (form is None) for module in beside)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)

    on_ranks(size, check)
    assert made.calls == [len(rows)] * spec.num_layers * size


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("whole_experts", [False, True])
@pytest.mark.parametrize(
    "case", ["nemotron-h-latent", "nemotron-h-experts", "deepseek-v3", "llama4"]
)
@pytest.mark.parametrize(
    "form", [None, CONVERTED_FP8, replace(CONVERTED_FP8, block=(1, None))], ids=str
)
def test_experts_of_other_kinds_behind_kernels(
    form: WeightFormat | None, case: str, whole_experts: bool, size: int, tmp_path: Path
) -> None:
    """Without gates, with a latent, behind a router that limits groups, and with weights that scale
    inputs. Formats are kept."""
    write_checkpoint(case, tmp_path)
    spec = load_spec(tmp_path)
    assert spec.moe is not None and not has_fused_layers(spec)
    latent = None if spec.moe.experts.latent_size is None else 64
    experts = replace(spec.moe.experts, intermediate_size=128, latent_size=latent)
    if case == "llama4" and experts.shared is not None:  # in size like the others
        experts = replace(experts, shared=replace(experts.shared, intermediate_size=128))
    spec = replace(spec, hidden_size=96, moe=replace(spec.moe, experts=experts))
    if form is not None:
        rules = (Rule(re.compile(r".*\.experts\..*_proj"), form),)
        spec = replace(spec, weights=WeightFormats("test", rules))
    parts = 1 if whole_experts else size
    rows = torch.randn(9, 96, generator=torch.Generator().manual_seed(5))

    def check(group: Group) -> None:
        model = build_model(
            spec,
            tmp_path,
            dtype=torch.float32,
            device=CPU,
            group=group,
            load_format="dummy",
            max_sequence_length=CONTEXT,
            whole_experts=whole_experts,
            kernels=KernelChoices(
                fused_experts=True, keeps_experts=lambda form: has_expert_kernels(form, spec, parts)
            ),
        )
        modules = [module for module in model.modules() if isinstance(module, ExpertsMLP)]
        made: Any = TwinExperts()
        for module in modules:
            expected = [module.part(Normed(of), pdl=False) for of in (rows, rows[:2])]
            module.use_kernels(made)
            assert (module.weights.kinds is None) == (form is None)
            assert not module.memory.has_shared and not module.has_half_norms
            found = [module.part(Normed(of), pdl=False) for of in (rows, rows[:2])]
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)
        assert modules and made.calls == [9, 2] * len(modules)

    on_ranks(size, check)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("case", ["glm4-moe", "hunyuan-moe", "hy-v3", "qwen3.5-experts"])
@pytest.mark.parametrize(
    "form", [None, CONVERTED_FP8, replace(CONVERTED_FP8, block=(1, None))], ids=str
)
def test_a_shared_expert_is_one_more_choice_of_few_tokens(
    form: WeightFormat | None, case: str, size: int, tmp_path: Path
) -> None:
    """With a gate or without one, plain or in codes, if it is like the others."""
    write_checkpoint(case, tmp_path)
    spec = load_spec(tmp_path)
    assert spec.moe is not None and spec.moe.experts.shared is not None
    shared = replace(spec.moe.experts.shared, intermediate_size=128)
    experts = replace(spec.moe.experts, intermediate_size=128, shared=shared)
    spec = replace(spec, hidden_size=128, moe=replace(spec.moe, experts=experts))
    if form is not None:
        rules = (Rule(re.compile(r".*(experts?|shared_mlp)\..*_proj"), form),)
        spec = replace(spec, weights=WeightFormats("test", rules))
    rows = torch.randn(9, 128, generator=torch.Generator().manual_seed(5))

    def check(group: Group) -> None:
        model = build_model(
            spec,
            tmp_path,
            dtype=torch.float32,
            device=CPU,
            group=group,
            load_format="dummy",
            max_sequence_length=CONTEXT,
            kernels=KernelChoices(
                keep_quantized=True,
                fused_experts=True,
                keeps_experts=lambda form: has_expert_kernels(form, spec, size),
            ),
        )
        modules = [layer.mlp for layer in model.layers if isinstance(layer.mlp, ExpertsMLP)]
        made: Any = TwinExperts()
        for module in modules:
            assert module.memory.has_shared and (module.shared_gate is not None) == shared.gated
            expected = [module.part(Normed(of), pdl=False) for of in (rows, rows[:2])]
            module.use_kernels(made)
            assert (module.weights.kinds is None) == (form is None)
            found = [module.part(Normed(of), pdl=False) for of in (rows, rows[:2])]
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)
        assert made.calls == [9, 2] * len(modules) and made.with_shared == [2] * len(modules)

    on_ranks(size, check)


def test_layers_whose_gates_have_limits_are_not_fused(tmp_path: Path) -> None:
    write_checkpoint("qwen3-moe", tmp_path)
    spec = load_spec(tmp_path)
    assert spec.moe is not None and has_fused_layers(spec)
    limited = replace(spec.moe, limits={1: GateLimits(of_shared=7.0)})
    assert not has_fused_layers(replace(spec, moe=limited))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("length", [5, 40])
def test_layers_with_biases_on_tensor_cores(length: int, size: int, tmp_path: Path) -> None:
    """Biases of attention, of experts in codes, and of their router, all after half-done norms."""
    prompt = a_prompt(write_quantized("mxfp4-gpt-oss", tmp_path), length)
    spec = load_spec(tmp_path)
    assert has_fused_layers(spec) and spec.biases.output

    def keeps(form: WeightFormat) -> bool:
        return has_expert_kernels(form, spec, 1)

    def check(group: Group) -> None:
        model = load(tmp_path, group, fused=True, whole_experts=True, keeps_experts=keeps)
        use_twins(model)
        check_prompt_then_token(model, *prompt)

    on_ranks(size, check)


def write(case: str, folder: Path) -> Any:
    if case.startswith("broad-hybrid"):
        has_experts = case.endswith("experts")
        return write_broad_hybrid_checkpoint(folder, experts=has_experts, num_experts=NUM_EXPERTS)
    if case == "broad-experts":
        return write_broad_experts_checkpoint(folder, num_experts=NUM_EXPERTS)
    if case == "broad-afmoe":
        return write_broad_afmoe_checkpoint(folder)
    if case == "broad-latents":
        return write_broad_latents_checkpoint(folder)
    if case == "broad-olmoe":
        return write_broad_olmoe_checkpoint(folder, num_experts=NUM_EXPERTS)
    if case != "broad":
        return write_checkpoint(case, folder)
    assert wide_linear.is_faster(40, 512, 512, parts=True)
    return write_broad_checkpoint(folder)


def with_packed(spec: ModelSpec, theirs: Any, pattern: str) -> ModelSpec:
    """The spec of a checkpoint whose modules of these names are converted to FP8. Their weights in
    ``theirs`` are rounded as those are."""
    form, names = CONVERTED_FP8, re.compile(pattern)
    for name, weight in theirs.named_parameters():
        if names.fullmatch(name.removesuffix(".weight")):
            found = quantize(weight.data, form.encoding, (128, 128), symmetric=True)
            weight.data.copy_(dequantized(found, torch.float32))
    return replace(spec, weights=WeightFormats("test", (Rule(names, form),)))


def a_prompt(theirs: Any, length: int) -> Prompt:
    """A prompt and one more token, the logits of each, and a page table for two rows.

    The same ones each time: in some prompts two experts nearly tie, and rounding chooses.
    """
    ids = torch.randint(0, VOCAB_SIZE, (length + 1,), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        expected: Tensor = theirs(ids[None]).logits[0]
    return ids, expected, torch.randperm(NUM_PAGES).int().view(2, -1)


def of_slot(num_tokens: int, slot: int) -> AdaptedTokens | None:
    """All tokens use the adapter in a slot; slot 0 means none."""
    size = arranged_size(num_tokens, slot, num_tokens)
    slots = np.full(num_tokens, slot, np.int32)
    ranks = np.full(slot + 1, MAX_RANK, np.int32)
    content = arrange_tokens(slots, ranks, block=num_tokens, size=size)
    return AdaptedTokens(torch.from_numpy(content), num_tokens, num_tokens) if slot else None


def check_prompt_then_token(
    ours: Decoder, ids: Tensor, expected: Tensor, table: Tensor, *, slot: int = 0
) -> None:
    """Prefill all but the last of ``ids``, then decode it, with the adapter in a slot."""
    shape = ours.spec.attention_shape(ours.group.size)
    length = len(ids) - 1
    run: RecurrentRows | None = None
    step: RecurrentRows | None = None
    if (recurrent := ours.spec.recurrent) is not None:
        of_rank = recurrent.of_rank(ours.group.size)
        states = StateStorage(
            of_rank,
            num_rows=2,
            num_snapshots=0,
            dtype=torch.float32,
            state_dtype=torch.float32,
            device=CPU,
            num_checks=0,
            most_tokens=0,
        )
        ours.bind_states(states.layers)
        step = RecurrentRows(torch.tensor([1]))
        runs = Runs.of([Run(0, length, 1, position=0)], torch.from_numpy)
        run = RecurrentRows(torch.empty(0, dtype=torch.int64), runs)
    with torch.inference_mode():
        has_latents = shape.latent_dim is not None
        prefill = LatentPrefill(shape) if has_latents else TritonPrefill(shape)
        attend_chunks = prefill.plan_chunks(
            Chunks(
                rows=torch.tensor([1], dtype=torch.int32),
                offsets=torch.tensor([0, length], dtype=torch.int32),
                ends=torch.tensor([length], dtype=torch.int32),
                page_table=table,
                host_offsets=np.array([0, length], np.int32),
                host_ends=np.array([length], np.int32),
                max_length=length,
                max_end=length,
            )
        )
        positions = torch.arange(length)
        slots = table[1, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE

        def of_chunk(q: Tensor, layer_kv: PagedKV, layer: int) -> Tensor:
            out = q.new_empty(*q.shape[:2], layer_kv.values.shape[-1])
            attend_chunks(out, q, layer_kv, layer)
            return out

        found = ours(ids[:-1], positions, slots, of_chunk, run, of_slot(length, slot))
        torch.testing.assert_close(ours.logits(found.residual), expected[:-1], atol=2e-3, rtol=2e-3)

        make = LatentDecode if has_latents else TritonDecode
        decode = make(shape, max_batch_size=1, device=CPU)
        attend_rows = decode.plan_rows(
            DecodeRows(
                rows=torch.tensor([1], dtype=torch.int32),
                lengths=torch.tensor([length + 1], dtype=torch.int32),
                page_table=table,
            )
        )
        last = torch.tensor([length])
        place = table[1, last // PAGE_SIZE] * PAGE_SIZE + last % PAGE_SIZE

        def of_row(q: Tensor, layer_kv: PagedKV, layer: int) -> Tensor:
            out = q.new_empty(*q.shape[:2], layer_kv.values.shape[-1])
            attend_rows(out, q, layer_kv, layer)
            return out

        found = ours(ids[-1:], last, place, of_row, step, of_slot(1, slot))
        torch.testing.assert_close(ours.logits(found.residual), expected[-1:], atol=2e-3, rtol=2e-3)


def test_state_of_rows_goes_in_and_out() -> None:
    table = RowTable.empty(4, max_pages=3, dummy_page=9, vocab_size=20, device=CPU)
    given = StepInputs.empty(3, 2, CPU)
    table.tokens[:4] = torch.tensor([10, 11, 12, 13], dtype=torch.int32)
    table.lengths[:4] = torch.tensor([0, 5, 8, 3], dtype=torch.int32)
    table.sampling.column("marked")[1:3] = 1
    given.buffer[0] = 2
    given.lines[0] = torch.tensor([2, 1, table.dummy_row])
    given.grants[:] = torch.tensor([[2, 2, 6], [1, 1, 4]])
    inputs = begin_decode(table, given, 3, PAGE_SIZE)
    assert inputs.tokens.tolist() == [12, 11, 0]
    assert inputs.positions.tolist() == [8, 5, 0]
    assert inputs.lengths.tolist() == [9, 6, 1]
    assert inputs.slots.tolist() == [6 * PAGE_SIZE, 4 * PAGE_SIZE + 1, 9 * PAGE_SIZE]
    assert inputs.window_slots is None
    assert given.buffer[0] == 0

    sampled = torch.tensor([7, -1, 3], dtype=torch.int32)
    keep_sampled(table, samples_of(inputs), sampled)
    assert table.tokens.tolist() == [10, 0, 7, 13, 3]
    assert table.lengths.tolist() == [0, 6, 9, 3, 0]
    assert table.sampling.marks.nonzero().tolist() == [[2, 7]]
    assert table.sampling.marks[2, 7] == ONCE


def samples_of(inputs: DecodeInputs) -> Samples:
    """What a decode step with these inputs samples."""
    return Samples(inputs.rows, inputs.lengths, inputs.tokens)


def test_rows_may_have_several_tokens_each() -> None:
    table = RowTable.empty(3, max_pages=3, dummy_page=9, vocab_size=20, device=CPU, mtp_tokens=2)
    table.tokens[:3] = torch.tensor([10, 11, 12], dtype=torch.int32)
    table.known[1:, 0] = torch.tensor([0, 6])
    table.lengths[:3] = torch.tensor([5, 6, 1], dtype=torch.int32)
    table.pages[0, 1:] = torch.tensor([7, 2])
    given = StepInputs.empty(5, 0, CPU)
    guesses = [MTP_GUESS, MTP_GUESS - 1]
    given.lines[:] = torch.tensor([[0, 0, 0, 1, 2], [4, *guesses, -1, -1], [7, 8, 9, 50, 50]])
    inputs = begin_decode(table, given, 5, PAGE_SIZE)
    assert inputs.tokens.tolist() == [4, 0, 6, 11, 12]
    assert inputs.positions.tolist() == [7, 8, 9, 6, 1]
    assert inputs.lengths.tolist() == [8, 9, 10, 7, 2]
    assert inputs.slots[:3].tolist() == [7 * PAGE_SIZE + 3, 2 * PAGE_SIZE, 2 * PAGE_SIZE + 1]
    keep_sampled(table, samples_of(inputs), torch.tensor([0, 2, 6, 4, 5]).int())
    assert table.tokens[:3].tolist() == [2, 4, 5] and table.lengths[:3].tolist() == [9, 7, 2]


@pytest.mark.parametrize(
    ("sampled", "num_counted"),
    [
        ([8, 8, 8, 9], 4),
        ([8, 8, 5, 9], 3),
        ([8, 5, 8, 9], 2),
        ([5, 8, 8, 9], 1),
        ([8, -1, 8, 9], 2),
    ],
)
def test_samples_after_wrong_guesses_do_not_count(sampled: list[int], num_counted: int) -> None:
    """Of the middle row, which has guessed 8 three times. The others have one sample each."""
    table = RowTable.empty(3, max_pages=3, dummy_page=9, vocab_size=20, device=CPU)
    table.sampling.column("marked")[:] = 1
    table.sampling.marks[1, 8] = 5 * ONCE
    rows = torch.tensor([2, 1, 1, 1, 1, 0, 3, 3]).int()
    previous = torch.tensor([1, 4, 8, 8, 8, 9, 3, 3]).int()
    samples = Samples(rows, torch.tensor([6, 10, 11, 12, 13, 7, 1, 1]).int(), previous)
    keep_sampled(table, samples, torch.tensor([8, *sampled, 9, 3, 3]).int())
    last = sampled[num_counted - 1]
    assert table.tokens[:3].tolist() == [9, max(last, 0), 8]
    assert table.lengths.tolist() == [7, 9 + num_counted, 6, 0]
    counted = [token for token in sampled[:num_counted] if token >= 0]
    expected = ONCE * np.bincount(counted, minlength=20)
    expected[8] += 5 * ONCE
    assert table.sampling.marks[1].tolist() == expected.tolist()
    assert table.sampling.marks[[0, 2]].nonzero().tolist() == [[0, 9], [1, 8]]


def test_a_step_finds_slots_in_window_pages() -> None:
    table = RowTable.empty(
        2, max_pages=2, dummy_page=9, vocab_size=20, device=CPU, dummy_window_page=5
    )
    given = StepInputs.empty(3, 2, CPU)
    table.lengths[:2] = torch.tensor([6, 3], dtype=torch.int32)
    window_line = 1 + len(table.tokens)
    given.buffer[0] = 2
    given.lines[0] = torch.tensor([1, 0, table.dummy_row])
    given.grants[:] = torch.tensor([[1, 0, 7], [window_line, 0, 2]])
    inputs = begin_decode(table, given, 3, PAGE_SIZE)
    assert inputs.slots.tolist() == [7 * PAGE_SIZE + 3, 9 * PAGE_SIZE + 2, 9 * PAGE_SIZE]
    assert inputs.window_slots is not None
    assert inputs.window_slots.tolist() == [2 * PAGE_SIZE + 3, 5 * PAGE_SIZE + 2, 5 * PAGE_SIZE]


def test_layers_can_be_marked(tmp_path: Path) -> None:
    marks: list[str] = []

    @contextmanager
    def mark(name: str) -> Iterator[None]:
        marks.append(name)
        yield
        marks.append("end")

    write_checkpoint("qwen3", tmp_path)
    ours = load(tmp_path, OneRank(), fused=True)
    ours.mark = mark
    ids = torch.arange(3)
    with torch.inference_mode():
        ours(ids, ids, ids, lambda q, kv, layer: q)
    names = [[f"layer {layer}", "end"] for layer in range(ours.spec.num_layers)]
    assert marks == [mark for pair in names for mark in pair]
