// Runs an int8 network.
//
// An image goes through stages. In a stage that is divided by rows, a strip of the last layer's rows is computed
// through all layers of the stage, so that what lies between them stays in a near cache; rows that two strips need are
// computed twice. In one that is divided by channels, each thread reads only its share of the weights. Threads claim
// units of a stage from both of its ends, so that one works in the same half of the image from layer to layer, and
// nobody waits for a helper that has not come.

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

#include "amx.h"
#include "layers.h"

// --- stages ---------------------------------------------------------------------------------------------------------

struct Inference {
    const u8 *image;
    u8 *arena;
    u8 *const *results; // for all images
    int number;         // of the image
};

INLINE int64_t pitch(const Tensor &t) { return (int64_t)(t.left + t.width + t.right) * t.channels * t.item; }

// Where a result lies without its border, as callers get it.
static u8 *result(const Tensor &t, const Inference &now) {
    return now.results[t.result] + (int64_t)t.width * t.channels * t.item * t.height * now.number;
}

static View whole(const Tensor &t, const Inference &now) {
    const int64_t row = pitch(t);
    u8 *base = t.offset < 0 ? result(t, now) : now.arena + t.offset + t.top * row + t.left * t.channels;
    return {base, row, t.channels};
}

static void run_convolution(const Layer &l, const Tensor &a, const Tensor &b, View in, View out, Part part) {
    Product p = {};
    p.column = in.column * l.column_stride;
    p.segment = in.row;
    p.segments = l.kernel_height;
    p.quads = l.kernel_width * a.channels / 4;
    const int channels = b.channels * l.fold, width = b.width / l.fold;
    const int64_t column = out.column * l.fold;
    const bool each_alone = l.kernel_height == 1 && l.kernel_width == 1 && l.row_stride == 1 && l.column_stride == 1;
    const bool in_one = each_alone && in.row == a.width * in.column;
    if (l.tile && in_one) {
        p.in = in.base + part.y0 * in.row;
        convolve_by_tiles(l, p, {(part.y1 - part.y0) * width, width, part.y0, out, column}, channels, part);
        return;
    }
    if (in_one && out.row == width * column && !out.ring) {
        p.in = in.base + part.y0 * in.row;
        convolve(l, p, {out.base + part.y0 * out.row, column, 0}, channels, (part.y1 - part.y0) * width, part);
        return;
    }
    for (int y = part.y0; y < part.y1; y++) {
        p.in = in.base + (y * l.row_stride - l.pad_top) * in.row - l.pad_left * in.column;
        if (l.tile) convolve_by_tiles(l, p, {width, width, y, out, column}, channels, part);
        else convolve(l, p, {out.at(y), column, 0}, channels, width, part);
    }
}

static void run_addition(const Layer &l, const Tensor &a, const Tensor &o, View in, View other, View out, Part part) {
    const int n = least(16 * part.to, a.channels) - 16 * part.from;
    const bool in_one = n == a.channels && in.row == a.width * in.column && other.row == in.row && out.row == in.row;
    for (int y = part.y0; y < part.y1; y++) {
        const u8 *x = in.base + y * in.row + 16 * part.from, *z = other.base + y * other.row + 16 * part.from;
        u8 *made = out.base + y * out.row + 16 * part.from;
        if (in_one) {
            add(l, a.zero, o.zero, x, z, made, n * a.width);
            continue;
        }
        for (int column = 0; column < a.width; column++, x += in.column, z += other.column, made += out.column)
            add(l, a.zero, o.zero, x, z, made, n);
    }
}

static void run_layer(const Program &g, const Layer &l, View in, View out, const Inference &now, Part part) {
    const Tensor &a = g.tensor[l.in], &b = g.tensor[l.out];
    const int64_t bytes = (int64_t)b.width * b.channels;
    switch (l.kind) {
    case PAD:
        for (int y = part.y0; y < part.y1; y++) memcpy(out.base + y * out.row, now.image + y * bytes, bytes);
        break;
    case CONVOLUTION: run_convolution(l, a, b, in, out, part); break;
    case DEPTHWISE: {
        const bool small = l.kernel_height == 3, all = l.row_stride == 1;
        auto *run = small ? (all ? depthwise<3, 1> : depthwise<3, 2>) : (all ? depthwise<5, 1> : depthwise<5, 2>);
        run(l, b.width, in, out, part);
        break;
    }
    case ADD: {
        const Tensor &o = g.tensor[l.other];
        run_addition(l, a, o, in, whole(o, now), out, part);
        break;
    }
    case MEAN: mean(l, a, in, out.base, part); break;
    case DENSE: dense(l, a.channels, b.channels, in.base, (float *)out.base, part); break;
    }
}

INLINE int vectors_of(const Layer &l, const Tensor &made) { return (made.channels * l.fold + 15) / 16; }

// Rows [first, last) of a tensor, with its border, in memory of their own.
static View strip(const Tensor &t, int first, int last, u8 *memory) {
    const int64_t row = pitch(t), left = t.left * t.channels, right = t.right * t.channels;
    for (int y = first; y < last; y++, memory += row) {
        if (y < 0 || y >= t.height) {
            memset(memory, t.zero, row);
        } else {
            memset(memory, t.zero, left);
            memset(memory + row - right, t.zero, right);
        }
    }
    return {memory - last * row + left, row, t.channels};
}

enum { GROUP_VECTORS = 4 }; // of channels that go through a convolution and a window together

INLINE int64_t rounded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// A convolution and the depthwise windows of what it makes, which is never whole: of 64 channels there are as many rows
// as `paired` rows of windows need, in a ring, and the nearest cache.
static void run_pair(const Program &g, const Layer &l, const Layer &w, View in, View out, const Inference &now,
                     u8 *memory, Part part) {
    const Tensor &t = g.tensor[l.out];
    const int rows = w.kernel_height + (l.paired - 1) * w.row_stride, column = least(t.channels, 16 * GROUP_VECTORS);
    const int64_t row = (int64_t)(t.left + t.width + t.right) * column;
    memset(memory, t.zero, rows * row);
    for (int v = part.from; v < part.to; v += GROUP_VECTORS) {
        const int to = least(v + GROUP_VECTORS, part.to);
        // Where a position is several columns, all channels are computed at once.
        const int own_from = l.fold > 1 ? 0 : v, own_to = l.fold > 1 ? vectors_of(l, t) : to;
        const View ring = {memory + t.left * column - 16 * v, row, column, rows};
        int next = part.y0 * w.row_stride - w.pad_top;
        for (int y = part.y0; y < part.y1; y += l.paired) {
            const int y1 = least(y + l.paired, part.y1), until = (y1 - 1) * w.row_stride - w.pad_top + w.kernel_height;
            while (next < until) {
                if (next >= 0 && next < t.height) {
                    const int last = least(until, t.height);
                    run_layer(g, l, in, ring, now, {next, last, own_from, own_to});
                    next = last;
                } else {
                    memset(ring.at(next++) + 16 * v, t.zero, (int64_t)t.width * column);
                }
            }
            run_layer(g, w, ring, out, now, {y, y1, v, to});
        }
    }
}

static void run_rows(const Program &g, const Stage &s, const Inference &now, u8 *scratch, int unit) {
    const Layer *layer = g.layer + s.first;
    int begin[MOST_STAGE_LAYERS], end[MOST_STAGE_LAYERS]; // rows of what each layer makes
    int n = s.count - 1;
    begin[n] = unit * s.size;
    end[n] = least(begin[n] + s.size, g.tensor[layer[n].out].height);
    for (; n > 0; n--) {
        const Layer &l = layer[n];
        begin[n - 1] = begin[n] * l.row_stride - l.pad_top;
        end[n - 1] = (end[n] - 1) * l.row_stride - l.pad_top + l.kernel_height;
    }
    u8 *ring = scratch;
    scratch += g.ring;
    View in = layer[0].kind == PAD ? View{} : whole(g.tensor[layer[0].in], now);
    for (n = 0; n < s.count;) {
        const int last = n + (layer[n].paired > 0);
        const Tensor &t = g.tensor[layer[last].out];
        View out;
        if (last == s.count - 1) {
            out = whole(t, now);
        } else {
            out = strip(t, begin[last], end[last], scratch);
            scratch += rounded((end[last] - begin[last]) * pitch(t));
        }
        const int from = begin[last] > 0 ? begin[last] : 0;
        const Part part = {from, least(end[last], t.height), 0, vectors_of(layer[last], t)};
        if (layer[n].paired) run_pair(g, layer[n], layer[last], in, out, now, ring, part);
        else run_layer(g, layer[n], in, out, now, part);
        in = out;
        n = last + 1;
    }
}

static void run_channels(const Program &g, const Stage &s, const Inference &now, u8 *scratch, int unit) {
    const Layer *layer = g.layer + s.first;
    const int from = unit * s.size;
    for (int n = 0; n < s.count;) {
        const int last = n + (layer[n].paired > 0);
        const Layer &l = layer[last];
        const Tensor &t = g.tensor[l.out];
        const View in = whole(g.tensor[layer[n].in], now);
        const View out = whole(t, now);
        const Part part = {0, t.height, from, least(from + s.size, vectors_of(l, t))};
        if (layer[n].paired) run_pair(g, layer[n], l, in, out, now, scratch, part);
        else run_layer(g, l, in, out, now, part);
        n = last + 1;
    }
}

static void run_unit(const Program &g, int stage, int unit, const Inference &now, u8 *scratch) {
    const Stage &s = g.stage[stage];
    if (s.by_channels) run_channels(g, s, now, scratch, unit);
    else run_rows(g, s, now, scratch, unit);
}

// --- threads --------------------------------------------------------------------------------------------------------

// Units [low, high) of a stage, which nobody has claimed, in one word that is changed at once.
struct Claim {
    int stage, low, high;
    static Claim of(uint64_t word) { return {(int)(word >> 48), (int)(word >> 24 & 0xffffff), (int)(word & 0xffffff)}; }
    uint64_t word() const { return (uint64_t)stage << 48 | (uint64_t)low << 24 | (uint64_t)high; }
};
static const Claim NOTHING = {0xffff, 0, 0};

struct Network {
    Program program;
    int helpers = 0;
    pthread_t *thread;
    int32_t *id; // the kernel's numbers of the helpers' threads
    std::atomic<int> started{0};
    std::atomic<bool> busy{false}; // the helpers help with one inference at a time
    std::atomic<bool> ending{false};
    std::atomic<uint32_t> calls{0}; // a futex: helpers sleep until it changes
    std::atomic<int> asleep{0};
    alignas(64) std::atomic<uint64_t> claim{NOTHING.word()};
    alignas(64) std::atomic<int> done{0}; // units of the stage, by helpers
    alignas(64) Inference now{};
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    u8 *spare = nullptr; // memory of inferences that ended: each begins with the address of the next
};

static void futex(std::atomic<uint32_t> &at, int operation, uint32_t value) {
    syscall(SYS_futex, (uint32_t *)&at, operation | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
}

// Claims a unit of this stage from its low or high end; false when none is left.
static bool claim(Network &n, int stage, bool low, int *unit) {
    uint64_t word = n.claim.load(std::memory_order_acquire);
    for (;;) {
        Claim c = Claim::of(word);
        if (c.stage != stage || c.low >= c.high) return false;
        *unit = low ? c.low++ : --c.high;
        if (n.claim.compare_exchange_weak(word, c.word(), std::memory_order_acq_rel)) return true;
    }
}

struct Job {
    Network *network;
    u8 *scratch;
    int number;
};

// A helper's life. Within an inference it looks for work all the time; between inferences it sleeps.
static void *help(void *argument) {
    Job *job = (Job *)argument;
    Network &n = *job->network;
    n.id[job->number] = (int32_t)syscall(SYS_gettid);
    pthread_setname_np(pthread_self(), "hv-int8"); // which `top -H` shows
    n.started.fetch_add(1);
    while (!n.ending.load(std::memory_order_acquire)) {
        const uint32_t calls = n.calls.load();
        const int stage = Claim::of(n.claim.load()).stage;
        int unit;
        if (stage == NOTHING.stage) {
            release_tiles();
            n.asleep.fetch_add(1);
            if (!n.ending.load()) futex(n.calls, FUTEX_WAIT, calls); // returns at once after a call since it was read
            n.asleep.fetch_sub(1);
        } else if (claim(n, stage, false, &unit)) {
            run_unit(n.program, stage, unit, n.now, job->scratch); // which the caller waits for, so `now` stays
            n.done.fetch_add(1, std::memory_order_release);
        } else {
            _mm_pause();
        }
    }
    free(job->scratch);
    delete job;
    return nullptr;
}

// Large memory begins where a large page can. Behind it there is more: windows read all of 64 channels where 48 are left.
static u8 *aligned(int64_t bytes) {
    const int64_t unit = bytes > 1 << 20 ? 1 << 21 : 64;
    return (u8 *)aligned_alloc(unit, (bytes / unit + 1) * unit);
}

// Memory of one inference: a line to chain it by, its arena with the borders filled in, and its thread's scratch.
static u8 *take(Network &n) {
    pthread_mutex_lock(&n.lock);
    u8 *memory = n.spare;
    if (memory) memcpy(&n.spare, memory, sizeof n.spare);
    pthread_mutex_unlock(&n.lock);
    const Program &g = n.program;
    if (memory || !(memory = aligned(64 + g.arena + g.scratch))) return memory;
    for (int i = 0; i < g.tensors; i++) {
        const Tensor &t = g.tensor[i];
        if (t.offset >= 0) memset(memory + 64 + t.offset, t.zero, pitch(t) * (t.top + t.height + t.bottom));
    }
    return memory;
}

static void give_back(Network &n, u8 *memory) {
    pthread_mutex_lock(&n.lock);
    memcpy(memory, &n.spare, sizeof n.spare);
    n.spare = memory;
    pthread_mutex_unlock(&n.lock);
}

static void run_alone(const Program &g, const Inference &now, u8 *scratch) {
    for (int stage = 0; stage < g.stages; stage++)
        for (int unit = 0; unit < g.stage[stage].units; unit++) run_unit(g, stage, unit, now, scratch);
}

static void run_helped(Network &n, const Inference &now, u8 *scratch) {
    const Program &g = n.program;
    n.now = now;
    for (int stage = 0; stage < g.stages; stage++) {
        const int units = g.stage[stage].units;
        n.done.store(0, std::memory_order_relaxed);
        n.claim.store(Claim{stage, 0, units}.word(), std::memory_order_release);
        if (stage == 0) {
            n.calls.fetch_add(1);
            if (n.asleep.load()) futex(n.calls, FUTEX_WAKE, n.helpers);
        }
        int own = 0;
        for (int unit; claim(n, stage, true, &unit); own++) run_unit(g, stage, unit, now, scratch);
        while (n.done.load(std::memory_order_acquire) + own < units) _mm_pause();
    }
    n.claim.store(NOTHING.word(), std::memory_order_release);
}

// Copies the results that layers read, too.
static void copy_results(const Program &g, const Inference &now) {
    for (int i = 0; i < g.tensors; i++) {
        const Tensor &t = g.tensor[i];
        if (t.result < 0 || t.offset < 0) continue;
        const View from = whole(t, now);
        const int64_t row = (int64_t)t.width * t.channels;
        for (int y = 0; y < t.height; y++) memcpy(result(t, now) + y * row, from.at(y), row);
    }
}

extern "C" {

// Asks the system to let this process use tiles, if the processor has them: 0, or why it does not.
int32_t network_tiles() {
#ifdef WITHOUT_TILES
    return ENOSYS;
#else
    const int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18; // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA, since Linux 5.16
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) ? errno : 0;
#endif
}

void network_close(Network *n) {
    n->ending.store(true);
    n->calls.fetch_add(1);
    futex(n->calls, FUTEX_WAKE, n->helpers);
    for (int i = 0; i < n->helpers; i++) pthread_join(n->thread[i], nullptr);
    while (u8 *memory = n->spare) {
        memcpy(&n->spare, memory, sizeof n->spare);
        free(memory);
    }
    delete[] n->thread;
    delete[] n->id;
    delete n;
}

// What the program points to must stay until it is closed. Null without memory, or if a helper cannot be started.
Network *network_open(const Program *program, int32_t helpers) {
    Network *n = new Network();
    n->program = *program;
    n->thread = new pthread_t[helpers];
    n->id = new int32_t[helpers]();
    for (int i = 0; i < helpers; i++) {
        Job *job = new Job{n, aligned(program->scratch), i};
        if (!job->scratch || pthread_create(&n->thread[i], nullptr, help, job)) {
            free(job->scratch);
            delete job;
            network_close(n);
            return nullptr;
        }
        n->helpers++;
    }
    while (n->started.load() < helpers) sched_yield();
    return n;
}

// The kernel's number of a helper's thread.
int32_t network_helper(const Network *n, int32_t number) { return n->id[number]; }

// Results of `count` images, one by one, into memory for all of each. Of callers at once the first has the helpers, the others go alone. False
// without memory.
int32_t network_run(Network *n, const u8 *images, u8 *const *results, int64_t image, int32_t count) {
    u8 *memory = take(*n);
    if (!memory) return 0;
    const Program &g = n->program;
    u8 *scratch = memory + 64 + g.arena;
    bool busy = false;
    const bool helped = n->helpers && n->busy.compare_exchange_strong(busy, true);
    for (int i = 0; i < count; i++) {
        const Inference now = {images + i * image, memory + 64, results, i};
        if (helped) run_helped(*n, now, scratch);
        else run_alone(g, now, scratch);
        copy_results(g, now);
    }
    if (helped) n->busy.store(false, std::memory_order_release);
    release_tiles();
    give_back(*n, memory);
    return 1;
}
}
