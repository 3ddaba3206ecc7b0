// A counter of 24 bits beside the product of two 8-bit counters with strides 3 and 5, every cycle, no register behind it.
// TABLES = 1 makes the multiplier of look-up tables; else the product comes from outside, as from a multiplier block.
module product #(parameter TABLES = 1) (
  input clk, input [15:0] from_block, output [7:0] left, output [7:0] right, output any
);
  reg [23:0] count = 0;
  reg [7:0] a = 0, b = 0;
  assign left = a;
  assign right = b;
  (* keep *) wire [15:0] found;  // else it is proved that not all of its bits can be set, and none is made
  generate
    if (TABLES) assign found = a * b;
    else assign found = from_block;
  endgenerate
  always @(posedge clk) begin
    count <= count + 1'b1;
    a <= a + 8'd3;
    b <= b + 8'd5;
  end
  assign any = count[23] | (&a) | (&b) | (&found);
endmodule
