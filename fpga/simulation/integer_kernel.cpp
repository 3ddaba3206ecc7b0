// An integer graph's logits on a CPU: the same bits as hawkvision/integer/reference.py, fast enough to serve.
//
// Maps lie in memory in HWC order inside a frame of zeros as wide as the next convolution's padding. So the pixels under
// one row of a kernel are kernel · channels bytes in a row, which are multiplied four at a time:
//
//   weights  [vector of outputs][kernel row][group of 4 bytes][outputs of a vector][4], zeros behind a row's last byte
//   maps     every output of a vector sees the same 4 bytes: one broadcast
//
// That is one VPDPBUSD (uint8 × int8 → int32, nothing saturates) for 64 products, or with older x86 a PMADDWD for the even
// bytes and one for the odd. Blocks of two rows are computed at a time, as many pixels as registers hold sums of, so that
// a vector of weights is loaded once for all of them. Groups may read up to 3 bytes, and blocks up to a row and 3 pixels,
// beyond what counts: products with zeros, sums that are not kept.
//
// The maximum of a pool is taken of accumulators: requantisation never decreases, so the result is the same for a
// quarter of the work.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512VNNI__)
#define WIDE 1
#include <immintrin.h>
#elif defined(__SSE2__)
#include <immintrin.h>
#endif

namespace {

// Outputs of a vector, which is one register, and pixels of a block, whose sums all stay in registers: there are 32 of
// 64 bytes, or 16 shorter ones.
#if defined(WIDE)
constexpr int LANES = 16;
constexpr int BLOCK_COLUMNS = 4;
#elif defined(__AVX2__)
constexpr int LANES = 8;
constexpr int BLOCK_COLUMNS = 2;
#else
constexpr int LANES = 4;
constexpr int BLOCK_COLUMNS = 2;
#endif
constexpr int BLOCK_ROWS = 2;
constexpr int BLOCK_VECTORS = 2;

typedef int32_t Vector __attribute__((vector_size(4 * LANES)));

}  // namespace

extern "C" {

// As fpga/simulation/integer_kernel.py: _KernelLayer.
struct Layer {
    int32_t kernel, pad;
    int32_t height, width, channels;  // taken
    int32_t made_height, made_width, made_channels;  // convolved
    int32_t pool;  // 0 or 1
    int32_t pre_shift, shift, limit;  // limit 0: the accumulators are the logits
    const int8_t* weights;
    const int32_t* bias;  // whole vectors, as multiplier
    const int32_t* multiplier;
};

// As fpga/simulation/integer_kernel.py: _KernelNetwork.
struct Network {
    int32_t count;
    const Layer* layers;
};

// Outputs of a vector: how weights must be laid out.
int32_t hv_lanes();

int32_t hv_logits(
    const Network* network, const uint8_t* pixels, int32_t planes, int64_t n, int32_t* logits);
}

namespace {

constexpr int32_t KEPT = (1 << 17) - 1;

inline Vector broadcast(int32_t value) {
    return Vector{} + value;
}

// accumulators += for each lane the sum of four products: bytes, unsigned, with the lane's weights, signed.
inline Vector multiply(Vector accumulators, const uint8_t* bytes, const int8_t* weights) {
    int32_t four;
    std::memcpy(&four, bytes, 4);
#if defined(WIDE)
    return (Vector)_mm512_dpbusd_epi32((__m512i)accumulators, _mm512_set1_epi32(four), _mm512_loadu_si512(weights));
#elif defined(__SSE2__)
    typedef int16_t Halves __attribute__((vector_size(4 * LANES)));
    Halves lanes;
    std::memcpy(&lanes, weights, sizeof lanes);
    const Halves even = (Halves)broadcast(four & 0x00FF00FF), odd = (Halves)broadcast((four >> 8) & 0x00FF00FF);
#if defined(__AVX2__)
    return accumulators + (Vector)_mm256_madd_epi16((__m256i)((lanes << 8) >> 8), (__m256i)even) +
           (Vector)_mm256_madd_epi16((__m256i)(lanes >> 8), (__m256i)odd);
#else
    return accumulators + (Vector)_mm_madd_epi16((__m128i)((lanes << 8) >> 8), (__m128i)even) +
           (Vector)_mm_madd_epi16((__m128i)(lanes >> 8), (__m128i)odd);
#endif
#else
    Vector lanes;
    std::memcpy(&lanes, weights, sizeof lanes);
    for (int byte = 0; byte < 4; ++byte) {
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
        const int up = 24 - 8 * byte;
#else
        const int up = 8 * byte;
#endif
        accumulators += ((lanes << up) >> 24) * broadcast(bytes[byte]);
    }
    return accumulators;
#endif
}

// Sums of ROWS x COLUMNS neighbouring positions and VECTORS vectors of outputs.
template <int ROWS, int COLUMNS, int VECTORS>
inline void convolve(
    const Layer& layer, const uint8_t* at, ptrdiff_t stride, int first, Vector (&sums)[ROWS][COLUMNS][VECTORS]) {
    const int groups = (layer.kernel * layer.channels + 3) / 4;
    const ptrdiff_t per_vector = ptrdiff_t(layer.kernel) * groups * 4 * LANES;
    for (int v = 0; v < VECTORS; ++v) {
        Vector bias;
        std::memcpy(&bias, layer.bias + (first + v) * LANES, sizeof bias);
        for (int y = 0; y < ROWS; ++y)
            for (int x = 0; x < COLUMNS; ++x) sums[y][x][v] = bias;
    }
    const int8_t* weights = layer.weights + first * per_vector;
    for (int row = 0; row < layer.kernel; ++row, at += stride)
        for (int group = 0; group < groups; ++group, weights += 4 * LANES)
            for (int y = 0; y < ROWS; ++y)
                for (int x = 0; x < COLUMNS; ++x)
                    for (int v = 0; v < VECTORS; ++v)
                        sums[y][x][v] = multiply(
                            sums[y][x][v], at + y * stride + x * layer.channels + 4 * group, weights + v * per_vector);
}

inline Vector least(Vector a, Vector b) {
    return a < b ? a : b;
}

inline Vector greatest(Vector a, Vector b) {
    return a > b ? a : b;
}

// Where a layer's maps go: the inside of the next one's frame.
struct Sink {
    uint8_t* origin;
    ptrdiff_t stride;
};

inline void give(const Layer& layer, const Sink& sink, int vector, int y, int x, Vector sums) {
    Vector multiplier;
    std::memcpy(&multiplier, layer.multiplier + vector * LANES, sizeof multiplier);
    const Vector kept = least(greatest(sums >> layer.pre_shift, broadcast(0)), broadcast(KEPT));
    const Vector scaled = (kept * multiplier + (1 << (layer.shift - 1))) >> layer.shift;
    const Vector limited = least(scaled, broadcast(layer.limit));
    uint8_t bytes[LANES];
    for (int lane = 0; lane < LANES; ++lane) bytes[lane] = uint8_t(limited[lane]);
    uint8_t* to = sink.origin + y * sink.stride + ptrdiff_t(x) * layer.made_channels + vector * LANES;
    const int left = layer.made_channels - vector * LANES;
    if (left >= LANES)
        std::memcpy(to, bytes, LANES);
    else
        std::memcpy(to, bytes, left);
}

template <int VECTORS>
inline void run_block(
    const Layer& layer, const uint8_t* maps, ptrdiff_t stride, const Sink& sink, int first, int y, int x) {
    Vector sums[BLOCK_ROWS][BLOCK_COLUMNS][VECTORS];
    convolve(layer, maps + y * stride + ptrdiff_t(x) * layer.channels, stride, first, sums);
    for (int v = 0; v < VECTORS; ++v)
        if (layer.pool) {
            for (int column = 0; column < BLOCK_COLUMNS && x + column + 1 < layer.made_width; column += 2) {
                const Vector upper = greatest(sums[0][column][v], sums[0][column + 1][v]);
                const Vector lower = greatest(sums[1][column][v], sums[1][column + 1][v]);
                give(layer, sink, first + v, y / 2, (x + column) / 2, greatest(upper, lower));
            }
        } else {
            for (int row = 0; row < BLOCK_ROWS && y + row < layer.made_height; ++row)
                for (int column = 0; column < BLOCK_COLUMNS && x + column < layer.made_width; ++column)
                    give(layer, sink, first + v, y + row, x + column, sums[row][column][v]);
        }
}

void run_layer(const Layer& layer, const uint8_t* maps, ptrdiff_t stride, const Sink& sink) {
    const int vectors = (layer.made_channels + LANES - 1) / LANES;
    const int rows = layer.pool ? layer.made_height / 2 * 2 : layer.made_height;
    const int columns = layer.pool ? layer.made_width / 2 * 2 : layer.made_width;
    for (int y = 0; y < rows; y += BLOCK_ROWS)
        for (int x = 0; x < columns; x += BLOCK_COLUMNS) {
            int first = 0;
            for (; first + BLOCK_VECTORS <= vectors; first += BLOCK_VECTORS)
                run_block<BLOCK_VECTORS>(layer, maps, stride, sink, first, y, x);
            for (; first < vectors; ++first) run_block<1>(layer, maps, stride, sink, first, y, x);
        }
}

void run_last(const Layer& layer, const uint8_t* maps, ptrdiff_t stride, int32_t* logits) {
    for (int first = 0; first * LANES < layer.made_channels; ++first) {
        Vector sums[1][1][1];
        convolve(layer, maps, stride, first, sums);
        const int left = layer.made_channels - first * LANES;
        std::memcpy(logits + first * LANES, &sums[0][0][0], sizeof(int32_t) * (left < LANES ? left : LANES));
    }
}

ptrdiff_t stride_of(const Layer& layer) {
    return ptrdiff_t(layer.width + 2 * layer.pad) * layer.channels;
}

// Bytes of a layer's frame, with what blocks read beyond it.
size_t frame_of(const Layer& layer) {
    const size_t rows = layer.height + 2 * layer.pad + BLOCK_ROWS - 1;
    const size_t bytes = rows * stride_of(layer) + size_t(BLOCK_COLUMNS) * layer.channels + 4;
    return (bytes + 63) / 64 * 64;
}

// The pixel that the input stage shows: of three planes their luminance where the network takes one.
inline void show(uint8_t* to, const uint8_t* pixel, int planes, int taken) {
    if (planes == taken)
        for (int c = 0; c < taken; ++c) to[c] = pixel[c];
    else
        to[0] = uint8_t((77 * pixel[0] + 150 * pixel[1] + 29 * pixel[2] + 128) >> 8);
}

void take(const Layer& layer, const uint8_t* pixels, int planes, uint8_t* inside) {
    const ptrdiff_t stride = stride_of(layer);
    for (int y = 0; y < layer.height; ++y, inside += stride) {
        if (planes == layer.channels) {
            std::memcpy(inside, pixels, size_t(layer.width) * planes);
            pixels += size_t(layer.width) * planes;
            continue;
        }
        for (int x = 0; x < layer.width; ++x, pixels += planes)
            show(inside + ptrdiff_t(x) * layer.channels, pixels, planes, layer.channels);
    }
}

}  // namespace

int32_t hv_lanes() {
    return LANES;
}

// Logits (n, classes) of n images (height, width, planes). Several threads may call it at once. 0, or 1 if there is no memory.
int32_t hv_logits(
    const Network* network, const uint8_t* pixels, int32_t planes, int64_t n, int32_t* logits) {
    const Layer* layers = network->layers;
    const Layer& last = layers[network->count - 1];
    size_t bytes = 0;
    for (int index = 0; index < network->count; ++index) bytes += frame_of(layers[index]);
    // Zeroed once: images write the inside of the frames only.
    uint8_t* const frames = static_cast<uint8_t*>(std::calloc(bytes, 1));
    if (frames == nullptr) return 1;
    const size_t area = size_t(layers->height) * layers->width;
    for (int64_t image = 0; image < n; ++image) {
        uint8_t* maps = frames;
        take(*layers, pixels + image * area * planes, planes,
             maps + layers->pad * (stride_of(*layers) + layers->channels));
        for (const Layer* layer = layers; layer != &last; ++layer) {
            uint8_t* const next = maps + frame_of(*layer);
            const ptrdiff_t stride = stride_of(layer[1]);
            run_layer(*layer, maps, stride_of(*layer), {next + layer[1].pad * (stride + layer[1].channels), stride});
            maps = next;
        }
        run_last(last, maps, stride_of(last), logits + image * last.made_channels);
    }
    std::free(frames);
    return 0;
}
