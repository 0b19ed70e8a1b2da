"""Indexing, gather and scatter."""

TABLE = """
getitem_int: {x}[{i0}] ;; {x}[-1] ;; {x}[..., 0] ;; {x}[0, ...] ;; {x}[:, -1] ;; {x}[0, 0] ;; {x}[torch.tensor(0)]
getitem_slice: {x}[1:] ;; {x}[:-1] ;; {x}[::2] ;; {x}[..., 1:] ;; {x}[:, :1] ;; {x}[-2:] ;; {x}[0:1, ..., 1:] ;; {x}[slice(None, 1)] ;; {x}[..., ::2]
getitem_none: {x}[None] ;; {x}[..., None] ;; {x}[:, None] ;; {x}[None, ..., 0] ;; {x}[None, :, None] ;; {x}[...]
getitem_list: {x}[[0, -1]] ;; {x}[..., [0, 0]] ;; {x}[[0, 1], [1, 0]] ;; {x}[:, [1, 0]]
getitem_tensor: {x}[{ints0}] ;; {x}[..., {ints_last}] ;; {x}[{ints0}, 0] ;; {x}[{ints0}, {ints0}] ;; {x}[{ints0}[:, None]] ;; {x}[0, {ints_last}] ;; {x}[{ints0}, ..., None] ;; {x}[:, {ints_last}, None] ;; {x}[{ints0}, :, 0]
getitem_mask: ({x} * {mask})[{ints0}] ;; {x}[torch.tensor([True] * {s0})] ;; {x}[{mask}].sum() ;; {x}[{mask}]
index_select: torch.index_select({x}, {d}, {ints}) ;; {x}.index_select({d}, {ints})
gather: torch.gather({x}, {d}, {gather_index}) ;; {x}.gather({d}, {gather_index})
take: torch.take({x}, torch.tensor([0, {n} - 1, 0])) ;; {x}.take(torch.tensor([[1, 0]]))
take_along_dim: torch.take_along_dim({x}, {gather_index}, {d}) ;; torch.take_along_dim({x}, torch.tensor([0, 1]))
scatter: torch.scatter({x}, {d}, {arange_index}, {y}) ;; {x}.scatter({d}, {arange_index}, 0.5) ;; torch.scatter({x}, {d}, {arange_index}.flip({d}), {x}.sin())
scatter_add: torch.scatter_add({x}, {d}, {gather_index}, {y}) ;; {x}.scatter_add({d}, {gather_index}, {x}.cos())
scatter_reduce: torch.scatter_reduce({x}, {d}, {gather_index}, {y}, "sum") ;; {x}.scatter_reduce({d}, {gather_index}, {y}, "amax") ;; {x}.scatter_reduce({d}, {gather_index}, {y}, "mean", include_self=False) ;; {x}.scatter_reduce({d}, {gather_index}, {y}, "prod")
index_add: torch.index_add({x}, {d}, {ints}, {x}.index_select({d}, {ints})) ;; {x}.index_add({d}, torch.arange({size_d}), {y}, alpha=2)
index_copy: torch.index_copy({x}, {d}, torch.arange({size_d}).flip(0), {y}) ;; {x}.index_copy({d}, torch.tensor([0]), {x}.narrow({d}, 0, 1) * 2)
index_fill: torch.index_fill({x}, {d}, {ints}, 0.5) ;; {x}.index_fill({d}, {ints}, {scalar})
index_put: torch.index_put({x}, ({ints0},), {scalar}) ;; {x}.index_put(({ints0},), {x}[{ints0}] * 2, accumulate=True)
index_reduce: torch.index_reduce({x}, {d}, {ints}, {x}.index_select({d}, {ints}).sin(), "amax")
masked_scatter: {x}.masked_scatter({mask}, {y})
put: {x}.put(torch.tensor([0, 1]), torch.stack([{x}.sum(), {x}.mean()])) ;; {x}.put(torch.tensor([0]), {x}.sum().reshape(1), accumulate=True)
embedding: F.embedding({ints0}, {matrix}) ;; {matrix}[{ints0}] * 2 ;; F.embedding(torch.tensor([[0, 1], [1, 1]]), {matrix}) ;; F.embedding({ints0}, {matrix}, padding_idx=0)
embedding_bag: F.embedding_bag(torch.tensor([[0, 1], [1, 1]]), {matrix}, mode="sum") ;; F.embedding_bag(torch.tensor([[0, 1], [1, 1]]), {matrix})
tensor_index_of_value: {x}[{x}.flatten().argmax() % {s0}] ;; {x}[({x} > 0).flatten().long().sum() % {s0}]
"""
