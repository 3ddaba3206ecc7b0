// Bicubic scaling of images of three channels, for processors that have AVX-512 VBMI as well: the pixels of OpenCV
// with Intel's library, whose order of operations this is, another at the edges than within (`vision/bicubic.py`).

#pragma once

#include <immintrin.h>
#include <stdint.h>

enum { TAPS = 4, VALUES = 16, MOST_GROUPS = 192 }; // of a row of 1,024 pixels

struct Scaling { // `vision/bicubic.py` has the same structure
    int32_t rows_in, rows_out, values_out; // the last: of a row, three a pixel
    // Of each 16 values of a row of the outcome:
    const int32_t *base;   // where in a row of the image the 64 bytes begin that they are made of
    const uint64_t *there; // which of these are in the row
    const uint8_t *pick;   // of each tap, which byte for each value
    const float *across;   // of each tap, its weight for each value
    const uint16_t *edge;  // which values have taps beyond the row
    // Of each row of the outcome:
    const int32_t *first; // row of the image; what is beyond its edge is as the edge
    const float *down;    // the weights of four
};

#define VBMI __attribute__((target("avx512f,avx512bw,avx512vl,avx512vbmi")))
#define VBMI_INLINE static inline __attribute__((always_inline, target("avx512f,avx512bw,avx512vl,avx512vbmi")))

VBMI_INLINE __m512 floats(__m128i bytes) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)); }

template <bool EDGE> VBMI static void across(const Scaling &s, const uint8_t *row, float *out) {
    for (int value = 0, g = 0; value < s.values_out; value += VALUES, g++) {
        const __m512i bytes = _mm512_maskz_loadu_epi8(s.there[g], row + s.base[g]);
        const __m512i taps = _mm512_permutexvar_epi8(_mm512_loadu_si512(s.pick + 64 * g), bytes);
        const __m512 a = floats(_mm512_castsi512_si128(taps)), b = floats(_mm512_extracti32x4_epi32(taps, 1));
        const __m512 c = floats(_mm512_extracti32x4_epi32(taps, 2)), d = floats(_mm512_extracti32x4_epi32(taps, 3));
        const float *w = s.across + TAPS * VALUES * g;
        const __m512 u = _mm512_loadu_ps(w), v = _mm512_loadu_ps(w + 16);
        const __m512 x = _mm512_loadu_ps(w + 32), y = _mm512_loadu_ps(w + 48);
        __m512 sum = {};
        if (!EDGE) {
            const __m512 outer = _mm512_fmadd_ps(u, a, _mm512_mul_ps(y, d));
            sum = _mm512_add_ps(outer, _mm512_fmadd_ps(v, b, _mm512_mul_ps(x, c)));
        }
        if (EDGE || s.edge[g]) {
            const __m512 left = _mm512_fmadd_ps(u, a, _mm512_mul_ps(v, b));
            const __m512 at_edge = _mm512_fmadd_ps(y, d, _mm512_fmadd_ps(x, c, left));
            sum = EDGE ? at_edge : _mm512_mask_mov_ps(sum, s.edge[g], at_edge);
        }
        _mm512_storeu_ps(out + value, sum);
    }
}

// Which sums lie so near to a half that the last bit decides how they are rounded.
VBMI_INLINE __mmask16 near_half(__m512 sum) {
    const __m512 above = _mm512_sub_ps(sum, _mm512_roundscale_ps(sum, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC));
    const __m512 apart = _mm512_abs_ps(_mm512_sub_ps(above, _mm512_set1_ps(0.5f)));
    return _mm512_cmple_ps_mask(apart, _mm512_mul_ps(_mm512_abs_ps(sum), _mm512_set1_ps(0x1p-23f)));
}

// Which of the values at edges may be rounded the other way.
template <bool EDGE>
VBMI static __mmask16 down(const Scaling &s, const float *const (&row)[TAPS], const float *weights, uint8_t *out) {
    __mmask16 unsure = 0;
    __m512 w[TAPS];
    for (int k = 0; k < TAPS; k++) w[k] = _mm512_set1_ps(weights[k]);
    for (int value = 0, g = 0; value < s.values_out; value += VALUES, g++) {
        const __m512 a = _mm512_loadu_ps(row[0] + value), b = _mm512_loadu_ps(row[1] + value);
        const __m512 c = _mm512_loadu_ps(row[2] + value), d = _mm512_loadu_ps(row[3] + value);
        __m512 sum = {};
        if (!EDGE) {
            const __m512 upper = _mm512_fmadd_ps(w[0], a, _mm512_mul_ps(w[1], b));
            sum = _mm512_add_ps(upper, _mm512_fmadd_ps(w[2], c, _mm512_mul_ps(w[3], d)));
        }
        if (EDGE || s.edge[g]) {
            const __m512 even = _mm512_add_ps(_mm512_mul_ps(w[0], a), _mm512_mul_ps(w[2], c));
            const __m512 at_edge = _mm512_add_ps(even, _mm512_add_ps(_mm512_mul_ps(w[1], b), _mm512_mul_ps(w[3], d)));
            sum = EDGE ? at_edge : _mm512_mask_mov_ps(sum, s.edge[g], at_edge);
            unsure |= near_half(sum) & (EDGE ? 0xffff : s.edge[g]);
        }
        const __m512i made = _mm512_max_epi32(_mm512_cvtps_epi32(sum), _mm512_setzero_si512());
        const int left = s.values_out - value;
        const __mmask16 keep = left >= VALUES ? 0xffff : (__mmask16)((1 << left) - 1);
        _mm512_mask_cvtusepi32_storeu_epi8(out + value, keep, made);
    }
    return unsure;
}

extern "C" {

// Rows of the image lie `stride` bytes apart, those of the outcome one behind another. Other than 0 if a value at the
// edges may be one more or one less than it should.
VBMI int32_t bicubic_scale(const Scaling *scaling, const uint8_t *image, int64_t stride, uint8_t *out) {
    const Scaling &s = *scaling;
    alignas(64) float held[TAPS][MOST_GROUPS * VALUES]; // row y at y modulo four: the last of those within
    alignas(64) float edge[TAPS][MOST_GROUPS * VALUES];
    int next = 0;
    __mmask16 unsure = 0;
    for (int y = 0; y < s.rows_out; y++, out += s.values_out) {
        const float *row[TAPS];
        const bool within = s.first[y] >= 0 && s.first[y] + TAPS <= s.rows_in;
        for (int k = 0; k < TAPS; k++) {
            int wanted = s.first[y] + k;
            if (within) {
                if (wanted >= next) {
                    across<false>(s, image + wanted * stride, held[wanted % TAPS]);
                    next = wanted + 1;
                }
                row[k] = held[wanted % TAPS];
            } else {
                wanted = wanted < 0 ? 0 : wanted >= s.rows_in ? s.rows_in - 1 : wanted;
                across<true>(s, image + wanted * stride, edge[k]);
                row[k] = edge[k];
            }
        }
        if (within) unsure |= down<false>(s, row, s.down + TAPS * y, out);
        else unsure |= down<true>(s, row, s.down + TAPS * y, out);
    }
    return unsure;
}
}
