"""Complex numbers and Fourier transforms: operations that lead there, stay there, and lead back."""

FFT = """
fft: torch.fft.fft({x}).abs() ;; torch.fft.fft({x}, dim={d}).real ;; torch.fft.fft({x}, n=3).imag ;; torch.view_as_real(torch.fft.fft({x}, norm="ortho"))
ifft: torch.fft.ifft({x}).real ;; torch.fft.ifft(torch.fft.fft({x}) * torch.fft.fft({y})).real
rfft: torch.fft.rfft({x}).abs() ;; torch.view_as_real(torch.fft.rfft({x}, dim={d})) ;; torch.fft.rfft({x}, norm="forward").real
irfft: torch.fft.irfft(torch.fft.rfft({x}) * 2, n={last}) ;; torch.fft.irfft(torch.fft.rfft({x}), {last}) ;; torch.fft.irfft(torch.complex({x}, {x}.sin()))
hfft: torch.fft.hfft(torch.complex({x}, {x}.sin())) ;; torch.fft.ihfft({x}).abs()
fft2: torch.fft.fft2({x}).abs() ;; torch.fft.ifft2({x}).real ;; torch.view_as_real(torch.fft.rfft2({x})) ;; torch.fft.irfft2(torch.fft.rfft2({x}), s={x}.shape[-2:])
fftn: torch.fft.fftn({x}).real ;; torch.fft.ifftn({x}, dim=({d},)).imag ;; torch.view_as_real(torch.fft.rfftn({x})) ;; torch.fft.irfftn(torch.fft.rfftn({x}), s={shape_text})
fftshift: torch.fft.fftshift({x}) ;; torch.fft.ifftshift({x}, dim={d}) ;; torch.fft.fftshift(torch.fft.fft({x})).real
convolution_by_fft: torch.fft.irfft(torch.fft.rfft({x}, n=8) * torch.fft.rfft({y}, n=8), n=8)
stft: torch.stft({vector}.repeat(4), 4, 2, window=torch.ones(4, dtype={x}.dtype), return_complex=True).abs()
"""

ENTERING = """
complex: torch.complex({x}, {y}) ;; torch.complex({x}, {x}.sin()) ;; torch.complex({y}.cos(), {x})
polar: torch.polar({pos}, {x}) ;; torch.polar({pos}, {x}.sin()) ;; torch.polar(torch.ones_like({x}), {x})
view_as_complex: torch.view_as_complex(torch.stack([{x}, {y}], -1)) ;; torch.view_as_complex(torch.stack([{x}, {x}.cos()], -1).contiguous())
times_i: {x} * 1j ;; 1j * {x} ;; {x} + 2j ;; {x} * (1 + 2j) ;; torch.exp(1j * {x}) ;; (1 - 1j) / {pos}
to_complex: {x}.to(torch.complex128) * (1 + 1j) ;; {x}.cdouble() * 1j ;; {x}.to(torch.complex128)
complex_constant: {x} * torch.polar(torch.ones({last}, dtype=torch.float64), torch.arange({last}.0, dtype=torch.float64)) ;; {x} + torch.tensor([0.5 + 1j], dtype=torch.complex128) ;; torch.mul({x}, torch.tensor(1j))
rfft_complex: torch.fft.rfft({x}) ;; torch.fft.fft({x}) ;; torch.fft.ifft({x})
"""

TABLE = """
c_exp: torch.exp({x}) ;; {x}.exp()
c_sin: torch.sin({x}) ;; {x}.cos() ;; {x}.sinh() ;; torch.cosh({x})
c_tanh: torch.tanh({x} * 0.3) ;; torch.sigmoid({x} * 0.3) ;; torch.tan({x} * 0.2)
c_log: torch.log({x} + 3) ;; torch.log2({x} + 3) ;; torch.log1p({x} + 2) ;; torch.log10({x} + 3)
c_sqrt: torch.sqrt({x} + 3) ;; torch.rsqrt({x} + 3) ;; ({x} + 3) ** 0.5
c_pow: {x} ** 2 ;; {x} ** 3 ;; torch.square({x}) ;; ({x} + 3) ** 1.5 ;; ({x} + 3) ** (0.5 + 1j) ;; torch.pow({x} + 3, {x}) ;; 2 ** {x}
c_asin: torch.asin({x} * 0.2) ;; torch.atan({x} * 0.2) ;; torch.acos({x} * 0.2) ;; torch.asinh({x} * 0.2) ;; torch.atanh({x} * 0.2)
c_mul: {x} * {x} ;; {x} * {x}.conj() ;; {x} * (0.5 - 1j) ;; {x} * {x}.real ;; torch.mul({x}, {x}.sin()) ;; {x} * 2 ;; {x}.imag * {x}
c_add: {x} + {x}.conj() ;; {x} + 1 ;; {x} - 2j ;; {x}.real + {x} ;; torch.sub({x}, {x}.exp(), alpha=2) ;; torch.addcmul({x}, {x}, {x}, value=0.5) ;; torch.lerp({x}, {x}.sin(), 0.3)
c_div: {x} / ({x} + 3) ;; 1 / ({x} + 3) ;; torch.reciprocal({x} + 3) ;; {x} / (1 + 2j) ;; {x} / ({x}.abs() + 1) ;; ({x} + 3).reciprocal()
c_conj: {x}.conj() ;; torch.conj({x}) ;; torch.conj_physical({x}) ;; {x}.conj().resolve_conj() ;; torch.resolve_conj({x}.conj())
c_sgn: torch.sgn({x} + 3) ;; {x}.sgn() ;; -{x} ;; +{x}
c_sum: {x}.sum() ;; {x}.mean({d}) ;; {x}.sum({d}, keepdim=True) ;; {x}.prod({d}) ;; {x}.cumsum({d}) ;; {x}.cumprod({d}) ;; {x}.sum() * {x} ;; torch.prod({x})
c_matmul: {x} @ {x}.mT ;; {x} @ {x}.mH ;; {x}.matmul({x}.mT.conj()) ;; torch.einsum("...i,...i->...", {x}, {x}) ;; torch.vdot({x}.flatten(), {x}.flatten().sin()) ;; torch.dot({x}.flatten(), {x}.flatten()) ;; torch.outer({x}.flatten(), {x}.flatten().conj()) ;; torch.linalg.vecdot({x}, {x}.sin()) ;; torch.inner({x}, {x})
c_shape: {x}.reshape(-1) ;; {x}.T ;; {x}.flip({d}) ;; {x}[0] ;; {x}[..., 1:] ;; torch.cat([{x}, {x}.conj()], {d}) ;; torch.stack([{x}, {x} * 1j]) ;; {x}.H ;; {x}.adjoint() ;; {x}.roll(1, {d}) ;; {x}.unsqueeze(0) ;; {x}.expand(2, *{shape_text}) ;; F.pad({x}, (1, 0)) ;; {x}.diff() ;; {x}[{ints0}] ;; torch.where({mask}, {x}, {x}.conj()) ;; torch.tril({x}) ;; torch.diag_embed({x}) ;; {x}.index_select({d}, {ints}) ;; {x}.gather({d}, {gather_index}) ;; {x}.masked_fill({mask}, 0.5)
c_in_place: {t} = {x}.clone() // {t}.mul_(1j) ;; {t} = {x}.clone() // {t}[0] = 1 + 1j ;; {t} = {x} * 1 // {t} += {x}.conj() ;; {t} = {x}.clone() // {t}.real.mul_(2) ;; {t} = {x}.clone() // {t}.conj_physical_()
c_fft: torch.fft.fft({x}) ;; torch.fft.ifft({x}, dim={d}) ;; torch.fft.fft2({x}) ;; torch.fft.fftn({x}) ;; torch.fft.fftshift({x}) ;; torch.fft.fft({x}, n=3, norm="ortho")
c_linalg: torch.linalg.solve({x} @ {x}.mH + 2 * torch.eye({s0}, dtype={x}.dtype), {x}) ;; torch.linalg.inv({x} @ {x}.mH + torch.eye({s0}, dtype={x}.dtype)) ;; torch.linalg.det({x} @ {x}.mT + 2 * torch.eye({s0}, dtype={x}.dtype)) ;; torch.linalg.matrix_exp({x} @ {x}.mT * 0.1) ;; torch.linalg.cholesky({x} @ {x}.mH + torch.eye({s0}, dtype={x}.dtype))
c_as_real: torch.view_as_complex(torch.view_as_real({x}) * 2) ;; torch.complex({x}.imag, {x}.real) ;; torch.view_as_complex(torch.view_as_real({x}).sin())
"""

LEAVING = """
real: {x}.real ;; torch.real({x}) ;; {x}.real.sin()
imag: {x}.imag ;; torch.imag({x}) ;; {x}.imag * {x}.real
c_abs: {x}.abs() ;; torch.abs({x}) ;; abs({x}) ;; ({x} * {x}.conj()).real ;; {x}.abs().square() ;; {x}.abs() ** 2
angle: torch.angle({x} + 3) ;; {x}.angle() ;; torch.atan2({x}.imag, {x}.real)
view_as_real: torch.view_as_real({x}) ;; torch.view_as_real({x}.conj().resolve_conj()) ;; torch.view_as_real({x})[..., 0]
c_norm: torch.linalg.vector_norm({x}) ;; {x}.norm() ;; torch.linalg.norm({x}) ;; torch.linalg.vector_norm({x}, 3, dim={d}) ;; torch.linalg.svdvals({x} @ {x}.mH + torch.diag(torch.arange({s0}.0)).to({x}.dtype)) ;; torch.linalg.eigvalsh({x} @ {x}.mH + torch.diag(torch.arange({s0}.0)).to({x}.dtype))
c_slogdet: torch.linalg.slogdet({x} @ {x}.mH + torch.eye({s0}, dtype={x}.dtype))[1]
c_irfft: torch.fft.irfft({x}) ;; torch.fft.hfft({x}) ;; torch.fft.irfft2({x}) ;; torch.fft.irfftn({x})
"""
