"""Times attention over shared pages: tiles, blocks, stages and programs, beside plain decode attention."""

import itertools, time, numpy as np, torch
from minisgl_backend.kernels.shared_attention import *
from minisgl_backend.kernels.cuda.decode_attention import DecodeAttentionKernel
dev=torch.device("cuda"); P=torch.cuda.get_device_properties(dev).multi_processor_count
FP8=torch.float8_e4m3fn
torch.manual_seed(0)
def graph_us(f, n=6, reps=10):
    s=torch.cuda.Stream(); s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s):
        f(); f(); s.synchronize()
        g=torch.cuda.CUDAGraph()
        with torch.cuda.graph(g,stream=s):
            for _ in range(n): f()
        g.replay(); s.synchronize()
        ts=[]
        for _ in range(reps):
            a,b=torch.cuda.Event(True),torch.cuda.Event(True); a.record(s); g.replay(); b.record(s); b.synchronize(); ts.append(a.elapsed_time(b))
    return sorted(ts)[len(ts)//2]*1000/n
def case(name, heads, kv, fp8, ngroups, each, shared, own, dim=128, page=16):
    B=ngroups*each
    sp=shared//page; lens=torch.randint(own//2, own*3//2, (B,))+shared
    width=int(-(-(lens.max().item())//page))
    op=width-sp
    npages=ngroups*sp+B*op
    perm=torch.randperm(npages).int()
    table=torch.empty(B,width,dtype=torch.int32)
    for g in range(ngroups): table[g*each:(g+1)*each,:sp]=perm[g*sp:(g+1)*sp]
    table[:,sp:]=perm[ngroups*sp:].view(B,op)
    order=torch.randperm(B); table=table[order].to(dev); lens_d=lens[order].int().to(dev)
    pos=torch.empty(B,dtype=torch.long); pos[order]=torch.arange(B)
    members=pos.numpy().astype(np.int32).reshape(ngroups,each)
    members.sort(axis=1)
    rows=torch.arange(B,dtype=torch.int32,device=dev)
    kd=FP8 if fp8 else torch.bfloat16
    dims=(npages,page,kv,dim)
    K=torch.randn(dims,device=dev,dtype=torch.bfloat16).to(kd);V=torch.randn(dims,device=dev,dtype=torch.bfloat16).to(kd)
    q=torch.randn(B,heads,dim,device=dev,dtype=torch.bfloat16)
    one=torch.ones(1,device=dev) if fp8 else None
    sizes=np.full(ngroups,each,np.int32);begins=np.zeros(ngroups,np.int32);ends=np.full(ngroups,sp,np.int32)
    fixed=dict(num_heads=heads,num_kv_heads=kv,head_dim=dim,page_size=page,dtype=torch.bfloat16,kv_dtype=kd,max_batch_size=256,device=dev)
    ref=DecodeAttentionKernel(**fixed)
    runs=ref.plan(table,lens_d,rows=rows,window=None,pdl=False)
    call=dict(rows=rows,scale=dim**-.5,window=None,k_scale=one,v_scale=one)
    base=graph_us(lambda: ref(q,K,V,table,lens_d,runs,pdl=True,**call))
    item=K.element_size()
    shared_b=ngroups*sp*page*kv*dim*2*item; own_b=int((lens-shared).sum())*kv*dim*2*item
    print(f"\n== {name} heads {heads}/{kv} {'fp8' if fp8 else 'bf16'} {ngroups}x{each} shared {shared} own {own}: today {base:.1f} us; at 4.2TB/s shared {shared_b/4.2e6:.1f} own {own_b/4.2e6:.1f}",flush=True)
    expect=ref(q,K,V,table,lens_d,runs,pdl=False,**call)
    # own part alone: lengths as if the rest were there
    found=[]
    for tile,block,warps,stages,per in CONFIGS:
        if tile<heads//kv: continue
        cut=Cut(tile=tile,block=block,num_warps=warps,stages=stages,per_processor=per)
        try:
            sh=SharedAttention(SharedShape(max_batch=256,page_size=page,num_heads=heads,num_kv_heads=kv,head_dim=dim,processors=P,cut=cut),dev)
            t0=time.perf_counter(); w=sh.table.content(sizes,begins,ends,members.reshape(-1),rows.cpu().numpy()); t1=time.perf_counter()
            sh.words[:len(w)]=torch.from_numpy(w).to(dev)
            us=graph_us(lambda: sh(q,K,V,table,lens_d,scale=dim**-.5,window=None,k_scale=one,pdl=True))
            found.append((us,(tile,block,warps,stages,per),sh,int(w[0]),(t1-t0)*1e6))
        except Exception as e:
            print("  ",(tile,block,warps,stages,per),"failed",type(e).__name__,str(e)[:80])
    found.sort(key=lambda x:x[0])
    for us,c,sh,n,h in found[:6]+found[-1:]:
        k=DecodeAttentionKernel(**fixed,shared=sh)
        res=[]
        for pdl in (True,False):
            r=k.plan(table,lens_d,rows=rows,window=None,grouped=True,pdl=False)
            out=k(q,K,V,table,lens_d,r,grouped=True,pdl=pdl,**call)
            err=float((out.double()-expect.double()).norm()/expect.double().norm())
            res.append(graph_us(lambda: k(q,K,V,table,lens_d,r,grouped=True,pdl=pdl,**call)))
        print(f"  {c} pieces {n} shared {us:.1f} us, all with pdl {res[0]:.1f}, without {res[1]:.1f}; {base/res[0]:.2f}x; err {err:.1e}; table {h:.0f} us",flush=True)
    return found[0][1] if found else None

FULL=[(t,b,w,s,p) for (t,b,w,s),p in itertools.product([(32,32,4,3),(32,64,4,2),(32,64,4,3),(32,128,4,2),(64,32,4,3),(64,32,4,4),(64,64,4,2),(64,64,4,3),(64,64,4,4),(64,128,4,2),(64,128,4,3),(64,64,8,3),(64,128,8,2),(128,32,8,3),(128,64,8,2),(128,64,8,3),(128,128,8,2)],(2,4))]
SOME=[(t,b,w,s,p) for t,b,w,s,p in FULL if (t,b,w,s) in [(32,64,4,3),(64,32,4,3),(64,64,4,2),(64,64,4,3),(64,64,8,3),(64,128,8,2),(128,64,8,2),(128,64,8,3)]]
import sys
if len(sys.argv)>1:
    k=int(sys.argv[1])
    todo=[(h,f,c) for h in (16,40) for f in (False,True) for c in (SOME if f else FULL) if c[4]==2]
    for h,f,c in todo[k::6]:
        CONFIGS=[c]; case("warm",h,8,f,1,2,256,64)
    raise SystemExit
CONFIGS=FULL
for heads in (16,40):
    case("A",heads,8,False,16,16,2048,256)
CONFIGS=SOME
case("A",16,8,True,16,16,2048,256); case("A",40,8,True,16,16,2048,256)
for heads in (16,40):
    case("B",heads,8,False,64,4,2048,256)
    case("C",heads,8,False,1,256,8000,256)
case("C",16,8,True,1,256,8000,256)
CONFIGS=[(64,64,4,3,4),(64,64,4,3,2),(32,64,4,3,4),(64,32,4,3,4)]
for heads in (16,40):
  for ng,each,sh in ((1,2,256),(1,2,1024),(1,2,4096),(1,4,256),(1,4,1024),(1,4,4096),(1,16,128),(1,16,512),(1,16,2048),(8,2,512),(8,2,2048),(4,16,128),(4,16,512),(128,2,128),(128,2,512),(128,2,2048),(16,16,64),(16,16,128),(16,16,256),(16,16,512)):
    case("small",heads,8,False,ng,each,sh,256)
