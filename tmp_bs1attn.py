import json, os, sys, time
import torch
from bench.replica import decode_attention as bench
from kernels.attention import split_kv_decode as sd
from kernels.attention.triton_backend import multiprocessors
CPU = not torch.cuda.is_available()
dev = torch.device("cpu" if CPU else "cuda")
BASE = dict(_TILE_BYTES=16<<10,_WARPS=4,_PROGRAMS=2,_STAGES=3,_READS_EARLY=True,_MERGED=64,_MERGE_WARPS=4)
VARIANTS = {
 "k64w4p2s3": {},
 "k64w4p2s5": dict(_STAGES=5),
 "k64w4p2s2": dict(_STAGES=2),
 "k64w4p3s3": dict(_PROGRAMS=3),
 "k32w4p3s5": dict(_TILE_BYTES=8<<10,_PROGRAMS=3,_STAGES=5),
 "k32w4p2s7": dict(_TILE_BYTES=8<<10,_PROGRAMS=2,_STAGES=7),
 "k32w2p4s5": dict(_TILE_BYTES=8<<10,_WARPS=2,_PROGRAMS=4,_STAGES=5),
 "k128w8p1s3": dict(_TILE_BYTES=32<<10,_WARPS=8,_PROGRAMS=1,_STAGES=3),
 "late": dict(_READS_EARLY=False),
 "m32": dict(_MERGED=32),
 "mw8": dict(_MERGE_WARPS=8),
}
class V(sd.SplitKVDecode):
    def __init__(self, settings, *a):
        self.settings = settings; self.set(); super().__init__(*a)
    def set(self):
        for k, v in (BASE | self.settings).items(): setattr(sd, k, v)
    def attend_into(self, *a):
        self.set(); super().attend_into(*a)
t0 = time.time(); rows = []
layers = 2 if CPU else 48
sizes = [(1,1300),(1,300),(1,8000),(4,1300),(8,1300),(15,1300),(4,8000)]
order = [(m,b) for m in ("qwen3-30b-a3b","llama-8b") for b in sizes] + [(m,b) for m in ("gpt-oss-20b","gemma3-12b") for b in [(1,1300),(1,8000),(8,1300)]]
for model, (n, tokens) in order:
    if CPU: tokens = min(tokens, 300)
    if time.time()-t0 > float(os.environ.get("LIMIT","105")): print("stopped for time"); break
    heads = bench.MODELS[model]
    if CPU: heads = bench.Heads(heads.query//2, heads.kv//2, 64, (None,))
    case = bench.Case(heads, n, tokens, layers, dev)
    kernels = {} if CPU else case.kernels()
    kernels.pop("split_kv", None)
    for name, settings in VARIANTS.items():
        if model != "qwen3-30b-a3b" and name in ("late","k64w4p2s2"): continue
        if model in ("gpt-oss-20b","gemma3-12b") and name not in ("k64w4p2s3","k64w4p2s5","k32w4p3s5","k32w4p2s7"): continue
        v = V(settings, case.kv, case.shape, 16, case.num_pages+16, multiprocessors(dev) , case.sinks)
        v.plan_graph(case.batch, n); kernels[name] = v
    if CPU:
        for name, v in kernels.items():
            print(model, n, tokens, name, case.error(*case.chain(v)()), flush=True)
        continue
    if n == 1 and tokens == 1300:
        from kernels.linear.gemv import gemv
        from kernels.experts.autotune import graph_times
        width = heads.query * heads.dim
        def call():
            for up, down in case.weights:
                qkv = gemv(case.x, up, norm=case.norm, eps=1e-6)
                gemv(qkv[:, :width], down, residual=case.x, out=case.x)
        print("products alone", graph_times([[call]], 40)[0] / layers)
    (without, *times), errors = case.measure(kernels)
    print(f"{model} {n}x{tokens}: {case.shape.windows[:2]} without {without:.2f}, {time.time()-t0:.0f} s")
    for (name, us), e in zip(zip(kernels, times), errors): print(f"   {name:14s} {us-without:7.2f}  err {e:.2g}", flush=True)
    rows.append(dict(model=model,n=n,tokens=tokens,without=without,us=dict(zip(kernels,times)),err=dict(zip(kernels,errors))))
    json.dump(rows, open(os.environ.get("OUT",".")+"/bs1attn.json","w"), indent=1)
    del case, kernels, v
if not CPU:
    from triton.runtime.jit import JITFunction
    for name in ("_attend", "_merge"):
        for cache in getattr(sd, name).device_caches.values():
            for k in cache[0].values():
                print(name, k.metadata.num_warps, "regs", k.n_regs, "spills", k.n_spills, "shared", k.metadata.shared)
