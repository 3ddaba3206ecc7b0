// One free-running counter of BITS bits, of which only the top one leaves the chip.
module counter #(parameter BITS = 28) (input clk, output top);
  reg [BITS-1:0] count = 0;
  always @(posedge clk) count <= count + 1'b1;
  assign top = count[BITS-1];
endmodule
