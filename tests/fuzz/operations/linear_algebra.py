"""torch.linalg: factors and signs that are not determined appear only in what does not depend on them."""

TABLE = """
solve: torch.linalg.solve({spd}, {right}) ;; torch.linalg.solve({regular}, {right}[:, None]) ;; torch.linalg.solve({regular}, {regular}.T) ;; torch.linalg.solve({spd}, {right}[None], left=False) ;; torch.linalg.solve_ex({regular}, {right})[0]
det: torch.det({regular}) ;; torch.linalg.det({spd}) ;; {square}.det()
slogdet: torch.linalg.slogdet({regular})[1] ;; torch.slogdet({spd}).logabsdet ;; {t}_sign, {t} = torch.linalg.slogdet({regular})
logdet: torch.logdet({spd}) ;; {spd}.logdet()
inv: torch.linalg.inv({regular}) ;; torch.inverse({spd}) ;; {regular}.inverse() ;; torch.linalg.inv_ex({spd}).inverse
cholesky: torch.linalg.cholesky({spd}) ;; torch.linalg.cholesky({spd}, upper=False) ;; torch.linalg.cholesky({spd}, upper=True) ;; torch.linalg.cholesky_ex({spd}).L
cholesky_solve: torch.cholesky_solve({right}[:, None], torch.linalg.cholesky({spd})) ;; torch.cholesky_inverse(torch.linalg.cholesky({spd}))
qr: torch.linalg.qr({regular}).R ;; torch.linalg.qr({regular})[0] ;; {t}_q, {t} = torch.linalg.qr({regular}) // {t} = {t}_q * {t} ;; torch.linalg.qr({tall}).Q ;; torch.linalg.qr({regular}, mode="r").R
eigh: torch.linalg.eigh({symmetric}).eigenvalues ;; {t}_l, {t} = torch.linalg.eigh({symmetric}) // {t} = {t} ** 2 + {t}_l ;; torch.linalg.eigvalsh({symmetric}) ;; torch.linalg.eigh({symmetric}, UPLO="U")[0]
svdvals: torch.linalg.svdvals({regular}) ;; torch.linalg.svd({regular}).S ;; torch.linalg.svd({tall}, full_matrices=False)[1] ;; {t}_u, {t}_s, {t} = torch.linalg.svd({regular}, full_matrices=False) // {t} = {t}_u ** 2 + {t} ** 2 + {t}_s ;; torch.svd({regular}).S
pinv: torch.linalg.pinv({tall}) ;; torch.pinverse({regular}) ;; torch.linalg.pinv({spd}, hermitian=True)
lstsq: torch.linalg.lstsq({tall}, {tall}[:, :1].cos()).solution ;; torch.linalg.lstsq({regular}, {regular}.sin())[0]
matrix_exp: torch.linalg.matrix_exp({square}) ;; torch.matrix_exp({square} * 0.5) ;; {square}.matrix_exp()
matrix_norm: torch.linalg.matrix_norm({regular}) ;; torch.linalg.matrix_norm({regular}, 2) ;; torch.linalg.matrix_norm({regular}, "nuc") ;; torch.linalg.matrix_norm({regular}, 1) ;; torch.linalg.norm({regular}, float("inf")) ;; torch.linalg.matrix_norm({regular}, -2) ;; torch.linalg.norm({regular}, "fro")
cond: torch.linalg.cond({regular}) ;; torch.linalg.cond({spd}, "fro")
solve_triangular: torch.linalg.solve_triangular({regular}.tril(), {right}[:, None], upper=False) ;; torch.linalg.solve_triangular({regular}.triu(), {regular}, upper=True) ;; torch.triangular_solve({right}[:, None], {regular}.triu()).solution ;; torch.linalg.solve_triangular({regular}.triu(), {regular}, upper=True, left=False, unitriangular=True)
lu: torch.linalg.lu({regular})[1] ;; torch.linalg.lu({regular}).U ;; {t}_p, {t}_l, {t} = torch.linalg.lu({regular}) // {t} = {t}_l + {t} ;; torch.linalg.lu_factor({regular})[0] ;; torch.linalg.lu_solve(*torch.linalg.lu_factor({regular}), {right}[:, None])
tensorsolve: torch.linalg.tensorsolve({regular}[None], {right}[None]) ;; torch.linalg.tensorinv({regular}, ind=1)
eigvals: torch.linalg.eigvals({symmetric} + 0.1 * torch.triu({symmetric}, 1)).real ;; torch.linalg.eig({symmetric}).eigenvalues.real
householder: torch.linalg.householder_product({tall}, {tall}[0])
ldl: torch.linalg.ldl_solve(*torch.linalg.ldl_factor({spd}), {right}[:, None])
"""
