// The layers of an int8 network, for processors that have AVX-512 VNNI: the same integers as ONNX Runtime's.

#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "program.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
typedef uint8_t u8;

struct Part { // of a layer's output: rows [y0, y1) and vectors of channels [from, to)
    int y0, y1, from, to;
};

struct View { // (y, x) at base + y * row + x * column; of a ring, y modulo its rows
    u8 *base;
    int64_t row, column;
    int ring = 0;
    u8 *at(int y) const { return base + (ring ? (y + ring) % ring : y) * row; } // y of a ring from -ring on
};

INLINE int least(int a, int b) { return a < b ? a : b; }
INLINE __mmask64 first(int n) { return n >= 64 ? ~0ull : n > 0 ? (1ull << n) - 1 : 0; }

// Sums in steps of the output: rounded to nearest, ties to even, as ONNX Runtime rounds.
INLINE __m512i rescaled(__m512i sum, __m512 scale) {
    return _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_cvtepi32_ps(sum), scale));
}

// --- convolution as a matrix product --------------------------------------------------------------------------------

// Of the `segments` rows of a window, each `quads` times four bytes, with vectors of 16 channels.
struct Product {
    const u8 *in;
    int64_t column, segment; // bytes from one position, or row of the window, to the next
    int32_t segments, quads;
    const int8_t *weights; // of each four bytes: of each vector, four of each of its channels
    const int32_t *bias;
};

// Sums at M positions of N vectors. They stay in registers, which the compiler has to be told: it takes the intrinsic
// apart into a copy and an instruction, and keeps the copies in memory.
template <int M, int N> INLINE void multiply(const Product &p, __m512i (&sum)[M][N]) {
    UNROLL for (int j = 0; j < N; j++)
        UNROLL for (int i = 0; i < M; i++) sum[i][j] = _mm512_loadu_si512(p.bias + 16 * j);
    const int8_t *weights = p.weights;
    int segment = 0;
    do {
        const u8 *in = p.in + segment * p.segment;
        int quad = 0;
        do {
            __m512i w[N];
            UNROLL for (int j = 0; j < N; j++) w[j] = _mm512_loadu_si512(weights + 64 * j);
            UNROLL for (int i = 0; i < M; i++) {
                int32_t four;
                memcpy(&four, in + i * p.column, 4);
                const __m512i v = _mm512_set1_epi32(four);
                UNROLL for (int j = 0; j < N; j++)
                    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum[i][j]) : "v"(v), "v"(w[j]));
            }
            in += 4, weights += 64 * N;
        } while (++quad < p.quads);
    } while (++segment < p.segments);
}

struct Target { // where a product's bytes go, at positions `column` apart; of each, those in `keep`
    u8 *out;
    int64_t column;
    __mmask64 keep;
};

// Up to four vectors of 16 channels, in steps of the output, as bytes.
INLINE __m512i bytes_of(const __m512i (&q)[4], __m512i zero) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i low = _mm512_adds_epi16(_mm512_packs_epi32(q[0], q[1]), zero);
    const __m512i high = _mm512_adds_epi16(_mm512_packs_epi32(q[2], q[3]), zero);
    return _mm512_permutexvar_epi32(order, _mm512_packus_epi16(low, high));
}

template <int M, int N> static void tile(const Product &p, const float *scale, int zero, const Target &made) {
    __m512i sum[M][N];
    multiply<M, N>(p, sum);
    UNROLL for (int i = 0; i < M; i++) {
        __m512i q[4] = {};
        UNROLL for (int j = 0; j < N; j++) q[j] = rescaled(sum[i][j], _mm512_loadu_ps(scale + 16 * j));
        const __m512i bytes = bytes_of(q, _mm512_set1_epi16((int16_t)zero));
        _mm512_mask_storeu_epi8(made.out + i * made.column, made.keep, bytes);
    }
}

typedef void Tile(const Product &, const float *, int, const Target &);
enum { MOST_POSITIONS = 7, MORE_POSITIONS = 14 }; // the latter with up to two vectors: both fill the registers
#define TILES(M) {tile<M, 1>, tile<M, 2>, tile<M, 3>, tile<M, 4>}
static Tile *const TILE[][4] = {TILES(1), TILES(2), TILES(3), TILES(4), TILES(5), TILES(6), TILES(7)};
static Tile *const LONG_TILE[] = {tile<MORE_POSITIONS, 1>, tile<MORE_POSITIONS, 2>};

// The part's vectors, of `channels` channels in all, at `positions` positions.
static void convolve(const Layer &l, Product p, Target made, int channels, int positions, Part part) {
    const u8 *in = p.in;
    u8 *out = made.out;
    for (int v = part.from; v < part.to; v += l.vectors) {
        const int vectors = least(l.vectors, part.to - v), left = channels - 16 * v;
        p.weights = l.weights + (int64_t)v * 64 * p.quads * p.segments;
        p.bias = l.bias + 16 * v;
        made.keep = first(least(left, 16 * vectors));
        for (int i = 0; i < positions;) {
            const int rest = positions - i;
            const bool more = vectors <= 2 && rest >= MORE_POSITIONS;
            const int n = more ? MORE_POSITIONS : least(rest, MOST_POSITIONS);
            p.in = in + i * p.column;
            made.out = out + i * made.column + 16 * v;
            (more ? LONG_TILE[vectors - 1] : TILE[n - 1][vectors - 1])(p, l.scale + 16 * v, l.zero, made);
            i += n;
        }
    }
}

// --- depthwise convolution ------------------------------------------------------------------------------------------

// The same for 64, 32 and 16 channels at once.
#define FOR_WIDTH(I, M, SI)                                                                                            \
    INLINE void load(I &v, const void *at) { v = M##_loadu_##SI((const I *)at); }                                      \
    INLINE void store(u8 *at, I v, uint64_t keep) { M##_mask_storeu_epi8(at, keep, v); }                               \
    INLINE void accumulate(I &sum, I bytes, I weights) { sum = M##_dpbusd_epi32(sum, bytes, weights); }                \
    INLINE void rescale(I &sum, const float *scale) {                                                                  \
        sum = M##_cvtps_epi32(M##_mul_ps(M##_cvtepi32_ps(sum), M##_loadu_ps(scale)));                                  \
    }                                                                                                                  \
    /* Four bytes of each channel beside one another: within each 128 bits, channels 0-3, 4-7, and so on. */           \
    INLINE void interleave(I a, I b, I c, I d, I *out) {                                                               \
        I ab = M##_unpacklo_epi8(a, b), AB = M##_unpackhi_epi8(a, b);                                                  \
        I cd = M##_unpacklo_epi8(c, d), CD = M##_unpackhi_epi8(c, d);                                                  \
        out[0] = M##_unpacklo_epi16(ab, cd), out[1] = M##_unpackhi_epi16(ab, cd);                                      \
        out[2] = M##_unpacklo_epi16(AB, CD), out[3] = M##_unpackhi_epi16(AB, CD);                                      \
    }                                                                                                                  \
    /* And back, in one byte each. */                                                                                  \
    INLINE I together(const I *q, int zero) {                                                                          \
        const I offset = M##_set1_epi16((int16_t)zero);                                                                \
        I low = M##_adds_epi16(M##_packs_epi32(q[0], q[1]), offset);                                                   \
        I high = M##_adds_epi16(M##_packs_epi32(q[2], q[3]), offset);                                                  \
        return M##_packus_epi16(low, high);                                                                            \
    }
FOR_WIDTH(__m512i, _mm512, si512)
FOR_WIDTH(__m256i, _mm256, si256)
FOR_WIDTH(__m128i, _mm, si128)

enum { GROUP_BYTES = 64 }; // of weights: what the widest takes at once

// A value that several operations use is loaded once, in a register: the compiler would rather load it for each.
template <class I> INLINE I loaded(const void *at) {
    I v;
    load(v, at);
    __asm__("" : "+v"(v));
    return v;
}

// What is made of 16, 32 or 64 channels, from their first.
struct Channels {
    const int8_t *weights;
    const int32_t *bias;
    const float *scale;
    int zero;
    uint64_t keep;       // which bytes of a position's output
    const u8 *in[7];     // rows of inputs
    u8 *out[2];          // two rows of outputs; where both are the same, the first is kept
    int64_t column, out_column;
};

// Outputs of a window of K x K: two rows of N columns, from K + STRIDE rows of inputs in groups of four.
template <class I, int K, int STRIDE, int N>
INLINE void window(const Channels &c, const I (*held)[(K + STRIDE + 3) / 4][4], int64_t at) {
    constexpr int GROUPS = (K + STRIDE + 3) / 4, COLUMNS = K + (N - 1) * STRIDE;
    I q[2][N][4];
    for (int j = 0; j < 4; j++) {
        I sum[2][N];
        load(sum[0][0], c.bias + 16 * j);
        for (int t = 0; t < N; t++) sum[1][t] = sum[0][t] = sum[0][0];
        for (int g = 0; g < GROUPS; g++) {
            I in[COLUMNS];
            for (int k = 0; k < COLUMNS; k++) in[k] = loaded<I>(&held[k][g][j]);
            for (int k = 0; k < K; k++)
                for (int y = 0; y < 2; y++) {
                    if (4 * g + 3 < y * STRIDE || 4 * g >= y * STRIDE + K) continue; // the group has none of its rows
                    const I w = loaded<I>(c.weights + (((y * GROUPS + g) * K + k) * 4 + j) * GROUP_BYTES);
                    for (int t = 0; t < N; t++) accumulate(sum[y][t], in[k + t * STRIDE], w);
                }
        }
        for (int y = 0; y < 2; y++)
            for (int t = 0; t < N; t++) {
                rescale(sum[y][t], c.scale + 16 * j);
                q[y][t][j] = sum[y][t];
            }
    }
    // Both rows are stored in any case: behind a branch the compiler would compute the second one apart from the first.
    for (int y = 1; y >= 0; y--)
        for (int t = 0; t < N; t++) store(c.out[y] + at + t * c.out_column, together(q[y][t], c.zero), c.keep);
}

template <class I, int K, int STRIDE> static void depthwise_rows(const Channels &c, int width) {
    constexpr int ROWS = K + STRIDE, GROUPS = (ROWS + 3) / 4, WIDE = 14, COLUMNS = (WIDE - 1) * STRIDE + K;
    constexpr int MOST = K == 3 && STRIDE == 1 ? 3 : 7; // columns at once: what is quickest on an EPYC of Zen 5
    I held[COLUMNS][GROUPS][4]; // of 64 channels 16 kB at most
    for (int from = 0; from < width; from += WIDE) {
        const int n = least(width - from, WIDE), columns = (n - 1) * STRIDE + K;
        for (int x = 0; x < columns; x++) {
            const int64_t at = (int64_t)(from * STRIDE + x) * c.column;
            for (int g = 0; g < GROUPS; g++) {
                I four[4]; // a row that is not there meets weights of zero
                for (int r = 0; r < 4; r++) four[r] = loaded<I>(c.in[4 * g + r < ROWS ? 4 * g + r : ROWS - 1] + at);
                interleave(four[0], four[1], four[2], four[3], held[x][g]);
            }
        }
        int x = 0;
        for (; x + MOST <= n; x += MOST) window<I, K, STRIDE, MOST>(c, held + x * STRIDE, (from + x) * c.out_column);
        for (; x + 2 <= n; x += 2) window<I, K, STRIDE, 2>(c, held + x * STRIDE, (from + x) * c.out_column);
        if (x < n) window<I, K, STRIDE, 1>(c, held + x * STRIDE, (from + x) * c.out_column);
    }
}

// Weights are packed by 64 channels.
template <int K, int STRIDE> static void depthwise(const Layer &l, int width, View in, View out, Part part) {
    constexpr int ROWS = K + STRIDE, WEIGHTS = 2 * ((ROWS + 3) / 4) * K * 4 * GROUP_BYTES;
    for (int v = part.from, vectors; v < part.to; v += vectors) {
        const int group = v / 4, within = v % 4; // of 64 channels
        const int left = part.to - v;
        vectors = within == 0 && left >= 3 ? least(left, 4) : within <= 2 && left >= 2 ? 2 : 1;
        auto *run = vectors >= 3   ? depthwise_rows<__m512i, K, STRIDE>
                    : vectors == 2 ? depthwise_rows<__m256i, K, STRIDE>
                                   : depthwise_rows<__m128i, K, STRIDE>;
        Channels c = {};
        c.weights = l.weights + group * WEIGHTS + within * 16;
        c.bias = l.bias + 64 * group + 4 * within;
        c.scale = l.scale + 64 * group + 4 * within;
        c.zero = l.zero;
        c.keep = first(16 * vectors);
        c.column = in.column;
        c.out_column = out.column;
        for (int y = part.y0; y < part.y1; y += 2) {
            const int kept = least(2, part.y1 - y); // an odd last row is computed with another, which is not kept
            const int above = y * STRIDE - l.pad_top, last = (y + kept - 1) * STRIDE - l.pad_top + K - 1;
            for (int r = 0; r < ROWS; r++) {
                c.in[r] = in.at(least(above + r, last)) - l.pad_left * in.column + 16 * v;
            }
            for (int t = 0; t < 2; t++) c.out[t] = out.at(y + least(t, kept - 1)) + 16 * v;
            run(c, width);
        }
    }
}

// --- the rest -------------------------------------------------------------------------------------------------------

INLINE __m512i integers_at(const u8 *at, __mmask16 keep) {
    return _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(keep, at));
}

INLINE void store_bytes(u8 *at, __mmask16 keep, __m512i made) {
    _mm_mask_storeu_epi8(at, keep, _mm512_cvtusepi32_epi8(_mm512_max_epi32(made, _mm512_setzero_si512())));
}

// Two runs of n bytes. In the order of operations that ONNX Runtime has, so that what lies halfway goes the same way.
static void add(const Layer &l, int zero, int other_zero, const u8 *in, const u8 *other, u8 *out, int n) {
    const __m512 a = _mm512_set1_ps(l.ratio), b = _mm512_set1_ps(l.other_ratio);
    const float zeros = __builtin_fmaf(l.ratio, (float)zero, l.other_ratio * (float)other_zero);
    const __m512 constant = _mm512_set1_ps((float)l.zero - zeros);
    for (int i = 0; i < n; i += 16) {
        const __mmask16 keep = (__mmask16)first(n - i);
        const __m512 x = _mm512_cvtepi32_ps(integers_at(in + i, keep));
        const __m512 y = _mm512_cvtepi32_ps(integers_at(other + i, keep));
        store_bytes(out + i, keep, _mm512_cvtps_epi32(_mm512_fmadd_ps(x, a, _mm512_fmadd_ps(y, b, constant))));
    }
}

// Of all positions.
static void mean(const Layer &l, const Tensor &t, View in, u8 *out, Part part) {
    for (int v = part.from; v < part.to; v++) {
        const __mmask16 keep = (__mmask16)first(t.channels - 16 * v);
        __m512i sum = _mm512_set1_epi32(-t.zero * t.height * t.width);
        for (int y = 0; y < t.height; y++)
            for (int x = 0; x < t.width; x++)
                sum = _mm512_add_epi32(sum, integers_at(in.base + y * in.row + x * in.column + 16 * v, keep));
        const __m512i made = rescaled(sum, _mm512_set1_ps(l.ratio));
        store_bytes(out + 16 * v, keep, _mm512_add_epi32(made, _mm512_set1_epi32(l.zero)));
    }
}

template <int N> static void dense_vectors(const Product &p, const float *scale, int left, float *out) {
    __m512i sum[1][N];
    multiply<1, N>(p, sum);
    for (int j = 0; j < N; j++) {
        const __m512 made = _mm512_mul_ps(_mm512_cvtepi32_ps(sum[0][j]), _mm512_loadu_ps(scale + 16 * j));
        _mm512_mask_storeu_ps(out + 16 * j, (__mmask16)first(left - 16 * j), made);
    }
}

static void dense(const Layer &l, int features, int classes, const u8 *in, float *out, Part part) {
    Product p = {in, 0, 0, 1, features / 4, nullptr, nullptr};
    for (int v = part.from; v < part.to; v += l.vectors) {
        const int vectors = least(l.vectors, part.to - v);
        auto *run = vectors == 1   ? dense_vectors<1>
                    : vectors == 2 ? dense_vectors<2>
                    : vectors == 3 ? dense_vectors<3>
                                   : dense_vectors<4>;
        p.weights = l.weights + (int64_t)v * 64 * p.quads;
        p.bias = l.bias + 16 * v;
        run(p, l.scale + 16 * v, classes - 16 * v, out + 16 * v);
    }
}
