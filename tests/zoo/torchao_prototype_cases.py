"""Subclasses of torchao 0.18.0's prototypes, and of training in low precision, that run on CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .case import CONSTRUCTED, INPUT, PARAMETER, RETURNED, SEVERAL, case
from .torchao_cases import linear

SINCE = "0.18"


def with_weight(model: nn.Module, weight: torch.Tensor, requires_grad: bool = False) -> nn.Module:
    model.weight = nn.Parameter(weight, requires_grad=requires_grad)
    return model


@case("float8 training, weights of sharded modules", PARAMETER, CONSTRUCTED, backward=True, since=SINCE)
def _():
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=True)
    return convert_to_float8_training(nn.Sequential(nn.Linear(32, 32), nn.ReLU()), config=config), (torch.randn(16, 32),)


@case("float8 weights of sharded modules, views", INPUT, RETURNED, since=SINCE)
def _():
    from torchao.float8.float8_training_tensor import LinearMMConfig
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

    x = WeightWithDynamicFloat8CastTensor(torch.randn(4, 4), LinearMMConfig(), torch.float8_e4m3fn)
    return lambda x: (x.view(-1, 2)[1:], x + 1, x.split(2)), (x,)


@case("mixture of experts training, float8", PARAMETER, backward=True, since=SINCE, since_torch="2.15")
def _():
    from torchao.prototype.moe_training.config import Float8TrainingOpConfig
    from torchao.prototype.moe_training.tensor import Float8TrainingWeightWrapperTensor

    model = nn.Linear(32, 32, bias=False).bfloat16()
    weight = Float8TrainingWeightWrapperTensor(model.weight.detach(), Float8TrainingOpConfig())
    return with_weight(model, weight, requires_grad=True), (torch.randn(16, 32).bfloat16(),)


def emulated():
    from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe

    return MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL)


@case("mixture of experts training, MXFP8", PARAMETER, backward=True, since=SINCE)
def _():
    from torchao.prototype.moe_training.tensor import MXFP8TrainingWeightWrapperTensor

    model = nn.Linear(64, 64, bias=False).bfloat16()
    weight = MXFP8TrainingWeightWrapperTensor(model.weight.detach(), emulated())
    return with_weight(model, weight, requires_grad=True), (torch.randn(32, 64).bfloat16().requires_grad_(),)


@case("mixture of experts training, grouped products in MXFP8", INPUT, backward=True, since=SINCE)
def _():
    from torchao.prototype.moe_training.tensor import MXFP8TrainingWeightWrapperTensor

    weight = MXFP8TrainingWeightWrapperTensor(torch.randn(2, 64, 64).bfloat16(), emulated()).requires_grad_()
    ends = torch.tensor([32, 64], dtype=torch.int32)
    x = torch.randn(64, 64).bfloat16().requires_grad_()
    return lambda x, w, ends: torch._grouped_mm(x, w.transpose(-2, -1), offs=ends), (x, weight, ends)


@case("GPTQ observer", INPUT, since=SINCE)
def _():
    from torchao.prototype.gptq.observer import GPTQObserverTensor

    return lambda x, w: F.linear(x, w), (torch.randn(5, 4), GPTQObserverTensor.from_hp(torch.randn(3, 4)))


@case("integers of 4 bits, packed", INPUT, RETURNED, since=SINCE)
def _():
    from torchao.prototype.dtypes.uintx.uintx_utils import to_uintx

    x = to_uintx(torch.randint(0, 8, (4, 32), dtype=torch.uint8), torch.uint4, -1)
    return lambda x: (x.get_plain() * 2, x.detach(), x - 1), (x,)


@case("codebook of Core ML", PARAMETER, since=SINCE)
def _():
    from torchao.prototype.quantization.codebook_coreml.codebook_quantized_tensor import CodebookQuantizedTensor

    codes, codebook = torch.randint(0, 16, (64, 64), dtype=torch.uint8), torch.randn(1, 2, 16, 1)
    weight = CodebookQuantizedTensor(codes, codebook, torch.uint4, [-1, 32], torch.Size([64, 64]), dtype=torch.float32)
    return with_weight(nn.Linear(64, 64), weight), (torch.randn(4, 64),)


@case("int4 weight-only, packed for a CPU", PARAMETER, since=SINCE)
def _():
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
    from torchao.quantization import quantize_

    model = linear(128, 64, torch.bfloat16)
    quantize_(model, PrototypeInt4WeightOnlyConfig(group_size=64))
    return model, (torch.randn(4, 128).bfloat16(),)


@case("float8 weight, static scales", INPUT, PARAMETER, RETURNED, SEVERAL, since=SINCE)
def _():
    from torchao.float8.inference import Float8MMConfig
    from torchao.prototype.quantization.float8_static_quant.prototype_float8_tensor import PrototypeFloat8Tensor

    weight = PrototypeFloat8Tensor.from_hp(torch.randn(64, 64).bfloat16(), mm_config=Float8MMConfig())
    model = with_weight(nn.Linear(64, 64).bfloat16(), weight)
    return lambda w, x: (w.dequantize(), w.t(), w[:32], model(x)), (weight, torch.randn(4, 64).bfloat16())


@case("block-sparse matrix taken apart", INPUT, RETURNED, since=SINCE)
def _():
    from torchao.sparsity.blocksparse import BlockSparseTensor

    dense = torch.block_diag(torch.randn(32, 32), torch.ones(32, 32))
    return lambda x: (x.values() * 2, x.crow_indices(), x.col_indices(), x.detach()), (BlockSparseTensor.from_dense(dense, 32),)
