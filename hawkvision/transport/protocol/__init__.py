"""What travels: datagrams, frames and control messages as bytes, their protection, identities and addresses."""
