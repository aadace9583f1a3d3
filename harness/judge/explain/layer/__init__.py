"""Ways to connect and compute a layer's other operations wrongly: residuals, the activation, the embedding."""
