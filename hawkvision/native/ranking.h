// The most probable classes of one image, from its logits: what `cascade/scores.py` does in some thirty calls of NumPy,
// each of which has to be fetched from memory where images are rare.

#pragma once

#include <math.h>
#include <stdint.h>
#include <stdlib.h>

// The k most probable of `classes`, most probable first and ties by lower number, and their probabilities: in double
// precision but for the division by `before`, and rounded at last. False without memory.
extern "C" int32_t most_probable(const float *logits, int32_t classes, float before, double temperature, int32_t k,
                                 int32_t *number, float *probability) {
    double *odds = (double *)malloc(classes * sizeof(double));
    if (!odds) return 0;
    double top = -INFINITY, total = 0.0;
    for (int i = 0; i < classes; i++) {
        odds[i] = (double)(logits[i] / before) / temperature;
        top = odds[i] > top ? odds[i] : top;
    }
    for (int i = 0; i < classes; i++) total += odds[i] = exp(odds[i] - top);
    int held = 0;
    for (int i = 0; i < classes; i++) {
        const float its = (float)(odds[i] / total);
        if (held == k && !(its > probability[k - 1])) continue;
        int at = held < k ? held++ : k - 1;
        for (; at > 0 && its > probability[at - 1]; at--) {
            probability[at] = probability[at - 1];
            number[at] = number[at - 1];
        }
        probability[at] = its;
        number[at] = i;
    }
    free(odds);
    return 1;
}
