"""Matrix products and their relatives."""

TABLE = """
matmul: {x} @ {m} ;; torch.matmul({x}, {m}) ;; {x}.matmul({v}) ;; {square} @ {square} ;; {x} @ {x}.mT ;; {x} @ {x}.T ;; {v} @ {m}
mm: torch.mm({matrix}, {matrix}.T) ;; {matrix}.mm({m})
bmm: torch.bmm(torch.stack([{matrix}, {matrix}.cos()]), torch.stack([{matrix}.T, {matrix}.T])) ;; torch.stack([{matrix}, {matrix}]) @ {m}
mv: torch.mv({matrix}, {v}) ;; {matrix}.mv({v})
dot: torch.dot({vector}, {vector}.sin()) ;; torch.vdot({vector}, {vector}.cos()) ;; {vector} @ {vector} ;; torch.inner({x}, {v}) ;; torch.inner({x}, {x})
outer: torch.outer({vector}, {vector}.sin()) ;; torch.ger({vector}, {v}) ;; {vector}[:, None] * {vector}
einsum: torch.einsum("ij,kj->ik", {matrix}, {matrix}) ;; torch.einsum("...i,ij->...j", {x}, {m}) ;; torch.einsum("ii->i", {square}) ;; torch.einsum("ij->j", {matrix}) ;; torch.einsum("i,j,i->ij", {vector}, {vector}, {vector}) ;; torch.einsum("...i,...i", {x}, {y}) ;; torch.einsum("ij,jk,kl->il", {square}, {square}, {square}) ;; torch.einsum("ij,ij->", {matrix}, {matrix})
tensordot: torch.tensordot({x}, {m}, 1) ;; torch.tensordot({x}, {y}, dims=([{d}], [{d}])) ;; torch.tensordot({x}, {y}, {x}.ndim)
linear: F.linear({x}, {m}.T) ;; F.linear({x}, {m}.T, {bias}) ;; F.linear({x}, {v})
bilinear: F.bilinear({matrix}, {matrix}, torch.stack([{v}[:, None] * {v}, {v}[:, None] + {v}]))
addmm: torch.addmm({bias}, {matrix}, {m}) ;; torch.addmm({bias}, {matrix}, {m}, beta=0.5, alpha=2)
baddbmm: torch.baddbmm({bias}, torch.stack([{matrix}, {matrix}]), torch.stack([{m}, {m}.cos()])) ;; torch.addbmm({bias}, torch.stack([{matrix}, {matrix}]), torch.stack([{m}, {m}.cos()]))
addmv: torch.addmv({scalar}.reshape(1), {matrix}, {v}) ;; torch.addr({square}, {square}[0], {square}[1])
multi_dot: torch.linalg.multi_dot([{matrix}, {m}, {m}.T]) ;; torch.chain_matmul({matrix}, {m}, {m}.T)
matrix_power: torch.matrix_power({square}, 3) ;; torch.linalg.matrix_power({square}, 2) ;; torch.linalg.matrix_power({spd}, -1)
kron: torch.kron({x}, {x}.sin()) ;; torch.kron({matrix}, {m})
cross: torch.linalg.cross({x}[..., :1].expand(*{x}.shape[:-1], 3) * {three}, {three} + 0 * {x}[..., :1]) ;; torch.cross({three} * {x}.sum(), {three}.sin(), dim=-1)
vecdot: torch.linalg.vecdot({x}, {y}) ;; torch.linalg.vecdot({x}, {y}, dim={d})
cdist: torch.cdist({rows}, {rows}.sin() + 2) ;; torch.cdist({rows}, {m}.T, p=1.0) ;; torch.cdist({rows}, {m}.T, p=3.0)
pdist: F.pdist({rows})
"""
