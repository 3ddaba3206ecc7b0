// hv_requantise: sums of PE channels, all at once, become activations, LANES a beat, in channel order.
//
//   t = sum + bias        u = clip(t >> PRE_SHIFT, 0, 2^17 − 1)
//   y = min((u · multiplier + 2^(SHIFT−1)) >> SHIFT, 2^OB − 1)            exactly as hawkvision/integer/ir.py says
//
// RAW = 1 gives t itself instead (LANES sums of ACCW bits): the logits of the last stage.
// FILE holds, a line for each group of LANES channels, LANES times {bias (ACCW bits), multiplier (9 bits)}.
//
// Timing: PE/LANES consecutive beats, the first 4 cycles (RAW) or 12 cycles after `done`.
// Constraint: `done` comes at most every PE/LANES cycles. LUT = 1: the multipliers are look-up tables.
module hv_requantise #(
  parameter CHANNELS = 4,
  parameter PE = 2,
  parameter LANES = 1,
  parameter ACCW = 20,
  parameter OB = 8,
  parameter PRE_SHIFT = 0,
  parameter SHIFT = 16,
  parameter RAW = 0,
  parameter LUT = 0,
  parameter FILE = "hv_requantise.mem"
)(
  input  wire                                     clk,
  input  wire                                     rst,
  input  wire                                     done,
  input  wire [PE*ACCW-1:0]                       acc,
  output wire                                     out_valid,
  output wire [LANES*((RAW != 0) ? ACCW : OB)-1:0] out_data
);
  localparam BEATS = PE / LANES, GROUPS = CHANNELS / LANES;
  localparam GB = (GROUPS > 1) ? $clog2(GROUPS) : 1, LB = $clog2(BEATS + 1);
  localparam KEPT = 17, MB = 9, WORD = ACCW + MB;
  localparam DEPTH = (RAW != 0) ? 3 : 11;

  reg [PE*ACCW-1:0] hold;
  reg [LB-1:0]      left;
  reg [GB-1:0]      group;
  reg [DEPTH-1:0]   valids;
  always @(posedge clk) begin
    if (done) begin
      hold <= acc;
      left <= BEATS;
    end else if (left != 0) begin
      hold <= hold >> (LANES*ACCW);
      left <= left - 1'b1;
    end
    if (left != 0) group <= (group == GROUPS - 1) ? 0 : group + 1'b1;
    valids <= {valids, left != 0};
    if (rst) begin
      left   <= 0;
      group  <= 0;
      valids <= 0;
    end
  end
  assign out_valid = valids[DEPTH-1];

  wire [LANES*WORD-1:0] constants;
  hv_rom #(.DEPTH(GROUPS), .WIDTH(LANES*WORD), .FILE(FILE)) rom (.clk(clk), .address(group), .word(constants));
  reg [LANES*ACCW-1:0] sum_1, sum_2;
  always @(posedge clk) begin
    sum_1 <= hold[LANES*ACCW-1:0];
    sum_2 <= sum_1;
  end

  generate
    for (genvar q = 0; q < LANES; q = q + 1) begin : g_lane
      reg signed [ACCW-1:0] t;
      always @(posedge clk) t <= $signed(sum_2[q*ACCW +: ACCW]) + $signed(constants[q*WORD + MB +: ACCW]);
      if (RAW != 0) begin : g_raw
        assign out_data[q*ACCW +: ACCW] = t;
      end else begin : g_scaled
        wire signed [63:0] wide = t;
        wire signed [63:0] shifted = wide >>> PRE_SHIFT;
        reg [MB-1:0]   multiplier, multiplier_u;
        reg [KEPT-1:0] u;
        wire signed [MB+KEPT+1:0] product;
        hv_mul #(.WA(MB+1), .WB(KEPT+1), .LUT(LUT)) mul (
          .clk(clk), .used(1'b1), .a({1'b0, multiplier_u}), .b({1'b0, u}), .p(product)
        );
        reg [MB+KEPT:0] scaled;
        wire [MB+KEPT:0] rounded = scaled >> SHIFT;
        reg [OB-1:0] y;
        always @(posedge clk) begin
          multiplier   <= constants[q*WORD +: MB];
          multiplier_u <= multiplier;
          u      <= shifted[63] ? 0 : (|shifted[62:KEPT]) ? {KEPT{1'b1}} : shifted[KEPT-1:0];
          scaled <= product[MB+KEPT:0] + (1 << (SHIFT-1));
          y      <= (|(rounded >> OB)) ? {OB{1'b1}} : rounded[OB-1:0];
        end
        assign out_data[q*OB +: OB] = y;
      end
    end
  endgenerate
endmodule
