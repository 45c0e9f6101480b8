// What a bfloat16 step on a CPU does beside matrix products, each in one pass over memory. Sums are in fp32, results are
// rounded once. Compiled by kernels/native.py for the processor it runs on; kernels/api.py is the specification.

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

using bf16 = uint16_t;

inline float widen(bf16 x) {
    uint32_t bits = uint32_t(x) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline bf16 narrow(float x) {  // to nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bf16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// e^x for x <= 88: 2^n * e^r with |r| <= ln(2) / 2, the latter by its Taylor polynomial of degree 6.
inline float exponential(float x) {
    x = x < -87.f ? -87.f : x;
    float n = std::rint(x * 1.44269504f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float y = 1.f + r * (1.f + r * (1.f / 2 + r * (1.f / 6 + r * (1.f / 24 + r * (1.f / 120 + r * (1.f / 720))))));
    int32_t bits = (int32_t(n) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return y * power;
}

inline float inverse_rms(const bf16* x, int64_t size, float eps) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; i++) sum += widen(x[i]) * widen(x[i]);
    return 1 / std::sqrt(sum / size + eps);
}

// Rotate one head of `size`, after its norm if there is a `weight`.
inline void rotate(const bf16* x, const bf16* weight, float eps, const bf16* cos, const bf16* sin, int64_t size, bf16* out) {
    int64_t half = size / 2;
    float scale = weight ? inverse_rms(x, size, eps) : 1;
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        float a = widen(x[i]) * scale, b = widen(x[half + i]) * scale;
        if (weight) a *= widen(weight[i]), b *= widen(weight[half + i]);
        out[i] = narrow(a * widen(cos[i]) - b * widen(sin[i]));
        out[half + i] = narrow(b * widen(cos[half + i]) + a * widen(sin[half + i]));
    }
}

}  // namespace

extern "C" {

// x [rows, size] -> out, contiguous; with `residual`, which takes the sum, of x + residual.
void rms_norm(const bf16* x, bf16* residual, const bf16* weight, float eps, int64_t rows, int64_t size, bf16* out, int threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        const bf16* from = x + row * size;
        if (residual) {
            bf16* sum = residual + row * size;
#pragma omp simd
            for (int64_t i = 0; i < size; i++) sum[i] = narrow(widen(from[i]) + widen(sum[i]));
            from = sum;
        }
        float scale = inverse_rms(from, size, eps);
        bf16* to = out + row * size;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) to[i] = narrow(widen(from[i]) * scale * widen(weight[i]));
    }
}

// gate_up [rows, 2 * size] -> out [rows, size], contiguous.
void silu_mul(const bf16* gate_up, int64_t rows, int64_t size, bf16* out, int threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        const bf16 *gate = gate_up + row * 2 * size, *up = gate + size;
        bf16* to = out + row * size;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) {
            float g = widen(gate[i]);
            to[i] = narrow(g / (1 + exponential(-g < 88.f ? -g : 88.f)) * widen(up[i]));
        }
    }
}

// q [rows, heads, size], k and v [rows, groups, size] with `strides` between their rows; cos and sin [rows, size].
// -> rotated q, contiguous; rotated k and v at `slots` of keys and values [slots, groups, size].
void rotary_write_kv(const bf16* q, const bf16* k, const bf16* v, const int64_t* strides, const bf16* cos, const bf16* sin,
                     const bf16* q_norm, const bf16* k_norm, float eps, const int64_t* slots, int64_t rows, int64_t heads,
                     int64_t groups, int64_t size, bf16* out, bf16* keys, bf16* values, int threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        const bf16 *c = cos + row * size, *s = sin + row * size;
        for (int64_t h = 0; h < heads; h++)
            rotate(q + row * strides[0] + h * size, q_norm, eps, c, s, size, out + (row * heads + h) * size);
        int64_t slot = slots[row] * groups * size;
        for (int64_t g = 0; g < groups; g++)
            rotate(k + row * strides[1] + g * size, k_norm, eps, c, s, size, keys + slot + g * size);
        std::memcpy(values + slot, v + row * strides[2], groups * size * sizeof(bf16));
    }
}

}
