"""What watches guarantees: streams, audits, and the state that survives a restart."""
