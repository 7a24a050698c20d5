"""A row's bits depend on that row alone: not on how many rows there are, their order, their company or any buffer's size.

On this rests that engine and trainer agree bit for bit although they batch the same tokens in other ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from trtl_rl.kernels import ops, units
from trtl_rl.kernels.kernel_set import KernelSet, LayerUnits, find_compiler
from trtl_rl.kernels.spec import HeadSpec, LayerSpec, Part, fuse
from trtl_rl.model.bind import TrainableDecoder
from trtl_rl.model.kv import Blocks, KeyValueBuffers, RopeTables, Rows, block_length
from trtl_rl.model.layer import forward_rows, head_logits
from trtl_rl.model.weights import DecoderWeights
from trtl_rl.recipe.formats import BlockFormat, LinearFormat

FP8 = LinearFormat(BlockFormat((128, 128), "amax_over_448"), BlockFormat((1, 128), "inverse"), "fp8", "fp8", "fp8")
BF16 = replace(FP8, fprop="bf16", compute="bf16")
NONE = LinearFormat()
M = 160
Run = Callable[..., Any]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def outputs(run: Run, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    with torch.inference_mode():
        out = run(*inputs)
    return [out] if isinstance(out, torch.Tensor) else list(out)


def assert_invariant(run: Run, inputs: list[torch.Tensor], is_rows: list[bool], tile: int) -> None:
    """Run all rows at once; then fewer, in other orders, one tile by itself, and next to rows of another size."""
    whole = outputs(run, inputs)
    order = torch.randperm(M, generator=torch.Generator().manual_seed(1))
    choices = [order, order[: 2 * tile], order[:tile], order[-tile:], order[:1].expand(tile), torch.arange(tile)]
    choices += [torch.arange(M).repeat(3), torch.arange(M - tile, M)]
    for rows in choices:
        part = outputs(run, [x[rows] if dynamic else x for x, dynamic in zip(inputs, is_rows, strict=True)])
        for a, b in zip(whole, part, strict=True):
            assert torch.equal(a[rows], b)
    strangers = [
        x * 1e3 if dynamic and x.is_floating_point() else x for x, dynamic in zip(inputs, is_rows, strict=True)
    ]
    kept = order[: M // 2]
    for mine, other in zip(inputs, strangers, strict=True):
        if mine is not other:
            other[kept] = mine[kept]
    for a, b in zip(whole, outputs(run, strangers), strict=True):
        assert torch.equal(a[kept], b[kept]) and (a.shape[0] == M)


@pytest.mark.parametrize(
    "run", [lambda x: x / x.abs().amax(), lambda x: x.cumsum(0), lambda x: x * x.shape[0], lambda x: x - x[:32].mean()]
)
def test_the_check_of_these_tests_sees_a_row_that_depends_on_others(run: Run) -> None:
    with pytest.raises(AssertionError):
        assert_invariant(run, [random(M, 8)], [True], 32)


FORMATS = [
    NONE,
    BF16,
    LinearFormat(None, BlockFormat((1, 128), "inverse"), "fp8"),
    LinearFormat(None, BlockFormat((1, 128), "amax_over_448", "pow2"), "fp8"),
    LinearFormat(None, BlockFormat((1, 48), "inverse"), "fp8", compute="bf16"),
]


@pytest.mark.parametrize("tile", [1, 7, 32])
@pytest.mark.parametrize("k", [24, 96, 128, 161, 320])
@pytest.mark.parametrize("format", FORMATS, ids=["none", "bf16", "inverse", "pow2", "blocks of 48"])
def test_quantise_rows(format: LinearFormat, k: int, tile: int) -> None:
    def run(x: torch.Tensor) -> list[torch.Tensor]:
        operand, kept = ops.quantise_rows(x, format)
        return [operand, *(part.view(torch.uint8) if part.element_size() == 1 else part for part in kept)]

    assert_invariant(run, [random(M, k)], [True], tile)


@pytest.mark.parametrize("k", [24, 96, 128, 161, 320])
@pytest.mark.parametrize("format", FORMATS, ids=["none", "bf16", "inverse", "pow2", "blocks of 48"])
def test_backward_sees_the_operand_of_the_forward_pass(format: LinearFormat, k: int) -> None:
    operand, kept = ops.quantise_rows(random(M, k) * 10 ** random(M, 1, seed=1), format)
    assert torch.equal(ops.kept_rows(kept, format), operand)
    quantised = format.forward_activation is not None
    assert kept[0].dtype == (torch.float8_e4m3fn if quantised else torch.float32) and len(kept) == 1 + quantised


@pytest.mark.parametrize("n", [48, 61, 128, 500])
@pytest.mark.parametrize("k", [96, 128, 161, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_gemm(k: int, n: int, dtype: torch.dtype) -> None:
    x, operand = random(M, k), random(n, k, seed=1).to(dtype)
    assert_invariant(ops.gemm, [x, operand], [True, False], 8)
    y = ops.gemm(x, operand)
    assert torch.equal(ops.gemm(x, ops.pack(operand)), y)
    exact = x.to(dtype).double() @ operand.double().t()
    assert torch.allclose(y.double(), exact, atol=1e-3, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_gemm_where_torch_comes_without_onednn(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x, operand = random(M, 160), random(96, 160, seed=1).to(dtype)
    with_onednn = ops.gemm(x, operand)
    monkeypatch.setattr(ops, "ONEDNN", False)
    monkeypatch.setattr(ops, "ONEDNN_BF16", False)
    assert_invariant(ops.gemm, [x, operand], [True, False], 8)
    assert torch.allclose(ops.gemm(x, operand), with_onednn, atol=1e-4, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5)
    assert torch.equal(ops.gemm(x, ops.pack(operand)), ops.gemm(x, operand))


@pytest.mark.parametrize("tile", [1, 7, 32])
@pytest.mark.parametrize("shape", [(96,), (128,), (161,), (4, 24), (2, 64)], ids=str)
def test_rms_norm(shape: tuple[int, ...], tile: int) -> None:
    weight = random(shape[-1], seed=1)
    assert_invariant(lambda x: ops.rms_norm(x, weight, 1e-6), [random(M, *shape)], [True], tile)


@pytest.mark.parametrize("tile", [1, 7, 32])
@pytest.mark.parametrize("d", [24, 64])
def test_rope(d: int, tile: int) -> None:
    inputs = [random(M, 4, d), random(M, d, seed=1), random(M, d, seed=2)]
    assert_invariant(ops.rope, inputs, [True] * 3, tile)


@pytest.mark.parametrize("tile", [32, 64])
@pytest.mark.parametrize("f", [160, 161, 256])
def test_silu_mul(f: int, tile: int) -> None:
    assert_invariant(ops.silu_mul, [random(M, 2 * f)], [True], tile)


@pytest.mark.parametrize("tile", [32, 64])
@pytest.mark.parametrize("v", [61, 128, 1000])
def test_token_logprob(v: int, tile: int) -> None:
    generator = torch.Generator().manual_seed(1)
    ids, temperature = torch.randint(0, v, (M,), generator=generator), torch.rand(M, generator=generator) + 0.5
    inputs = [random(M, v) * 5, ids, temperature]
    assert_invariant(ops.token_logprob, inputs, [True] * 3, tile)
    logprob, logsumexp, entropy = ops.token_logprob(*inputs)
    exact = torch.log_softmax(inputs[0].double() / temperature.double()[:, None], -1)
    assert torch.allclose(logprob.double(), exact.gather(-1, ids[:, None])[:, 0], atol=1e-5)
    assert torch.allclose(entropy.double(), -(exact.exp() * exact).sum(-1), atol=1e-5)
    assert torch.allclose(logsumexp.double(), (inputs[0].double() / temperature.double()[:, None]).logsumexp(-1))


def spec_of(
    format: LinearFormat, *, qk_norm: bool, bias: bool, hidden: int = 96, feed: int = 160, rank: int = 0
) -> LayerSpec:
    d = hidden // 4
    return LayerSpec(
        hidden, 4, 2, d, feed, 1e-6, qk_norm,
        fuse([Part(4 * d, format, bias, rank), Part(2 * d, format, bias), Part(2 * d, NONE, bias, rank)], hidden),
        fuse([Part(hidden, format, False, rank)], 4 * d)[0],
        fuse([Part(feed, format, False, rank), Part(feed, format, False, rank // 2)], hidden),
        fuse([Part(hidden, format, bias, rank)], feed)[0],
    )  # fmt: skip


def head_of(format: LinearFormat) -> HeadSpec:
    return HeadSpec(96, 61, 1e-6, fuse([Part(61, format, False)], 96)[0])


SPECS = {
    "none": spec_of(NONE, qk_norm=False, bias=True),
    "fp8 ragged": spec_of(FP8, qk_norm=True, bias=True),
    "fp8 aligned": spec_of(FP8, qk_norm=False, bias=False, hidden=128, feed=256),
    "fp8 odd": spec_of(FP8, qk_norm=True, bias=True, hidden=136, feed=150),  # no whole vectors, two blocks of columns
    "fp8 adapters": spec_of(FP8, qk_norm=True, bias=True, rank=6),
    "fp8 bf16": spec_of(replace(FP8, compute="bf16"), qk_norm=True, bias=True, rank=2),
}


def unit_inputs(unit: units.Unit, seed: int = 0) -> tuple[list[torch.Tensor], list[bool]]:
    """Random inputs in the shapes of the unit's own example, with M rows."""
    example = unit.example()
    is_rows = [dynamic is not None for dynamic in example.dynamic]
    inputs = []
    for i, (tensor, dynamic) in enumerate(zip(example.inputs, is_rows, strict=True)):
        shape = (M, *tensor.shape[1:]) if dynamic else tuple(tensor.shape)
        scale = 1.0 if dynamic or tensor.dim() < 2 else tensor.shape[1] ** -0.5
        inputs.append((random(*shape, seed=seed + i) * scale).to(tensor.dtype))
    return inputs, is_rows


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("unit", [units.BeforeAttention, units.AfterAttention])
def test_units_of_a_layer(unit: type[Any], spec: str) -> None:
    made = unit(SPECS[spec])
    inputs, is_rows = unit_inputs(made)
    assert_invariant(made.forward, inputs, is_rows, 8)


@pytest.mark.parametrize("format", [NONE, FP8], ids=["none", "fp8"])
def test_units_of_the_head(format: LinearFormat) -> None:
    head = units.Head(head_of(format))
    inputs, is_rows = unit_inputs(head)
    assert_invariant(head.forward, inputs, is_rows, 8)
    logprob = units.TokenLogprob(head_of(format))
    assert_invariant(logprob.forward, [random(M, 61) * 5, torch.arange(M) % 61, torch.ones(M)], [True] * 3, 32)


def by_names(run: Run, case: dict[str, torch.Tensor]) -> torch.Tensor:
    return run(*(models.in_tiles(tensor) if name == "keys" else tensor for name, tensor in case.items()))


def attention_case(
    slots: int, heads: int, kv_heads: int, d: int, length: int, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "q": random(M, heads, d) * 3,
        "keys": random(slots, kv_heads, d, length, seed=1).to(dtype),
        "values": random(slots, kv_heads, length, d, seed=2).to(dtype),
        "sequence": torch.randint(0, slots, (M,), generator=generator),
        "position": torch.randint(0, 90, (M,), generator=generator),
        "window": torch.arange(96),
    }


def exact_attention(c: dict[str, torch.Tensor]) -> torch.Tensor:
    """In float64, row by row, over the visible keys only."""
    out = []
    group = c["q"].shape[1] // c["keys"].shape[1]
    for q, s, p in zip(c["q"].double(), c["sequence"].tolist(), c["position"].tolist(), strict=True):
        keys = c["keys"][s, :, :, : p + 1].double().repeat_interleave(group, 0)
        values = c["values"][s, :, : p + 1].double().repeat_interleave(group, 0)
        weights = (torch.einsum("hd,hdl->hl", q, keys) * q.shape[-1] ** -0.5).softmax(-1)
        out.append(torch.einsum("hl,hld->hd", weights, values).flatten())
    return torch.stack(out)


def assert_attention(run: Run, heads: int, kv_heads: int, d: int, dtype: torch.dtype = torch.float32) -> None:
    """Exact to float32; no bit depends on rows, window, capacity, slot, or what lies after a row's position."""
    case = attention_case(5, heads, kv_heads, d, 96, dtype)
    whole = by_names(run, case)
    assert (whole.double() - exact_attention(case)).abs().max() < 1e-5
    inputs = list({**case, "keys": models.in_tiles(case["keys"])}.values())
    assert_invariant(run, inputs, [True, False, False, True, True, False], 8)

    with torch.inference_mode():
        for capacity, window in ((96, 96), (160, 96), (160, 160), (1024, 96), (1024, 512)):
            grown = dict(case)
            grown["keys"] = F.pad(case["keys"], (0, capacity - 96), value=1e4)  # finite, as a former occupant left it
            grown["values"] = F.pad(case["values"], (0, 0, 0, capacity - 96), value=-1e4)
            grown["window"] = torch.arange(window)
            assert torch.equal(by_names(run, grown), whole), (capacity, window)

        near = case["position"] < 40
        rows = near.nonzero()[:32, 0]
        assert len(rows) == 32
        short = {name: case[name][rows] for name in ("q", "sequence", "position")}
        part = by_names(run, {**case, **short, "window": torch.arange(64)})
        assert torch.equal(part, whole[rows])  # a smaller window

        moved = dict(case)
        order = torch.tensor([3, 0, 4, 2, 1])
        moved["keys"] = torch.cat([random(2, kv_heads, d, 96, seed=7).to(dtype), case["keys"][order]])
        moved["values"] = torch.cat([random(2, kv_heads, 96, d, seed=8).to(dtype), case["values"][order]])
        moved["sequence"] = 2 + order.argsort()[case["sequence"]]
        assert torch.equal(by_names(run, moved), whole)  # other slots

        dirty = dict(case)
        dirty["keys"], dirty["values"] = case["keys"].clone(), case["values"].clone()
        for s in range(5):
            last = int(case["position"][case["sequence"] == s].max())
            dirty["keys"][s, :, :, last + 1 :] = 1e4
            dirty["values"][s, :, last + 1 :] = -1e4
        assert torch.equal(by_names(run, dirty), whole)  # what lies behind


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(4, 2, 24), (4, 4, 64), (6, 1, 16)])
def test_attention_by_tiles(heads: int, kv_heads: int, d: int, dtype: torch.dtype) -> None:
    assert_attention(ops.attention_by_tiles, heads, kv_heads, d, dtype)


def test_attention_by_tiles_over_long_buffers() -> None:
    generator = torch.Generator().manual_seed(3)
    q, position = random(32, 2, 8) * 3, torch.randint(0, 700, (32,), generator=generator)
    keys, values = random(3, 1, 8, 704, seed=1), random(3, 1, 704, 8, seed=2)
    sequence = torch.arange(32) % 3
    whole = ops.attention_by_tiles(q, models.in_tiles(keys), values, sequence, position, torch.arange(704))
    for window in (736, 1024, 4096):
        longer = models.in_tiles(F.pad(keys, (0, window - 704))), F.pad(values, (0, 0, 0, window - 704))
        assert torch.equal(ops.attention_by_tiles(q, *longer, sequence, position, torch.arange(window)), whole)


def test_compiled_and_eager_attention_are_the_same_function() -> None:
    case = attention_case(5, 4, 2, 24, 96)
    assert torch.allclose(by_names(ops.attention, case), by_names(ops.attention_by_tiles, case), atol=1e-5)


def engine_logprobs(
    decoder: TrainableDecoder, ids: list[list[int]], prompts: list[int], capacity: int
) -> list[torch.Tensor]:
    """As an engine computes them: prompts prefilled one by one into slots in use before, then all decoded together."""
    d = decoder.description
    weights = DecoderWeights(d, KernelSet(False))
    weights.load(decoder.snapshot)
    rope = RopeTables(d.inverse_frequencies, d.attention_scaling, models.CONTEXT)
    slots = [6, 2, 7, 0]
    length = block_length(capacity)
    blocks = Blocks(np.arange(8) * length, np.full(8, length))
    buffers = KeyValueBuffers(d.key_value_dtypes, blocks.positions, d.kv_heads, d.head_dim)
    for layer in range(d.layers):
        for tensor in buffers.view(layer, length):
            tensor.fill_(123.0)
    out: list[list[torch.Tensor]] = [[] for _ in ids]

    def step(which: list[int], tokens: list[int], position: list[int]) -> torch.Tensor:
        owner = np.array([slots[i] for i in which])
        rows = Rows.make(np.array(tokens), owner, np.array(position), blocks, rope, shape=d)
        return head_logits(weights, forward_rows(weights, buffers, rows))

    def record(i: int, row: torch.Tensor, target: int) -> None:
        tile = row.expand(32, -1).contiguous()
        inputs = [tile, torch.full((32,), target), torch.full((32,), 0.7)]
        out[i].append(weights.head_units.logprob(inputs)[0][0])

    with torch.inference_mode():
        for i, (sequence, n) in enumerate(zip(ids, prompts, strict=True)):
            logits = step([i] * n, sequence[:n], list(range(n)))
            record(i, logits[n - 1 : n], sequence[n])
        for offset in range(max(len(s) - n for s, n in zip(ids, prompts, strict=True)) - 1):
            active = [i for i, (s, n) in enumerate(zip(ids, prompts, strict=True)) if n + offset + 1 < len(s)]
            tokens, position = [ids[i][prompts[i] + offset] for i in active], [prompts[i] + offset for i in active]
            logits = step(active, tokens, position)
            for row, i in enumerate(active):
                record(i, logits[row : row + 1], ids[i][prompts[i] + offset + 1])
    return [torch.stack(part) for part in out]


@pytest.mark.parametrize("recipe", ["none", "fp8_block"])
@pytest.mark.parametrize("family", models.FAMILIES)
def test_decoding_token_by_token_has_the_bits_of_training(family: str, recipe: str) -> None:
    decoder = models.bind(models.tiny(family, tied=family == "qwen2"), recipe)
    ids, prompts = models.sequences(61, (5, 17, 80, 9)), [2, 7, 41, 8]
    answers = [len(s) - n for s, n in zip(ids, prompts, strict=True)]
    trained = decoder.forward(ids, answers, 0.7)[0].detach().split(answers)
    for capacity in (models.CONTEXT,) if recipe == "none" else (300,):
        for a, b in zip(trained, engine_logprobs(decoder, ids, prompts, capacity), strict=True):
            assert torch.equal(a, b)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def operators() -> dict[str, Callable[[], Any]]:
    """Every operator on enough values that torch shares its loops among threads, at odd places."""
    m = 2176
    buffers = [models.in_tiles(random(24, 2, 24, 96, seed=1)), random(24, 2, 96, 24, seed=2)]
    return {
        "quantise_rows": lambda: ops.quantise_rows(random(m, 320), FORMATS[2])[0],
        "gemm": lambda: ops.gemm(random(m, 256), random(700, 256, seed=1)),
        "gemm in bf16": lambda: ops.gemm(random(m, 1024), random(700, 1024, seed=1).bfloat16()),
        "gemm of 8 rows": lambda: ops.gemm(random(8, 2048), random(48, 2048, seed=1)),
        "gemm of 8 rows in bf16": lambda: ops.gemm(random(8, 2048), random(48, 2048, seed=1).bfloat16()),
        "quantise_rows in bf16": lambda: ops.quantise_rows(random(m, 320), BF16)[0],
        "rms_norm": lambda: ops.rms_norm(random(m, 4, 72), random(72, seed=1), 1e-6),
        "rope": lambda: ops.rope(random(m, 4, 24), random(m, 24, seed=1), random(m, 24, seed=2)),
        "silu_mul": lambda: ops.silu_mul(random(m, 1400)),
        "attention": lambda: ops.attention_by_tiles(
            random(m, 4, 24), *buffers, torch.arange(m) % 24, torch.arange(m) % 90, torch.arange(96)
        ),
        "token_logprob": lambda: torch.cat(ops.token_logprob(random(m, 61), torch.arange(m) % 61, torch.ones(m))),
    }


@pytest.mark.parametrize("name", list(operators()))
def test_the_number_of_threads_changes_no_bit_of_an_operator(threads: Callable[[int], None], name: str) -> None:
    run = operators()[name]
    threads(1)
    one = run()
    for count in (2, 3, 5):
        threads(count)
        assert torch.equal(run(), one), f"{count} threads"


@pytest.mark.parametrize("recipe", ["none", "fp8_block"])
def test_the_number_of_threads_changes_no_bit_of_a_logprob(threads: Callable[[int], None], recipe: str) -> None:
    decoder = models.bind(models.tiny("qwen3", hidden_size=256, intermediate_size=700), recipe)
    ids = models.sequences(61, (90,) * 24)
    results = []
    for count in (1, 3):
        threads(count)
        with torch.no_grad():
            results.append(decoder.forward(ids, [89] * 24, 1.0)[0])
    assert torch.equal(*results)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
def test_compiled_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same of compiled code, whose loops and reductions the compiler arranges; it also computes what eager code does."""
    monkeypatch.setenv("TRTL_RL_CACHE", str(tmp_path))
    spec, head = SPECS["fp8 odd"], head_of(NONE)
    kernels = KernelSet(True)
    kernels.prepare([spec], head)
    assert kernels.compile_seconds > 0 and len(list(tmp_path.rglob("*.pt2"))) == 6
    made: LayerUnits = kernels.layer(spec)

    def compiled(run: Run) -> Run:
        return lambda *inputs: run(inputs)

    pairs: list[tuple[units.Unit, Run]] = [
        (units.BeforeAttention(spec), compiled(made.before)),
        (units.AfterAttention(spec), compiled(made.after)),
        (units.Head(head), compiled(kernels.head(head).head)),
    ]
    for unit, run in pairs:
        inputs, is_rows = unit_inputs(unit)
        assert_invariant(run, inputs, is_rows, 8)
        for a, b in zip(outputs(unit.forward, inputs), outputs(run, inputs), strict=True):
            assert (a.float() - b.float()).abs().mean() < 1e-3 * b.float().abs().mean()  # an FP8 code may flip
    logprob = compiled(kernels.head(head).logprob)
    assert_invariant(logprob, [random(M, 61) * 5, torch.arange(M) % 61, torch.ones(M)], [True] * 3, 32)
    assert_attention(lambda *inputs: made.attention(inputs)[0], spec.heads, spec.kv_heads, spec.head_dim)

    again = KernelSet(True, build=False)  # an engine: loads what lies there
    again.prepare([spec], head)
    assert again.compile_seconds == 0 and again.identity == kernels.identity != KernelSet(False).identity
    inputs, _ = unit_inputs(units.BeforeAttention(spec))
    for gil_free in (False, True):
        again.gil_free = gil_free
        for a, b in zip(made.before(inputs), again.layer(spec).before(inputs), strict=True):
            assert torch.equal(a, b)
    assert again.layer(spec).before(inputs)[0].isfinite().all()  # inputs that were given away once live on
