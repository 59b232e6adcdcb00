import sys, subprocess, time, torch, os, json, itertools
sys.path.insert(0, "benchmarks")
import kernel_speed as KB
from moespeq.kernels import draft, loaders, verify
from moespeq.kernels.loaders import Loader
from moespeq.kernels.geometry import ExpertGeometry
from moespeq.kernels.verify_table import VerifyTable
from moespeq.nested import *
V=[(64,128,4,128),(64,128,4,None),(64,64,4,96),(64,64,4,80),(64,64,4,None),(128,64,8,96),(64,32,4,64)]
P=[(64,128,4,3)]
U=[(8,0,0),(16,0,0),(32,0,0),(16,32,4),(16,64,8),(16,64,2),(32,64,8)]
D=[(4,0,0),(8,0,0),(16,0,0),(8,32,4),(8,16,4),(8,64,4),(16,32,8)]
NAMES=["qwen1.5-moe","phi-3.5-moe"]
DN=["qwen1.5-moe","qwen3-30b","phi-3.5-moe","mixtral-8x7b"]
oblock=draft._Block.of.__func__
def dforce(kind,v):
    def of(cls,m,rows,ns):
        b=oblock(cls,m,rows,ns)
        if (kind=="u")!=(ns==1): return b
        return cls(v[0],v[1] or b.units,v[2] or b.num_warps)
    draft._Block.of=classmethod(of)
orig=Loader.choose.__func__
def force(v, stages=None):
    def choose(cls, m, layout):
        L=orig(cls,m,layout)
        if layout is Layout.PLAIN and stages is None: return L
        return cls(L.kind, stages or L.num_stages, v[0], v[1], v[2], v[3] if stages is None else None)
    Loader.choose=classmethod(choose)
def warm(i,n):
    jobs=[("v",s,v) for s in NAMES for v in V]+[("p",s,v) for s in NAMES for v in P]+[("u",s,v) for s in DN for v in U]+[("d",s,v) for s in DN for v in D]
    for kind,s,v in jobs[i::n]:
        try:
            sh=KB.SHAPES[s]; g=ExpertGeometry(sh.matrices,DEFAULT_FORMAT)
            bank=torch.zeros(2,g.base_bytes,dtype=torch.uint8,device="cuda")
            hid=torch.zeros(33,sh.hidden,dtype=torch.bfloat16,device="cuda")
            if kind in "vp":
                force(v, v[3] if kind=="p" else None)
                t=VerifyTable(sh.distinct,33,sh.top_k,"cuda"); slots=torch.zeros(2,4096,dtype=torch.uint8,device="cuda")
                inner=torch.zeros(33*sh.top_k,sh.intermediate,dtype=torch.bfloat16,device="cuda"); pr=torch.zeros(33*sh.top_k,sh.hidden,dtype=torch.bfloat16,device="cuda")
                verify.verify_experts(hid,t,slots,bank,pr,inner,geometry=g,layout=Layout.PLAIN if kind=="p" else Layout.FIXED,top_k=sh.top_k,activation="silu")
            else:
                dforce(kind,v)
                draft.draft_experts(hid[:1].contiguous(),torch.full((1,sh.top_k),-1,device="cuda"),torch.zeros(1,sh.top_k,device="cuda"),bank,first_row=0,geometry=g,activation="silu")
            torch.cuda.synchronize()
        except Exception as e: print("WARM FAIL",kind,s,v,repr(e)[:300],flush=True)
def main():
    out={}
    for s in NAMES:
        sh=KB.SHAPES[s]; g=ExpertGeometry(sh.matrices,DEFAULT_FORMAT)
        gen=torch.Generator("cuda").manual_seed(0)
        bank,slots,enc=KB.encode_layer(sh,g,gen)
        gb=2e-9*sh.distinct*sh.weights_per_expert
        print(s,"encode GB/s",{l.value:round(gb/t,1) for l,t in enc.items()},flush=True)
        for v in V:
            force(v)
            try:
                t=KB.time_verify(sh,g,Layout.FIXED,bank,slots[Layout.FIXED]); print(s,"fixed",v,f"{t*1e6:.1f} us {gb/t:.0f} GB/s",flush=True); out[f"{s} fixed {v}"]=t
            except Exception as e: print("FAIL",v,repr(e)[:200],flush=True)
        for v in P:
            force(v,v[3])
            try:
                t=KB.time_verify(sh,g,Layout.PLAIN,bank,slots[Layout.PLAIN]); print(s,"plain",v,f"{t*1e6:.1f} us {gb/t:.0f} GB/s",flush=True); out[f"{s} plain {v}"]=t
            except Exception as e: print("FAIL",v,repr(e)[:200],flush=True)
        Loader.choose=classmethod(orig)
        del bank,slots; torch.cuda.empty_cache()
    for s in DN:
        sh=KB.SHAPES[s]; g=ExpertGeometry(sh.matrices,DEFAULT_FORMAT)
        nb=max(sh.top_k*2, min(64,int(600e6//g.base_bytes))//sh.top_k*sh.top_k)
        bank=torch.randint(0,60,(nb,g.base_bytes),dtype=torch.uint8,device="cuda")
        n=nb//sh.top_k
        hid=torch.randn(1,sh.hidden,device="cuda").bfloat16()
        inner=torch.randn(sh.top_k,sh.intermediate,device="cuda").bfloat16(); w=torch.rand(1,sh.top_k,device="cuda")
        routes=torch.randperm(nb,device="cuda").view(n,1,sh.top_k)
        for kind,L in (("u",U),("d",D)):
            for v in L:
                dforce(kind,v)
                try:
                    def run():
                        for _ in range(2):
                            for r in routes:
                                if kind=="u": draft.draft_up(hid,r,bank,first_row=0,geometry=g,activation="silu")
                                else: draft.draft_down(inner,r,w,bank,first_row=0,geometry=g)
                    t=KB.time_graph(run)/n/2
                    b=sh.top_k*g.base_bytes*(2/3 if kind=="u" else 1/3)
                    print(s,kind,v,f"{t*1e6:.2f} us {b/t*1e-9:.0f} GB/s",flush=True); out[f"{s} {kind} {v}"]=t
                except Exception as e: print("FAIL",kind,v,repr(e)[:200],flush=True)
    json.dump(out,open(os.environ["OUT"]+"/scratch.json","w"),indent=1)
if __name__=="__main__":
    if len(sys.argv)>2: warm(int(sys.argv[1]),int(sys.argv[2]))
    else: main()
