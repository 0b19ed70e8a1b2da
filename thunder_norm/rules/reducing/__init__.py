"""What many entries become one by: reductions, running totals, pooling, resampling, order statistics."""
