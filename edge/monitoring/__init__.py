"""What keeps guarantees true: certificates, streams, audits, and the state that survives a restart."""
