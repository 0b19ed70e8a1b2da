"""How results move with their arguments, for ellipsoids of perturbations and near the data at hand."""
