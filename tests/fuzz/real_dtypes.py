"""Types of results, sizes that are 0 or none, dimensions, and memory formats."""

from __future__ import annotations

from .real_statement import results

OPERANDS = (
    "x", "y", "z", "i", "b", "h", "c", "n", "k", "True", "2j", "i[0, 0]", "b[0, 0]", "h[0, 0]", "z.double()", "i.to(torch.uint8)", "i.to(torch.int16)[0, 0]", "h.half()", "c[0, 0]", "torch.tensor(2)", "torch.tensor(1.5, dtype=torch.float64)", "x.shape[0]", "e", "float('inf')", "-1", "0",
)  # fmt: skip
BINARY = (
    "{a} + {b}", "{a} - {b}", "{a} * {b}", "{a} / {b}", "{a} // {b}", "{a} % {b}", "{a} ** {b}", "{a} == {b}", "{a} < {b}", "{a} & {b}", "{a} | {b}", "{a} ^ {b}", "{a} << {b}", "torch.maximum(torch.as_tensor({a}), torch.as_tensor({b}))", "torch.where(b, {a}, {b})", "torch.true_divide({a}, {b})", "torch.floor_divide({a}, {b})",
    "torch.remainder({a}, {b})", "torch.fmod({a}, {b})", "torch.pow({a}, {b})", "torch.div({a}, {b}, rounding_mode='trunc')", "torch.div({a}, {b}, rounding_mode='floor')", "torch.add({a}, {b}, alpha=2)", "torch.sub({a}, {b}, alpha=0.5)", "torch.logical_and(torch.as_tensor({a}), torch.as_tensor({b}))", "torch.atan2(torch.as_tensor({a}), torch.as_tensor({b}))", "torch.result_type({a}, {b})", "torch.mul({a}, {b})", "torch.bitwise_and({a}, {b})", "torch.eq({a}, {b})",
    "torch.rsub(torch.as_tensor({a}), {b})", "torch.hypot(torch.as_tensor({a}), torch.as_tensor({b}))", "torch.nextafter(torch.as_tensor({a}), torch.as_tensor({b}))", "torch.ldexp(torch.as_tensor({a}), torch.as_tensor({b}))", "torch.float_power({a}, {b})", "torch.xlogy({a}, {b})", "torch.gcd(torch.as_tensor({a}), torch.as_tensor({b}))", "torch.isclose(torch.as_tensor({a}), torch.as_tensor({b}))", "torch.stack([torch.as_tensor({a}), torch.as_tensor({b})])", "torch.cat([torch.as_tensor({a}), torch.as_tensor({b})])", "torch.lerp(torch.as_tensor({a}), torch.as_tensor({b}), 0.5)", "torch.clamp(torch.as_tensor({a}), min={b})", "divmod({a}, {b})",
    "torch.fmax(torch.as_tensor({a}), torch.as_tensor({b}))", "torch.heaviside(torch.as_tensor({a}), torch.as_tensor({b}))", "torch.copysign(torch.as_tensor({a}), {b})", "torch.outer(torch.as_tensor({a}).flatten(), torch.as_tensor({b}).flatten())", "torch.dot(torch.as_tensor({a}).flatten(), torch.as_tensor({b}).flatten())",
)  # fmt: skip
UNARY = (
    "-{a}", "~{a}", "+{a}", "abs({a})", "{a}.sum()", "{a}.sum(0)", "{a}.sum(-1, keepdim=True)", "{a}.mean()", "{a}.mean(-1)", "{a}.mean(dtype=torch.float64)", "{a}.prod()", "{a}.prod(-1)", "{a}.max()", "{a}.max(-1)", "{a}.min(0)", "{a}.amax()", "{a}.amax(-1, keepdim=True)", "{a}.argmax()", "{a}.argmax(-1)", "{a}.argmin(0, keepdim=True)", "{a}.all()", "{a}.any(-1)", "{a}.std()", "{a}.var(-1)", "{a}.cumsum(-1)", "{a}.cumprod(0)", "{a}.norm()", "{a}.norm(dim=-1)", "{a}.norm(1, -1, True)",
    "{a}.exp()", "{a}.sqrt()", "{a}.sin()", "{a}.sigmoid()", "{a}.relu()", "{a}.tanh()", "{a}.floor()", "{a}.round()", "{a}.round(decimals=1)", "{a}.trunc()", "{a}.sign()", "{a}.reciprocal()", "{a}.rsqrt()", "{a}.log1p()", "{a}.square()", "{a}.isnan()", "{a}.isfinite()", "{a}.sort(-1)", "{a}.sort(0, descending=True)", "{a}.argsort(-1)", "{a}.topk(1)", "{a}.flip(0)", "{a}.roll(1, -1)", "{a}.tril()", "{a}.triu(1)", "{a}.softmax(-1)", "{a}.log_softmax(0)", "{a}.softmax(-1, dtype=torch.float64)",
    "{a}.float()", "{a}.double()", "{a}.half()", "{a}.bfloat16()", "{a}.int()", "{a}.long()", "{a}.bool()", "{a}.to(torch.complex64)", "{a}.type(torch.float64)", "{a}.new_zeros(2)", "{a}.new_ones(2, dtype=torch.int64)", "{a}.new_full((2,), 3)", "torch.zeros_like({a})", "torch.full_like({a}, 2.5)", "torch.ones_like({a}, dtype=torch.float64)", "torch.empty_like({a}).shape", "{a}.nonzero()", "{a}.unique()", "{a}.count_nonzero()", "{a}.numel()", "{a}.dim()", "{a}.shape", "{a}.size()", "{a}.size(-1)", "{a}.dtype", "{a}.is_floating_point()", "{a}.is_complex()", "{a}.element_size()", "{a}.device", "{a}.layout", "len({a})", "{a}.stride()", "{a}.is_contiguous()", "{a}.ndim", "{a}.nelement()", "{a}.storage_offset()", "{a}.itemsize", "{a}.nbytes",
    "{a}.squeeze()", "{a}.unsqueeze(-1)", "{a}.flatten()", "{a}.reshape(-1)", "{a}.repeat(2, 1)", "{a}.repeat_interleave(2)", "{a}.tile(2)", "{a}.expand(2, *{a}.shape)", "{a}[..., None]", "{a}[None, ...]", "{a}[()]", "{a}[-1]", "{a}[..., 0]", "{a}[:0]", "{a}[::2]", "{a}[[0, -1]]", "{a}[torch.tensor([0, -1])]", "{a}[torch.tensor(1)]", "{a}[i[1, :2].abs() % 3]", "{a}[i % 3 == 0]" , "{a}[True]", "{a}[None, :, None]", "{a}.take(torch.tensor([0, -1]))", "{a}.logsumexp(-1)", "{a}.median()", "{a}.median(-1)", "{a}.quantile(0.5)", "{a}.mode()", "{a}.kthvalue(1)", "{a}.std(unbiased=False)", "{a}.var(0, correction=0)", "torch.std_mean({a})", "torch.var_mean({a}, -1)", "{a}.aminmax()", "{a}.cummax(-1)", "{a}.diff()", "{a}.nansum()", "{a}.nanmean(-1)", "{a}.logical_not()", "{a}.frac()", "{a}.ceil()", "{a}.erf()", "{a}.lgamma()", "{a}.angle()", "{a}.conj()", "{a}.sgn()", "{a}.nan_to_num()", "{a}.clamp(0, 1)", "{a}.clamp(min=0)", "{a}.clamp(max=1.5)", "{a}.histc(3)" ,
    "F.relu({a})", "F.gelu({a})", "F.silu({a})", "F.elu({a})", "F.celu({a})", "F.selu({a})", "F.leaky_relu({a})", "F.hardtanh({a})", "F.softplus({a})", "F.logsigmoid({a})", "F.normalize({a})", "F.layer_norm({a}, ({a}.shape[-1],))", "F.pad({a}, (1, 1))", "F.pad({a}, (1, 1), value=True)", "F.one_hot({a}.abs().long() % 5, 5)", "F.dropout({a}, 0.5, False)", "F.mse_loss({a}, {a} * 2)", "F.l1_loss({a}, {a} * 2)", "F.glu({a})", "F.softmax({a}, 0)", "F.log_softmax({a}, dim=-1)", "F.cosine_similarity({a}, {a} * 2, -1)", "F.threshold({a}, 0.1, 20)", "torch.einsum('...a->...', {a})", "torch.diag({a})", "torch.trace({a})", "torch.linalg.norm({a})", "torch.linalg.vector_norm({a}, dim=-1)", "{a} @ {a}.mT", "{a}.T", "{a}.H",
    "{a}.sum((0, 1))", "{a}.sum(())", "{a}.sum([])", "{a}.sum(dim=None)", "{a}.mean((0, -1), keepdim=True)", "{a}.sum(dtype=torch.float16)", "{a}.max(dim=0, keepdim=True)", "{a}.max(dim=-1).indices", "{a}.sum(axis=1, keepdims=True)", "{a}.any()", "{a}.all(0, keepdim=True)", "{a}.any(dim=(0, 1))", "max({a}.shape)", "{a}.permute(*range({a}.dim())[::-1])", "{a}.movedim(-1, 0)", "{a}.tensor_split(2)", "{a}.tensor_split(torch.tensor([1]))", "{a}.chunk(2, -1)", "{a}.split(1)", "{a}.unbind(-1)", "{a}.frexp()", "torch.take_along_dim({a}, {a}.argsort(-1), -1)", "torch.take_along_dim({a}, torch.full((3, 1), -1), 1)", "{a}.gather(-1, {a}.argsort(-1))", "{a}.index_select(0, torch.tensor([0, 1]))", "{a}.masked_fill({a} > 0, 2)", "{a}.masked_fill({a} > 0, z)", "{a}.scatter(-1, i.abs() % 4, 1)", "torch.var_mean({a}, -1, correction=7)", "torch.var({a}, -1, correction=4)", "{a}.cov()", "torch.searchsorted(y.sort().values, {a})", "torch.bucketize({a}, y.sort().values)", "{a}.vander()" if False else "torch.atleast_3d({a})", "torch.block_diag({a}, {a})", "torch.broadcast_tensors({a}, x)", "torch.meshgrid(y, y, indexing='ij')", "torch.cartesian_prod(y, y)", "torch.tensordot({a}, {a}, 2)", "torch.cdist({a}, {a})", "torch.isin({a}, {a})", "{a}.tolist()", "{a}.item()", "bool({a}.any())", "str({a}.dtype)", "repr({a}.shape)", "{a}.to({a})", "{a}.to('cpu')", "{a}.to(torch.float32, copy=True)", "{a}.type()", "{a}.cpu()", "{a}.contiguous(memory_format=torch.contiguous_format)", "torch.is_tensor({a})", "torch.numel({a})", "torch.is_complex({a})", "isinstance({a}, torch.FloatTensor)", "{a}.has_names()", "{a}.is_signed()" if False else "{a}.is_sparse", "{a}.names", "{a}.untyped_storage().nbytes()", "{a}.data_ptr() > 0", "{a}.is_shared()", "{a}.retains_grad", "{a}._version >= 0", "{a}.output_nr", "hash({a}) == hash({a})", "{a} is {a}", "{a} in [{a}]" , "id({a}) == id({a})",
)  # fmt: skip
TENSORS = (
    "x",
    "y",
    "z",
    "i",
    "b",
    "h",
    "c",
    "e",
    "h.half()",
    "i.to(torch.uint8)",
    "z.double()",
    "x.t()",
    "x[:, ::2]",
    "x[:0]",
    "x[0, 0]",
    "x.nan_to_num() * float('nan')",
    "x * 0",
)
IMAGES = ("x.view(1, 3, 2, 2).to(memory_format=torch.channels_last)", "x.view(1, 3, 2, 2).contiguous(memory_format=torch.channels_last)", "F.conv2d(x.view(1, 3, 2, 2).to(memory_format=torch.channels_last), torch.ones(2, 3, 1, 1))", "x.view(1, 3, 2, 2).to(memory_format=torch.channels_last) * 2", "torch.empty_like(x.view(1, 3, 2, 2).to(memory_format=torch.channels_last)).shape", "x.view(1, 3, 2, 2).to(memory_format=torch.channels_last).is_contiguous(memory_format=torch.channels_last)", "x.view(1, 3, 2, 2).to(memory_format=torch.channels_last).stride()", "x.t().contiguous().stride()", "(x * 2).stride()", "x.t().reshape(12)", "x.t().clone().view(-1)", "(x.t() * 2).view(-1)", "x.t().contiguous().view(-1)", "x.t().view(-1)", "x[:, ::2].view(-1)", "x.t().is_contiguous()", "F.interpolate(x.view(1, 3, 2, 2), scale_factor=2)", "F.max_pool2d(x.view(1, 3, 2, 2), 2)", "F.avg_pool2d(x.view(1, 3, 2, 2), 2)", "F.batch_norm(x, None, None, training=True)", "F.adaptive_avg_pool2d(x.view(1, 3, 2, 2), 1)", "torch.channel_shuffle(x.view(1, 3, 2, 2), 3)", "F.pixel_shuffle(x.view(1, 12, 1, 1), 2)", "F.unfold(x.view(1, 3, 2, 2), 2)")  # fmt: skip
EMPTY = ("e.sum()", "e.mean()", "e.sum(0)", "e.max()", "e.max(-1)", "e.max(0)", "e.amax(0)", "e.prod()", "e.std()", "e @ x.t()", "torch.cat([e, x])", "torch.cat([torch.empty(0), x])", "e.softmax(-1)", "self.lin(e)", "F.mse_loss(e, e)", "e.view(0, 4)", "e.view(-1, 4)", "e.view(-1)", "e.reshape(0, -1)", "e.argmax(-1)", "e.cumsum(0)", "e.norm()", "e.flatten()", "torch.stack([e, e])", "e.sort()", "e.topk(0)", "e[e > 0]", "e + y", "e * z", "e.any()", "e.all()", "F.cross_entropy(e, i[0, :0])", "F.layer_norm(e, (4,))", "e.unbind()", "e.split(1)", "e.var(0)", "e.logsumexp(0)", "x.new_empty(0).sum()", "x[:0].mean(0)", "torch.zeros(0, 3) @ torch.zeros(3, 0)", "torch.zeros(3, 0) @ torch.zeros(0, 3)", "x.sum(0)[:0].prod()")  # fmt: skip

DTYPES = (
    *results(*(e.format(a=a, b=b) for e in BINARY for a in OPERANDS for b in OPERANDS)),
    *results(*(e.format(a=a) for e in UNARY for a in TENSORS)),
    *results(*IMAGES, *EMPTY),
)
