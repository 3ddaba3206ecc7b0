// hv_stream_in: pixels from outside, one a beat with all its C channels, into the first stage's rows.
//
//   s_data   channel 0 in the low byte; pixels row by row, images one behind the other, no marks between them
//   s_mask   1 if the pixel arrived. One that did not becomes the pixel above as it was shown there, or FILL in a
//            image's first row (hawkvision.integer.reference.filled); s_data is then not looked at.
// A beat counts when s_valid and s_ready are both high. Rows may come at any pace, even with pauses inside a row.
// s_ready is a register: high while a row is being taken, low for 4 cycles or more between rows, until the first stage
// has a free row (`freed` marks each one that became free; there are ROOM at the beginning).
//
// Latency: out_data 4 cycles after its beat. A row costs at least W + 4 cycles.
module hv_stream_in #(
  parameter H = 8,
  parameter W = 8,
  parameter C = 1,
  parameter ROOM = 4,
  parameter [8*C-1:0] FILL = 0
)(
  input  wire           clk,
  input  wire           rst,
  input  wire           s_valid,
  output wire           s_ready,
  input  wire [8*C-1:0] s_data,
  input  wire           s_mask,
  input  wire           freed,
  output reg            out_valid,
  output reg  [8*C-1:0] out_data
);
  localparam XB = (W > 1) ? $clog2(W) : 1, YB = (H > 1) ? $clog2(H) : 1, RB = $clog2(ROOM + 1);
  reg          open;
  reg [1:0]    gap;
  reg [RB-1:0] room;
  reg [XB-1:0] x;
  reg [YB-1:0] y;
  wire taken = s_valid & open;
  wire row_end = taken & (x == W - 1);
  wire begin_row = ~open & (gap == 0) & (room != 0);
  assign s_ready = open;
  always @(posedge clk) begin
    if (begin_row) open <= 1;
    if (row_end) open <= 0;
    if (row_end) gap <= 3;
    else if (gap != 0) gap <= gap - 1'b1;
    room <= room + freed - begin_row;
    if (taken) x <= row_end ? 0 : x + 1'b1;
    if (row_end) y <= (y == H - 1) ? 0 : y + 1'b1;
    if (rst) begin
      open <= 0;
      gap  <= 3;
      room <= ROOM;
      x    <= 0;
      y    <= 0;
    end
  end

  // The row above, as it was shown. The gap between rows keeps its reads behind the writes for every W.
  (* no_rw_check *) reg [8*C-1:0] above [0:W-1];
  reg           v1, v2, v3, m1, m2, m3, top1, top2, top3;
  reg [XB-1:0]  x1, x2, x3;
  reg [8*C-1:0] d1, d2, d3, above2, above3;
  wire [8*C-1:0] shown = m3 ? d3 : top3 ? FILL : above3;
  always @(posedge clk) begin
    {v1, v2, v3} <= {taken, v1, v2};
    {m1, m2, m3} <= {s_mask, m1, m2};
    {top1, top2, top3} <= {y == 0, top1, top2};
    {x1, x2, x3} <= {x, x1, x2};
    {d1, d2, d3} <= {s_data, d1, d2};
    above2 <= above[x1];
    above3 <= above2;
    if (v3) above[x3] <= shown;
    out_data  <= shown;
    out_valid <= v3;
    if (rst) begin
      {v1, v2, v3} <= 0;
      out_valid <= 0;
    end
  end
endmodule
