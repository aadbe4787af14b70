"""What ranks of different pipelines exchange: averages of weights, and calls that carry tensors."""
