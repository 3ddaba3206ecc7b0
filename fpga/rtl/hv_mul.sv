// hv_mul: p = a · b, both signed, five cycles later; one product a cycle. Where `used` is low, the product is zero.
//
//   LUT = 0   one MULT18X18D with its input, pipeline and output registers, and two registers in the fabric behind it,
//             because the way out of a DSP row is long: 84 columns in one clock were the slowest path of all. Operands
//             are left-justified: the block sees 18-bit numbers whose low bits are zero, and no sign bit has to be
//             routed eleven times. yosys does not pack registers into this block, so it is instantiated where ECP5_DSP
//             is defined; elsewhere the same in plain registers.
//             Its registers have neither enable nor reset: four blocks share four of each, so a signal for every
//             block could not be placed. `used` clears the second register behind it.
//   LUT = 1   shift and add: the bits of `a` select shifted copies of `b`, which a binary tree sums, one adder a
//             cycle. The top bit's copy is subtracted (two's complement). `used` is not looked at: b must be zero.
//
// Constraints: WA, WB ≤ 18; with LUT also 2 ≤ WA ≤ 16, because the tree has four levels.
module hv_mul #(
  parameter WA = 8,
  parameter WB = 9,
  parameter LUT = 0
)(
  input  wire                    clk,
  input  wire                    used,
  input  wire signed [WA-1:0]    a,
  input  wire signed [WB-1:0]    b,
  output wire signed [WA+WB-1:0] p
);
  localparam PW = WA + WB;
  generate
    if (WA > 18 || WB > 18 || (LUT != 0 && (WA < 2 || WA > 16))) begin : g_refused
      $error("hv_mul: operands of %0d and %0d bits are too wide", WA, WB);
    end
    if (LUT != 0) begin : g_lut
      // Node j of level l is worth bits j·2^l … of `a`, times `b`; it holds at most WB + 2^l bits and a sign.
      localparam LEVELS = $clog2(WA);
      wire [(LEVELS+1)*WA*(PW+1)-1:0] node;
      for (genvar i = 0; i < WA; i = i + 1) begin : g_leaf
        wire signed [PW:0] copy = b;
        assign node[i*(PW+1) +: PW+1] = a[i] ? copy : {(PW+1){1'b0}};
      end
      for (genvar l = 1; l <= LEVELS; l = l + 1) begin : g_level
        localparam BELOW = (WA + (1 << (l-1)) - 1) >> (l-1);
        localparam STEP = 1 << (l-1);
        for (genvar j = 0; j < (BELOW + 1) / 2; j = j + 1) begin : g_node
          reg signed [PW:0] r;
          if (2*j + 1 == BELOW) begin : g_alone
            always @(posedge clk) r <= node[((l-1)*WA + 2*j)*(PW+1) +: PW+1];
          end else begin : g_join
            wire signed [PW:0] low = node[((l-1)*WA + 2*j)*(PW+1) +: PW+1];
            wire signed [PW:0] high = node[((l-1)*WA + 2*j + 1)*(PW+1) +: PW+1];
            wire signed [PW:0] above = low >>> STEP;
            wire signed [PW-STEP:0] sum;
            if ((2*j + 1) * STEP == WA - 1) begin : g_minus
              assign sum = above - high;
            end else begin : g_plus
              assign sum = above + high;
            end
            always @(posedge clk) r <= $signed({sum, low[STEP-1:0]});
          end
          assign node[(l*WA + j)*(PW+1) +: PW+1] = r;
        end
      end
      wire [6*PW-1:0] late;
      assign late[LEVELS*PW +: PW] = node[LEVELS*WA*(PW+1) +: PW];
      for (genvar l = LEVELS; l < 5; l = l + 1) begin : g_late
        reg [PW-1:0] r;
        always @(posedge clk) r <= late[l*PW +: PW];
        assign late[(l+1)*PW +: PW] = r;
      end
      assign p = late[5*PW +: PW];
    end else begin : g_dsp
      reg signed [PW-1:0] near, out;
      wire signed [PW-1:0] product;
      reg [2:0] used_late;
      reg       clear;
      always @(posedge clk) begin
        used_late <= {used_late, used};
        clear     <= ~used_late[2];
        near      <= product;
        if (clear) out <= 0;
        else out <= near;
      end
      assign p = out;
`ifdef ECP5_DSP
      wire [17:0] A = {a, {(18-WA){1'b0}}};
      wire [17:0] B = {b, {(18-WB){1'b0}}};
      wire [35:0] P;
      assign product = P[35 -: PW];
      MULT18X18D #(
        .REG_INPUTA_CLK("CLK0"), .REG_INPUTB_CLK("CLK0"), .REG_PIPELINE_CLK("CLK0"), .REG_OUTPUT_CLK("CLK0"),
        .REG_INPUTA_CE("CE0"), .REG_INPUTA_RST("RST0"), .GSR("DISABLED")
      ) block (
        .CLK0(clk), .CE0(1'b1), .RST0(1'b0), .SIGNEDA(1'b1), .SIGNEDB(1'b1), .SOURCEA(1'b0), .SOURCEB(1'b0),
        .A0(A[0]), .A1(A[1]), .A2(A[2]), .A3(A[3]), .A4(A[4]), .A5(A[5]), .A6(A[6]), .A7(A[7]), .A8(A[8]),
        .A9(A[9]), .A10(A[10]), .A11(A[11]), .A12(A[12]), .A13(A[13]), .A14(A[14]), .A15(A[15]), .A16(A[16]),
        .A17(A[17]),
        .B0(B[0]), .B1(B[1]), .B2(B[2]), .B3(B[3]), .B4(B[4]), .B5(B[5]), .B6(B[6]), .B7(B[7]), .B8(B[8]),
        .B9(B[9]), .B10(B[10]), .B11(B[11]), .B12(B[12]), .B13(B[13]), .B14(B[14]), .B15(B[15]), .B16(B[16]),
        .B17(B[17]),
        .C0(1'b0), .C1(1'b0), .C2(1'b0), .C3(1'b0), .C4(1'b0), .C5(1'b0), .C6(1'b0), .C7(1'b0), .C8(1'b0),
        .C9(1'b0), .C10(1'b0), .C11(1'b0), .C12(1'b0), .C13(1'b0), .C14(1'b0), .C15(1'b0), .C16(1'b0), .C17(1'b0),
        .P0(P[0]), .P1(P[1]), .P2(P[2]), .P3(P[3]), .P4(P[4]), .P5(P[5]), .P6(P[6]), .P7(P[7]), .P8(P[8]),
        .P9(P[9]), .P10(P[10]), .P11(P[11]), .P12(P[12]), .P13(P[13]), .P14(P[14]), .P15(P[15]), .P16(P[16]),
        .P17(P[17]), .P18(P[18]), .P19(P[19]), .P20(P[20]), .P21(P[21]), .P22(P[22]), .P23(P[23]), .P24(P[24]),
        .P25(P[25]), .P26(P[26]), .P27(P[27]), .P28(P[28]), .P29(P[29]), .P30(P[30]), .P31(P[31]), .P32(P[32]),
        .P33(P[33]), .P34(P[34]), .P35(P[35])
      );
`else
      reg signed [WA-1:0] a_in;
      reg signed [WB-1:0] b_in;
      reg signed [PW-1:0] piped, given;
      always @(posedge clk) begin
        a_in  <= a;
        b_in  <= b;
        piped <= a_in * b_in;
        given <= piped;
      end
      assign product = given;
`endif
    end
  endgenerate
endmodule
