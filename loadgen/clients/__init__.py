"""The programs that send requests and time the answers, one module a protocol."""
