// The data path of an instruction-driven accelerator for convolutions of signed bytes, after the published description
// of MARLANN (github.com/SymbioticEDA/MARLANN): an instruction word walks through eight stages; three pointers of 17 bits
// and one of 9 make addresses; four 16-bit memories give 64 bits that are turned to begin at any 16-bit word; sixteen
// products of eight bits are summed in two groups of eight into two 32-bit accumulators, which are shifted, saturated
// and written back. Written for this bench. Memories and multipliers are outside: their outputs are inputs here.
module accelerator (
  input clk, input issue, input [31:0] instruction,
  input [63:0] words,       // of the memories, as they lie
  input [255:0] products,   // of the multipliers, after their own registers
  output reg [15:0] read_address, output reg [15:0] write_address, output reg [8:0] coefficient,
  output reg [63:0] write_data, output reg [7:0] write_bytes, output reg [63:0] turned
);
  localparam LOAD = 6'd28, CLEAN = 6'd20, SUM = 6'd40, VECTOR = 6'd9, STORE = 6'd13;
  reg [31:0] stage [2:9];
  reg [9:2] active = 0;
  reg [16:0] vector_at = 0, load_at = 0, store_at = 0;
  reg [8:0] coefficient_at = 0;
  reg [15:0] read_early = 0, read_late = 0;
  reg early = 0, late = 0;
  reg [1:0] turn = 0;
  integer i;
  always @(posedge clk) begin
    active <= {active[8:2], issue};
    stage[2] <= instruction;
    for (i = 3; i <= 9; i = i + 1) stage[i] <= stage[i-1];
    early <= 0;
    late <= 0;
    read_early <= 0;
    read_late <= 0;
    if (issue && instruction[5:0] == SUM) begin
      early <= 1;
      read_early <= (instruction[31:15] + vector_at) >> 1;
    end
    if (issue && instruction[5:0] == VECTOR) vector_at <= instruction[31:15] + vector_at;
    coefficient <= stage[3][14:6] + coefficient_at;
    if (active[3] && stage[3][5:0] == 6'd15) coefficient_at <= stage[3][14:6] + coefficient_at;
    if (active[5] && stage[5][5:0] == LOAD) begin
      late <= 1;
      read_late <= (stage[5][31:15] + load_at) >> 1;
    end
    if (active[5] && stage[5][5:0] == 6'd11) load_at <= stage[5][31:15] + load_at;
    read_address <= ({16{early}} & read_early) | ({16{late}} & read_late);
    turn <= read_address[1:0];
    turned <= {words, words} >> (16 * turn);
  end

  // sums and accumulators
  reg signed [19:0] sum_0 = 0, sum_1 = 0;
  reg signed [31:0] acc_0 = 0, acc_1 = 0;
  wire signed [15:0] p [0:15];
  genvar g;
  generate
    for (g = 0; g < 16; g = g + 1) begin : split
      assign p[g] = products[16*g +: 16];
    end
  endgenerate
  wire signed [31:0] shifted_0 = acc_0 >>> stage[8][10:6], shifted_1 = acc_1 >>> stage[8][10:6];
  reg [7:0] byte_0 = 0, byte_1 = 0;
  reg [16:0] store_address = 0;
  reg [63:0] store_data = 0;
  reg [7:0] store_bytes = 0;
  always @(posedge clk) begin
    sum_0 <= p[0] + p[1] + p[2] + p[3] + p[4] + p[5] + p[6] + p[7];
    sum_1 <= p[8] + p[9] + p[10] + p[11] + p[12] + p[13] + p[14] + p[15];
    if (active[8]) begin
      case (stage[8][5:0])
        SUM: begin
          acc_0 <= acc_0 + sum_0;
          acc_1 <= acc_1 + sum_1;
        end
        LOAD: begin
          acc_0 <= turned[31:0];
          acc_1 <= turned[63:32];
        end
        6'd32: begin
          acc_0 <= acc_0 + $signed(turned[31:0]);
          acc_1 <= acc_1 + $signed(turned[63:32]);
        end
        6'd36: begin
          acc_0 <= acc_0 > $signed(turned[31:0]) ? acc_0 : turned[31:0];
          acc_1 <= acc_1 > $signed(turned[63:32]) ? acc_1 : turned[63:32];
        end
        default: ;
      endcase
    end
    byte_0 <= (&shifted_0[31:7] == |shifted_0[31:7]) ? shifted_0[7:0] : shifted_0[31] ? 8'h80 : 8'h7f;
    byte_1 <= (&shifted_1[31:7] == |shifted_1[31:7]) ? shifted_1[7:0] : shifted_1[31] ? 8'h80 : 8'h7f;
    store_address <= stage[9][31:15] + store_at;
    store_bytes <= 0;
    store_data <= {acc_1, acc_0};
    if (active[9]) begin
      if (stage[9][5:3] == 3'b010) begin
        store_bytes <= 8'h03;
        store_data <= {48'd0, {8{~byte_1[7]}} & byte_1, {8{~byte_0[7]}} & byte_0};
      end
      if (stage[9][5:2] == 4'b0110) store_bytes <= 8'hff;
      if (stage[9][5:0] == STORE) store_at <= stage[9][31:15] + store_at;
    end
    write_address <= store_address >> 1;
    write_bytes <= store_address[0] ? store_bytes << 1 : store_bytes;
    write_data <= store_address[0] ? store_data << 8 : store_data;
  end
endmodule
