// Causal attention of a bfloat16 step over the paged cache on AMX tiles. kernels/api.py is the specification, and
// kernels/native.py compiles this for the processor it runs on.
//
// A sequence and a key-value head are one task: its columns are the queries of all heads that read this one. Scores lie
// as [keys, columns], so that keys are tiles of the cache as it is, and a softmax goes over lanes of 16 columns at once;
// keys come in chunks, whose results are rescaled as in FlashAttention (arXiv:2205.14135).

#include <cstdint>

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cmath>
#include <vector>

namespace {

using bf16 = uint16_t;

constexpr int64_t LANES = 16, CHUNK = 512, MAX_SIZE = 128;
constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Tiles: 0 and 1 sum up, 2 and 3 are loaded for one product, 4 to 7 hold the queries.

inline __m512 exponential(__m512 x) {  // of x <= 0: 2^n * e^r with |r| <= ln(2) / 2, the latter by Taylor's polynomial
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.69314718f), x), y = _mm512_set1_ps(1.f / 120);
    for (float c : {1.f / 24, 1.f / 6, 1.f / 2, 1.f, 1.f}) y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(c));
    return _mm512_scalef_ps(y, n);
}

inline void transpose(__m512i (&r)[16]) {  // 16 rows of 16 numbers of 32 bits
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
            r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
        }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 16; j += 8) {
            t[j + i] = _mm512_shuffle_i32x4(r[j + i], r[j + i + 4], 0x88);
            t[j + i + 4] = _mm512_shuffle_i32x4(r[j + i], r[j + i + 4], 0xdd);
        }
    for (int i = 0; i < 8; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    }
}

inline __m512i pair(__m256i low, __m256i high) {  // 16 numbers of 16 bits each, side by side
    return _mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
}

inline __m256i narrow(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }

struct Sequence {
    const int64_t* blocks;
    int64_t num_queries, num_keys, first_row;
};

struct Cache {
    const bf16 *keys, *values;
    int64_t block_size, groups, size;

    // Where 16 keys begin, or the last ones there are.
    const bf16* tile(const bf16* side, const Sequence& sequence, int64_t key, int64_t group) const {
        key = key < sequence.num_keys ? key : (sequence.num_keys - 1) / LANES * LANES;
        return side + ((sequence.blocks[key / block_size] * block_size + key % block_size) * groups + group) * size;
    }
};

struct Scratch {
    std::vector<bf16> values;                   // [size, keys]
    alignas(64) float scores[CHUNK * LANES];    // [keys, columns]
    alignas(64) uint32_t shares[CHUNK / 2 * LANES];  // [pairs of keys, columns]
    alignas(64) uint32_t queries[MAX_SIZE / 2 * LANES];  // [pairs of dimensions, columns]
    alignas(64) float sums[MAX_SIZE * LANES];   // [size, columns]
};

// The values of a group as [size, keys], keys rounded up to 32 and zero behind the last.
void turn_values(const Cache& cache, const Sequence& sequence, int64_t group, int64_t stride, bf16* out) {
    const int64_t step = cache.groups * cache.size;
    for (int64_t first = 0; first < stride; first += 32) {
        const bf16* tiles[2];
        for (int64_t i = 0; i < 2; i++) tiles[i] = cache.tile(cache.values, sequence, first + i * LANES, group);
        for (int64_t d = 0; d < cache.size; d += LANES) {
            __m512i rows[16];
            for (int64_t j = 0; j < 16; j++) {
                const bf16* low = tiles[j / 8] + j % 8 * 2 * step + d;
                const int64_t left = sequence.num_keys - first - 2 * j;
                const __m256i zero = _mm256_setzero_si256();
                rows[j] = pair(left > 0 ? _mm256_loadu_si256((const __m256i*)low) : zero,
                               left > 1 ? _mm256_loadu_si256((const __m256i*)(low + step)) : zero);
            }
            transpose(rows);
            for (int64_t j = 0; j < 16; j++) _mm512_storeu_si512(out + (d + j) * stride + first, rows[j]);
        }
    }
}

// One sequence and group. q and out [rows, heads, size] are contiguous.
void attend(const bf16* q, const Cache& cache, const Sequence& sequence, int64_t group, int64_t heads, int64_t window,
            float scale, bf16* out, Scratch& scratch) {
    const int64_t size = cache.size, per_group = heads / cache.groups, num_keys = sequence.num_keys;
    const int64_t num_columns = sequence.num_queries * per_group, before = num_keys - sequence.num_queries;
    const int64_t stride = (num_keys + 31) / 32 * 32;
    scratch.values.resize(size * stride);
    turn_values(cache, sequence, group, stride, scratch.values.data());
    for (int64_t first = 0; first < num_columns; first += LANES) {
        const int64_t in_use = num_columns - first < LANES ? num_columns - first : LANES;
        alignas(64) int32_t positions[LANES];
        auto row_of = [&](int64_t column) {
            return (sequence.first_row + column / per_group) * heads + group * per_group + column % per_group;
        };
        for (int64_t lane = 0; lane < LANES; lane++) positions[lane] = before + (first + (lane < in_use ? lane : 0)) / per_group;
        const __m512i last = _mm512_load_si512(positions);
        const __m512i hidden = _mm512_sub_epi32(last, _mm512_set1_epi32(window));  // and all before
        for (int64_t d = 0; d < size; d += 32) {
            __m512i rows[16];
            for (int64_t lane = 0; lane < LANES; lane++)
                rows[lane] = lane < in_use ? _mm512_loadu_si512(q + row_of(first + lane) * size + d) : _mm512_setzero_si512();
            transpose(rows);
            for (int64_t j = 0; j < 16; j++) _mm512_store_si512(scratch.queries + (d / 2 + j) * LANES, rows[j]);
        }
        for (int64_t d = 0; d < size * LANES; d += LANES) _mm512_store_ps(scratch.sums + d, _mm512_setzero_ps());
        __m512 most = _mm512_set1_ps(-INFINITY), total = _mm512_setzero_ps();
        const int64_t end = before + (first + in_use - 1) / per_group + 1;
        int64_t begin = positions[0] - window + 1;
        begin = begin < 0 ? 0 : begin / CHUNK * CHUNK;
        for (int64_t chunk = begin; chunk < end; chunk += CHUNK) {
            const int64_t count = end - chunk < CHUNK ? (end - chunk + 31) / 32 * 32 : CHUNK;
            _tile_loadd(4, scratch.queries, 64);
            if (size > 32) _tile_loadd(5, scratch.queries + 16 * LANES, 64);
            if (size > 64) _tile_loadd(6, scratch.queries + 32 * LANES, 64);
            if (size > 96) _tile_loadd(7, scratch.queries + 48 * LANES, 64);
            for (int64_t k = 0; k < count; k += LANES) {
                const bf16* keys = cache.tile(cache.keys, sequence, chunk + k, group);  // what is not there is hidden below
                const int64_t bytes = cache.groups * size * sizeof(bf16);
                _tile_zero(0);
                _tile_loadd(2, keys, bytes);
                _tile_dpbf16ps(0, 2, 4);
                if (size > 32) { _tile_loadd(3, keys + 32, bytes); _tile_dpbf16ps(0, 3, 5); }
                if (size > 64) { _tile_loadd(2, keys + 64, bytes); _tile_dpbf16ps(0, 2, 6); }
                if (size > 96) { _tile_loadd(3, keys + 96, bytes); _tile_dpbf16ps(0, 3, 7); }
                _tile_stored(0, scratch.scores + k * LANES, 64);
            }
            __m512 more = most;
            for (int64_t k = 0; k < count; k++) {
                const __m512i key = _mm512_set1_epi32(chunk + k);
                const __mmask16 sees = _mm512_cmple_epi32_mask(key, last) & _mm512_cmpgt_epi32_mask(key, hidden);
                __m512 score = _mm512_mul_ps(_mm512_load_ps(scratch.scores + k * LANES), _mm512_set1_ps(scale));
                score = _mm512_mask_blend_ps(sees, _mm512_set1_ps(-INFINITY), score);
                _mm512_store_ps(scratch.scores + k * LANES, score);
                more = _mm512_max_ps(more, score);
            }
            const __mmask16 saw = _mm512_cmp_ps_mask(more, _mm512_set1_ps(-INFINITY), _CMP_NEQ_UQ);
            const __m512 base = _mm512_maskz_mov_ps(saw, more), kept = exponential(_mm512_sub_ps(most, base));
            most = more;
            total = _mm512_mul_ps(total, kept);
            for (int64_t k = 0; k < count; k += 2) {
                const __m512 a = exponential(_mm512_sub_ps(_mm512_load_ps(scratch.scores + k * LANES), base));
                const __m512 b = exponential(_mm512_sub_ps(_mm512_load_ps(scratch.scores + (k + 1) * LANES), base));
                total = _mm512_add_ps(total, _mm512_add_ps(a, b));
                _mm512_store_si512(scratch.shares + k / 2 * LANES, pair(narrow(a), narrow(b)));
            }
            for (int64_t d = 0; d < size * LANES; d += LANES)
                _mm512_store_ps(scratch.sums + d, _mm512_mul_ps(_mm512_load_ps(scratch.sums + d), kept));
            for (int64_t d = 0; d < size; d += LANES) {
                const bf16* values = scratch.values.data() + d * stride + chunk;
                _tile_loadd(0, scratch.sums + d * LANES, 64);
                for (int64_t k = 0; k < count; k += 32) {
                    _tile_loadd(2, values + k, stride * sizeof(bf16));
                    _tile_loadd(3, scratch.shares + k / 2 * LANES, 64);
                    _tile_dpbf16ps(0, 2, 3);
                }
                _tile_stored(0, scratch.sums + d * LANES, 64);
            }
        }
        const __m512 inverse = _mm512_div_ps(_mm512_set1_ps(1), total);
        for (int64_t d = 0; d < size; d += 32) {
            __m512i rows[16];
            for (int64_t j = 0; j < 16; j++) {
                const float* sums = scratch.sums + (d + 2 * j) * LANES;
                rows[j] = pair(narrow(_mm512_mul_ps(_mm512_load_ps(sums), inverse)),
                               narrow(_mm512_mul_ps(_mm512_load_ps(sums + LANES), inverse)));
            }
            transpose(rows);
            for (int64_t lane = 0; lane < in_use; lane++)
                _mm512_storeu_si512(out + row_of(first + lane) * size + d, rows[lane]);
        }
    }
}

}  // namespace

extern "C" {

// Whether this process may use tiles.
int allow_tiles() { return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0; }

// block_table [sequences, blocks]; keys and values [slots, groups, size], 16 slots or a multiple of it in a block; a
// window is in keys.
void attention(const bf16* q, const bf16* keys, const bf16* values, const int64_t* block_table, const int64_t* query_starts,
               const int64_t* seq_lens, int64_t sequences, int64_t blocks, int64_t block_size, int64_t heads, int64_t groups,
               int64_t size, int64_t window, float scale, bf16* out, int threads) {
    const Cache cache{keys, values, block_size, groups, size};
#pragma omp parallel num_threads(threads)
    {
        const TileConfig config;
        _tile_loadconfig(&config);
        std::vector<Scratch> scratch(1);
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < sequences * groups; task++) {
            const int64_t s = task / groups, first_row = query_starts[s];
            const Sequence sequence{block_table + s * blocks, query_starts[s + 1] - first_row, seq_lens[s], first_row};
            attend(q, cache, sequence, task % groups, heads, window, scale, out, scratch[0]);
        }
        _tile_release();
    }
}

}

#else

extern "C" int allow_tiles() { return 0; }

#endif
