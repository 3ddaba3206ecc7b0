// Drives a Verilated hv_top, or its netlist: pixels in, logits out, the cycle of every event written down.
// Called from fpga/simulation/rtl_simulation.py through ctypes; the struct below and the one there must agree.
//
// A cycle: inputs are set with the clock low, handshakes are read, the clock goes up. All outputs come from registers.

#include <cstdint>
#include <memory>
#include <stdexcept>

#include "Vtop.h"
#include "verilated.h"

// Verilator's fatal errors end the call, not the process.
void vl_fatal(const char* file, int line, const char*, const char* message) {
    throw std::runtime_error(message);
}

namespace {

constexpr int kResetCycles = 4;

struct Device {
    VerilatedContext context;
    std::unique_ptr<Vtop> top;

    void cycle_up() {
        top->clk = 1;
        top->eval();
    }

    void reset() {
        top->rst = 1;
        top->s_valid = 0;
        top->s_data = 0;
        top->s_mask = 0;
        top->m_ready = 0;
        for (int i = 0; i < kResetCycles; ++i) {
            top->clk = 0;
            top->eval();
            cycle_up();
        }
        top->rst = 0;
    }
};

// One step of a linear congruential generator (Knuth's MMIX constants); its top byte is well mixed.
struct Dice {
    uint64_t state;
    uint32_t byte() {
        state = state * 6364136223846793005ULL + 1442695040888963407ULL;
        return static_cast<uint32_t>(state >> 56);
    }
};

}  // namespace

extern "C" {

struct Job {
    int64_t images, height, width, channels, classes;
    const uint8_t* pixels;    // images x height x width x channels
    const uint8_t* mask;      // images x height x width, or null for all ones
    const int64_t* arrives;   // images x height: the cycle from which a row's pixels are offered, or null
    uint32_t stall_in;        // of 256 cycles, how many have nothing to offer
    uint32_t stall_out;       // of 256 cycles, how many take nothing
    uint64_t seed;
    int64_t limit;            // cycles, at most
    int64_t beats;            // pixels, at most: to stop within an image
    int32_t* logits;          // images x classes
    int64_t* first_in;        // by image: cycle of the first pixel taken
    int64_t* last_in;         // … of the last
    int64_t* last_out;        // … of the last logit taken
    int64_t cycles;           // out
    int64_t given;            // out: logits
    int64_t misplaced;        // out: beats whose m_last is wrong
};

void* hv_new() {
    try {
        auto device = std::make_unique<Device>();
        device->top = std::make_unique<Vtop>(&device->context);
        device->reset();
        return device.release();
    } catch (const std::exception&) {
        return nullptr;
    }
}

void hv_free(void* handle) {
    auto* device = static_cast<Device*>(handle);
    device->top->final();
    delete device;
}

void hv_reset(void* handle) { static_cast<Device*>(handle)->reset(); }

void hv_run(void* handle, Job* job) {
    auto* device = static_cast<Device*>(handle);
    Vtop* top = device->top.get();
    Dice dice{job->seed};
    const int64_t row = job->width, image = job->height * row;
    const int64_t beats = job->beats < job->images * image ? job->beats : job->images * image;
    const int64_t logits = beats / image * job->classes;
    int64_t in = 0, out = 0, now = 0, misplaced = 0;
    for (; (in < beats || out < logits) && now < job->limit; ++now) {
        bool offer = in < beats && (job->arrives == nullptr || job->arrives[in / row] <= now);
        if (job->stall_in != 0) offer = (dice.byte() >= job->stall_in) && offer;
        const bool take = job->stall_out == 0 || dice.byte() >= job->stall_out;
        uint32_t pixel = 0;
        if (offer)
            for (int64_t c = job->channels - 1; c >= 0; --c) pixel = pixel << 8 | job->pixels[in * job->channels + c];
        top->s_valid = offer;
        top->s_data = pixel;
        top->s_mask = offer && (job->mask == nullptr || job->mask[in]);
        top->m_ready = take;
        top->clk = 0;
        top->eval();
        if (offer && top->s_ready) {
            if (in % image == 0) job->first_in[in / image] = now;
            if (in % image == image - 1) job->last_in[in / image] = now;
            ++in;
        }
        if (take && top->m_valid && out < logits) {
            job->logits[out] = static_cast<int32_t>(top->m_data);
            const bool last = out % job->classes == job->classes - 1;
            if (last) job->last_out[out / job->classes] = now;
            if (last != static_cast<bool>(top->m_last)) ++misplaced;
            ++out;
        }
        device->cycle_up();
    }
    top->s_valid = 0;
    top->m_ready = 0;
    job->cycles = now;
    job->given = out;
    job->misplaced = misplaced;
}

}  // extern "C"
