// hv_mac: PE output channels, each the sum over beats of N products weight · activation.
//
//   a   N unsigned AB-bit activations, the first in the low bits
//   w   PE × N signed WB-bit weights, a cycle after their activations: weight n of channel p at bit (p·N + n)·WB
//   A channel's sum begins with the beat that has `first` and is complete with the one that has `last` (which may be
//   the same); `done` then marks `acc`: PE sums of ACCW bits, channel 0 in the low bits.
//
// The first LUT_PE channels multiply in look-up tables, the others in DSP blocks. With PACK, two channels p and p+1
// share a DSP block: it multiplies a by w1·2^F + w0, F = WB + AB. The low F bits of the product are w0·a; the rest is
// w1·a, less one if w0·a is negative: that borrow goes into the adder tree as a carry (hv_sum). `w` then holds for
// channel p+1 not w1 but w1 − [w0 < 0], so that the operand is {that, w0 with its sign repeated} and costs no adder.
//
// Zero gating (as in Eyeriss: Chen et al., ISSCC 2016): where an activation is zero, or no beat comes, the operands of
// its multipliers stay what they were, so that nothing switches there, and the products are cleared. Their registers
// also bring weights and activations, which come from far, near to where they are multiplied.
//
// Latency: `done` comes 8 + clog2(N) cycles after the beat with `last`.
// Constraints: with PACK 2·WB + AB ≤ 18, and the most negative weight is not used. ACCW holds every partial sum.
module hv_mac #(
  parameter N = 1,
  parameter PE = 1,
  parameter AB = 8,
  parameter WB = 4,
  parameter ACCW = 20,
  parameter LUT_PE = 0,
  parameter PACK = 0
)(
  input  wire               clk,
  input  wire               rst,
  input  wire               valid,
  input  wire               first,
  input  wire               last,
  input  wire [N*AB-1:0]    a,
  input  wire [PE*N*WB-1:0] w,
  output reg                done,
  output wire [PE*ACCW-1:0] acc
);
  localparam F = WB + AB, T = $clog2(N), SW = F + T, DELAY = 7 + T;
  generate
    if (PACK != 0 && 2*WB + AB > 18) begin : g_refused
      $error("hv_mac: weights of %0d bits do not share a multiplier", WB);
    end
  endgenerate

  reg [DELAY-1:0] valids, firsts, lasts;
  always @(posedge clk) begin
    valids <= {valids, valid};
    firsts <= {firsts, first};
    lasts  <= {lasts, last};
    done   <= valids[DELAY-1] & lasts[DELAY-1];
    if (rst) begin
      valids <= 0;
      done   <= 0;
    end
  end
  wire take = valids[DELAY-1], start = firsts[DELAY-1];

  // Activations again, beside the weights that belong to them, and which of them count.
  reg [N*AB-1:0] arrived;
  reg [N-1:0]    counts;
  always @(posedge clk) arrived <= a;
  generate
    for (genvar n = 0; n < N; n = n + 1) begin : g_counts
      always @(posedge clk) counts[n] <= valid & (|a[n*AB +: AB]);
    end
  endgenerate

  // What is multiplied: a product of look-up tables becomes zero by its activation, a block's operands both stay.
  reg [N*AB-1:0] for_luts, for_blocks;
  reg [N-1:0]    used;
  always @(posedge clk) begin
    for_luts <= arrived;
    used     <= counts;
  end
  generate
    for (genvar n = 0; n < N; n = n + 1) begin : g_operand
      always @(posedge clk) if (counts[n]) for_blocks[n*AB +: AB] <= arrived[n*AB +: AB];
    end
  endgenerate

  generate
    for (genvar p = 0; p < PE; p = p + 1) begin : g_pe
      // In a pair the even one (counted from LUT_PE) owns the multipliers.
      localparam PAIRED = PACK != 0 && p >= LUT_PE && (((p - LUT_PE) & 1) == 1 || p + 1 < PE);
      localparam UPPER = PAIRED && ((p - LUT_PE) & 1) == 1;
      wire [N*F-1:0] products;
      wire [N-1:0]   borrows;
      wire [N*F-1:0] upper;  // of a pair's lower channel: the products of the other one
      wire signed [SW-1:0] total;
      wire                 total_c;
      reg [N*WB-1:0] weights;
      for (genvar n = 0; n < N; n = n + 1) begin : g_n
        always @(posedge clk) if (counts[n]) weights[n*WB +: WB] <= w[(p*N + n)*WB +: WB];
        wire signed [AB:0] act = {1'b0, (p < LUT_PE) ? for_luts[n*AB +: AB] : for_blocks[n*AB +: AB]};
        if (UPPER) begin : g_upper
          assign products[n*F +: F] = g_pe[p-1].upper[n*F +: F];
          assign borrows[n] = g_pe[p-1].products[n*F + F - 1];
        end else if (PAIRED) begin : g_pair
          wire signed [WB-1:0]    w0 = weights[n*WB +: WB];
          wire signed [F-1:0]     low = w0;
          wire signed [WB+F-1:0]  both = {g_pe[p+1].weights[n*WB +: WB], low};
          wire signed [WB+F+AB:0] product;
          hv_mul #(.WA(WB+F), .WB(AB+1)) mul (.clk(clk), .used(used[n]), .a(both), .b(act), .p(product));
          assign products[n*F +: F] = product[F-1:0];
          assign upper[n*F +: F] = product[2*F-1:F];
          assign borrows[n] = 1'b0;
        end else begin : g_single
          wire signed [WB+AB:0] product;
          hv_mul #(.WA(WB), .WB(AB+1), .LUT(p < LUT_PE)) mul (
            .clk(clk), .used(used[n]), .a(weights[n*WB +: WB]), .b(act), .p(product)
          );
          assign products[n*F +: F] = product[F-1:0];
          assign borrows[n] = 1'b0;
        end
      end
      hv_sum #(.N(N), .W(F), .CARRY(UPPER)) sum (
        .clk(clk), .x(products), .c(borrows), .total(total), .total_c(total_c)
      );
      reg signed [ACCW-1:0] held;
      wire signed [ACCW-1:0] base = start ? {ACCW{1'b0}} : held;
      wire signed [ACCW-1:0] added = total;
      wire [ACCW:0] after = {base, 1'b1} + {added, (UPPER ? total_c : 1'b0)};
      always @(posedge clk) if (take) held <= after[ACCW:1];
      assign acc[p*ACCW +: ACCW] = held;
    end
  endgenerate
endmodule
