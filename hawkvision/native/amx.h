// Convolutions on processors with Intel AMX: one instruction multiplies 64 bytes at each of 16 positions with the
// weights of 16 channels. Its registers, tiles of 16 rows of 64 bytes, can be read by way of memory only.

#pragma once

#include <type_traits>

#include "layers.h"

// Of the eight tiles, four hold sums, then come one of bytes at positions, and two of weights.
enum { TILE_POSITIONS = 16, SUMS = 0, TAKEN = 4, WEIGHTS = 5, USED_TILES = 7 };

#ifdef WITHOUT_TILES // for an assembler that does not know them; nothing is then planned by tiles
#define TILES_ASM(...) (void)0
#else
#define TILES_ASM(...) __asm__ volatile(__VA_ARGS__)
#endif

#define NOINLINE __attribute__((noinline)) // where one function of all would have too few registers

struct TileShapes { // as LDTILECFG reads them
    u8 palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {}; // of a row
    u8 rows[16] = {};
};

template <int T> INLINE void load_tile(const void *at, int64_t row) {
    TILES_ASM("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(at), "r"(row), "i"(T) : "memory");
}
template <int T> INLINE void store_tile(void *at, int64_t row) {
    TILES_ASM("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(at), "r"(row), "i"(T) : "memory");
}
template <int SUM, int A, int B> INLINE void multiply_tiles() {
    TILES_ASM("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(A), "i"(B));
}

static thread_local int shapes; // of this thread's tiles: positions and quads; 0: it has none

static void shape_tiles(int positions, int quads) {
    const int wanted = positions << 8 | quads;
    if (shapes == wanted) return;
    shapes = wanted;
    TileShapes s;
    for (int t = 0; t < USED_TILES; t++) {
        s.rows[t] = (u8)(t < WEIGHTS ? positions : quads);
        s.bytes[t] = (uint16_t)(t < TAKEN || t >= WEIGHTS ? 64 : 4 * quads);
    }
    TILES_ASM("ldtilecfg %0" ::"m"(s)); // which takes as long as ten products
}

// So that the system need not keep them when it runs another thread.
static void release_tiles() {
    if (shapes) TILES_ASM("tilerelease");
    shapes = 0;
}

// f(0) to f(N - 1), of which each knows its number when it is compiled.
template <int N, int I = 0, class F> INLINE void each(const F &f) {
    if constexpr (I < N) {
        f(std::integral_constant<int, I>());
        each<N, I + 1>(f);
    }
}

// Of a tile's positions, the sums of N vectors in as many tiles.
template <int N> static NOINLINE void sum_tiles(const Product &p, int quads) {
    each<N>([&](auto j) { load_tile<SUMS + j>(p.bias + 16 * j, 0); });
    const int8_t *weights = p.weights;
    for (int segment = 0; segment < p.segments; segment++) {
        const u8 *in = p.in + segment * p.segment;
        for (int quad = 0; quad < p.quads; quad += quads, in += 4 * quads, weights += 64 * N * quads) {
            load_tile<TAKEN>(in, p.column);
            each<N>([&](auto j) {
                load_tile<WEIGHTS + j % 2>(weights + 64 * j, 64 * N);
                multiply_tiles<SUMS + j, TAKEN, WEIGHTS + j % 2>();
            });
        }
    }
}

// What becomes of the sums of N vectors: bytes, of which those in `keep` are stored.
template <int N> struct Rescaling {
    __m512 scale[N];
    __m512i zero;
    __mmask64 keep;
};

template <int N> struct Made { // by one tile's products
    alignas(64) int32_t sums[TILE_POSITIONS][N][16];
    u8 *out[TILE_POSITIONS];
    int positions;
};

template <int N> INLINE void make_bytes(const Made<N> &made, const Rescaling<N> &r, int from, int to) {
    for (int i = from; i < least(to, made.positions); i++) {
        __m512i q[4] = {};
        UNROLL for (int j = 0; j < N; j++) q[j] = rescaled(_mm512_load_si512(made.sums[i][j]), r.scale[j]);
        _mm512_mask_storeu_epi8(made.out[i], r.keep, bytes_of(q, r.zero));
    }
}

// Stores the sums of one tile. A store waits for its product; meanwhile bytes are made of the sums before.
template <int N> static NOINLINE void store_tiles(Made<N> &now, const Made<N> &before, const Rescaling<N> &rescaling) {
    constexpr int SHARE = (TILE_POSITIONS + N - 1) / N;
    const Rescaling<N> r = rescaling; // in registers
    each<N>([&](auto j) {
        store_tile<SUMS + j>(now.sums[0][j], 64 * N);
        make_bytes(before, r, j * SHARE, (j + 1) * SHARE);
    });
}

struct Run { // of positions, which lie `width` to a row of the output, `column` apart, from row y on
    int positions, width, y;
    View out;
    int64_t column;
};

template <int N> static void run_tiles(const Layer &l, Product p, const Run &run, int n, int v, __mmask64 keep) {
    Rescaling<N> r = {{}, _mm512_set1_epi16((int16_t)l.zero), keep};
    UNROLL for (int j = 0; j < N; j++) r.scale[j] = _mm512_loadu_ps(l.scale + 16 * (v + j));
    Made<N> made[2];
    made[1].positions = 0;
    const u8 *in = p.in;
    int turn = 0;
    for (int i = 0; i < run.positions; i += n, turn ^= 1) {
        const int from = least(i, run.positions - n); // the last may compute some again
        p.in = in + from * p.column;
        sum_tiles<N>(p, l.tile);
        Made<N> &now = made[turn];
        now.positions = n;
        int y = run.y + from / run.width, x = from % run.width;
        u8 *out = run.out.at(y) + x * run.column + 16 * v;
        for (int k = 0; k < n; k++, out += run.column) {
            if (x++ == run.width) x = 1, out = run.out.at(++y) + 16 * v;
            now.out[k] = out;
        }
        store_tiles(now, made[turn ^ 1], r);
    }
    make_bytes(made[turn ^ 1], r, 0, TILE_POSITIONS);
}

// As `convolve`.
static void convolve_by_tiles(const Layer &l, Product p, const Run &run, int channels, Part part) {
    const int tiles = (run.positions + TILE_POSITIONS - 1) / TILE_POSITIONS;
    const int n = (run.positions + tiles - 1) / tiles; // positions of each
    shape_tiles(n, l.tile);
    for (int v = part.from; v < part.to; v += l.vectors) {
        const int vectors = least(l.vectors, part.to - v), left = channels - 16 * v;
        p.weights = l.weights + (int64_t)v * 64 * p.quads * p.segments;
        p.bias = l.bias + 16 * v;
        auto *run_some = vectors == 1   ? run_tiles<1>
                         : vectors == 2 ? run_tiles<2>
                         : vectors == 3 ? run_tiles<3>
                                        : run_tiles<4>;
        run_some(l, p, run, n, v, first(least(left, 16 * vectors)));
    }
}
