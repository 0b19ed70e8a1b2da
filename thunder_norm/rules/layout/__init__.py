"""Where entries stand: shapes, indices, joining, writing into a part, masks, copies, tensors that are made."""
