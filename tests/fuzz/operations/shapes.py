"""Views, copies, and putting values together."""

TABLE = """
reshape: {x}.reshape(-1) ;; torch.reshape({x}, {shape2}) ;; {x}.reshape({shape2}) ;; {x}.reshape(*{shape2}) ;; {x}.reshape_as({w}.flatten())
view: {x}.view(-1) ;; {x}.contiguous().view({shape2}) ;; {x}.view(*{x}.shape, 1)
flatten: torch.flatten({x}) ;; {x}.flatten(1) ;; {x}.flatten(0, -1) ;; {x}.ravel()
unflatten: {x}.unflatten(-1, (1, {last})) ;; torch.unflatten({x}, 0, (-1, 1))
permute: {x}.permute({perm}) ;; torch.permute({x}, {perm}) ;; {x}.permute(*{perm})
transpose: {x}.transpose({d}, {e}) ;; torch.transpose({x}, 0, -1) ;; torch.swapaxes({x}, {d}, {e}) ;; {x}.swapdims({d}, {e})
t: {x}.t() ;; {x}.T ;; {x}.mT ;; {x}.adjoint() ;; {x}.H
movedim: torch.movedim({x}, {d}, {e}) ;; {x}.moveaxis(0, -1)
squeeze: {x}.unsqueeze({d}).squeeze({d}) ;; torch.squeeze({x}[None]) ;; {x}.squeeze() ;; {x}[:, None].squeeze((1,))
unsqueeze: {x}.unsqueeze(0) ;; torch.unsqueeze({x}, -1) ;; {x}[None] ;; {x}[..., None]
expand: {x}.expand(2, *{shape_text}) ;; {x}.unsqueeze(0).expand(2, *[-1] * {x}.ndim) ;; {x}[:1].expand_as({x}) ;; torch.broadcast_to({x}, (2, *{shape_text}))
broadcast_tensors: torch.broadcast_tensors({x}, {b})[1] * {x} ;; {t}_a, {t} = torch.broadcast_tensors({b}, {x}) // {t} = {t} + {t}_a
repeat: {x}.repeat(*[1] * ({x}.ndim - 1), 2) ;; {x}.repeat(2, *[1] * {x}.ndim) ;; torch.tile({x}, (2,)) ;; {x}.tile(1, 2)
repeat_interleave: torch.repeat_interleave({x}, 2, dim={d}) ;; {x}.repeat_interleave(2) ;; {x}.repeat_interleave(torch.arange(1, {size_d} + 1), dim={d}, output_size={size_d} * ({size_d} + 1) // 2)
roll: torch.roll({x}, 1, {d}) ;; {x}.roll(-1) ;; torch.roll({x}, (1, 2), (0, -1))
flip: torch.flip({x}, ({d},)) ;; {x}.flip({d}) ;; torch.flipud({x}) ;; {x}.fliplr()
rot90: torch.rot90({x}, 1, ({d}, {e})) ;; {x}.rot90(2, (0, 1))
chunk: torch.chunk({x}, 2, {d})[0] ;; {x}.chunk(2, {d})[-1] ;; {t}_a, {t} = {x}.chunk(2, -1) // {t} = {t} * {t}_a
split: torch.split({x}, 1, {d})[0] ;; {x}.split([1, {size_d} - 1], {d})[1] ;; {x}.tensor_split(2, {d})[0] ;; torch.tensor_split({x}, (1,), {d})[1]
unbind: torch.unbind({x}, {d})[0] ;; sum({x}.unbind({d})) ;; {t}_first, *{t}_rest = {x} // {t} = {t}_first * 2 + sum({t}_rest) ;; torch.stack([row * i for i, row in enumerate({x})])
stack: torch.stack([{x}, {y}], {d}) ;; torch.stack(({x}, {x}.cos()), -1) ;; torch.stack([{x}, {w}])
cat: torch.cat([{x}, {y}], {d}) ;; torch.cat(({x}, {x} * 2), -1) ;; torch.concat([{x}, {w}], dim={d}) ;; torch.cat([{x}, {x}.new_zeros({shape_text})])
hstack: torch.hstack([{x}, {y}]) ;; torch.vstack([{x}, {y}]) ;; torch.dstack([{x}, {y}]) ;; torch.column_stack([{x}, {y}])
tril: torch.tril({square}) ;; {square}.triu(1) ;; torch.tril({x}, -1) + {x} ;; {x}.triu()
diag: torch.diag({square}) ;; torch.diag({vector}) ;; torch.diagonal({square}, offset=1) ;; {square}.diagonal() ;; torch.diagonal({x}, 0, {d}, {e})
diag_embed: torch.diag_embed({x}) ;; torch.diag_embed({x}, offset=1) ;; torch.diagflat({x}) ;; torch.diag_embed({x}, 0, 0, 1)
trace: torch.trace({square}) ;; {square}.trace()
narrow: torch.narrow({x}, {d}, 0, 1) ;; {x}.narrow({d}, {size_d} - 1, 1)
select: torch.select({x}, {d}, {i}) ;; {x}.select({d}, {i})
unfold: {x}.unfold({d}, 2, 1) ;; {x}.unfold(-1, 2, 2)
as_strided: torch.as_strided({x}.contiguous(), ({n},), (1,)) ;; {x}.contiguous().as_strided((2,), (1,))
pad: F.pad({x}, (1, 2)) ;; F.pad({x}, (1, 0), value=0.5) ;; F.pad({x}, (0, 1, 1, 0)) ;; F.pad({x}[None], (1, 1), mode="reflect") ;; F.pad({x}[None], (1, 1), mode="replicate") ;; F.pad({x}[None], (1, 0), mode="circular") ;; F.pad({x}, (-1, 1)) ;; torch.constant_pad_nd({x}, (1, 1), 0.2)
meshgrid: torch.meshgrid({vector}, {vector}, indexing="ij")[0] ;; {t}_a, {t} = torch.meshgrid({vector}, {vector}.sin(), indexing="xy") // {t} = {t} * {t}_a
cartesian_prod: torch.cartesian_prod({vector}, {vector}.cos()) ;; torch.combinations({vector})
block_diag: torch.block_diag({matrix}, {matrix}.sin())
atleast: torch.atleast_1d({x}) ;; torch.atleast_2d({x}) ;; torch.atleast_3d({x})
vander: torch.vander({vector}) ;; torch.vander({vector}, 3, True) ;; torch.linalg.vander({vector})
select_scatter: torch.select_scatter({x}, {x}.select({d}, 0) * 2, {d}, 0) ;; torch.slice_scatter({x}, {x}.narrow({d}, 0, 1).sin(), {d}, 0, 1) ;; torch.diagonal_scatter({square}, {square}.diagonal() * 2)
triu_indices: {square}[torch.triu_indices(*{square}.shape).unbind()] ;; {square}[torch.tril_indices({sn}, {sn}, -1)[0]]
pixel_shuffle: F.pixel_shuffle({x}.reshape(1, -1, 1, 1).repeat(1, 4, 1, 1), 2) ;; F.channel_shuffle(torch.stack([{matrix}, {matrix} * 2])[None], 2)
empty: torch.cat([{x}[:0], {x}]) ;; {x}[:0].sum() + {x} ;; {x}[:0] ;; {x} * {x}[..., :0].sum() + {x} ;; torch.cat([{x}[..., :0].cos(), {x}], -1)
zero_dim: {x}.sum() * {x} ;; {x}.flatten()[0] ;; {x} * {x}.mean() + {x}.flatten()[-1] ;; {x} / {pos}.max() ;; ({x}.sum() + 1) * 2 ;; torch.stack([{x}.sum(), {x}.prod()])
structure: {t} = dict(a={x}, b=[{x}.sin(), {x}.sum()]) // {t} = {t}["a"] * {t}["b"][1] + {t}["b"][0] ;; {t} = Pair({x}, {x} * 2) // {t} = {t}.first * {t}.second ;; {t} = ({x}, ({x}.cos(), 3)) // {t} = {t}[0] * {t}[1][1] + {t}[1][0]
closure: (lambda v: v * {x})({x}.sin()) ;; helper({x}) ;; [v * 2 for v in ({x}, {x}.sin())][1] ;; functools.reduce(torch.add, [{x}, {x} * 2, {x}.cos()]) ;; functools.partial(torch.mul, {x})({y})
"""
