/* Evaluates a netlist of FPGA cells, clock cycle by clock cycle, for 64 independent copies of the chip at once.
 *
 * Every net is one 64-bit word, bit L of which belongs to copy ("lane") L. A look-up table is then a few bitwise
 * operations for all lanes; multipliers and block RAMs are computed lane by lane from transposed words. There is one
 * clock, no delays, and two values: a cycle settles the combinational cells in the order that the caller gives, then
 * clocks all registers at once. Since nothing is shared with Verilator or with the RTL, agreement of the three is
 * evidence. What toggled is counted on the way.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t word;
enum { LANES = 64 };

/* Combinational cells: eight integers each. */
enum { LUT = 0, MUX = 1, CARRY = 2, MEMORY = 3, MULTIPLY = 4 };
struct op {
    int32_t kind, out;
    int32_t in[4];
    int32_t init; /* LUT, CARRY: truth table; MEMORY: 4*number + bit; MULTIPLY: number */
    int32_t more; /* CARRY: carry out net */
    int32_t carry_in, inject;
};

enum { CE_INVERTED = 1, LSR_INVERTED = 2, SETS = 4 };
struct flip_flop {
    int32_t q, d, enable, reset, flags;
};

struct memory { /* 16 words of 4 bits, read at once, written at the clock */
    int32_t data[4], write_address[4], write;
    word cells[16][4];
};

enum { REG_A = 1, REG_B = 2, REG_PIPE = 4, REG_OUT = 8 };
struct multiplier {
    int32_t a[18], b[18], p[36], signed_a, signed_b, registers;
    int64_t held_a[LANES], held_b[LANES], pipe[LANES], out[LANES];
};

struct port {
    int32_t address[14], enable, write, reset, width, mode; /* mode: 0 keeps, 1 shows the new word, 2 the old */
    int32_t registered; /* a register of its own behind the word that was read */
    int32_t data[36], out[36];
};
struct block_ram {
    struct port port[2]; /* of 36 bits wide ports, port 0 writes and port 1 reads */
    int32_t written;     /* else all lanes read one copy */
    uint32_t *cells;     /* 1,024 words of 18 bits, per lane if `written` */
    word held[2][LANES]; /* what was read, where a register shows it a cycle later */
};

struct netlist {
    int32_t nets, ops, flip_flops, memories, multipliers, block_rams;
    struct op *op;
    struct flip_flop *flip_flop;
    struct memory *memory;
    struct multiplier *multiplier;
    struct block_ram *block_ram;
    word *value, *before, *next;
    uint64_t *toggles;         /* per net, over all lanes, while counting */
    uint64_t *operations;      /* per multiplier: operand changes, over all lanes */
    uint64_t *accesses;        /* per block RAM port, two each: enabled clocks, over all lanes */
};

static void transpose(word m[64]) {
    /* Swap ever smaller blocks (Hacker's Delight, section 7-3, in this file's bit order). */
    word mask = 0x00000000FFFFFFFFull;
    for (int step = 32; step; step >>= 1, mask ^= mask << step)
        for (int k = 0; k < 64; k = ((k | step) + 1) & ~step) {
            word t = ((m[k] >> step) ^ m[k | step]) & mask;
            m[k] ^= t << step;
            m[k | step] ^= t;
        }
}

static inline word mux(word zero, word one, word select) { return zero ^ ((zero ^ one) & select); }

static inline word lut(uint32_t table, word a, word b, word c, word d) {
    word at[8];
    for (int i = 0; i < 8; i++) {
        word low = -(word)(table >> (2 * i) & 1), high = -(word)(table >> (2 * i + 1) & 1);
        at[i] = mux(low, high, a);
    }
    for (int i = 0; i < 4; i++) at[i] = mux(at[2 * i], at[2 * i + 1], b);
    return mux(mux(at[0], at[1], c), mux(at[2], at[3], c), d);
}

/* Per lane, the integer that `count` nets, least significant first, spell. */
static void gather(const word *value, const int32_t *nets, int count, word lane[LANES]) {
    memset(lane, 0, LANES * sizeof(word));
    for (int i = 0; i < count; i++) lane[i] = value[nets[i]];
    transpose(lane);
}

static void scatter(word *value, const int32_t *nets, int count, word lane[LANES]) {
    transpose(lane);
    for (int i = 0; i < count; i++)
        if (nets[i] > 1) value[nets[i]] = lane[i];
}

static void operands(const struct netlist *n, const struct multiplier *m, int64_t a[LANES], int64_t b[LANES]) {
    int32_t nets[38];
    word lane[LANES];
    memcpy(nets, m->a, sizeof m->a);
    memcpy(nets + 18, m->b, sizeof m->b);
    nets[36] = m->signed_a;
    nets[37] = m->signed_b;
    gather(n->value, nets, 38, lane);
    for (int l = 0; l < LANES; l++) {
        int64_t x = lane[l] & 0x3FFFF, y = lane[l] >> 18 & 0x3FFFF;
        a[l] = lane[l] >> 36 & 1 && x >> 17 ? x - (1 << 18) : x;
        b[l] = lane[l] >> 37 & 1 && y >> 17 ? y - (1 << 18) : y;
    }
}

static void product_out(struct netlist *n, const struct multiplier *m, const int64_t p[LANES]) {
    word lane[LANES];
    for (int l = 0; l < LANES; l++) lane[l] = (word)p[l];
    scatter(n->value, m->p, 36, lane);
}

static void settle(struct netlist *n) {
    word *v = n->value;
    for (int32_t i = 0; i < n->ops; i++) {
        const struct op *o = &n->op[i];
        word a = v[o->in[0]], b = v[o->in[1]], c = v[o->in[2]], d = v[o->in[3]];
        switch (o->kind) {
        case LUT: v[o->out] = lut((uint32_t)o->init, a, b, c, d); break;
        case MUX: v[o->out] = mux(a, b, c); break;
        case CARRY: { /* half of a carry cell: the table's value, the sum, and the carry that goes on */
            word full = lut((uint32_t)o->init, a, b, c, d), in = v[o->carry_in];
            word pass = o->inject ? 0 : lut((uint32_t)o->init & 15, a, b, 0, 0);
            v[o->out] = full ^ (o->inject ? 0 : in);
            v[o->more] = (~full & pass) | (full & in);
            break;
        }
        case MEMORY: {
            const struct memory *m = &n->memory[o->init >> 2];
            word at[16];
            for (int e = 0; e < 16; e++) at[e] = m->cells[e][o->init & 3];
            for (int e = 0; e < 8; e++) at[e] = mux(at[2 * e], at[2 * e + 1], a);
            for (int e = 0; e < 4; e++) at[e] = mux(at[2 * e], at[2 * e + 1], b);
            v[o->out] = mux(mux(at[0], at[1], c), mux(at[2], at[3], c), d);
            break;
        }
        case MULTIPLY: { /* one without any register */
            struct multiplier *m = &n->multiplier[o->init];
            int64_t x[LANES], y[LANES];
            operands(n, m, x, y);
            for (int l = 0; l < LANES; l++) x[l] *= y[l];
            product_out(n, m, x);
            break;
        }
        }
    }
}

static void clock_memories(struct netlist *n) {
    const word *v = n->value;
    for (int32_t i = 0; i < n->memories; i++) {
        struct memory *m = &n->memory[i];
        word write = v[m->write];
        if (!write) continue;
        for (int e = 0; e < 16; e++) {
            word here = write;
            for (int k = 0; k < 4; k++) here &= e >> k & 1 ? v[m->write_address[k]] : ~v[m->write_address[k]];
            for (int k = 0; k < 4; k++) m->cells[e][k] = mux(m->cells[e][k], v[m->data[k]], here);
        }
    }
}

static void clock_multipliers(struct netlist *n, int counting) {
    for (int32_t i = 0; i < n->multipliers; i++) {
        struct multiplier *m = &n->multiplier[i];
        int64_t a[LANES], b[LANES];
        operands(n, m, a, b);
        for (int l = 0; l < LANES; l++) {
            if (counting) n->operations[i] += a[l] != m->held_a[l] || b[l] != m->held_b[l];
            int64_t x = m->registers & REG_A ? m->held_a[l] : a[l], y = m->registers & REG_B ? m->held_b[l] : b[l];
            int64_t p = m->registers & REG_PIPE ? m->pipe[l] : x * y;
            m->out[l] = p;
            m->pipe[l] = x * y;
            m->held_a[l] = a[l];
            m->held_b[l] = b[l];
        }
    }
}

/* What the registers hold, after the clock, on the product's nets. */
static void show_multipliers(struct netlist *n) {
    for (int32_t i = 0; i < n->multipliers; i++) {
        const struct multiplier *m = &n->multiplier[i];
        int64_t p[LANES];
        if (m->registers & REG_OUT) product_out(n, m, m->out);
        else if (m->registers & REG_PIPE) product_out(n, m, m->pipe);
        else if (m->registers & REG_A) {
            for (int l = 0; l < LANES; l++) p[l] = m->held_a[l] * m->held_b[l];
            product_out(n, m, p);
        }
    }
}

/* The place of a word of `width` bits below 18 within 18: narrow ones lie in the low 8 bits of each half. */
static inline int place(int width, uint32_t address) {
    int at = 9 * (address >> 3 & 1);
    if (width <= 4) at += 4 * (address >> 2 & 1);
    if (width <= 2) at += 2 * (address >> 1 & 1);
    if (width == 1) at += address & 1;
    return at;
}

static uint64_t read_word(const uint32_t *cells, int width, uint32_t address) {
    if (width == 36) return cells[address >> 5 << 1] | (uint64_t)cells[(address >> 5 << 1) + 1] << 18;
    if (width == 18) return cells[address >> 4];
    return cells[address >> 4] >> place(width, address) & ((1u << width) - 1);
}

static void write_word(uint32_t *cells, int width, uint32_t address, uint64_t data) {
    if (width >= 18) { /* four, or two, bytes of nine bits, each with its enable among the low address bits */
        uint32_t first = width == 36 ? address >> 5 << 1 : address >> 4;
        for (int byte = 0; byte < width / 9; byte++)
            if (address >> byte & 1) {
                uint32_t *cell = &cells[first + byte / 2];
                int at = 9 * (byte & 1);
                *cell = (*cell & ~(0x1FFu << at)) | (uint32_t)(data >> 9 * byte & 0x1FF) << at;
            }
        return;
    }
    uint32_t mask = ((1u << width) - 1) << place(width, address);
    cells[address >> 4] = (cells[address >> 4] & ~mask) | ((uint32_t)data << place(width, address) & mask);
}

static void clock_block_ram(struct netlist *n, int32_t number, int counting) {
    struct block_ram *ram = &n->block_ram[number];
    word address[2][LANES], data[2][LANES], out[2][LANES], old[2];
    const word *v = n->value;
    int wide = ram->port[1].width == 36;
    for (int p = 0; p < 2; p++) {
        struct port *port = &ram->port[p];
        word enable = v[port->enable];
        old[p] = enable;
        if (counting) n->accesses[2 * number + p] += (uint64_t)__builtin_popcountll(enable);
        gather(v, port->address, 14, address[p]);
        if (port->registered) memcpy(out[p], ram->held[p], sizeof out[p]);
        else gather(v, port->out, 36, out[p]);
        word resets = v[port->reset];
        for (int l = 0; l < LANES; l++) {
            const uint32_t *cells = ram->cells + (ram->written ? 1024 * l : 0);
            word on = enable >> l & 1, writes = on & v[port->write] >> l;
            if (resets >> l & 1) out[p][l] = 0;
            else if (on && (!writes || port->mode == 2) && (port->width < 36 || p == 1))
                out[p][l] = read_word(cells, port->width, (uint32_t)address[p][l]);
        }
    }
    for (int p = 0; p < 2 && ram->written; p++) {
        struct port *port = &ram->port[p];
        word writes = old[p] & v[port->write];
        if (!writes) continue;
        gather(v, port->data, 36, data[p]);
        for (int l = 0; l < LANES; l++)
            if (writes >> l & 1) {
                uint32_t *cells = ram->cells + 1024 * l;
                write_word(cells, port->width, (uint32_t)address[p][l], data[p][l]);
                if (port->mode == 1 && port->width < 36) out[p][l] = read_word(cells, port->width, (uint32_t)address[p][l]);
            }
    }
    /* Into `next`, for other cells still look at this cycle's values. */
    for (int p = wide ? 1 : 0; p < 2; p++) {
        word shown[LANES];
        memcpy(shown, ram->port[p].registered ? ram->held[p] : out[p], sizeof shown);
        memcpy(ram->held[p], out[p], sizeof out[p]);
        scatter(n->next, ram->port[p].out, 36, shown);
    }
}

/* One clock edge: registers take what has settled. */
static void tick(struct netlist *n, int counting) {
    word *v = n->value, *next = n->next;
    for (int32_t i = 0; i < n->flip_flops; i++) {
        const struct flip_flop *f = &n->flip_flop[i];
        word enable = v[f->enable] ^ -(word)(f->flags & CE_INVERTED ? 1 : 0);
        word reset = v[f->reset] ^ -(word)(f->flags & LSR_INVERTED ? 1 : 0);
        word to = f->flags & SETS ? ~(word)0 : 0;
        next[f->q] = mux(mux(v[f->q], v[f->d], enable), to, reset);
    }
    clock_memories(n);
    clock_multipliers(n, counting);
    for (int32_t i = 0; i < n->block_rams; i++) clock_block_ram(n, i, counting);
    for (int32_t i = 0; i < n->flip_flops; i++) v[n->flip_flop[i].q] = next[n->flip_flop[i].q];
    for (int32_t i = 0; i < n->block_rams; i++)
        for (int p = 0; p < 2; p++)
            for (int k = 0; k < 36; k++) {
                int32_t net = n->block_ram[i].port[p].out[k];
                if (net > 1) v[net] = next[net];
            }
    show_multipliers(n);
}

static void count(struct netlist *n) {
    for (int32_t i = 2; i < n->nets; i++) {
        n->toggles[i] += (uint64_t)__builtin_popcountll(n->value[i] ^ n->before[i]);
        n->before[i] = n->value[i];
    }
}

/* Free running: `stimulus` gives, cycle by cycle, a word for each of `inputs` nets. */
void netlist_cycles(struct netlist *n, int64_t cycles, const int32_t *nets, int32_t inputs, const word *stimulus,
                    int32_t counting) {
    for (int64_t c = 0; c < cycles; c++) {
        for (int32_t i = 0; i < inputs; i++) n->value[nets[i]] = stimulus[c * inputs + i];
        settle(n);
        if (counting) count(n);
        else memcpy(n->before, n->value, (size_t)n->nets * sizeof(word));
        tick(n, counting);
    }
    settle(n);
}

struct stream {
    int32_t reset, in_valid, in_ready, in_bits, out_valid, out_ready, out_bits;
    int32_t in_data[64], out_data[64];
};

/* Every lane is offered its `beats` input words without pause, and takes outputs as they come, until lane 0 has had
 * `results` of them and every other lane too, or `limit` cycles are over. Toggles count from the cycle in which lane 0
 * had `from` results to that in which it had `until`. Returns the cycles taken, -1 past the limit; `counted` is that of
 * the cycles counted. */
int64_t netlist_stream(struct netlist *n, const struct stream *s, const uint64_t *words, int64_t beats,
                       uint64_t *taken, int64_t results, int64_t from, int64_t until, int64_t limit,
                       int64_t *counted) {
    int64_t sent[LANES] = {0}, had[LANES] = {0}, cycle;
    word *v = n->value;
    *counted = 0;
    v[s->out_ready] = ~(word)0;
    v[s->reset] = ~(word)0;
    v[s->in_valid] = 0;
    for (int i = 0; i < 16; i++) {
        settle(n);
        tick(n, 0);
    }
    v[s->reset] = 0;
    for (cycle = 0; cycle < limit; cycle++) {
        word lane[LANES], valid = 0;
        for (int l = 0; l < LANES; l++) {
            lane[l] = sent[l] < beats ? words[l * beats + sent[l]] : 0;
            valid |= (word)(sent[l] < beats) << l;
        }
        v[s->in_valid] = valid;
        scatter(v, s->in_data, s->in_bits, lane);
        settle(n);
        int counting = had[0] >= from && had[0] < until;
        if (counting) count(n), ++*counted;
        else memcpy(n->before, v, (size_t)n->nets * sizeof(word));
        word accepted = valid & v[s->in_ready], given = v[s->out_valid];
        if (given) gather(v, s->out_data, s->out_bits, lane);
        int unfinished = 0;
        for (int l = 0; l < LANES; l++) {
            sent[l] += accepted >> l & 1;
            if (given >> l & 1 && had[l] < results) taken[l * results + had[l]++] = lane[l];
            unfinished |= had[l] < results;
        }
        if (!unfinished) return cycle + 1;
        tick(n, counting);
    }
    return -1;
}
