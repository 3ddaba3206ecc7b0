"""What builds came to: report files, their pages, and the energy estimate."""
