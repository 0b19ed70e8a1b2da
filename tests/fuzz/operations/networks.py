"""What neural networks are made of: losses, normalizations, attention, convolutions, pooling, modules."""

LOSSES = """
mse_loss: F.mse_loss({x}, {y}) ;; F.mse_loss({x}, {w}, reduction="sum") ;; F.mse_loss({x}, {y}, reduction="none")
l1_loss: F.l1_loss({x}, {y}) ;; F.l1_loss({x}, {w}, reduction="none")
smooth_l1_loss: F.smooth_l1_loss({x}, {y}) ;; F.smooth_l1_loss({x}, {w}, beta=0.4)
huber_loss: F.huber_loss({x}, {w}) ;; F.huber_loss({x}, {y}, reduction="none", delta=0.5)
binary_cross_entropy: F.binary_cross_entropy({prob}, torch.sigmoid({w})) ;; F.binary_cross_entropy({prob}, {mask}.to({x}.dtype), reduction="sum")
bce_with_logits: F.binary_cross_entropy_with_logits({x}, torch.sigmoid({w})) ;; F.binary_cross_entropy_with_logits({x}, {mask}.to({x}.dtype), pos_weight=torch.sigmoid({w}))
kl_div: F.kl_div({x}.log_softmax(-1), torch.softmax({w}, -1), reduction="batchmean") ;; F.kl_div({x}.log_softmax(-1), {w}.log_softmax(-1), log_target=True)
nll_loss: F.nll_loss({rows}.log_softmax(-1), {classes}) ;; F.nll_loss({rows}.log_softmax(-1), {classes}, reduction="none") ;; F.nll_loss({rows}.log_softmax(-1), {classes}, ignore_index=0, reduction="sum")
cross_entropy: F.cross_entropy({rows}, {classes}) ;; F.cross_entropy({rows}, {rows}.detach().softmax(-1)) ;; F.cross_entropy({rows}, {classes}, label_smoothing=0.1) ;; F.cross_entropy({rows}, {classes}, weight={v}.abs() + 0.1) ;; F.cross_entropy({rows}, {classes}, reduction="none") ;; F.cross_entropy({rows}, {classes}, ignore_index=0, reduction="sum")
poisson_nll_loss: F.poisson_nll_loss({x}, {w}.abs()) ;; F.poisson_nll_loss({pos}, {w}.abs(), log_input=False)
gaussian_nll_loss: F.gaussian_nll_loss({x}, {w}, {pos}) ;; F.gaussian_nll_loss({x}, {y}, {pos}, full=True, reduction="sum")
hinge_embedding_loss: F.hinge_embedding_loss({x}, {mask} * 2 - 1)
margin_ranking_loss: F.margin_ranking_loss({x}, {y}, {mask} * 2 - 1, margin=0.3)
soft_margin_loss: F.soft_margin_loss({x}, ({mask} * 2 - 1).to({x}.dtype)) ;; F.multilabel_soft_margin_loss({rows}, {rows}.detach().sigmoid())
multi_margin_loss: F.multi_margin_loss({rows}, {classes})
cosine_similarity: F.cosine_similarity({x}, {y}, dim={d}) ;; F.cosine_similarity({x}, {w}, dim=-1) ;; F.cosine_embedding_loss({rows}, {rows}.sin() + 1, torch.ones({rows}.shape[0], dtype=torch.long))
triplet_margin_loss: F.triplet_margin_loss({rows}, {rows}.sin(), {rows} + 1) ;; F.triplet_margin_loss({x}, {y}, {w}, swap=True)
pairwise_distance: F.pairwise_distance({x}, {y}) ;; F.pairwise_distance({x}, {w}, p=1.0, keepdim=True)
"""

TABLE = """
softmax: torch.softmax({x}, {d}) ;; F.softmax({x}, dim=-1) ;; {x}.softmax({d}) ;; F.softmin({x}, {d}) ;; torch.special.softmax({x}, {d})
log_softmax: torch.log_softmax({x}, {d}) ;; F.log_softmax({x}, dim=-1) ;; {x}.log_softmax({d}) ;; torch.special.log_softmax({x}, -1)
layer_norm: F.layer_norm({x}, ({last},)) ;; F.layer_norm({x}, ({last},), {v}, {v}.sin()) ;; F.layer_norm({x}, {shape_text}) ;; F.layer_norm({x}, ({last},), {v}, None, 1e-2)
rms_norm: F.rms_norm({x}, ({last},)) ;; F.rms_norm({x}, ({last},), {v}, 1e-3) ;; {x} * torch.rsqrt({x}.square().mean(-1, keepdim=True) + 1e-5) * {v}
group_norm: F.group_norm({rows}[:, None].repeat(1, 4, 1) * 1.5, 2) ;; F.group_norm({image}.repeat(1, 2, 1, 1), 2)
instance_norm: F.instance_norm({image}) ;; F.instance_norm({rows}[None])
batch_norm: F.batch_norm({rows}, None, None, training=True) ;; F.batch_norm({rows}, {v}.detach(), {v}.detach().abs() + 0.5, training=False) ;; F.batch_norm({rows}, None, None, {v}, {v}.cos(), True)
local_response_norm: F.local_response_norm({rows}[None], 2)
normalize: F.normalize({x}, dim={d}) ;; F.normalize({x}) ;; F.normalize({x}, p=1.0, dim=-1)
glu: F.glu(torch.cat([{x}, {x}.cos()], -1)) ;; F.glu({x}.repeat_interleave(2, 0), 0)
attention: F.scaled_dot_product_attention({rows}[None], {rows}[None].sin(), {rows}[None]) ;; F.scaled_dot_product_attention({rows}[None, None], {rows}[None, None], {rows}[None, None].cos(), is_causal=True) ;; F.scaled_dot_product_attention({rows}[None], {rows}[None], {rows}[None], scale=0.3) ;; F.scaled_dot_product_attention({rows}[None], {rows}[None], {rows}[None], attn_mask=torch.ones({rows}.shape[0], {rows}.shape[0], dtype=torch.bool).tril()) ;; torch.softmax({rows} @ {rows}.T / {last} ** 0.5, -1) @ {rows} ;; torch.softmax(({rows} @ {rows}.T).masked_fill(torch.ones({rows}.shape[0], {rows}.shape[0], dtype=torch.bool).triu(1), float("-inf")), -1) @ {rows}
multihead_attention: F.multi_head_attention_forward({rows}, {rows}, {rows}, {last}, 1, torch.cat([{v} * {v}[:, None], {v} + {v}[:, None], {v} - 2 * {v}[:, None]]), torch.cat([{v}, {v}, {v}]), None, None, False, 0.0, {v} * {v}[:, None], {v})[0]
rotary: torch.cat([-{x}[..., {last} // 2 :], {x}[..., : {last} // 2]], -1) * {x}.sin() + {x} * {x}.cos()
linear_module: {linear}({x}) ;; functional_call({linear}, dict(weight={m}.T, bias={bias}), ({x},)) ;; functional_call({linear}, dict(weight={m}.T), {x})
mlp_module: {mlp}({x}) ;; {t} = {mlp}({x}) // {t} = {t} * 2
layer_norm_module: {layer_norm}({x}) ;; functional_call({layer_norm}, dict(weight={v}), ({x},))
conv_module: {conv}({image}) ;; functional_call({conv}, dict(weight={image}[:1, :1, :2, :2].cos()), ({image},))
batch_norm_module: {batch_norm}({rows})
attention_module: {attention}({rows}, {rows}, {rows})[0] ;; {attention}({rows}, {rows}.sin(), {rows}, need_weights=False)[0]
own_module: {module}({x}) ;; functional_call({module}, dict(scale={scalar}), ({x},))
"""

CONVOLUTIONS = """
conv1d: F.conv1d({signal}, {signal}[:1, :, :2].sin()) ;; F.conv1d({signal}, {signal}[:1, :, :2], padding=1, stride=2) ;; F.conv1d({signal}, {signal}[:1, :, :2].cos(), {scalar}.reshape(1), dilation=2, padding=2) ;; F.conv1d({signal}, {signal}[:1, :, :3], padding="same")
conv2d: F.conv2d({image}, {image}[:, :, :2, :2].sin()) ;; F.conv2d({image}, {image}[:, :, :2, :1], padding=1) ;; F.conv2d({image}.repeat(1, 2, 1, 1), {image}[:, :, :1, :2].repeat(2, 1, 1, 1), groups=2) ;; F.conv2d({image}, {image}[:, :, :1, :1], {scalar}.reshape(1), stride=2)
conv3d: F.conv3d({image}[None], {image}[None, :, :, :1, :2].cos())
conv_transpose1d: F.conv_transpose1d({signal}, {signal}.mT[:, :1, :1].repeat({signal}.shape[1], 1, 2)[: {signal}.shape[1]].sin()) ;; F.conv_transpose1d({signal}[:, :1], {signal}[:1, :1, :2], stride=2, output_padding=1)
conv_transpose2d: F.conv_transpose2d({image}, {image}[:, :, :2, :2].sin()) ;; F.conv_transpose2d({image}, {image}[:, :, :2, :1], stride=2, padding=1)
avg_pool: F.avg_pool1d({signal}, 2) ;; F.avg_pool2d({image}, 2, stride=1) ;; F.avg_pool2d({image}, (2, 1), padding=(1, 0), count_include_pad=False) ;; F.avg_pool1d({signal}, 2, 1, ceil_mode=True) ;; F.avg_pool3d({image}[None], 1)
max_pool: F.max_pool1d({signal}, 2) ;; F.max_pool2d({image}, 2, stride=1) ;; F.max_pool2d({image}, (1, 2), padding=(0, 1)) ;; F.max_pool2d({image}, 2, return_indices=True)[0] ;; F.max_pool3d({image}[None], (1, 1, 2))
adaptive_pool: F.adaptive_avg_pool1d({signal}, 2) ;; F.adaptive_avg_pool2d({image}, (2, 1)) ;; F.adaptive_max_pool1d({signal}, 2) ;; F.adaptive_max_pool2d({image}, 1) ;; F.adaptive_avg_pool2d({image}, 1)
lp_pool: F.lp_pool1d({signal} * {signal} + 0.1, 2, 2) ;; F.lp_pool2d({image} * {image} + 0.1, 3, 2)
interpolate: F.interpolate({signal}, scale_factor=2) ;; F.interpolate({image}, scale_factor=2, mode="bilinear") ;; F.interpolate({signal}, size=5, mode="linear", align_corners=True) ;; F.interpolate({image}, size=(3, 3), mode="bicubic") ;; F.interpolate({image}, size=(2, 5), mode="nearest") ;; F.interpolate({image}, size=(2, 3), mode="area") ;; F.interpolate({image}, scale_factor=2.0, mode="nearest-exact")
unfold_fold: F.unfold({image}, 2) ;; F.unfold({image}, (1, 2), padding=1) ;; F.fold(F.unfold({image}, 2), {image}.shape[-2:], 2)
grid_sample: F.grid_sample({image}, torch.tanh({image}[:, 0, :, :, None] * torch.tensor([0.4, 0.7], dtype={x}.dtype)), align_corners=False) ;; F.grid_sample({image}, F.affine_grid({scalar} * 0.3 + torch.tensor([[[1.0, 0.2, 0.1], [0.1, 0.8, 0.0]]], dtype={x}.dtype), (1, 1, 2, 2), align_corners=False), align_corners=True)
max_unpool: F.max_unpool1d(*F.max_pool1d({signal}, 2, return_indices=True), 2)
"""
