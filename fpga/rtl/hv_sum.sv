// hv_sum: the sum of N signed numbers by a binary tree of adders, a register behind each: clog2(N) cycles.
//
// Every number x may come with a carry c, and is then worth x + c; the sum is given in the same way. An adder has one
// carry input, so each takes the carry of its left operand and hands on that of its right one: N carries cost nothing.
// This undoes the borrow of packed multiplication (see hv_mac). Without CARRY all c are taken as zero.
//
//   x   N numbers of W bits, the first in the low bits           total   W + clog2(N) bits
module hv_sum #(
  parameter N = 4,
  parameter W = 12,
  parameter CARRY = 0
)(
  input  wire                          clk,
  input  wire [N*W-1:0]                x,
  input  wire [N-1:0]                  c,
  output wire signed [W+$clog2(N)-1:0] total,
  output wire                          total_c
);
  localparam LEVELS = $clog2(N), TW = W + LEVELS;
  wire [(LEVELS+1)*N*TW-1:0] value;
  wire [(LEVELS+1)*N-1:0]    carry;
  generate
    for (genvar i = 0; i < N; i = i + 1) begin : g_leaf
      wire signed [TW-1:0] leaf = $signed(x[i*W +: W]);
      assign value[i*TW +: TW] = leaf;
      assign carry[i] = (CARRY != 0) ? c[i] : 1'b0;
    end
    for (genvar l = 1; l <= LEVELS; l = l + 1) begin : g_level
      localparam BELOW = (N + (1 << (l-1)) - 1) >> (l-1);
      localparam BITS = W + l;
      for (genvar j = 0; j < (BELOW + 1) / 2; j = j + 1) begin : g_node
        reg signed [BITS-1:0] r;
        wire signed [TW-1:0] made = r;
        wire signed [TW-1:0] left = value[((l-1)*N + 2*j)*TW +: TW];
        if (2*j + 1 == BELOW) begin : g_alone
          always @(posedge clk) r <= left;
        end else if (CARRY != 0) begin : g_carry
          // Written with one more low bit, so that synthesis makes one carry chain of it.
          wire [BITS-1:0] right = value[((l-1)*N + 2*j + 1)*TW +: BITS];
          wire [BITS:0] sum = {left[BITS-1:0], 1'b1} + {right, carry[(l-1)*N + 2*j]};
          always @(posedge clk) r <= sum[BITS:1];
        end else begin : g_plain
          always @(posedge clk) r <= left + $signed(value[((l-1)*N + 2*j + 1)*TW +: TW]);
        end
        assign value[(l*N + j)*TW +: TW] = made;
        if (CARRY != 0) begin : g_pass
          reg q;
          always @(posedge clk) q <= carry[(l-1)*N + ((2*j + 1 == BELOW) ? 2*j : 2*j + 1)];
          assign carry[l*N + j] = q;
        end else begin : g_none
          assign carry[l*N + j] = 1'b0;
        end
      end
    end
  endgenerate
  assign total   = value[LEVELS*N*TW +: TW];
  assign total_c = carry[LEVELS*N];
endmodule
