"""First look: bit equality and times of candidates for batch-invariant kernels."""

from __future__ import annotations

import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import torch

from minisgl_backend.kernels.linear_cut import _RING_BYTES, Cut
from minisgl_backend.kernels.prefill_attention import prefill_attention, prefill_attention_reference
from minisgl_backend.kernels.triton_kernels.grouped_linear import launch_grouped_linear
from minisgl_backend.kernels.triton_kernels.invariant_attention_kernel import (
    launch_invariant_attention,
)
from minisgl_backend.kernels.triton_kernels.invariant_linear_kernel import launch_invariant_linear

DEV = torch.device("cuda")
SHAPES = {
    "0.6B qkv": (4096, 1024),
    "0.6B o": (1024, 2048),
    "0.6B gate_up": (6144, 1024),
    "0.6B down": (1024, 3072),
    "14B qkv": (7168, 5120),
    "14B o": (5120, 5120),
    "14B gate_up": (34816, 5120),
    "14B down": (5120, 17408),
    "30B qkv": (5120, 2048),
    "30B o": (2048, 4096),
    "0.6B head": (151936, 1024),
    "30B router": (128, 2048),
}


def us(f, n=5, reps=7):
    s = torch.cuda.Stream()
    s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s):
        f()
        s.synchronize()
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g, stream=s):
            for _ in range(n):
                f()
        g.replay()
        s.synchronize()
        ts = []
        for _ in range(reps):
            a, b = torch.cuda.Event(True), torch.cuda.Event(True)
            a.record(s)
            g.replay()
            b.record(s)
            b.synchronize()
            ts.append(a.elapsed_time(b))
    return sorted(ts)[len(ts) // 2] * 1000 / n


def staged(features, tokens, splits, size):
    cut = Cut(features, tokens, 1, splits=splits)
    steps = size // splits // 64
    stages = min(steps, _RING_BYTES // cut.stage_bytes, 8)
    return Cut(
        features, tokens, max(stages, -(-cut.finished_bytes // cut.stage_bytes)), splits=splits
    )


def cuts_for(height, size):
    for tokens in (8, 64, 128, 192):
        for splits in (1, 2, 4):
            if (
                size % (64 * splits)
                or max(tokens // splits, 8) % 8
                or (tokens == 192 and splits > 2)
            ):
                continue
            for features in (64, 128):
                if features == 64 and tokens > 64:
                    continue
                if height % features == 0:
                    yield staged(features, tokens, splits, size)


TRITON = [
    (128, 256, 64, 3, 8),
    (128, 256, 64, 4, 8),
    (128, 128, 64, 4, 8),
    (128, 128, 64, 4, 4),
    (64, 256, 64, 4, 4),
    (256, 128, 64, 3, 8),
    (64, 128, 64, 5, 4),
]


def kernel_of(shape, cut):
    from minisgl_backend.kernels.cuda.linear import LinearKernel

    return LinearKernel(shape, DEV, most_tokens=16384, cuts={16384: cut})


def prepare():
    jobs = [(shape, cut) for shape in SHAPES.values() for cut in cuts_for(*shape)]
    seen, todo = set(), []
    for shape, cut in jobs:
        if (shape[1], cut) not in seen:
            seen.add((shape[1], cut))
            todo.append((shape, cut))
    t = time.time()
    with ThreadPoolExecutor(12) as pool:
        for job, result in zip(todo, pool.map(lambda j: attempt(kernel_of, *j), todo)):
            if isinstance(result, str):
                print("no kernel", job, result)
    print(len(todo), "kernels compiled in", round(time.time() - t), "s", flush=True)


def attempt(f, *args):
    try:
        return f(*args)
    except Exception as e:
        return f"{type(e).__name__}: {str(e)[:200]}"


def run_triton(x, w, config, dtype=torch.bfloat16, pdl=False):
    out = torch.empty(len(x), len(w), device=DEV, dtype=dtype)
    rows, columns, block, stages, warps = config
    launch_invariant_linear(
        out,
        x,
        w,
        None,
        rows=rows,
        columns=columns,
        block=block,
        stages=stages,
        num_warps=warps,
        pdl=pdl,
    )
    return out


def equality():
    print("== equal bits of GEMMs, elements that differ")
    for shape in ((1024, 1024), (5120, 5120), (5120, 17408)):
        torch.manual_seed(1)
        x = torch.randn(1024, shape[1], device=DEV).bfloat16()
        w = (torch.randn(shape, device=DEV) / 32).bfloat16()
        base = run_triton(x, w, (128, 128, 64, 4, 8), torch.float32)
        for config in (
            TRITON[:1]
            + TRITON[3:5]
            + [(16, 128, 64, 3, 4), (32, 128, 64, 3, 4), (64, 64, 128, 3, 4), (64, 64, 32, 3, 4)]
        ):
            got = attempt(run_triton, x, w, config, torch.float32)
            print(
                shape,
                "triton",
                config,
                got if isinstance(got, str) else int((got != base).sum()),
                flush=True,
            )
        whole = base.bfloat16()
        first = None
        for tokens in (8, 16, 32, 64, 96, 128, 192):
            for splits in (1, 2, 4):
                cut = staged(128, tokens, splits, shape[1])
                got = attempt(lambda: kernel_of(shape, cut)(x, w))
                if isinstance(got, str):
                    print(cut, got)
                    continue
                if splits == 1:
                    print(shape, "linear.cu", tokens, "against triton", int((got != whole).sum()))
                    ref = got
                first = first or {}
                first.setdefault((shape, splits), got)
                print(
                    shape,
                    "linear.cu",
                    tokens,
                    splits,
                    "against its first",
                    int((got != first[shape, splits]).sum()),
                    flush=True,
                )
        for m in (1, 16, 64, 100, 256, 512, 1024):
            got = torch.mm(x[:m], w.t())
            print(shape, "library", m, "against triton", int((got != whole[:m]).sum()))


def gemms(names, ms):
    for name in names:
        shape = SHAPES[name]
        w = (torch.randn(shape, device=DEV) / 32).bfloat16()
        for m in ms:
            if "head" in name and m > 256:
                continue
            x = torch.randn(m, shape[1], device=DEV).bfloat16()
            lib = us(lambda: torch.mm(x, w.t()))
            line = [f"lib {lib:.1f}"]
            found = []
            for cut in cuts_for(*shape):
                if (
                    cut.tokens > 2 * max(m, 8)
                    or (m > 256 and cut.tokens < 128)
                    or (m >= 64 and cut.tokens == 8)
                ):
                    continue
                kernel = attempt(kernel_of, shape, cut)
                if isinstance(kernel, str):
                    continue
                t = attempt(us, lambda: kernel(x, w, pdl=True))
                if not isinstance(t, str):
                    found.append((t, f"{cut.features}x{cut.tokens}/{cut.splits}"))
            for splits in (1, 2, 4):
                best = sorted(f for f in found if f[1].endswith(f"/{splits}"))[:2]
                line += [f"cu {n} {t:.1f}" for t, n in best]
            found = []
            if m >= 64:
                for config in TRITON:
                    t = attempt(us, lambda: run_triton(x, w, config))
                    found.append((1e9, f"{config} {t}") if isinstance(t, str) else (t, str(config)))
                line += [f"tr {n} {t:.1f}" for t, n in sorted(found)[:2]]
            if m >= 1024:
                line.append(f"TFLOPS lib {2 * m * w.numel() / lib / 1e6:.0f}")
            print(name, m, " | ".join(line), flush=True)


def paged(lengths, kv, dim, dtype=torch.bfloat16):
    page = 16
    width = -(-max(lengths) // page)
    table = torch.randperm(len(lengths) * width, device=DEV).int().view(len(lengths), width)
    keys = torch.randn(len(lengths) * width, page, kv, dim, device=DEV).to(dtype)
    values = torch.randn(len(lengths) * width, page, kv, dim, device=DEV).to(dtype)
    return keys, values, table


def attention_equality():
    print("== attention: rows of chunks against decoding rows, elements that differ")
    for heads, kv, dim in ((16, 8, 128), (40, 8, 128), (32, 4, 128), (8, 8, 64), (8, 2, 256)):
        lengths = [7, 64, 129, 700, 1500, 2048]
        keys, values, table = paged(lengths, kv, dim)
        total = sum(lengths)
        q = torch.randn(total, heads, dim, device=DEV).bfloat16()
        offsets = torch.tensor(
            [0, *torch.tensor(lengths).cumsum(0).tolist()], device=DEV, dtype=torch.int32
        )
        ends = torch.tensor(lengths, device=DEV, dtype=torch.int32)
        rows = torch.arange(len(lengths), device=DEV, dtype=torch.int32)
        for window in (None, 100):
            fixed = dict(
                scale=dim**-0.5,
                window=window,
                k_scale=None,
                v_scale=None,
                block=64,
                split=512,
                pdl=False,
            )
            whole = {}
            for tile, warps in ((128, 8), (128, 4), (64, 4), (16, 1), (16, 4)):
                out = torch.full_like(q, float("nan"))
                r = attempt(
                    lambda: launch_invariant_attention(
                        out,
                        q,
                        keys,
                        values,
                        table,
                        None,
                        rows=rows,
                        offsets=offsets,
                        ends=ends,
                        tile=tile,
                        programs=1,
                        stages=2,
                        num_warps=warps,
                        **fixed,
                    )
                )
                if isinstance(r, str):
                    print(dim, tile, warps, r)
                    continue
                whole[tile, warps] = out
            base = whole[128, 8]
            ref = torch.empty_like(q)
            prefill_attention_reference(
                ref,
                q,
                keys,
                values,
                table,
                rows=rows,
                offsets=offsets,
                ends=ends,
                scale=dim**-0.5,
                window=window,
            )
            print(
                heads,
                kv,
                dim,
                "window",
                window,
                "off the reference",
                float((base.float() - ref.float()).norm() / ref.float().norm()),
                "chunk tiles",
                {k: int((v != base).sum()) for k, v in whole.items()},
            )
            # every position of some rows as a decoding row
            table_rows = torch.repeat_interleave(rows, ends.long())
            lens = torch.cat([torch.arange(1, n + 1, device=DEV) for n in lengths]).int()
            for tile, warps in ((64, 4), (16, 1), (16, 2), (16, 4)):
                for programs in (1, 3):
                    n = 512
                    pick = torch.randperm(total, device=DEV)[:n]
                    partial = (
                        torch.empty(n, heads, 32, dim, device=DEV),
                        torch.empty(n, heads, 32, device=DEV),
                        torch.zeros(n, heads, device=DEV, dtype=torch.int32),
                    )
                    out = torch.full(
                        (n, heads, dim), float("nan"), device=DEV, dtype=torch.bfloat16
                    )
                    r = attempt(
                        lambda: launch_invariant_attention(
                            out,
                            q[pick].contiguous(),
                            keys,
                            values,
                            table,
                            partial,
                            rows=table_rows[pick],
                            offsets=None,
                            ends=lens[pick],
                            tile=tile,
                            programs=programs,
                            stages=2,
                            num_warps=warps,
                            **fixed,
                        )
                    )
                    print(
                        "   decode",
                        tile,
                        warps,
                        programs,
                        r if isinstance(r, str) else int((out != base[pick]).sum()),
                        flush=True,
                    )


def attention_times():
    from minisgl_backend.kernels.cuda.decode_attention import DecodeAttentionKernel
    print("== decode attention, us")
    kinds = ((64, 4, 0), (16, 1, 0), (16, 2, 1), (16, 4, 1))
    for heads, kv, batch, low, high in ((16, 8, 256, 100, 2048), (40, 8, 256, 100, 2048), (16, 8, 16, 1000, 2000), (16, 8, 1, 4000, 4000)):
        dim = 128
        torch.manual_seed(0)
        lengths = torch.randint(low, high + 1, (batch,)).tolist()
        keys, values, table = paged(lengths, kv, dim)
        q = torch.randn(batch, heads, dim, device=DEV).bfloat16()
        rows = torch.arange(batch, device=DEV, dtype=torch.int32)
        lens = torch.tensor(lengths, device=DEV, dtype=torch.int32)
        kernel = DecodeAttentionKernel(num_heads=heads, num_kv_heads=kv, head_dim=dim, page_size=16, dtype=q.dtype, kv_dtype=q.dtype, max_batch_size=256, device=DEV)
        runs = kernel.plan(table, lens, rows=rows, window=None, pdl=False)
        base = us(lambda: kernel(q, keys, values, table, lens, runs, rows=rows, scale=dim**-0.5, window=None, k_scale=None, v_scale=None, pdl=True))
        moved = sum(lengths) * kv * dim * 4
        found = []
        partial = (torch.empty(batch, heads, 32, dim, device=DEV), torch.empty(batch, heads, 32, device=DEV), torch.zeros(batch, heads, device=DEV, dtype=torch.int32))
        out = torch.empty_like(q)
        many = batch == 256
        configs = [(*kind, block, stages, split, programs)
                   for kind in kinds for block in (64, 128) for stages in (2, 3, 4)
                   for split in (512, 1024) for programs in ((1, 2) if many else (4,) if batch == 16 else (8,))]
        for c in configs:
            tile, warps, dot, block, stages, split, programs = c
            if block == 128 and (warps == 1 or (tile == 64 and stages > 2)):
                continue
            if stages == 4 and (block == 128 or tile == 64):
                continue
            if not many and (split == 1024 or stages == 4):
                continue
            if heads == 40 and split == 512:
                continue
            t = attempt(us, lambda: launch_invariant_attention(out, q, keys, values, table, partial, rows=rows, offsets=None, ends=lens, tile=tile, programs=programs, stages=stages, num_warps=warps, block=block, split=split, by_dot=bool(dot), scale=dim**-0.5, window=None, k_scale=None, v_scale=None, pdl=True), 3, 3)
            if not isinstance(t, str):
                found.append((t, c))
        found.sort()
        print(f"{heads}/{kv} batch {batch} {low}..{high}: today {base:.1f}, {moved / base / 1e6:.2f} TB/s;", "(tile warps dot block stages split programs)")
        for kind in kinds:
            print("   ", [f"{c}: {t:.1f}" for t, c in found if c[:3] == kind][:4], flush=True)
    print("== prefill attention of 8192 tokens, us")
    for heads, kv in ((16, 8), (40, 8)):
        for n, each in ((8, 1024), (1, 8192)):
            dim = 128
            keys, values, table = paged([each] * n, kv, dim)
            q = torch.randn(n * each, heads, dim, device=DEV).bfloat16()
            rows = torch.arange(n, device=DEV, dtype=torch.int32)
            offsets = torch.arange(n + 1, device=DEV, dtype=torch.int32) * each
            ends = torch.full((n,), each, device=DEV, dtype=torch.int32)
            out = torch.empty_like(q)
            line = [f"triton today {us(lambda: prefill_attention(q, keys, values, table, rows=rows, offsets=offsets, ends=ends, max_length=each, scale=dim**-0.5, out=out), 2, 3):.0f}"]
            for tile, warps, block, stages, split, dot in ((128, 8, 64, 2, 512, 0), (128, 8, 64, 2, 1024, 0), (128, 8, 64, 2, 1024, 1), (128, 8, 64, 3, 1024, 0), (128, 8, 128, 2, 1024, 0), (128, 8, 128, 2, 1024, 1), (64, 4, 64, 2, 1024, 0), (64, 4, 64, 3, 1024, 0)):
                t = attempt(us, lambda: launch_invariant_attention(out, q, keys, values, table, None, rows=rows, offsets=offsets, ends=ends, tile=tile, programs=1, stages=stages, num_warps=warps, block=block, split=split, by_dot=bool(dot), scale=dim**-0.5, window=None, k_scale=None, v_scale=None, pdl=False), 2, 3)
                line.append(f"{tile, warps, block, stages, split, dot}: {t if isinstance(t, str) else round(t)}")
            print(heads, kv, n, "x", each, " | ".join(line), flush=True)


def dot_equality():
    print("== sums by dot: elements that differ from chunks of 128 rows")
    heads, kv, dim = 16, 8, 128
    lengths = [7, 64, 129, 700, 1500, 2048]
    keys, values, table = paged(lengths, kv, dim)
    total = sum(lengths)
    q = torch.randn(total, heads, dim, device=DEV).bfloat16()
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], device=DEV, dtype=torch.int32)
    ends = torch.tensor(lengths, device=DEV, dtype=torch.int32)
    rows = torch.arange(len(lengths), device=DEV, dtype=torch.int32)
    table_rows = torch.repeat_interleave(rows, ends.long())
    lens = torch.cat([torch.arange(1, n + 1, device=DEV) for n in lengths]).int()
    for block in (64, 128):
        fixed = dict(scale=dim**-0.5, window=None, k_scale=None, v_scale=None, block=block, split=512, pdl=False, by_dot=True)
        base = torch.full_like(q, float("nan"))
        launch_invariant_attention(base, q, keys, values, table, None, rows=rows, offsets=offsets, ends=ends, tile=128, programs=1, stages=2, num_warps=8, **fixed)
        for tile, warps in ((64, 4), (16, 1), (16, 2), (16, 4)):
            partial = (torch.empty(total, heads, 32, dim, device=DEV), torch.empty(total, heads, 32, device=DEV), torch.zeros(total, heads, device=DEV, dtype=torch.int32))
            out = torch.full_like(q, float("nan"))
            r = attempt(lambda: launch_invariant_attention(out, q, keys, values, table, partial, rows=table_rows, offsets=None, ends=lens, tile=tile, programs=2, stages=2, num_warps=warps, **fixed))
            print(block, tile, warps, r if isinstance(r, str) else int((out != base).sum()), flush=True)


def library():
    """The library without split-K, whatever the number of rows."""
    import warnings
    from minisgl_backend.kernels.cuda.invariant_linear import InvariantLinear
    print("== library without split-K, elements that differ")
    matmul = torch.backends.cuda.matmul
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.backends.cuda.preferred_blas_library("cublaslt")
        matmul.allow_bf16_reduced_precision_reduction = (False, False)
        torch.mm(torch.randn(64, 64, device=DEV).bfloat16(), torch.randn(64, 64, device=DEV).bfloat16())
    print("warnings:", [str(w.message)[:100] for w in seen])
    for name in ("0.6B qkv", "0.6B o", "0.6B gate_up", "0.6B down", "14B o", "14B down", "30B o"):
        shape = SHAPES[name]
        w = (torch.randn(shape, device=DEV) / 32).bfloat16()
        x = torch.randn(8448, shape[1], device=DEV).bfloat16()
        base = InvariantLinear(shape, DEV, most_tokens=8448)(x, w)
        bad = {}
        for m in [1, 2, 7, 8, 16, 33, 64, 65, 100, 128, 160, 192, 200, 256, 257, 300, 384, 512, 700, 1000, 1024, 1500, 2048, 3000, 4096, 5000, 8192, 8448]:
            n = int((torch.mm(x[:m], w.t()) != base[:m]).sum())
            if n:
                bad[m] = n
        times = {m: (round(us(lambda: torch.mm(x[:m], w.t()), 3, 3), 1)) for m in (64, 256, 8192)}
        print(name, "differ at", bad, "us", times, flush=True)


def grouped():
    """Whether the tiles of the experts' GEMM give the same bits."""
    print("== grouped GEMM: 16 against 64 rows")
    x = torch.randn(64, 2048, device=DEV).bfloat16()
    w = (torch.randn(4, 1536, 2048, device=DEV) / 32).bfloat16()
    outs = []
    for block in (16, 64):
        pairs = torch.arange(64, device=DEV, dtype=torch.int32)
        experts = torch.zeros(64 // block, device=DEV, dtype=torch.int32)
        out = torch.empty(64, 768, device=DEV, dtype=torch.bfloat16)
        launch_grouped_linear(out, x, w, pairs, experts, None, block=block, top_k=1, gated=True)
        outs.append(out)
    print("differ:", int((outs[0] != outs[1]).sum()), flush=True)


for part in sys.argv[1:]:
    try:
        {
            "prepare": prepare,
            "equality": equality,
            "attention_equality": attention_equality,
            "attention_times": attention_times,
            "grouped": grouped, "library": library, "dot_equality": dot_equality,
            "small": lambda: gemms(
                [
                    "0.6B qkv",
                    "0.6B o",
                    "0.6B gate_up",
                    "0.6B down",
                    "30B qkv",
                    "30B o",
                    "30B router",
                ],
                (8, 64, 256, 8192),
            ),
            "large": lambda: gemms(
                ["14B qkv", "14B o", "14B gate_up", "14B down", "0.6B head"], (64, 128, 256, 8192)
            ),
        }[part]()
    except Exception:
        traceback.print_exc()
