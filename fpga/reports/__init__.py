"""Reports of builds: their files, their pages and the energy estimate."""
