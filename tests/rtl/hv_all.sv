// One of each module, small, side by side, so that a single build serves all tests of modules.
module hv_all #(
  parameter CONSTANTS = "constants.mem",
  parameter BIASES = "biases.mem"
)(
  input  wire        clk,
  input  wire        rst,

  input  wire        fifo_in_valid,
  input  wire [7:0]  fifo_in_data,
  output wire        fifo_full,
  output wire        fifo_out_valid,
  input  wire        fifo_out_ready,
  output wire [7:0]  fifo_out_data,

  input  wire        pool_in_valid,
  input  wire [15:0] pool_in_data,
  output wire        pool_out_valid,
  output wire [15:0] pool_out_data,
  input  wire        least_in_valid,
  input  wire [15:0] least_in_data,
  output wire        least_out_valid,
  output wire [15:0] least_out_data,

  input  wire        mul_used,
  input  wire signed [16:0] mul_a,
  input  wire signed [8:0]  mul_b,
  output wire signed [25:0] mul_dsp,
  output wire signed [12:0] mul_lut_4,
  output wire signed [13:0] mul_lut_5,
  output wire signed [18:0] mul_lut_10,
  output wire signed [24:0] mul_lut_16,

  input  wire        mac_valid,
  input  wire        mac_first,
  input  wire        mac_last,
  input  wire [23:0] mac_a,
  input  wire [44:0] mac_w,
  output wire        mac_pack_done,
  output wire [59:0] mac_pack_acc,
  output wire        mac_lut_done,
  output wire [59:0] mac_lut_acc,

  input  wire        requantise_done,
  input  wire [63:0] requantise_acc,
  output wire        scaled_valid,
  output wire [15:0] scaled_data,
  output wire        scaled_lut_valid,
  output wire [15:0] scaled_lut_data,
  output wire        raw_valid,
  output wire [15:0] raw_data,

  input  wire        in_s_valid,
  output wire        in_s_ready,
  input  wire [15:0] in_s_data,
  input  wire        in_s_mask,
  input  wire        in_freed,
  output wire        in_out_valid,
  output wire [15:0] in_out_data,

  input  wire        out_in_valid,
  input  wire [39:0] out_in_data,
  output wire        out_freed,
  output wire        out_m_valid,
  input  wire        out_m_ready,
  output wire signed [31:0] out_m_data,
  output wire        out_m_last
);
  hv_fifo #(.DEPTH(4), .WIDTH(8)) fifo (
    .clk(clk), .rst(rst), .in_valid(fifo_in_valid), .in_data(fifo_in_data), .full(fifo_full),
    .out_valid(fifo_out_valid), .out_ready(fifo_out_ready), .out_data(fifo_out_data)
  );
  hv_pool #(.H(5), .W(7), .C(6), .LANES(2), .OB(8)) pool (
    .clk(clk), .rst(rst), .in_valid(pool_in_valid), .in_data(pool_in_data),
    .out_valid(pool_out_valid), .out_data(pool_out_data)
  );
  hv_pool #(.H(2), .W(2), .C(2), .LANES(2), .OB(8)) least (
    .clk(clk), .rst(rst), .in_valid(least_in_valid), .in_data(least_in_data),
    .out_valid(least_out_valid), .out_data(least_out_data)
  );
  hv_mul #(.WA(17), .WB(9)) dsp (.clk(clk), .used(mul_used), .a(mul_a), .b(mul_b), .p(mul_dsp));
  hv_mul #(.WA(4), .WB(9), .LUT(1)) lut_4 (.clk(clk), .used(mul_used), .a(mul_a[3:0]), .b(mul_b), .p(mul_lut_4));
  hv_mul #(.WA(5), .WB(9), .LUT(1)) lut_5 (.clk(clk), .used(mul_used), .a(mul_a[4:0]), .b(mul_b), .p(mul_lut_5));
  hv_mul #(.WA(10), .WB(9), .LUT(1)) lut_10 (.clk(clk), .used(mul_used), .a(mul_a[9:0]), .b(mul_b), .p(mul_lut_10));
  hv_mul #(.WA(16), .WB(9), .LUT(1)) lut_16 (.clk(clk), .used(mul_used), .a(mul_a[15:0]), .b(mul_b), .p(mul_lut_16));
  hv_mac #(.N(3), .PE(3), .AB(8), .WB(5), .ACCW(20), .PACK(1)) mac_pack (
    .clk(clk), .rst(rst), .valid(mac_valid), .first(mac_first), .last(mac_last), .a(mac_a), .w(mac_w),
    .done(mac_pack_done), .acc(mac_pack_acc)
  );
  hv_mac #(.N(3), .PE(3), .AB(8), .WB(5), .ACCW(20), .LUT_PE(2)) mac_lut (
    .clk(clk), .rst(rst), .valid(mac_valid), .first(mac_first), .last(mac_last), .a(mac_a), .w(mac_w),
    .done(mac_lut_done), .acc(mac_lut_acc)
  );
  hv_requantise #(
    .CHANNELS(8), .PE(4), .LANES(2), .ACCW(16), .OB(8), .PRE_SHIFT(1), .SHIFT(13), .FILE(CONSTANTS)
  ) scaled (
    .clk(clk), .rst(rst), .done(requantise_done), .acc(requantise_acc), .out_valid(scaled_valid),
    .out_data(scaled_data)
  );
  hv_requantise #(
    .CHANNELS(8), .PE(4), .LANES(2), .ACCW(16), .OB(8), .PRE_SHIFT(1), .SHIFT(13), .LUT(1), .FILE(CONSTANTS)
  ) scaled_lut (
    .clk(clk), .rst(rst), .done(requantise_done), .acc(requantise_acc), .out_valid(scaled_lut_valid),
    .out_data(scaled_lut_data)
  );
  hv_requantise #(.CHANNELS(8), .PE(4), .LANES(1), .ACCW(16), .RAW(1), .FILE(BIASES)) raw (
    .clk(clk), .rst(rst), .done(requantise_done), .acc(requantise_acc), .out_valid(raw_valid), .out_data(raw_data)
  );
  hv_stream_in #(.H(3), .W(2), .C(2), .ROOM(2), .FILL(16'h0201)) stream_in (
    .clk(clk), .rst(rst), .s_valid(in_s_valid), .s_ready(in_s_ready), .s_data(in_s_data), .s_mask(in_s_mask),
    .freed(in_freed), .out_valid(in_out_valid), .out_data(in_out_data)
  );
  hv_stream_out #(.CLASSES(6), .LANES(2), .ACCW(20), .ROOM(2)) stream_out (
    .clk(clk), .rst(rst), .in_valid(out_in_valid), .in_data(out_in_data), .freed(out_freed), .m_valid(out_m_valid),
    .m_ready(out_m_ready), .m_data(out_m_data), .m_last(out_m_last)
  );
endmodule
