"""Elementwise operations: of one value, of several, and in place on intermediates."""

TABLE = """
sin: torch.sin({x}) ;; {x}.sin()
cos: torch.cos({x}) ;; {x}.cos()
tan: torch.tan({unit})
tanh: torch.tanh({x}) ;; {x}.tanh()
sinh: torch.sinh({x})
cosh: torch.cosh({x})
exp: torch.exp({unit}) ;; {x}.exp()
exp2: torch.exp2({x}) ;; torch.special.exp2({x})
expm1: torch.expm1({x}) ;; {x}.expm1()
log: torch.log({pos}) ;; {pos}.log()
log2: torch.log2({pos})
log10: torch.log10({pos})
log1p: torch.log1p({pos})
sqrt: torch.sqrt({pos}) ;; {pos} ** 0.5
rsqrt: torch.rsqrt({pos}) ;; {pos}.rsqrt()
square: torch.square({x}) ;; {x}.square()
cbrt: torch.pow({pos}, 1 / 3)
abs: torch.abs({x}) ;; {x}.abs() ;; abs({x})
neg: -{x} ;; torch.neg({x}) ;; {x}.negative()
positive: +{x} ;; torch.positive({x})
reciprocal: torch.reciprocal({pos}) ;; 1 / {pos} ;; 2.0 / {pos}
sigmoid: torch.sigmoid({x}) ;; {x}.sigmoid() ;; torch.special.expit({x})
relu: torch.relu({x}) ;; F.relu({x}) ;; {x}.relu()
gelu: F.gelu({x}) ;; F.gelu({x}, approximate="tanh")
silu: F.silu({x})
elu: F.elu({x}) ;; F.elu({x}, alpha=0.7)
selu: F.selu({x})
celu: F.celu({x}, alpha=1.3)
leaky_relu: F.leaky_relu({x}) ;; F.leaky_relu({x}, 0.2)
softplus: F.softplus({x}) ;; F.softplus({x}, beta=2)
softsign: F.softsign({x})
logsigmoid: F.logsigmoid({x})
mish: F.mish({x})
hardswish: F.hardswish({x})
hardtanh: F.hardtanh({x}) ;; F.hardtanh({x}, -0.5, 0.8)
hardsigmoid: F.hardsigmoid({x})
relu6: F.relu6({x})
tanhshrink: F.tanhshrink({x})
softshrink: F.softshrink({x}, 0.3)
hardshrink: F.hardshrink({x}, 0.3)
threshold: F.threshold({x}, 0.2, 0.1)
atan: torch.atan({x}) ;; {x}.arctan()
asin: torch.asin({unit}) ;; torch.arcsin({unit})
acos: torch.acos({unit})
asinh: torch.asinh({x}) ;; {x}.arcsinh()
acosh: torch.acosh({pos} + 1)
atanh: torch.atanh({unit})
erf: torch.erf({x}) ;; torch.special.erf({x})
erfc: torch.erfc({x})
erfinv: torch.erfinv({unit})
lgamma: torch.lgamma({pos}) ;; torch.special.gammaln({pos})
digamma: torch.digamma({pos})
polygamma: torch.polygamma(1, {pos}) ;; torch.special.polygamma(2, {pos})
mvlgamma: torch.mvlgamma({pos} + 1, 2)
sign: torch.sign({x}) * {x} ;; {x}.sgn() + {x}
floor: {x} - torch.floor({x}) ;; {x}.ceil() * {x}
round: {x}.round() + {x} ;; torch.round({x}, decimals=1) * {x}
frac: torch.frac({x})
trunc: torch.trunc({x}) + {x} ;; {x}.fix() * {x}
clamp: torch.clamp({x}, -0.5, 0.6) ;; {x}.clamp(min=-0.3) ;; {x}.clamp(max=0.7) ;; torch.clip({x}, {lo}, {hi})
clamp_tensor: torch.clamp({x}, min={w}) ;; torch.clamp({x}, {w} - 1, {w} + 0.4) ;; {x}.clamp_max({y})
nan_to_num: torch.nan_to_num({x}) ;; {x}.nan_to_num(0.5)
sinc: torch.sinc({x})
i0: torch.i0({x}) ;; torch.special.i0e({x})
i1: torch.special.i1({x}) ;; torch.special.i1e({x})
logit: torch.logit({prob}) ;; {x}.logit(eps=0.1) ;; torch.special.logit({prob})
entr: torch.special.entr({pos})
ndtr: torch.special.ndtr({x})
log_ndtr: torch.special.log_ndtr({x})
ndtri: torch.special.ndtri({prob})
erfcx: torch.special.erfcx({x})
deg2rad: torch.deg2rad({x}) ;; torch.rad2deg({x})
pow_number: {x} ** 2 ;; {x} ** 3 ;; {pos} ** -1.5 ;; torch.pow({x}, 2) ;; {x}.pow(3) ;; pow({pos}, 0.7) ;; {x} ** 1 ;; {x} ** 0
pow_base: 2 ** {x} ;; torch.pow(1.7, {x}) ;; 0.5 ** {x}
float_power: torch.float_power({pos}, 1.5)
numbers: {x} * 2 ;; {c} * {x} ;; {x} + 1 ;; 3 - {x} ;; {x} / 3 ;; torch.mul({x}, {c}) ;; torch.sub({x}, 1, alpha=2) ;; torch.add({x}, {c}) ;; {x} * math.pi ;; torch.rsub({x}, 2)
cast: {x}.to(torch.float64) ;; {x}.double() ;; {x}.to({x}.dtype) ;; {x}.type_as({w})
cast_down: {x}.float() ;; {x}.to(torch.float32) ;; {x}.to(dtype=torch.float32)
detach: {x} * {x}.detach() ;; {x}.detach().sin() + {x}
loop: sum({x} * i for i in range(1, 3)) ;; {t} = {x} // for i in range(2): // ....{t} = {t} * {x}.cos() + i
branch: {x} * 2 if {x}.ndim > 1 else {x}.sin() ;; {x} / {x}.shape[0] ;; {x} * {x}.size(-1) ;; {x} * len({x}) ;; {x} / {x}.numel()
zeros_like: torch.zeros_like({x}) + {x} ;; torch.ones_like({x}) * {x} ;; torch.full_like({x}, 0.5) * {x} ;; {x} * torch.arange({s0}.0).reshape({s0}, *[1] * ({x}.ndim - 1)).to({x}.dtype)
factories: {x} + torch.linspace(0, 1, {last}, dtype={x}.dtype) ;; {x} * {x}.new_full(({last},), 0.3) ;; {x} @ torch.eye({last}, dtype={x}.dtype) ;; {x} + {x}.new_zeros({shape_text}) ;; {x} * torch.tensor({c}, dtype={x}.dtype) ;; {x} + torch.ones({last}, dtype={x}.dtype)
constants: {x} + torch.tensor([{c}, 0.5], dtype={x}.dtype).sum() ;; {x} * torch.as_tensor(0.7, dtype={x}.dtype) ;; {x} * torch.full((), 2.0, dtype={x}.dtype)
custom: own({x}) ;; own({x} * 0.5) + {x}
no_op: {x}.clone() ;; {x}.contiguous() ;; F.dropout({x}, 0.0) ;; F.dropout({x}, 0.4, training=False) ;; torch.clone({x}) ;; {x}.view_as({x}) ;; {x}.alias() if hasattr({x}, "alias") else {x}
"""

BINARY = """
add: {x} + {y} ;; torch.add({x}, {b}) ;; {x}.add({y}, alpha=2) ;; {b} + {x} ;; {x} + {scalar}
sub: {x} - {y} ;; torch.sub({x}, {b}) ;; {b} - {x}
mul: {x} * {y} ;; torch.mul({x}, {b}) ;; {b} * {x} ;; {x} * {x} ;; {x} * {scalar}
div: {x} / ({y} * {y} + 0.5) ;; torch.div({y}, {pos}) ;; {y} / {pos} ;; {x} / {pos}.sum() ;; torch.true_divide({x}, {pos}) ;; {x} / ({scalar} * {scalar} + 1)
div_mode: torch.div({x}, {pos}, rounding_mode="floor") + {x} ;; {x} // 0.7 * {x} ;; torch.div({x}, 0.3, rounding_mode="trunc") + {x}
remainder: {x} % 0.7 ;; torch.remainder({x}, {pos}) ;; torch.fmod({x}, 0.6) ;; torch.fmod({y}, {pos})
pow: {pos} ** {y} ;; torch.pow({pos}, {b})
maximum: torch.maximum({x}, {y}) ;; torch.max({x}, {y}) ;; torch.fmax({x}, {y})
minimum: torch.minimum({x}, {y}) ;; torch.min({x}, {y}) ;; torch.fmin({x}, {y}) ;; torch.minimum({x}, {x}.mean())
where: torch.where({x} > 0.2, {x}, {y}) ;; torch.where({mask}, {x}, {b}) ;; torch.where({x} > {y}, {x}, 0.5) ;; {x}.where({x} < 0.4, {x}.sin()) ;; torch.where({mask}, 1.0, {x})
atan2: torch.atan2({x}, {pos}) ;; torch.arctan2({y}, {x})
hypot: torch.hypot({x}, {y})
lerp: torch.lerp({x}, {y}, 0.3) ;; torch.lerp({x}, {y}, {w}) ;; {x}.lerp({b}, 0.8)
addcmul: torch.addcmul({x}, {y}, {w}, value=0.5) ;; torch.addcmul({x}, {x}, {y})
addcdiv: torch.addcdiv({x}, {y}, {pos}, value=0.5)
logaddexp: torch.logaddexp({x}, {y}) ;; torch.logaddexp2({x}, {b})
xlogy: torch.xlogy({x}, {pos}) ;; torch.special.xlog1py({x}, {pos}) ;; torch.xlogy(2.0, {pos})
copysign: torch.copysign({x}, {y}) ;; torch.copysign({x}, -1.0)
ldexp: torch.ldexp({x}, torch.tensor(2))
comparison: ({x} > {y}).to({x}.dtype) * {x} ;; ({x} <= 0.3).double() * {x} ;; {x} * torch.isfinite({x}) ;; {x} * ({x} != 0) ;; torch.logical_and({x} > 0, {x} < 1) * {x} ;; {x} * ~({x} > 0.1)
heaviside: torch.heaviside({x}, {w}) * {x}
integers: {x} * {gather_index} ;; {x} + torch.arange({last}) ;; {gather_index} - {x} ;; {x} * {mask} ;; {gather_index} / {pos} ;; torch.mul({x}, {ints}.sum())
prelu: F.prelu({x}, {scalar}.reshape(1))
masked_fill: {x}.masked_fill({mask}, 0.5) ;; torch.masked_fill({x}, {x} > 0.3, {c}) ;; {x}.masked_fill({mask}, {scalar})
dist: torch.dist({x}, {y}) ;; torch.dist({x}, {w}, p=3)
"""

IN_PLACE = """
add_: {t} = {x}.clone() // {t}.add_({y}) ;; {t} = {x} * 1 // {t} += {b} ;; {t} = {x}.clone() // {t}.add_(1.5, alpha=2)
mul_: {t} = {x}.clone() // {t}.mul_({y}) ;; {t} = {x}.sin() // {t} *= {c} ;; {t} = {x}.clone() // {t}.mul_({t})
sub_: {t} = {x}.clone() // {t} -= {y} ;; {t} = {x} + 0 // {t}.sub_({w}, alpha=0.5)
div_: {t} = {x}.clone() // {t}.div_({pos}) ;; {t} = {x}.clone() // {t} /= 2
unary_: {t} = {x}.clone() // {t}.sin_() ;; {t} = {x}.clone() // {t}.exp_() ;; {t} = {x} * 2 // torch.tanh_({t}) ;; {t} = {x}.clone() // {t}.neg_() ;; {t} = {x}.clone() // {t}.sigmoid_().mul_(2)
clamp_: {t} = {x}.clone() // {t}.clamp_(min=-0.3) ;; {t} = {x}.clone() // {t}.clamp_(-0.5, 0.5)
relu_: {t} = {x}.clone() // {t}.relu_() ;; F.relu({x}.clone(), inplace=True) ;; F.leaky_relu_({x} * 1) ;; F.elu({x}.clone(), inplace=True)
zero_: {t} = {x}.clone() // {t}.zero_() // {t} = {t} + {x} ;; {t} = {x} * 2 // {t}.fill_(0.5) // {t} = {t} * {x}
copy_: {t} = {x}.clone() // {t}.copy_({y}) // {t} = {t} * {x} ;; {t} = torch.empty_like({x}) // {t}.copy_({x})
fill_: {t} = torch.zeros_like({x}) // {t}.add_({x}) ;; {t} = torch.empty_like({x}).fill_(0.3) * {x}
masked_fill_: {t} = {x}.clone() // {t}.masked_fill_({mask}, 0.2) ;; {t} = {x}.clone() // {t}.masked_fill_({t} > 0.3, 0.2)
pow_: {t} = {x}.clone() // {t}.pow_(2) ;; {t} = {x}.clone() // {t} **= 3
setitem: {t} = {x}.clone() // {t}[0] = 0.5 ;; {t} = {x}.clone() // {t}[0] = {x}[-1] * 2 ;; {t} = {x}.clone() // {t}[..., 0] = {c} ;; {t} = {x}.clone() // {t}[..., 1:] = {x}[..., :-1].cos() ;; {t} = {x} * 1 // {t}[-1] *= 2 ;; {t} = {x}.clone() // {t}[0] += {t}[1]
setitem_mask: {t} = {x}.clone() // {t}[{mask}] = 0.1 ;; {t} = {x}.clone() // {t}[{t} > 0.2] = 0.2 ;; {t} = {x} * 2 // {t}[{x} < 0] = 0.0
setitem_index: {t} = {x}.clone() // {t}[{ints0}] = 0.3 ;; {t} = {x}.clone() // {t}[[0, -1]] = {c}
fill_rows: {t} = torch.zeros_like({x}) // for i in range({s0}): // ....{t}[i] = {x}[i] * i ;; {t} = {x}.new_empty({shape_text}) // {t}[:] = {x}
view_in_place: {t} = {x}.clone() // {t}.view(-1).mul_(2) ;; {t} = {x}.clone() // {t}[0].add_(1) ;; {t} = {x}.clone() // {t}.T.mul_(0.5) ;; {t} = {x}.clone() // {t}.select(-1, 0).zero_()
scatter_: {t} = {x}.clone() // {t}.scatter_({d}, {gather_index}, 0.5) ;; {t} = torch.zeros_like({x}) // {t}.scatter_add_({d}, {gather_index}, {x}) ;; {t} = {x}.clone() // {t}.index_fill_({d}, {ints}, 0.3) ;; {t} = {x}.clone() // {t}.index_add_({d}, torch.arange({size_d}), {y})
out_of_list: {t} = [{x}, {x}.cos()] // {t}[0] = {t}[0] * 2 // {t} = sum({t}) ;; {t} = dict(a={x}, b={x} * 2) // {t}.update(b={x}.sin()) // {t} = {t}["a"] * {t}["b"]
"""
