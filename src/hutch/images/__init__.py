"""What boxes are made of: root file systems, Python packages, and the guest."""
