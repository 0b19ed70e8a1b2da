"""Products and what is made of them: matrix products, convolutions, Fourier transforms, determinants, distances."""
