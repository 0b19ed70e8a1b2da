"""Reductions, cumulative operations, sorting."""

TABLE = """
sum: torch.sum({x}) ;; {x}.sum({d}) ;; {x}.sum(dim={dims}, keepdim=True) ;; torch.sum({x}, dim=({d},)) ;; {x}.sum(axis={d})
mean: torch.mean({x}) ;; {x}.mean({d}, keepdim=True) ;; {x}.mean(dim={dims})
prod: torch.prod({x}) ;; {x}.prod({d}) ;; torch.prod({x}, dim={d}, keepdim=True)
var: torch.var({x}) ;; {x}.var({d}) ;; torch.var({x}, dim={d}, unbiased=False) ;; {x}.var({dims}, correction=0, keepdim=True)
std: torch.std({x}) ;; {x}.std({d}, keepdim=True) ;; torch.std({x}, {d}, correction=0)
var_mean: torch.var_mean({x}, {d})[0] ;; {t}_v, {t} = torch.std_mean({x}, {d}, keepdim=True) // {t} = {t} + {t}_v
amax: torch.amax({x}, {d}) ;; {x}.amax() ;; {x}.amax({dims}, keepdim=True)
amin: torch.amin({x}, {d}) ;; {x}.amin() ;; {x}.amin(dim={d}, keepdim=True)
max: torch.max({x}) ;; {x}.max({d}).values ;; {x}.max({d})[0] ;; {t}, {t}_i = torch.max({x}, {d}, keepdim=True)
min: torch.min({x}) ;; {x}.min(dim={d}).values ;; {t}, _ = {x}.min({d})
aminmax: torch.aminmax({x}).max ;; {t} = torch.aminmax({x}, dim={d}, keepdim=True) // {t} = {t}.max - {t}.min
logsumexp: torch.logsumexp({x}, {d}) ;; {x}.logsumexp({dims}, keepdim=True) ;; torch.special.logsumexp({x}, {d})
norm: torch.norm({x}) ;; {x}.norm(dim={d}) ;; {x}.norm(p=3, dim={d}, keepdim=True) ;; torch.norm({x}, p=1) ;; torch.linalg.vector_norm({x}) ;; torch.linalg.vector_norm({x}, 3, dim={d}) ;; torch.linalg.norm({x}) ;; torch.linalg.vector_norm({x}, float("inf")) ;; {x}.norm(p=float("inf"), dim={d})
nansum: torch.nansum({x}, {d}) ;; torch.nanmean({x}) ;; {x}.nanmean({d}, keepdim=True)
cumsum: torch.cumsum({x}, {d}) ;; {x}.cumsum({d}) ;; {x}.cumsum(dim={d}).flip({d})
cumprod: torch.cumprod({x}, {d}) ;; {x}.cumprod({d})
logcumsumexp: torch.logcumsumexp({x}, {d})
cummax: torch.cummax({x}, {d}).values ;; {x}.cummax({d})[0] ;; {t}, _ = torch.cummax({x}, {d})
cummin: torch.cummin({x}, {d}).values ;; {x}.cummin(dim={d})[0]
diff: torch.diff({x}) ;; torch.diff({x}, dim={d}) ;; torch.diff({x}, n=2)
trapezoid: torch.trapezoid({x}) ;; torch.trapezoid({x}, dx=0.5, dim={d}) ;; torch.cumulative_trapezoid({x}, dim={d})
gradient: torch.gradient({x}, dim={d})[0] ;; torch.gradient({x}, spacing=0.5)[0]
cov: torch.cov({rows}) ;; torch.corrcoef({rows}) ;; torch.cov({rows}.T, correction=0)
renorm: torch.renorm({x}, 2, {d}, 0.7)
all_any: {x} * (({x} > 0.3).any({d}, keepdim=True)) ;; {x} + ({x} > -9).all() ;; {x} * torch.count_nonzero({x}) ;; {x} * ({x} > 0).sum() ;; {x} / ({x} > -99).sum({d}, keepdim=True)
"""

SORTING = """
sort: torch.sort({x}, {d}).values ;; {x}.sort({d})[0] ;; {x}.sort(dim={d}, descending=True).values ;; {t}, {t}_i = torch.sort({x}, stable=True) ;; {t}, {t}_i = {x}.sort({d}) // {t} = {t} * {t}_i
topk: torch.topk({x}, {k}, {d}).values ;; {x}.topk({k}, {d})[0] ;; {t}, {t}_i = torch.topk({x}, {k}, dim={d}, largest=False) ;; {t} = torch.topk({x}, 2) // {t} = {t}.values * {t}.indices
kthvalue: torch.kthvalue({x}, {k}, {d}).values ;; {x}.kthvalue({k}, {d})[0] ;; {t}, _ = {x}.kthvalue(1, {d}, keepdim=True)
median: torch.median({x}) ;; torch.median({x}, {d}).values ;; {x}.median({d}, keepdim=True)[0] ;; torch.nanmedian({x}) ;; torch.nanmedian({x}, {d}).values
mode: torch.mode({x}, {d}).values
msort: torch.msort({x})
argsort: torch.gather({x}, {d}, torch.argsort({x}, {d})) ;; {x} * torch.argsort({x}, dim={d}) ;; {x}.take_along_dim({x}.argsort({d}, descending=True), {d})
argmax: {x} * {x}.argmax({d}, keepdim=True) ;; torch.gather({x}, {d}, {x}.argmin({d}, keepdim=True)) ;; {x}.flatten()[{x}.argmax()] ;; {x} + torch.argmax({x})
quantile: torch.quantile({x}, 0.3) ;; torch.quantile({x}, 0.6, dim={d}, keepdim=True) ;; torch.nanquantile({x}, 0.4, {d}) ;; torch.quantile({x}, torch.tensor([0.2, 0.7], dtype={x}.dtype), dim={d})
searchsorted: {x} * torch.searchsorted(torch.tensor([-0.5, 0.0, 0.5], dtype={x}.dtype), {x}.detach()) ;; torch.bucketize({x}, torch.tensor([-0.5, 0.5], dtype={x}.dtype)) * {x}
one_hot: F.one_hot({x}.flatten().argmax(), {n}) * {x}.flatten() ;; F.one_hot({ints}, {size_d}).to({x}.dtype).sum() * {x}
"""
