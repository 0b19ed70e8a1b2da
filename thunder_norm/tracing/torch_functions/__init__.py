"""Functions of torch and of libraries whose operation in Thunder is another, or none: done as torch does them."""
