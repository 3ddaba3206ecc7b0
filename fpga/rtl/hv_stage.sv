// hv_stage: one convolution with its requantisation and, with POOL, its 2x2 maximum: hv_window → hv_mac →
// hv_requantise → hv_pool, and the weights. Each of these files says what its parameters mean.
//
//   in_*     LANES-wide beats of the stage before; `freed` marks a row slot that the stage before may fill
//   out_*    beats of LANES activations (RAW: sums); `room_freed` marks a row slot that became free behind this stage
// WEIGHT_FILE: a line for each beat of a position (group, then kernel row, column and channels as TAPS and CH leave
// them), PE × TAPS × CH weights with channel 0's in the low bits, packed as hv_mac says. BIAS_FILE: see hv_requantise.
module hv_stage #(
  parameter H = 8,
  parameter W = 8,
  parameter CIN = 4,
  parameter COUT = 4,
  parameter K = 3,
  parameter PAD = 1,
  parameter AB = 8,
  parameter WB = 4,
  parameter ACCW = 20,
  parameter OB = 8,
  parameter PRE_SHIFT = 0,
  parameter SHIFT = 16,
  parameter RAW = 0,
  parameter POOL = 0,
  parameter IN_LANES = 1,
  parameter TAPS = 1,
  parameter CH = 1,
  parameter PE = 1,
  parameter LANES = 1,
  parameter LUT_PE = 0,
  parameter LUT_REQUANTISE = 0,
  parameter PACK = 0,
  parameter RING = 6,
  parameter ROOM = 4,
  parameter WEIGHT_FILE = "weights.mem",
  parameter BIAS_FILE = "bias.mem"
)(
  input  wire                                     clk,
  input  wire                                     rst,
  input  wire                                     in_valid,
  input  wire [IN_LANES*AB-1:0]                   in_data,
  output wire                                     freed,
  input  wire                                     room_freed,
  output wire                                     out_valid,
  output wire [LANES*((RAW != 0) ? ACCW : OB)-1:0] out_data
);
  localparam N = TAPS * CH, GROUPS = COUT / PE, WEIGHTS = GROUPS * (K * K * CIN / N);
  wire valid, first, last, done, made;
  wire [N*AB-1:0]    a;
  wire [PE*N*WB-1:0] w;
  wire [PE*ACCW-1:0] acc;
  wire [((WEIGHTS > 1) ? $clog2(WEIGHTS) : 1)-1:0] weight;
  wire [LANES*((RAW != 0) ? ACCW : OB)-1:0] activations;

  hv_window #(
    .H(H), .W(W), .CIN(CIN), .K(K), .PAD(PAD), .AB(AB), .IN_LANES(IN_LANES), .TAPS(TAPS), .CH(CH), .GROUPS(GROUPS),
    .RING(RING), .POOL(POOL), .ROOM(ROOM), .WEIGHTS(WEIGHTS)
  ) window (
    .clk(clk), .rst(rst), .in_valid(in_valid), .in_data(in_data), .freed(freed), .room_freed(room_freed),
    .weight(weight), .out_valid(valid), .out_first(first), .out_last(last), .out_data(a)
  );
  hv_rom #(.DEPTH(WEIGHTS), .WIDTH(PE*N*WB), .FILE(WEIGHT_FILE)) weights (.clk(clk), .address(weight), .word(w));
  hv_mac #(.N(N), .PE(PE), .AB(AB), .WB(WB), .ACCW(ACCW), .LUT_PE(LUT_PE), .PACK(PACK)) mac (
    .clk(clk), .rst(rst), .valid(valid), .first(first), .last(last), .a(a), .w(w), .done(done), .acc(acc)
  );
  hv_requantise #(
    .CHANNELS(COUT), .PE(PE), .LANES(LANES), .ACCW(ACCW), .OB(OB), .PRE_SHIFT(PRE_SHIFT), .SHIFT(SHIFT), .RAW(RAW),
    .LUT(LUT_REQUANTISE), .FILE(BIAS_FILE)
  ) requantise (
    .clk(clk), .rst(rst), .done(done), .acc(acc), .out_valid(made), .out_data(activations)
  );
  generate
    if (POOL != 0) begin : g_pool
      hv_pool #(.H(H + 2*PAD - K + 1), .W(W + 2*PAD - K + 1), .C(COUT), .LANES(LANES), .OB(OB)) pool (
        .clk(clk), .rst(rst), .in_valid(made), .in_data(activations), .out_valid(out_valid), .out_data(out_data)
      );
    end else begin : g_flat
      assign out_valid = made;
      assign out_data = activations;
    end
  endgenerate
endmodule
