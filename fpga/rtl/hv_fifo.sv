// hv_fifo: first in, first out; valid/ready on the way out, credits on the way in (the writer knows that there is room).
//
// DEPTH words in a memory that is read without a clock, and one more in the output register, so that `out_data` comes
// from a register and stays until it is taken. A word is out 2 cycles after it went in.
// Constraints: DEPTH is a power of two. A write while `full` would be lost: the writer must not, and tests/rtl proves
// that with a writer that heeds `full` nothing is lost, doubled or reordered.
module hv_fifo #(
  parameter DEPTH = 16,
  parameter WIDTH = 8
)(
  input  wire             clk,
  input  wire             rst,
  input  wire             in_valid,
  input  wire [WIDTH-1:0] in_data,
  output wire             full,
  output reg              out_valid,
  input  wire             out_ready,
  output reg  [WIDTH-1:0] out_data
`ifdef FORMAL
  , output wire [$clog2(DEPTH)+1:0] held  // words that went in and were not taken
`endif
);
  localparam AW = $clog2(DEPTH);
  generate
    if (DEPTH < 2 || (DEPTH & (DEPTH - 1)) != 0) begin : g_refused
      $error("hv_fifo: %0d words are no power of two above one", DEPTH);
    end
  endgenerate
  (* ram_style = "distributed" *) reg [WIDTH-1:0] memory [0:DEPTH-1];
  reg [AW:0] written, read;
  wire empty = written == read;
  assign full = written == (read ^ {1'b1, {AW{1'b0}}});
  wire put = in_valid & ~full, get = ~empty & (~out_valid | out_ready);
  always @(posedge clk) begin
    if (put) memory[written[AW-1:0]] <= in_data;
    if (put) written <= written + 1'b1;
    if (get) begin
      out_data <= memory[read[AW-1:0]];
      read     <= read + 1'b1;
    end
    out_valid <= get | (out_valid & ~out_ready);
    if (rst) begin
      written   <= 0;
      read      <= 0;
      out_valid <= 0;
    end
  end

`ifdef FORMAL
  // Any one word, chosen when it goes in: the words in front of it are counted, so many leave, then it does, unchanged.
  wire mark = $anyseq;
  wire [AW:0] waiting = written - read;
  wire taken = out_valid & out_ready;
  reg             tracked, shown;  // shown: it is in the output register
  reg [AW:0]      place;
  reg [AW+1:0]    ahead;
  reg [WIDTH-1:0] value, last_data;
  reg             last_kept;
  initial {written, read, out_valid, tracked, shown, last_kept} = 0;
  assign held = waiting + out_valid;
  always @(posedge clk) begin
    if (put & mark & ~tracked) begin
      tracked <= 1;
      place   <= written;
      value   <= in_data;
      ahead   <= held - taken;
    end
    if (tracked & taken) ahead <= ahead - 1'b1;
    if (tracked & get & read == place & ~shown) shown <= 1;
    if (shown & taken) {tracked, shown} <= 0;
    last_kept <= out_valid & ~out_ready & ~rst;
    last_data <= out_data;
    if (rst) {tracked, shown} <= 0;
  end
  always @* begin
    assert (waiting <= DEPTH);
    assert (full == (waiting == DEPTH));
    if (last_kept) assert (out_valid && out_data == last_data);
    if (shown) assert (tracked && out_valid && ahead == 0 && out_data == value);
    if (tracked && !shown) begin
      assert (place - read < waiting);
      assert (ahead == ((place - read) & {1'b0, {(AW+1){1'b1}}}) + out_valid);
      assert (memory[place[AW-1:0]] == value);
    end
    if (tracked && ahead == 0 && out_valid) assert (out_data == value);
  end
`endif
endmodule
