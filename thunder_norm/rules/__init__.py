"""Norm rules, one file per family of operations; importing the package registers them.

The files with an underscore hold what families share. A package imports from those before it: `entrywise` and `reducing`, `layout`,
`linear_algebra`, `layers`, `written_out` (what a program spells in many operations), `known_ranges`, `weighted`, `quotients`,
`loss_functions`; `movement` is for ellipsoids of perturbations, and knows `layers` and `written_out`.

Within one operation the rule registered first is tried first, hence the fixed order.
"""

# isort: off
from thunder_norm.rules.layout import untouched
from thunder_norm.rules.linear_algebra import linear, einsum, grouped, conv, embedding, constant_systems
from thunder_norm.rules.layers import attention, softmax, normalization
from thunder_norm.rules.written_out import gains  # before what is any product
from thunder_norm.rules.known_ranges import windows
from thunder_norm.rules.linear_algebra import summed_products
from thunder_norm.rules.written_out import (
    dual_variables,
    written_out_activations,
    stretched,
    written_out_exponentials,
    written_out_groups,
    written_out_means,
    logarithms,
    attention_written_out,
)
from thunder_norm.rules.layers import rotary
from thunder_norm.rules.entrywise import elementwise
from thunder_norm.rules.known_ranges import limits
from thunder_norm.rules.entrywise import powers
from thunder_norm.rules.quotients import powers_within
from thunder_norm.rules.linear_algebra import matrix_functions
from thunder_norm.rules.written_out import matrix_polynomials
from thunder_norm.rules.entrywise import domains, quantization, special, polynomials, steps
from thunder_norm.rules.layout import strided, written_calls
from thunder_norm.rules.known_ranges import partial_sums, ordered, ranges, ranges_of_activations, conditions, fractions
from thunder_norm.rules.weighted import weighted_sums, weighted_places, largest_of_groups, shares_of_groups, weighted_means
from thunder_norm.rules.quotients import over_factors, over_sums, over_larger, range_bounds
from thunder_norm.rules.known_ranges import gamma_functions, symmetric_parts, straight_through, where_zero, jumps_made_good
from thunder_norm.rules.written_out import divided_by_exponentials
from thunder_norm.rules.linear_algebra import determinants, reflections
from thunder_norm.rules.quotients import typical_quotients
from thunder_norm.rules.layers import own_lengths
from thunder_norm.rules.layout import drawn
from thunder_norm.rules.linear_algebra import inverses
from thunder_norm.rules.entrywise import binary
from thunder_norm.rules.layout import selections
from thunder_norm.rules.entrywise import divisions, log_sums
from thunder_norm.rules.layout import shape, indexing, replacing, writing, diagonals, joining
from thunder_norm.rules.weighted import kept_exponentials, set_aside, log_domain, choices, lowered, sums_of_exponentials
from thunder_norm.rules.quotients import kept_away  # after what knows more of an exponential or of a softmax
from thunder_norm.rules.layout import masking, casts, patches
from thunder_norm.rules.reducing import reductions, matrix_norms, running, order_statistics, those_left
from thunder_norm.rules.layout import combining
from thunder_norm.rules.reducing import pooling, framed_maxima
from thunder_norm.rules.linear_algebra import triangular, factorizations, eliminations
from thunder_norm.rules.reducing import unpooling, resampling, regions
from thunder_norm.rules.loss_functions import losses
from thunder_norm.rules.linear_algebra import distances
from thunder_norm.rules.loss_functions import margin_losses, likelihoods, binary_entropies, soft_labels
from thunder_norm.rules.layout import factories
from thunder_norm.rules.entrywise import derivatives
from thunder_norm.rules.layers import recurrent, recurrent_typical, recurrent_calls, reparametrizations
from thunder_norm.rules.linear_algebra import fourier
from thunder_norm.rules.layout import complex_numbers  # after the rules it extends
from thunder_norm.rules.known_ranges import complex_exponentials
from thunder_norm.rules.written_out import products  # after all that know more of a product
from thunder_norm.rules.movement import (
    movements,
    movements_as_written,
    movements_by_numbers,
    movements_nearby,
    movements_of_attention,
    movements_of_contractions,
    movements_of_maxima,
    movements_of_normalizations,
    movements_of_quotients,
    slopes,
)

__all__ = [
    "attention",
    "attention_written_out",
    "binary",
    "binary_entropies",
    "casts",
    "choices",
    "combining",
    "complex_exponentials",
    "complex_numbers",
    "constant_systems",
    "conv",
    "derivatives",
    "determinants",
    "diagonals",
    "distances",
    "divided_by_exponentials",
    "divisions",
    "domains",
    "drawn",
    "dual_variables",
    "einsum",
    "elementwise",
    "embedding",
    "factories",
    "eliminations",
    "factorizations",
    "fourier",
    "fractions",
    "framed_maxima",
    "gains",
    "gamma_functions",
    "grouped",
    "indexing",
    "inverses",
    "joining",
    "jumps_made_good",
    "kept_away",
    "kept_exponentials",
    "largest_of_groups",
    "likelihoods",
    "limits",
    "linear",
    "log_domain",
    "log_sums",
    "logarithms",
    "losses",
    "lowered",
    "margin_losses",
    "masking",
    "matrix_functions",
    "matrix_polynomials",
    "matrix_norms",
    "movements",
    "movements_as_written",
    "movements_by_numbers",
    "movements_nearby",
    "movements_of_attention",
    "movements_of_contractions",
    "movements_of_maxima",
    "movements_of_normalizations",
    "movements_of_quotients",
    "normalization",
    "order_statistics",
    "over_factors",
    "over_larger",
    "over_sums",
    "own_lengths",
    "ordered",
    "partial_sums",
    "conditions",
    "patches",
    "polynomials",
    "pooling",
    "powers",
    "powers_within",
    "products",
    "quantization",
    "range_bounds",
    "ranges",
    "ranges_of_activations",
    "recurrent",
    "recurrent_calls",
    "recurrent_typical",
    "reductions",
    "regions",
    "reflections",
    "reparametrizations",
    "replacing",
    "resampling",
    "rotary",
    "running",
    "selections",
    "set_aside",
    "shape",
    "shares_of_groups",
    "slopes",
    "soft_labels",
    "softmax",
    "special",
    "steps",
    "straight_through",
    "stretched",
    "strided",
    "summed_products",
    "sums_of_exponentials",
    "symmetric_parts",
    "those_left",
    "triangular",
    "typical_quotients",
    "unpooling",
    "untouched",
    "weighted_means",
    "weighted_places",
    "weighted_sums",
    "where_zero",
    "windows",
    "writing",
    "written_calls",
    "written_out_activations",
    "written_out_exponentials",
    "written_out_groups",
    "written_out_means",
]
