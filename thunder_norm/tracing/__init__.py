"""What every use of Thunder shares, below all that traces."""
