// hv_rom: DEPTH words of WIDTH bits, read from FILE (hexadecimal, one word a line); two cycles from address to word.
//
// The second cycle is a register in the fabric: a block RAM takes most of a cycle to give its word, and nothing but a
// register may follow it. Memories of at most 16 words are look-up tables, one for each bit.
module hv_rom #(
  parameter DEPTH = 16,
  parameter WIDTH = 8,
  parameter FILE = "hv_rom.mem"
)(
  input  wire                                        clk,
  input  wire [((DEPTH > 1) ? $clog2(DEPTH) : 1)-1:0] address,
  output reg  [WIDTH-1:0]                            word
);
  reg [WIDTH-1:0] read;
  generate
    if (DEPTH > 16) begin : g_block
      (* rom_style = "block" *) reg [WIDTH-1:0] memory [0:DEPTH-1];
      initial $readmemh(FILE, memory);
      always @(posedge clk) read <= memory[address];
    end else begin : g_logic
      (* rom_style = "logic" *) reg [WIDTH-1:0] memory [0:DEPTH-1];
      initial $readmemh(FILE, memory);
      always @(posedge clk) read <= memory[address];
    end
  endgenerate
  always @(posedge clk) word <= read;
endmodule
