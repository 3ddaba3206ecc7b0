// hv_stream_out: logits to the outside, one int32 a beat, in class order; m_last marks an image's last.
//
// A beat counts when m_valid and m_ready are both high; m_data and m_last stay as they are until then. Images wait
// in a FIFO of ROOM images: the last stage begins one only if there is room (`freed` marks each that has left), so
// back-pressure stops the pipeline at the boundaries of images and rows, never by a clock enable.
//
//   in_data   LANES logits of ACCW bits a beat, the first in the low bits
// Latency: 3 cycles from a beat to m_valid. Constraint: LANES divides CLASSES.
module hv_stream_out #(
  parameter CLASSES = 10,
  parameter LANES = 1,
  parameter ACCW = 20,
  parameter ROOM = 2
)(
  input  wire                  clk,
  input  wire                  rst,
  input  wire                  in_valid,
  input  wire [LANES*ACCW-1:0] in_data,
  output reg                   freed,
  output reg                   m_valid,
  input  wire                  m_ready,
  output wire signed [31:0]    m_data,
  output reg                   m_last
);
  localparam WORDS = ROOM * CLASSES / LANES;
  localparam DEPTH = (WORDS > 2) ? (1 << $clog2(WORDS)) : 2;
  localparam LB = $clog2(LANES + 1), CB = $clog2(CLASSES + 1);
  wire full, some;
`ifdef FORMAL
  wire [$clog2(DEPTH)+1:0] held;
`endif
  wire [LANES*ACCW-1:0] word;
  reg [LB-1:0] left;  // of the word in `data`, with the one that is out
  wire load = some & (~m_valid | (m_ready & left == 1));
  hv_fifo #(.DEPTH(DEPTH), .WIDTH(LANES*ACCW)) fifo (
    .clk(clk), .rst(rst), .in_valid(in_valid), .in_data(in_data), .full(full),
    .out_valid(some), .out_ready(load), .out_data(word)
`ifdef FORMAL
    , .held(held)
`endif
  );
  reg [LANES*ACCW-1:0] data;
  reg [CB-1:0] next;  // the class, counted from 1, of the logit behind the one that is out
  wire signed [ACCW-1:0] low = data[ACCW-1:0];
  assign m_data = low;
  always @(posedge clk) begin
    freed <= m_valid & m_ready & m_last;
    if (m_valid & m_ready) begin
      data    <= data >> ACCW;
      left    <= left - 1'b1;
      m_valid <= left != 1;
      m_last  <= next == CLASSES;
      next    <= (next == CLASSES) ? 1 : next + 1'b1;
    end
    if (load) begin
      data    <= word;
      left    <= LANES;
      m_valid <= 1;
    end
    if (rst) begin
      freed   <= 0;
      m_valid <= 0;
      left    <= 0;
      next    <= (CLASSES == 1) ? 1 : 2;
      m_last  <= CLASSES == 1;
    end
  end

`ifdef FORMAL
  // For LANES = 1: a last stage that begins no image without room never finds the FIFO full.
  reg [15:0] allowed;  // words
  wire [15:0] at = (next == 1) ? CLASSES - 1 : next - 2;  // the class of the logit that is out, or will be next
  reg kept, kept_last;
  reg [31:0] kept_data;
  initial begin
    {freed, m_valid, left, kept} = 0;
    allowed = ROOM * CLASSES;
    next = (CLASSES == 1) ? 1 : 2;
    m_last = CLASSES == 1;
  end
  always @(posedge clk) begin
    allowed <= allowed - in_valid + (freed ? CLASSES : 0);
    kept      <= m_valid & ~m_ready & ~rst;
    kept_data <= m_data;
    kept_last <= m_last;
    if (rst) allowed <= ROOM * CLASSES;
  end
  always @* begin
    assume (!in_valid || allowed != 0);
    assert (next >= 1 && next <= CLASSES);
    assert (left == m_valid);
    assert (m_last == (at == CLASSES - 1));
    assert (held + at + m_valid + allowed + (freed ? CLASSES : 0) == ROOM * CLASSES);
    assert (!(in_valid && full));
    if (kept) assert (m_valid && m_data == kept_data && m_last == kept_last);
  end
`endif
endmodule
