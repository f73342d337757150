"""Sweeps cuts of GEMMs with codes; `compile` fills the cache."""
import sys, itertools, statistics, time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
import torch
from minisgl_backend.kernels.linear_cut import Cut, CODES_BLOCK, cut_of
from minisgl_backend.kernels.packed_weight import CodesKind, PackedWeight, dequantize_weight
from minisgl_backend.kernels.quantized import QuantizedWeight
from minisgl_backend.kernels.quantized_linear import Float8Weight, float8_linear, float8_rows
from minisgl_backend.kernels.cuda.linear import LinearKernel
from minisgl_backend.weight_format import Encoding
dev = torch.device("cuda")
SHAPES = {"qkv": (7168, 5120), "o": (5120, 5120), "gateup": (34816, 5120), "down": (5120, 17408)}
KINDS = {"fp8": CodesKind(Encoding.E4M3, 128, 8, False), "int4": CodesKind(Encoding.INT4, 128, 1, True)}

def valid(cut, height, width):
    if cut.shared_bytes > 227*1024: return False
    if cut.even:
        return cut.num_steps(height, width) >= 132
    if width % (cut.splits*cut.numbers.block) or height % cut.features: return False
    if max(cut.tokens//cut.splits, 8) % 8: return False
    if cut.finished_bytes > cut.stages*cut.stage_bytes: return False
    if width // cut.numbers.block // cut.splits < cut.stages//2: return False
    blocks = height//cut.features*cut.splits
    return 50 <= blocks <= 600

def candidates(kind, name, batch):
    height, width = SHAPES[name]
    numbers = KINDS[kind].numbers(width)
    tokens = [batch]
    out = [("auto", cut_of(batch, height, width, numbers=numbers))]
    stages = {8: (8,), 16: (6,), 64: (4,), 96: (3,)}
    for t in tokens:
        for f in (64, 128):
            for st in stages[t]:
                for co in (False, True)[:1 if t <= 16 else 2]:
                    c = Cut(f, t, st, even=True, copies=co, numbers=numbers)
                    if valid(c, height, width): out.append(("", c))
                    c = Cut(f, t, st, splits=2, copies=co, numbers=numbers)
                    if co and name != "gateup" and valid(c, height, width): out.append(("", c))
                for sp in (2, 4):
                    c = Cut(f, t, st, splits=sp, numbers=numbers)
                    if name == "gateup" and (sp > 1 or f == 128): continue
                    if valid(c, height, width): out.append(("", c))
    return out

def kernel(kind, name, batch, cut):
    return LinearKernel(SHAPES[name], dev, cuts={batch: cut}, codes=KINDS[kind])

BATCHES = [8, 16, 64, 96]
ALL = [(k, n, b, how, c) for b in BATCHES for k in KINDS for n in SHAPES for how, c in candidates(k, n, b)]
if sys.argv[1] == "compile":
    start = time.time()
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda a: kernel(a[0], a[1], a[2], a[4]), ALL))
    print("compiled", len(ALL), time.time()-start); sys.exit()

def weights(kind, name, most=200e6):
    height, width = SHAPES[name]; k = KINDS[kind]; bits = k.encoding.bits
    out = []
    for _ in range(max(3, int(most // (height*width*bits//8)))):
        codes = torch.randint(0, 256, (height, width*bits//8), dtype=torch.uint8, device=dev)
        if kind == "fp8":
            codes = (codes & 0xbf).view(torch.float8_e4m3fn); block = (128, 128)
        else: block = (1, 128)
        sc = torch.rand(-(-height//block[0]), width//128, device=dev)*0.01 + 0.01
        z = torch.randint(0, 16, sc.shape, dtype=torch.uint8, device=dev) if k.zeros else None
        scales = torch.rand(height//64, width//128, 1, 64//k.shared_by, device=dev)*0.01+0.01
        if k.zeros: scales = ((scales.view(torch.int32) & ~0xff) | 8).view(torch.float32)
        out.append(PackedWeight(k, QuantizedWeight(k.encoding, block, codes, sc, z), scales, None))
    return out

def time_us(calls, repeats=5):
    stream = torch.cuda.Stream(); stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0](); stream.synchronize()
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g, stream=stream):
            for c in calls: c()
        times = []
        for _ in range(repeats+1):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record(stream); g.replay(); b.record(stream); b.synchronize(); times.append(a.elapsed_time(b))
    return statistics.median(times[1:])*1e3/len(calls)

torch.manual_seed(0)
for kind, name in itertools.product(KINDS, SHAPES):
    ws = weights(kind, name)
    n = max(len(ws), 12); order = [ws[i % len(ws)] for i in range(n)]
    height, width = SHAPES[name]
    for b in BATCHES:
        x = torch.randn(b, width, device=dev, dtype=torch.bfloat16)
        rows = []
        for k, nm, bb, how, c in ALL:
            if (k, nm, bb) != (kind, name, b): continue
            lk = kernel(k, nm, bb, c)
            us = time_us([lambda w=w: lk(x, w, pdl=True) for w in order])
            us1 = time_us([lambda w=w: lk(x[:1], w, pdl=True) for w in order], 3) if how and b == 8 else 0
            rows.append((us, f"{how}{c.features}x{c.tokens}s{c.stages}" + ("e" if c.even else f"/{c.splits}") + "C"*c.copies, us1))
        auto = rows[0]; rows.sort()
        print(kind, name, b, "auto", auto[1], f"{auto[0]:.1f} (1 row {auto[2]:.1f}) |", " ".join(f"{s}:{u:.1f}" for u, s, _ in rows[:7]), "... worst", f"{rows[-1][1]}:{rows[-1][0]:.1f}", flush=True)
    for b in (128, 256):
        lk = LinearKernel(SHAPES[name], dev, codes=KINDS[kind], cuts={b: cut_of(b, height, width, numbers=KINDS[kind].numbers(width))})
        x = torch.randn(b, width, device=dev, dtype=torch.bfloat16)
        print(kind, name, b, "own", f"{time_us([lambda w=w: lk(x, w, pdl=True) for w in order]):.1f}", flush=True)
    plain = torch.randn(height, width, device=dev, dtype=torch.bfloat16)
    if kind == "fp8":
        f8 = [Float8Weight.of(w) for w in order]
        for b in (8, 64, 128, 256, 1024, 4096):
            x = torch.randn(b, width, device=dev, dtype=torch.bfloat16)
            us = time_us([lambda w=w: float8_linear(x, w, pdl=True) for w in f8], 3)
            q = time_us([lambda: float8_rows(x, 128, pdl=True) for w in f8], 3)
            lib = time_us([lambda: torch.nn.functional.linear(x, plain) for _ in range(6)], 3) if b >= 64 else 0
            print(kind, name, b, f"float8_linear {us:.1f} of it rows {q:.1f}; bf16 {lib:.1f}", flush=True)
    us = time_us([lambda w=w: dequantize_weight(w.weight, torch.bfloat16, packed=True) for w in order[:4]], 3)
    print(kind, name, f"dequantize {us:.1f}", flush=True)
    del ws, order; torch.cuda.empty_cache()
