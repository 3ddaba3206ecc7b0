// hv_pool: the maximum of each 2x2 of a stream of H x W x C unsigned OB-bit activations, LANES channels a beat, HWC order.
//
// A row's pairs first (the left pixel waits in a memory of one pixel), then pairs of rows (the upper maximum waits in a
// memory of half a row). An odd last row or column is left out. Never waits: one beat a cycle if they come so.
// Latency: 6 cycles from the beat that completes a square. Memories are written before they are read for every W >= 2.
module hv_pool #(
  parameter H = 8,
  parameter W = 8,
  parameter C = 4,
  parameter LANES = 1,
  parameter OB = 8
)(
  input  wire                clk,
  input  wire                rst,
  input  wire                in_valid,
  input  wire [LANES*OB-1:0] in_data,
  output reg                 out_valid,
  output reg  [LANES*OB-1:0] out_data
);
  localparam GROUPS = C / LANES, HALF = (W / 2) * GROUPS;
  localparam CB = (GROUPS > 1) ? $clog2(GROUPS) : 1, XB = $clog2(W + 1), YB = $clog2(H + 1);
  localparam AW = (HALF > 1) ? $clog2(HALF) : 1;

  function [LANES*OB-1:0] greater(input [LANES*OB-1:0] a, input [LANES*OB-1:0] b);
    integer i;
    for (i = 0; i < LANES; i = i + 1)
      greater[i*OB +: OB] = (a[i*OB +: OB] > b[i*OB +: OB]) ? a[i*OB +: OB] : b[i*OB +: OB];
  endfunction

  // Where the beat at hand belongs.
  reg [CB-1:0] c;
  reg [XB-1:0] x;
  reg [YB-1:0] y;
  wire c_last = c == GROUPS - 1, x_last = x == W - 1;
  reg                v1, right1, lower1;
  reg [CB-1:0]       c1;
  reg [LANES*OB-1:0] d1;
  always @(posedge clk) begin
    v1     <= in_valid;
    d1     <= in_data;
    c1     <= c;
    right1 <= x[0];
    lower1 <= y[0];
    if ((H % 2 == 1) && y == H - 1) v1 <= 0;
    if (in_valid) begin
      c <= c_last ? 0 : c + 1'b1;
      if (c_last) x <= x_last ? 0 : x + 1'b1;
      if (c_last & x_last) y <= (y == H - 1) ? 0 : y + 1'b1;
    end
    if (rst) begin
      c  <= 0;
      x  <= 0;
      y  <= 0;
      v1 <= 0;
    end
  end

  // Pairs of a row.
  (* ram_style = "distributed" *) reg [LANES*OB-1:0] left [0:GROUPS-1];
  reg                v2, v3, lower2, lower3;
  reg [AW-1:0]       at3;
  reg [LANES*OB-1:0] l2, d2, d3;
  wire at_last = at3 == HALF - 1;
  always @(posedge clk) begin
    if (v1 & ~right1) left[c1] <= d1;
    v2     <= v1 & right1;
    d2     <= d1;
    l2     <= left[c1];
    lower2 <= lower1;
    v3     <= v2;
    d3     <= greater(d2, l2);
    lower3 <= lower2;
    if (v3) at3 <= at_last ? 0 : at3 + 1'b1;
    if (rst) begin
      v2  <= 0;
      v3  <= 0;
      at3 <= 0;
    end
  end

  // Pairs of rows.
  (* no_rw_check *) reg [LANES*OB-1:0] upper [0:HALF-1];
  reg                v4, v5;
  reg [LANES*OB-1:0] u4, u5, d4, d5;
  always @(posedge clk) begin
    if (v3 & ~lower3) upper[at3] <= d3;
    u4 <= upper[at3];
    d4 <= d3;
    v4 <= v3 & lower3;
    u5 <= u4;
    d5 <= d4;
    v5 <= v4;
    out_data  <= greater(d5, u5);
    out_valid <= v5;
    if (rst) begin
      v4 <= 0;
      v5 <= 0;
      out_valid <= 0;
    end
  end
endmodule
