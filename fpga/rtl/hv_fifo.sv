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
endmodule
