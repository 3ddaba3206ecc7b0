// What the kernel is told of a network; `program.py` has the same structures.

#pragma once

#include <stdint.h>

enum Kind : int32_t { PAD, CONVOLUTION, DEPTHWISE, ADD, MEAN, DENSE };

// Bytes (height, width, channels), within a border of their zero point as wide as what reads them pads.
struct Tensor {
    int32_t height, width, channels, top, left, bottom, right, zero;
    int32_t item;   // bytes of a value: 1, of logits 4
    int32_t result; // number among what callers get; -1: they do not
    int64_t offset; // of the whole tensor in the arena; -1: never whole, or a result that nothing reads
};

struct Layer {
    int32_t kind, in, other, out; // tensors; ADD adds `in` and `other`
    int32_t kernel_height, kernel_width, row_stride, column_stride, pad_top, pad_left;
    int32_t vectors; // of 16 output channels, in a packed group of weights
    int32_t fold;    // columns of `out` at one position: it is seen as (height, width / fold, channels * fold)
    int32_t zero;    // of the output
    int32_t tile;    // quads of bytes that a tile takes; 0: it is not computed by tiles
    int32_t paired;  // rows of the next layer for which it is computed at a time, into a ring (`run_pair`); 0: whole
    float ratio, other_ratio; // ADD, MEAN: what a step of each input is in steps of the output
    const int8_t *weights;
    const int32_t *bias; // with the input's zero point taken into account; padded to 64 channels
    const float *scale;  // of a sum, in steps of the output; likewise
};

struct Stage {
    int32_t first, count; // layers
    int32_t by_channels;  // else by rows
    int32_t size, units;  // of a unit: rows, or vectors of 16 channels, of the last layer's output
};

struct Program {
    int32_t tensors, layers, stages;
    const Tensor *tensor;
    const Layer *layer;
    const Stage *stage;
    int64_t arena, scratch, ring; // bytes: of one inference; of each thread in it; of that, for rows of `run_pair`
};

enum { MOST_STAGE_LAYERS = 8 }; // of a stage
