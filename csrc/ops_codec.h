// The codec and quantization ops on CPU tensors, into tensors that are given: checks, then cpu/codec/codec.h.
#pragma once

#include "ops_tensors.h"

namespace lowbit {

void encode(const Tensor& x, const Tensor& out, const FormatParams& format, bool saturate, const Random& random);
void decode(const Tensor& codes, const Tensor& out, const FormatParams& format);
void quantize(const Tensor& x, const MaybeTensor& global_scale, const Tensor& codes, const Tensor& scale,
              const MaybeTensor& zero_point, const SchemeParams& scheme, const Random& random);
void quantize_static(const Tensor& x, const Tensor& scale, const MaybeTensor& zero_point,
                     const MaybeTensor& global_scale, const Tensor& codes, const SchemeParams& scheme,
                     const Random& random);
void dequantize(const Tensor& codes, const Tensor& scale, const MaybeTensor& zero_point,
                const MaybeTensor& global_scale, const Tensor& out, const SchemeParams& scheme);
void fake_quantize(const Tensor& x, const MaybeTensor& scale, const MaybeTensor& zero_point,
                   const MaybeTensor& global_scale, const Tensor& out, const SchemeParams& scheme,
                   const Random& random);

}  // namespace lowbit
