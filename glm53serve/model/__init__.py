"""What a GLM-5.3 checkpoint is: config, tensors, formats and the reference network."""
