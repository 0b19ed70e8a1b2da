"""Subclasses of torchao 0.18.0 that run on CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torchao.quantization import quantize_

from .case import CONSTRUCTED, INPUT, PARAMETER, RETURNED, SEVERAL, case


def linear(in_features: int = 64, out_features: int = 64, dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(in_features, 64), nn.ReLU(), nn.Linear(64, out_features)).to(dtype)


def quantized(config, dtype: torch.dtype = torch.float32, batch: int = 4, requires_grad: bool = False):
    """Two layers quantised in place, and an input."""
    model = linear(dtype=dtype)
    quantize_(model, config)
    return model, (torch.randn(batch, 64, dtype=dtype, requires_grad=requires_grad),)


# -- training -----------------------------------------------------------------------------------------------------------


def float8(**options):
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = convert_to_float8_training(linear(), config=Float8LinearConfig(emulate=True, **options))
    return model, (torch.randn(16, 64, requires_grad=True),)


@case("float8 training, tensorwise", CONSTRUCTED, SEVERAL, backward=True)
def _():
    return float8()


@case("float8 training, scales rounded to powers of 2", CONSTRUCTED, SEVERAL, backward=True)
def _():
    return float8(round_scales_to_power_of_2=True)


@case("float8 training, rowwise", CONSTRUCTED, SEVERAL, backward=True)
def _():
    import dataclasses

    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.config import Float8LinearRecipeName

    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(Float8LinearRecipeName.ROWWISE), emulate=True)
    return convert_to_float8_training(linear(), config=config), (torch.randn(16, 64, requires_grad=True),)


@case("Float8TrainingTensor constructed", CONSTRUCTED, RETURNED)
def _():
    from torchao.float8.float8_training_tensor import hp_tensor_and_scale_to_float8

    def f(x, scale):
        return hp_tensor_and_scale_to_float8(x, scale, torch.float8_e4m3fn)

    return f, (torch.randn(16, 16), torch.tensor(2.0))


@case("Float8TrainingTensor, to_original_precision", INPUT)
def _():
    from torchao.float8.float8_training_tensor import hp_tensor_and_scale_to_float8

    x = hp_tensor_and_scale_to_float8(torch.randn(16, 16), torch.tensor(2.0), torch.float8_e4m3fn)
    return lambda x: x.to_original_precision() * 2, (x,)


@case("int8 mixed-precision training", PARAMETER, SEVERAL, backward=True)
def _():
    from torchao.prototype.quantized_training import int8_mixed_precision_training

    return quantized(int8_mixed_precision_training(), batch=32, requires_grad=True)


@case("int8 quantised training", PARAMETER, SEVERAL, backward=True)
def _():
    from torchao.prototype.quantized_training import int8_weight_only_quantized_training

    return quantized(int8_weight_only_quantized_training(), requires_grad=True)


@case("BitNet training", PARAMETER, SEVERAL, backward=True)
def _():
    from torchao.prototype.quantized_training import bitnet_training

    return quantized(bitnet_training(), batch=32, requires_grad=True)


def frozen(config):
    """The same with parameters that do not require grad; the input does."""
    model, args = quantized(config, batch=32, requires_grad=True)
    return model.requires_grad_(False), args


@case("int8 mixed-precision training, frozen weights", PARAMETER, SEVERAL, backward=True)
def _():
    from torchao.prototype.quantized_training import int8_mixed_precision_training

    return frozen(int8_mixed_precision_training())


@case("BitNet training, frozen weights", PARAMETER, SEVERAL, backward=True)
def _():
    from torchao.prototype.quantized_training import bitnet_training

    return frozen(bitnet_training())


@case("BitNet packed to 2 bits", PARAMETER)
def _():
    from torchao.prototype.quantized_training.bitnet import (
        BitNetPacked2bitLinearWeight,
        _pack_i2_in_i8,
        get_bitnet_scale,
        quantize_bitnet_weight,
    )

    model = nn.Linear(64, 64)
    weight = model.weight.detach()
    scale = get_bitnet_scale(weight)
    packed = BitNetPacked2bitLinearWeight(_pack_i2_in_i8(quantize_bitnet_weight(weight, scale)), scale)
    model.weight = nn.Parameter(packed, requires_grad=False)
    return model, (torch.randn(32, 64),)


@case("fake-quantised int4 weights (QAT)", backward=True)
def _():
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    model = nn.Sequential(nn.Linear(64, 64))
    quantize_(model, QATConfig(weight_config=IntxFakeQuantizeConfig(torch.int4, group_size=32), step="prepare"))
    return model, (torch.randn(4, 64, requires_grad=True),)


# -- weights quantised for inference ------------------------------------------------------------------------------------


@case("float8 weight-only", PARAMETER, SEVERAL)
def _():
    from torchao.quantization import Float8WeightOnlyConfig

    return quantized(Float8WeightOnlyConfig(set_inductor_config=False), torch.bfloat16)


@case("int8 weight-only", PARAMETER, SEVERAL)
def _():
    from torchao.quantization import Int8WeightOnlyConfig

    return quantized(Int8WeightOnlyConfig(set_inductor_config=False))


@case("int8 weight-only, bfloat16", PARAMETER, SEVERAL)
def _():
    from torchao.quantization import Int8WeightOnlyConfig

    return quantized(Int8WeightOnlyConfig(set_inductor_config=False), torch.bfloat16)


@case("int8 weight-only, gradient of the input", PARAMETER, SEVERAL, backward=True)
def _():
    from torchao.quantization import Int8WeightOnlyConfig

    return quantized(Int8WeightOnlyConfig(set_inductor_config=False), requires_grad=True)


@case("int8 dynamic activations and weights", PARAMETER, CONSTRUCTED, SEVERAL)
def _():
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig

    return quantized(Int8DynamicActivationInt8WeightConfig(set_inductor_config=False), batch=32)


@case("int8 static activations", PARAMETER, CONSTRUCTED, SEVERAL)
def _():
    from torchao.quantization.granularity import PerTensor
    from torchao.quantization.quant_api import Int8StaticActivationInt8WeightConfig

    config = Int8StaticActivationInt8WeightConfig(
        act_quant_scale=torch.tensor([[0.02]]), granularity=PerTensor(), set_inductor_config=False
    )
    return quantized(config, batch=32)


@case("int8 weight, sliced and dequantised", INPUT, RETURNED)
def _():
    from torchao.quantization.granularity import PerRow
    from torchao.quantization.quantize_.workflows.int8.int8_tensor import Int8Tensor

    x = Int8Tensor.from_hp(torch.randn(32, 16), granularity=PerRow())
    return lambda x: (x[4:12], x.dequantize() + 1), (x,)


@case("intx weight-only, int4 in groups", PARAMETER, SEVERAL)
def _():
    from torchao.quantization import IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerGroup

    return quantized(IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)))


@case("int8 activations, intx weights", PARAMETER, SEVERAL)
def _():
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig
    from torchao.quantization.granularity import PerGroup

    return quantized(Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32)))


@case("GGUF", PARAMETER, SEVERAL)
def _():
    from torchao.prototype.quantization.gguf import GGUFWeightOnlyConfig

    model = nn.Linear(256, 8)
    quantize_(model, GGUFWeightOnlyConfig())
    return model, (torch.randn(4, 256),)


@case("codebook", PARAMETER)
def _():
    from torchao.prototype.quantization.codebook import codebook_weight_only

    model = nn.Linear(64, 64)
    quantize_(model, codebook_weight_only(dtype=torch.uint8))
    return model, (torch.randn(4, 64),)


@case("activations logged by a custom operator", PARAMETER, since="0.16")
def _():
    from torchao.prototype.quant_logger import add_activation_loggers

    model = linear()
    add_activation_loggers(model)
    return model, (torch.randn(4, 64),)


@case("NF4, linear_nf4", INPUT, backward=True, since="0.18")
def _():
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4, to_nf4

    return linear_nf4, (torch.randn(4, 64, requires_grad=True), to_nf4(torch.randn(64, 64), 64, 2))


@case("NF4, F.linear", PARAMETER, since="0.18")
def _():
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    model = nn.Linear(64, 64, bias=False)
    model.weight = nn.Parameter(to_nf4(model.weight.detach(), 64, 2), requires_grad=False)
    return model, (torch.randn(4, 64),)


@case("NF4, F.linear, gradient of the input", INPUT, backward=True, since="0.18")
def _():
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    return lambda x, w: F.linear(x.sin(), w), (torch.randn(4, 64, requires_grad=True), to_nf4(torch.randn(64, 64), 64, 2))


@case("NF4, to(float32)", INPUT, since="0.18")
def _():
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    return lambda w: w.to(torch.float32) * 2, (to_nf4(torch.randn(64, 64), 64, 2),)


def mx(elem_dtype, **options):
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    return MXTensor.to_mx(torch.randn(32, 64), elem_dtype, 32, **options)


@case("MXFP8, dequantize", INPUT)
def _():
    return lambda x: x.dequantize(torch.float32) + 1, (mx(torch.float8_e4m3fn),)


@case("MXFP8, F.linear", INPUT, CONSTRUCTED)
def _():
    from torchao.prototype.mx_formats.mx_tensor import QuantizeTensorToMXKwargs

    weight = mx(torch.float8_e4m3fn, act_quant_kwargs=QuantizeTensorToMXKwargs())
    return lambda a, w: F.linear(a, w), (torch.randn(4, 64), weight)


@case("MXFP8 constructed and multiplied", CONSTRUCTED, SEVERAL)
def _():
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    def f(a, b):
        return MXTensor.to_mx(a, torch.float8_e4m3fn, 32) @ MXTensor.to_mx(b, torch.float8_e4m3fn, 32).t()

    return f, (torch.randn(32, 64), torch.randn(32, 64))


@case("MXFP4, dequantize", INPUT)
def _():
    return lambda x: x.dequantize(torch.float32) + 1, (mx(torch.float4_e2m1fn_x2),)


@case("MXFP8 transposed and returned", INPUT, RETURNED)
def _():
    return lambda x: x.t(), (mx(torch.float8_e4m3fn),)


def nvfp4():
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    return NVFP4Tensor.to_nvfp4(torch.randn(32, 64))


@case("NVFP4, dequantize", INPUT)
def _():
    return lambda x: x.dequantize(torch.float32) + 1, (nvfp4(),)


@case("NVFP4, F.linear", INPUT)
def _():
    return lambda a, w: F.linear(a, w), (torch.randn(4, 64), nvfp4())


@case("NVFP4 constructed", CONSTRUCTED, RETURNED)
def _():
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    return lambda a: NVFP4Tensor.to_nvfp4(a), (torch.randn(32, 64),)


# -- optimizer states ---------------------------------------------------------------------------------------------------


def state(name: str):
    import torchao.optim

    cls = getattr(torchao.optim, name, None) or getattr(
        __import__("torchao.optim.subclass_" + name[10:].lower(), fromlist=[name]), name
    )
    x = cls.zeros((4, 256), **({} if name == "OptimStateFp8" else {"signed": True}), block_size=128)
    return x.copy_(torch.randn(4, 256))


@case("8-bit optimizer state, lerp", INPUT)
def _():
    return lambda m, g: m.lerp(g, 0.1), (state("OptimState8bit"), torch.randn(4, 256))


@case("8-bit optimizer state, updated in place", INPUT)
def _():
    def f(m, g):
        new = m.float().lerp(g, 0.1)
        m.copy_(new)
        return new, m.float()

    return f, (state("OptimState8bit"), torch.randn(4, 256))


@case("4-bit optimizer state, lerp", INPUT)
def _():
    return lambda m, g: m.lerp(g, 0.1), (state("OptimState4bit"), torch.randn(4, 256))


@case("float8 optimizer state, lerp", INPUT)
def _():
    return lambda m, g: m.lerp(g, 0.1), (state("OptimStateFp8"), torch.randn(4, 256))


@case("8-bit optimizer state, view and dequantize", INPUT, RETURNED)
def _():
    return lambda m: (m.view(4, 256), m.dequantize() * 2), (state("OptimState8bit"),)


@case("float8 weight, dequantised and sliced", INPUT, RETURNED)
def _():
    from torchao.quantization import Float8Tensor

    x = Float8Tensor.from_hp(torch.randn(32, 16))
    return lambda x: (x[4:12], x.dequantize() + 1), (x,)


@case("Float8Tensor constructed", CONSTRUCTED, RETURNED)
def _():
    from torchao.quantization import Float8Tensor

    return lambda a: Float8Tensor.from_hp(a), (torch.randn(32, 16),)


@case("Int8Tensor constructed and multiplied", CONSTRUCTED)
def _():
    from torchao.quantization.granularity import PerRow
    from torchao.quantization.quantize_.workflows.int8.int8_tensor import Int8Tensor

    return lambda x, w: F.linear(x, Int8Tensor.from_hp(w, granularity=PerRow())), (torch.randn(4, 16), torch.randn(32, 16))
