// hv_window: the rows of a stage's input, and the order in which its convolution reads them.
//
// Input   H x W x CIN unsigned AB-bit activations in HWC order, IN_LANES a beat, any number of images one behind the
//         other. There is no back-pressure inside a row: a producer begins a row only when this stage has a free slot
//         for it. It counts: RING slots at the beginning, one more with each pulse on `freed`.
// Output  for each row, column, group of output channels (GROUPS), kernel position and CH input channels one beat of
//         TAPS x CH activations, zeros where the kernel reaches beyond the image:
//           TAPS = 1     kernel positions one after the other, row by row
//           TAPS = K     one column of the kernel at once, columns one after the other; tap 0 is the upper one
//           TAPS = K·K   all at once, tap = row · K + column; CH must be CIN
//         `first` and `last` mark a group's beats. `weight` is the index of a beat within its position, 0 to
//         GROUPS x beats − 1, a cycle before the beat itself, so that hv_rom's word comes a cycle after it (hv_mac).
//
// Rows    Row r lies in bank r mod BANKS: one bank for TAPS = 1, else K of them, so that any K rows can be read at
//         once. A word holds WORD = max(CH, IN_LANES) activations; a row's words begin at a power of two.
// Flow    A row of the output begins when the input rows it needs have arrived (`lead` counts those not yet asked for)
//         and the next stage has a free slot (`room`), if the row gives any (with POOL only the lower of two does). That
//         decision is a register made during the row before, so rows follow one another without a gap; the price is
//         that a row takes at least 3 cycles. Input rows that no later row needs are freed one a cycle.
//
// Timing  a beat leaves 4 cycles after its turn in the schedule, 5 for K·K. A row takes W' · GROUPS · beats
//         cycles, W' its columns; for K·K also K − 1 to fill the window.
// Limits  one of CH and IN_LANES divides the other; RING is a multiple of BANKS and at least K + 1.
module hv_window #(
  parameter H = 8,
  parameter W = 8,
  parameter CIN = 4,
  parameter K = 3,
  parameter PAD = 1,
  parameter AB = 8,
  parameter IN_LANES = 1,
  parameter TAPS = 1,
  parameter CH = 1,
  parameter GROUPS = 1,
  parameter RING = 6,
  parameter POOL = 0,
  parameter ROOM = 4,
  parameter WEIGHTS = 9
)(
  input  wire                                          clk,
  input  wire                                          rst,
  input  wire                                          in_valid,
  input  wire [IN_LANES*AB-1:0]                        in_data,
  output reg                                           freed,
  input  wire                                          room_freed,
  output wire [((WEIGHTS > 1) ? $clog2(WEIGHTS) : 1)-1:0] weight,
  output wire                                          out_valid,
  output wire                                          out_first,
  output wire                                          out_last,
  output wire [TAPS*CH*AB-1:0]                         out_data
);
  localparam OH = H + 2*PAD - K + 1, OW = W + 2*PAD - K + 1;
  localparam ALL = (K > 1 && TAPS == K*K) ? 1 : 0;
  localparam ROWS = (TAPS == 1) ? 1 : K;  // read at once
  localparam BANKS = ROWS, SLOTS = RING / BANKS;
  localparam WORD = (CH > IN_LANES) ? CH : IN_LANES;
  localparam GATHER = WORD / IN_LANES, PARTS = WORD / CH, PER = CIN / WORD;  // words of a pixel
  localparam ROW_WORDS = W * PER, COLUMNS = ALL ? OW + K - 1 : OW;
  localparam XB = (ROW_WORDS > 1) ? $clog2(ROW_WORDS) : 1;
  localparam SB = (SLOTS > 1) ? $clog2(SLOTS) : 1, BB = (BANKS > 1) ? $clog2(BANKS) : 1;
  localparam CXB = $clog2(W + 2*PAD + K) + 1, CYB = $clog2(H + 2*PAD + K) + 1;  // signed coordinates
  localparam ROW_CYCLES = ALL ? K - 1 + OW*GROUPS : OW*WEIGHTS, LB = $clog2(ROW_CYCLES + 1);
  localparam WB = (WEIGHTS > 1) ? $clog2(WEIGHTS) : 1, FB = $clog2(GROUPS + 1), KB = $clog2(K + 1);
  localparam PB = $clog2(PER + 1), QB = $clog2(PARTS + 1), GB = $clog2(GATHER + 1);
  localparam OB = $clog2(COLUMNS + 1), RB = $clog2(RING + 1), MB = $clog2(ROOM + 1);
  generate
    if (H + 2*PAD < K || W + 2*PAD < K || PAD >= K) begin : g_kernel
      $error("hv_window: a kernel of %0d does not fit", K);
    end
    if (WORD % IN_LANES != 0 || WORD % CH != 0 || CIN % WORD != 0) begin : g_word
      $error("hv_window: %0d lanes in and %0d channels at once do not divide one another", IN_LANES, CH);
    end
    if (RING % BANKS != 0 || RING < K + 1 || (TAPS != 1 && TAPS != K && TAPS != K*K) || (ALL && CH != CIN)) begin : g_ring
      $error("hv_window: %0d taps of %0d in %0d slots", TAPS, K, RING);
    end
  endgenerate

  // ------------------------------------------------------------------ rows in
  reg [GB-1:0]      gathered;
  reg [XB-1:0]      write_x;
  reg [SB-1:0]      write_slot;
  reg [BB-1:0]      write_bank;
  reg [BANKS-1:0]   write;
  reg [SB+XB-1:0]   write_at;
  reg [WORD*AB-1:0] write_word;
  reg               row_in, arrived;
  wire [WORD*AB-1:0] word;
  generate
    if (GATHER > 1) begin : g_gather
      reg [(WORD-IN_LANES)*AB-1:0] earlier;
      assign word = {in_data, earlier};
      always @(posedge clk) if (in_valid) earlier <= word[WORD*AB-1:IN_LANES*AB];
    end else begin : g_whole
      assign word = in_data;
    end
  endgenerate
  wire word_in = in_valid & (GATHER == 1 || gathered == GATHER - 1);
  wire row_whole = word_in & (write_x == ROW_WORDS - 1);
  always @(posedge clk) begin
    if (in_valid) gathered <= word_in ? 0 : gathered + 1'b1;
    if (word_in) write_x <= row_whole ? 0 : write_x + 1'b1;
    if (row_whole) begin
      write_bank <= (write_bank == BANKS - 1) ? 0 : write_bank + 1'b1;
      if (write_bank == BANKS - 1) write_slot <= (write_slot == SLOTS - 1) ? 0 : write_slot + 1'b1;
    end
    write      <= word_in ? {{BANKS{1'b0}}, 1'b1} << write_bank : 0;
    write_at   <= {write_slot, write_x};
    write_word <= word;
    row_in     <= row_whole;
    arrived    <= row_in;
    if (rst) begin
      gathered   <= 0;
      write_x    <= 0;
      write_slot <= 0;
      write_bank <= 0;
      write      <= 0;
      row_in     <= 0;
      arrived    <= 0;
    end
  end

  // ------------------------------------------------------------------ which row may begin
  // Slots are stepped through as (slot, bank); an image's first row lies K − 2·PAD slots behind the last one's.
  localparam NEW_BANK = (2*K*PAD + K - 2*PAD) % BANKS;
  localparam NEW_SLOT = ((K - 2*PAD + RING*PAD) / BANKS) % SLOTS;
  localparam START = RING + PAD - K;  // so that the first image's first row begins in slot 0
  localparam NEED_FIRST = (K - PAD < H) ? K - PAD : H;
  localparam FREE_LAST = (OH - 1 > PAD) ? H - (OH - 1 - PAD) : H;
  reg                  run, go, begun, settling, gives;
  reg [RB-1:0]         lead, need, owed;
  reg [RB-1:0]         frees;
  reg [MB-1:0]         room;
  reg [CYB-1:0]        next_y;
  reg [BB-1:0]         bank, next_bank;
  reg [SB-1:0]         slot, next_slot;
  reg signed [CYB-1:0] top;  // image row of the kernel's first
  // A row's end is counted down to, and known a cycle before: all that begins and ends rows hangs on it.
  reg [LB-1:0] row_left;
  reg row_last;
  wire begin_row = go & (~run | row_last);
  wire first_next = next_y == 0;
  wire [BB:0] bank_sum = bank + (first_next ? NEW_BANK : (BANKS > 1) ? 1 : 0);
  wire bank_over = bank_sum >= BANKS;
  wire [SB+1:0] slot_sum = slot + (first_next ? NEW_SLOT : (BANKS > 1) ? 0 : 1) + ((BANKS > 1) ? bank_over : 0);
  always @(posedge clk) begin
    next_bank <= bank_over ? bank_sum - BANKS : bank_sum;
    next_slot <= (slot_sum >= SLOTS) ? slot_sum - SLOTS : slot_sum;
    need      <= first_next ? NEED_FIRST : (H + PAD >= K && next_y <= H + PAD - K) ? 1 : 0;
    gives     <= (POOL == 0) | next_y[0];
    // What a row takes is booked a cycle after it began; `settling` keeps `go` from looking in between.
    lead      <= lead + arrived - (begun ? need : 0);
    room      <= room + room_freed - (begun & gives);
    begun     <= begin_row;
    settling  <= begin_row;
    go        <= ~begin_row & ~settling & (lead >= need) & (~gives | room != 0);
    if (begin_row) begin
      run    <= 1;
      next_y <= (next_y == OH - 1) ? 0 : next_y + 1'b1;
      top    <= $signed(next_y) - PAD;
      bank   <= next_bank;
      slot   <= next_slot;
      frees  <= (next_y == OH - 1) ? FREE_LAST : (next_y >= PAD) ? 1 : 0;
    end else if (row_last) run <= 0;
    row_left <= begin_row ? ROW_CYCLES - 1 : row_left - run;
    row_last <= begin_row ? ROW_CYCLES == 1 : run & (row_left == 1);
    freed <= owed != 0;
    owed  <= owed + (row_last ? frees : 0) - (owed != 0);
    if (rst) begin
      run      <= 0;
      row_last <= 0;
      go       <= 0;
      begun    <= 0;
      settling <= 1;
      lead     <= 0;
      room     <= ROOM;
      owed     <= 0;
      freed    <= 0;
      next_y   <= 0;
      bank     <= START % BANKS;
      slot     <= START / BANKS;
    end
  end

  // ------------------------------------------------------------------ schedule of a row
  reg [QB-1:0] part;
  reg [PB-1:0] at;  // word of the pixel
  reg [KB-1:0] kx, ky;
  reg [FB-1:0] group;
  reg [OB-1:0] column;
  reg [WB-1:0] beat;
  reg [XB-1:0] x, x0;  // word of the row, and that of the window's left column: modulo its size, masked where outside
  reg signed [CXB-1:0] cx, cx0;  // the same in pixels
  reg [SB-1:0] slot_k;
  reg signed [CYB-1:0] cy;
  reg starts;
  // Whether a counter stands at its end is a register too; those of one value are constants, so that synthesis sees it.
  reg part_end, at_end, kx_end, ky_end, group_end;
  wire part_last = PARTS == 1 || part_end;
  wire pixel_last = part_last & (PER == 1 || at_end);
  wire line_last = pixel_last & (ALL != 0 || K == 1 || kx_end);
  wire group_last = line_last & (TAPS != 1 || K == 1 || ky_end);
  wire filling = (ALL != 0) & (column < K - 1);
  wire position_last = group_last & (filling | GROUPS == 1 | group_end);
  localparam signed [CXB-1:0] LEFT = -PAD;
  localparam [XB-1:0] LEFT_WORD = -PAD * PER;
  always @(posedge clk) begin
    if (run) begin
      part   <= part_last ? 0 : part + 1'b1;
      part_end <= ~part_last & (part + 2 == PARTS);
      starts <= group_last;
      if (~filling) beat <= position_last ? 0 : beat + 1'b1;
      if (part_last) begin
        at <= pixel_last ? 0 : at + 1'b1;
        at_end <= ~pixel_last & (at + 2 == PER);
        x  <= x + 1'b1;
      end
      if (pixel_last) begin
        kx <= line_last ? 0 : kx + 1'b1;
        kx_end <= ~line_last & (kx + 2 == K);
        cx <= cx + 1'b1;
      end
      if (line_last) begin
        x  <= x0;
        cx <= cx0;
        ky <= group_last ? 0 : ky + 1'b1;
        ky_end <= ~group_last & (ky + 2 == K);
        cy <= cy + 1'b1;
        slot_k <= (slot_k == SLOTS - 1) ? 0 : slot_k + 1'b1;
      end
      if (group_last) begin
        group  <= position_last ? 0 : group + 1'b1;
        group_end <= ~position_last & (group + 2 == GROUPS);
        cy     <= top;
        slot_k <= slot;
      end
      if (position_last) begin
        column <= column + 1'b1;
        x      <= x0 + PER;
        x0     <= x0 + PER;
        cx     <= cx0 + 1'b1;
        cx0    <= cx0 + 1'b1;
      end
    end
    if (rst | row_last) begin
      column <= 0;
      x      <= LEFT_WORD;
      x0     <= LEFT_WORD;
      cx     <= LEFT;
      cx0    <= LEFT;
    end
    if (begin_row) begin
      cy     <= $signed(next_y) - PAD;
      slot_k <= next_slot;
    end
    if (rst) begin
      part   <= 0;
      at     <= 0;
      kx     <= 0;
      ky     <= 0;
      group  <= 0;
      beat   <= 0;
      starts <= 1;
      {part_end, at_end, kx_end, ky_end, group_end} <= 0;
    end
  end

  // ------------------------------------------------------------------ addresses, memories
  // Stage 1 addresses, 2 memory, 3 the register behind it, 4 rows in order and zeros, [5 window].
  localparam DEPTH = 4 + ALL;
  reg [DEPTH-1:0] valids, firsts, lasts;
  reg [XB-1:0]    x1;
  reg             inside1, inside2, inside3, step1, step2, step3, step4;
  reg [ROWS-1:0]  rows1, rows2, rows3;
  reg [BB-1:0]    bank1, bank2, bank3;
  reg [QB-1:0]    part1, part2, part3;
  reg [WB-1:0]    beat1, beat2, beat3, beat4;
  reg [BANKS*SB-1:0]      slots1;
  reg [BANKS*WORD*AB-1:0] read3;
  assign weight = ALL ? beat4 : beat3;
  assign {out_valid, out_first, out_last} = {valids[DEPTH-1], firsts[DEPTH-1], lasts[DEPTH-1]};
  always @(posedge clk) begin
    valids  <= {valids, run & ~filling};
    firsts  <= {firsts, starts};
    lasts   <= {lasts, group_last};
    x1      <= x;
    inside1 <= (cx >= 0) & (cx < W);
    step1   <= run & (filling | group == 0);
    bank1   <= bank;
    part1   <= part;
    beat1   <= beat;
    {inside2, inside3} <= {inside1, inside2};
    {rows2, rows3} <= {rows1, rows2};
    {bank2, bank3} <= {bank1, bank2};
    {part2, part3} <= {part1, part2};
    {beat2, beat3, beat4} <= {beat1, beat2, beat3};
    {step2, step3, step4} <= {step1, step2, step3};
    if (rst) valids <= 0;
  end
  generate
    if (TAPS == 1) begin : g_one
      always @(posedge clk) begin
        rows1  <= (cy >= 0) & (cy < H);
        slots1 <= slot_k;
      end
    end else begin : g_several
      wire [SB-1:0] slot_over = (slot == SLOTS - 1) ? 0 : slot + 1'b1;
      for (genvar r = 0; r < ROWS; r = r + 1) begin : g_row
        always @(posedge clk) begin
          rows1[r] <= (top + r >= 0) & (top + r < H);
          slots1[r*SB +: SB] <= (bank <= r) ? slot : slot_over;
        end
      end
    end
    for (genvar b = 0; b < BANKS; b = b + 1) begin : g_bank
      (* no_rw_check *) reg [WORD*AB-1:0] memory [0:(SLOTS << XB)-1];
      reg [WORD*AB-1:0] read;
      always @(posedge clk) begin
        if (write[b]) memory[write_at] <= write_word;
        read <= memory[{slots1[b*SB +: SB], x1}];
        read3[b*WORD*AB +: WORD*AB] <= read;
      end
    end
  endgenerate

  // Rows in kernel order, the wanted part of a word, zeros outside the image.
  reg [ROWS*CH*AB-1:0] lines;
  generate
    for (genvar t = 0; t < ROWS; t = t + 1) begin : g_tap
      wire [(BANKS+1)*WORD*AB-1:0] chosen;  // so far, by bank
      wire [(PARTS+1)*CH*AB-1:0]   wanted;  // so far, by part of the word
      assign chosen[WORD*AB-1:0] = 0;
      assign wanted[CH*AB-1:0] = 0;
      for (genvar b = 0; b < BANKS; b = b + 1) begin : g_choose
        assign chosen[(b+1)*WORD*AB +: WORD*AB] = chosen[b*WORD*AB +: WORD*AB]
          | ((bank3 == (b + BANKS - t) % BANKS) ? read3[b*WORD*AB +: WORD*AB] : {(WORD*AB){1'b0}});
      end
      for (genvar q = 0; q < PARTS; q = q + 1) begin : g_part
        assign wanted[(q+1)*CH*AB +: CH*AB] = wanted[q*CH*AB +: CH*AB]
          | ((part3 == q) ? chosen[(BANKS*WORD + q*CH)*AB +: CH*AB] : {(CH*AB){1'b0}});
      end
      always @(posedge clk)
        lines[t*CH*AB +: CH*AB] <= (inside3 & rows3[t]) ? wanted[PARTS*CH*AB +: CH*AB] : {(CH*AB){1'b0}};
    end
  endgenerate
  generate
    if (ALL != 0) begin : g_all
      reg [TAPS*CH*AB-1:0] window;
      for (genvar r = 0; r < K; r = r + 1) begin : g_row
        always @(posedge clk)
          if (step4) window[r*K*CH*AB +: K*CH*AB] <= {lines[r*CH*AB +: CH*AB], window[(r*K+1)*CH*AB +: (K-1)*CH*AB]};
      end
      assign out_data = window;
    end else begin : g_lines
      assign out_data = lines;
    end
  endgenerate
endmodule
